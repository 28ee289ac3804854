"""Position Interpolation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch

from ctxext.methods.base import Method
from ctxext.rope import RopeSpec, default_inv_freq


class PI(Method):
    """Squeeze all positions into the trained range.

    Position m is read as m / s, which is the same as dividing every frequency::

        theta'_i = theta_i / s

    Cheap to fine-tune; without fine-tuning it blurs neighbouring positions and costs quality at every length.

    Reference: Extending Context Window of Large Language Models via Positional Interpolation
    (https://arxiv.org/abs/2306.15595), Eq. 4. Transformers calls it ``linear``.
    """

    title: ClassVar[str] = "Position Interpolation"
    reference: ClassVar[str] = "https://arxiv.org/abs/2306.15595"
    untrained_factor: ClassVar[float | None] = 1.0
    evidence: ClassVar[str] = (
        "LLaMA-7B without training: perplexity 16.1 at 4 times its length, 112 at 8 times (2306.15595)"
    )

    name: Literal["pi"] = "pi"

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        return default_inv_freq(spec.rope_theta, spec.rotary_dim) / self.lengths(spec).factor, 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        lengths = self.lengths(spec)
        return {
            "rope_type": "linear",
            "rope_theta": spec.rope_theta,
            "factor": lengths.factor,
            # Not read by Transformers (it says so on loading), but without it nobody could tell what factor refers to.
            "original_max_position_embeddings": lengths.original,
        }
