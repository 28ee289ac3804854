"""A new base."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from ctxext.methods.base import Lengths, Method, Number
from ctxext.rope import RopeSpec, default_inv_freq


class RopeTheta(Method):
    """Replace the base of the frequencies, usually before fine-tuning on long text.

    ::

        theta'_i = b'^(-2i/d)

    Nothing ties the base to a length, so the target length is the trained one unless ``factor`` or
    ``max_position_embeddings`` says otherwise.

    Reference: Code Llama (https://arxiv.org/abs/2308.12950), section 2.4 (base 1e6); Effective Long-Context Scaling of
    Foundation Models (https://arxiv.org/abs/2309.16039), "adjusted base frequency" (base 5e5).
    """

    title: ClassVar[str] = "Base change"
    reference: ClassVar[str] = "https://arxiv.org/abs/2309.16039"
    evidence: ClassVar[str] = "published as the start of training on long text (2309.16039); no figures without"

    name: Literal["rope_theta"] = "rope_theta"
    rope_theta: Number = Field(gt=1, description="The new base, e.g. 1e6.")

    def lengths(self, spec: RopeSpec) -> Lengths:
        original = self.original_max_position_embeddings or spec.original_max_position_embeddings
        return self._settle(original) or Lengths(original, 1.0, original)

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        return default_inv_freq(self.rope_theta, spec.rotary_dim), 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.rope_theta}
