"""NTK-by-parts interpolation."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from ctxext.errors import ConfigError
from ctxext.methods.base import Method, Number, longrope_parameters
from ctxext.rope import RopeSpec, position_frequencies


class NTKByParts(Method):
    """Interpolate by how often a frequency turns within the trained length.

    A dimension that makes fewer than ``alpha`` turns within L tokens has never shown a full period in training and is
    interpolated; one that makes more than ``beta`` turns only knows relative distances and is left alone; in between
    the two are mixed::

        r_i      = L * theta_i / (2 pi)
        gamma_i  = clamp((r_i - alpha) / (beta - alpha), 0, 1)
        theta'_i = (1 - gamma_i) * theta_i / s + gamma_i * theta_i

    Reference: YaRN (https://arxiv.org/abs/2309.00071), Eq. 17-20. Transformers has no such type: a checkpoint is saved
    as ``longrope`` with equal factors for short and long input, and the frequencies here are computed from those same
    factors, so that the saved model agrees bit for bit.
    """

    title: ClassVar[str] = "NTK-by-parts"
    reference: ClassVar[str] = "https://arxiv.org/abs/2309.00071"

    name: Literal["ntk_by_parts"] = "ntk_by_parts"
    alpha: Number = Field(1.0, gt=0, description="Turns within the trained length below which all is interpolated.")
    beta: Number = Field(32.0, gt=0, description="Turns within the trained length above which nothing changes.")

    @model_validator(mode="after")
    def _check_order(self) -> NTKByParts:
        if self.alpha >= self.beta:
            raise ConfigError(f"method ntk_by_parts: alpha {self.alpha:g} must be below beta {self.beta:g}")
        return self

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        factors = torch.tensor(self._factors(spec), dtype=torch.float32, device="cpu")
        return 1.0 / (factors * position_frequencies(spec.rope_theta, spec.rotary_dim)), 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        return longrope_parameters(spec, self.lengths(spec), self._factors(spec), 1.0)

    def _factors(self, spec: RopeSpec) -> list[float]:
        lengths = self.lengths(spec)
        return by_parts_factors(spec, lengths.original, lengths.factor, self.alpha, self.beta)


def by_parts_factors(spec: RopeSpec, original: int, factor: float, alpha: float, beta: float) -> list[float]:
    """``theta_i / theta'_i`` of NTK-by-parts: 1 for fast frequencies, ``factor`` for slow ones; d/2 numbers."""
    inv_freq = 1.0 / position_frequencies(spec.rope_theta, spec.rotary_dim).double()
    turns = original * inv_freq / (2 * math.pi)
    gamma = ((turns - alpha) / (beta - alpha)).clamp(0, 1)
    factors: list[float] = (1.0 / ((1 - gamma) / factor + gamma)).tolist()
    return factors
