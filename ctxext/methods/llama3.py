"""Llama 3.1's scaling."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from ctxext.errors import ConfigError
from ctxext.methods.base import Method, Number
from ctxext.rope import RopeSpec, default_inv_freq


class Llama3(Method):
    """Interpolate by wavelength, with a ramp between two wavelengths given as fractions of the trained length.

    ::

        w_i      = 2 pi / theta_i
        smooth_i = clamp((L / w_i - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
        theta'_i = (1 - smooth_i) * theta_i / s + smooth_i * theta_i

    It is NTK-by-parts with other constants: L / w_i is the number of turns within the trained length.

    Reference: The Llama 3 Herd of Models (https://arxiv.org/abs/2407.21783); the definition is that of Meta's release
    of Llama 3.1 (factor 8) and of Transformers' ``llama3``.
    """

    title: ClassVar[str] = "Llama 3"
    reference: ClassVar[str] = "https://arxiv.org/abs/2407.21783"
    evidence: ClassVar[str] = "published with training on long text (2407.21783); no figures without"

    name: Literal["llama3"] = "llama3"
    low_freq_factor: Number = Field(
        1.0, gt=0, description="Turns within the trained length below which all is interpolated."
    )
    high_freq_factor: Number = Field(
        4.0, gt=0, description="Turns within the trained length above which nothing changes."
    )

    @model_validator(mode="after")
    def _check_order(self) -> Llama3:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"method llama3: low_freq_factor {self.low_freq_factor:g} must be below "
                f"high_freq_factor {self.high_freq_factor:g}"
            )
        return self

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        original, factor, _ = self.lengths(spec)
        inv_freq = default_inv_freq(spec.rope_theta, spec.rotary_dim)
        turns = original / (2 * math.pi / inv_freq)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        mixed = (1 - smooth) * inv_freq / factor + smooth * inv_freq
        # Three cases rather than a clamp, so that untouched frequencies keep their bits.
        scaled = torch.where(smooth <= 0, inv_freq / factor, mixed)
        return torch.where((smooth >= 1) | (factor == 1), inv_freq, scaled), 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        lengths = self.lengths(spec)
        return {
            "rope_type": "llama3",
            "rope_theta": spec.rope_theta,
            "factor": lengths.factor,
            "original_max_position_embeddings": lengths.original,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
        }
