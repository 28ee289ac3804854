"""YaRN."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from ctxext.errors import ConfigError
from ctxext.methods.base import Method, Number, longrope_parameters
from ctxext.methods.ntk_by_parts import by_parts_factors
from ctxext.rope import RopeSpec, position_frequencies


class YaRN(Method):
    """Interpolate slow frequencies, keep fast ones, ramp between them, and sharpen the attention a little.

    The dimension that makes ``rot`` full turns within the trained length is
    ``dim(rot) = d * ln(L / (2 pi rot)) / (2 ln b)``. Dimensions below ``low`` keep their frequency, those above
    ``high`` are divided by s, and a ramp that is linear in the dimension's index joins them::

        low, high = max(floor(dim(beta_fast)), 0), min(ceil(dim(beta_slow)), d - 1)
        ramp_i    = clamp((i - low) / (high - low), 0, 1)
        theta'_i  = ramp_i * theta_i / s + (1 - ramp_i) * theta_i

    Cosine and sine are both multiplied by ``attention_factor = 0.1 ln(s) + 1``, so a score is multiplied by its square.

    Reference: YaRN: Efficient Context Window Extension of Large Language Models (https://arxiv.org/abs/2309.00071),
    section 3. Deviation: the paper's ramp is linear in the number of turns; the authors' code, Transformers, vLLM and
    llama.cpp, and so all published checkpoints, make it linear in the index, and so does this class unless
    ``ramp: rotations`` asks for the paper's (which is then exported as ``longrope``).
    """

    title: ClassVar[str] = "YaRN"
    reference: ClassVar[str] = "https://arxiv.org/abs/2309.00071"
    untrained_factor: ClassVar[float | None] = 4.0
    evidence: ClassVar[str] = (
        "LLaMA-2-7B: perplexity 7.87 at its length, 8.06 at 2, 9.82 at 4, 11.74 at 8 times (2402.17463)"
    )

    name: Literal["yarn"] = "yarn"
    beta_fast: Number = Field(32.0, gt=0, description="Turns within the trained length above which nothing changes.")
    beta_slow: Number = Field(1.0, gt=0, description="Turns within the trained length below which all is interpolated.")
    attention_factor: Number | None = Field(
        None, gt=0, description="Final factor on cosine and sine, used as it is. Default: 0.1 ln(factor) + 1."
    )
    mscale: Number | None = Field(
        None,
        gt=0,
        description="With mscale_all_dim: attention factor (0.1 mscale ln s + 1) / (0.1 mscale_all_dim ln s + 1).",
    )
    mscale_all_dim: Number | None = Field(None, gt=0, description="See mscale; the two go together.")
    truncate: bool = Field(True, description="Round the ends of the ramp outwards to whole dimensions.")
    ramp: Literal["dimension", "rotations"] = Field(
        "dimension", description="Ramp linear in the dimension's index (published checkpoints) or in turns (the paper)."
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> YaRN:
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"method yarn: beta_fast {self.beta_fast:g} must be above beta_slow {self.beta_slow:g} (swapped?)"
            )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ConfigError("method yarn: mscale and mscale_all_dim act only together; give both or neither")
        if self.attention_factor is not None and self.mscale is not None:
            raise ConfigError("method yarn: attention_factor is final, so mscale would be ignored; give one of them")
        if self.ramp == "rotations" and not self.truncate:
            raise ConfigError("method yarn: truncate acts only on ramp: dimension; leave it out with ramp: rotations")
        return self

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        original, factor, _ = self.lengths(spec)
        positions = position_frequencies(spec.rope_theta, spec.rotary_dim)
        if self.ramp == "rotations":
            factors = by_parts_factors(spec, original, factor, self.beta_slow, self.beta_fast)
            inv_freq = 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * positions)
        elif factor == 1:
            inv_freq = 1.0 / positions
        else:
            low, high = self.correction_range(spec)
            index = torch.arange(spec.rotary_dim // 2, dtype=torch.int64, device="cpu").to(torch.float32)
            kept = 1 - ((index - low) / (high - low)).clamp(0, 1)
            inv_freq = 1.0 / (factor * positions) * (1 - kept) + 1.0 / positions * kept
        return inv_freq, self._attention_factor(factor)

    def correction_range(self, spec: RopeSpec) -> tuple[float, float]:
        """First and last dimension of the ramp (``low``, ``high``), as indices of frequencies.

        Raises:
            ConfigError: the trained length is so short, or the base so small, that no such range exists.
        """
        original = self.lengths(spec).original
        low, high = (
            spec.rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.rope_theta))
            for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, spec.rotary_dim - 1)
        if low > high:
            raise ConfigError(
                f"method yarn: no ramp between beta_fast {self.beta_fast:g} and beta_slow {self.beta_slow:g} turns for "
                f"trained length {original}, rope_theta {spec.rope_theta:g}, {spec.rotary_dim} rotary dimensions"
            )
        # Transformers' way around a division by zero; it makes the ramp a step.
        return (low, high + 0.001) if low == high else (low, high)

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        lengths = self.lengths(spec)
        attention_factor = self._attention_factor(lengths.factor)
        if self.ramp == "rotations":
            factors = by_parts_factors(spec, lengths.original, lengths.factor, self.beta_slow, self.beta_fast)
            return longrope_parameters(spec, lengths, factors, attention_factor)
        return {
            "rope_type": "yarn",
            "rope_theta": spec.rope_theta,
            "factor": lengths.factor,
            "original_max_position_embeddings": lengths.original,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "attention_factor": attention_factor,
            "truncate": self.truncate,
        }

    def _attention_factor(self, factor: float) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return (0.1 * self.mscale * math.log(factor) + 1) / (0.1 * self.mscale_all_dim * math.log(factor) + 1)
        return 0.1 * math.log(factor) + 1
