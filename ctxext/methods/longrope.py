"""LongRoPE's rescaling."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from ctxext.errors import ConfigError
from ctxext.methods.base import Method, Number, longrope_parameters
from ctxext.rope import RopeSpec, position_frequencies


class LongRoPE(Method):
    """Divide each frequency by its own factor, found by search.

    ::

        theta'_i         = theta_i / lambda_i
        attention_factor = sqrt(1 + ln s / ln L)

    Reference: LongRoPE (https://arxiv.org/abs/2402.13753), Eq. 2 and its released code. Deviation: the factors apply at
    every length. Transformers switches from short to long factors when the input passes the trained length, which
    leaves cached keys rotated by the wrong ones; a checkpoint saved from here carries equal factors for both.
    """

    title: ClassVar[str] = "LongRoPE"
    reference: ClassVar[str] = "https://arxiv.org/abs/2402.13753"
    untrained_factor: ClassVar[float | None] = 8.0
    evidence: ClassVar[str] = "8 times without training, with factors found by search for that very model (2402.13753)"

    name: Literal["longrope"] = "longrope"
    long_factor: tuple[Annotated[Number, Field(gt=0)], ...] = Field(
        min_length=1, description="One divisor for each of the d/2 frequencies (lambda in the paper)."
    )
    attention_factor: Number | None = Field(
        None, gt=0, description="Final factor on cosine and sine. Default: sqrt(1 + ln(factor) / ln(trained length))."
    )

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        if len(self.long_factor) != spec.rotary_dim // 2:
            raise ConfigError(
                f"method longrope: long_factor has {len(self.long_factor)} numbers, "
                f"but the model has {spec.rotary_dim // 2} frequencies"
            )
        factors = torch.tensor(self.long_factor, dtype=torch.float32, device="cpu")
        inv_freq = 1.0 / (factors * position_frequencies(spec.rope_theta, spec.rotary_dim))
        return inv_freq, self._attention_factor(spec)

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        return longrope_parameters(spec, self.lengths(spec), list(self.long_factor), self._attention_factor(spec))

    def _attention_factor(self, spec: RopeSpec) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        original, factor, _ = self.lengths(spec)
        return math.sqrt(1 + math.log(factor) / math.log(original))
