"""NTK-aware scaling."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch

from ctxext.methods.base import Method
from ctxext.rope import RopeSpec, default_inv_freq


class NTK(Method):
    """Enlarge the base, so that slow frequencies are interpolated and fast ones hardly change.

    The new base is chosen so that the slowest frequency is divided by exactly s::

        b' = b * s^(d / (d - 2))

    Reference: bloc97, NTK-Aware Scaled RoPE (2023), restated in the YaRN paper (https://arxiv.org/abs/2309.00071),
    Eq. 16. Transformers has no such type: a checkpoint is saved with the new ``rope_theta``.
    """

    title: ClassVar[str] = "NTK-aware"
    reference: ClassVar[str] = "https://arxiv.org/abs/2309.00071"
    untrained_factor: ClassVar[float | None] = 2.0
    evidence: ClassVar[str] = (
        "SmolLM2-135M reads on at 2 times (README); LLaMA-2-7B, one scale for all: 26.1 at 4 times (2402.17463)"
    )

    name: Literal["ntk"] = "ntk"

    def scaled_theta(self, spec: RopeSpec) -> float:
        """The enlarged base b'."""
        return ntk_theta(spec, self.lengths(spec).factor)

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        return default_inv_freq(self.scaled_theta(spec), spec.rotary_dim), 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.scaled_theta(spec)}


def ntk_theta(spec: RopeSpec, factor: float) -> float:
    """B' = b * s^(d / (d - 2)) for s = ``factor``."""
    d = spec.rotary_dim
    return float(spec.rope_theta * factor ** (d / (d - 2)))
