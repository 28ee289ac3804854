"""Dynamic NTK and Dynamic YaRN, causal: the scale belongs to the position of the query."""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ctxext.attention.partition import Block, Partition, Region, column_of
from ctxext.errors import ConfigError
from ctxext.methods.base import Lengths, Method, Number, WholeNumber
from ctxext.methods.ntk import NTK
from ctxext.methods.yarn import YaRN
from ctxext.rope import RopeSpec, default_inv_freq


class Dynamic(Method):
    """What both dynamic methods share: a scale that grows with the length, and to whom it applies.

    A query at position p uses the frequencies for the length n(p), and keys are rotated by the frequencies of the query
    that looks at them::

        n(p) = L                                          for p < L
        n(p) = L + the least multiple of step that covers p + 1 - L      beyond
        s    = factor * n / L - (factor - 1)

    So the scale depends on nothing but the query's own position: one forward pass, cached decoding, chunked prefill and
    every row of a batch give the same logits, and the first L tokens are read as by the unpatched model. ``seq_len``
    pins n for the whole window instead, as the papers do; the method is then static, and runs on stock attention.
    """

    factor: Number = Field(
        2.0,
        ge=1,
        le=1e6,
        description="Growth f of the scale, s = f n/L - (f - 1); above 1 it runs ahead of the length.",
    )
    max_position_embeddings: WholeNumber | None = Field(
        None, ge=2, description="How far ctxext's tools read, in tokens; changes no score. Default: 4 L."
    )
    step: WholeNumber = Field(512, ge=1, description="The scale grows every so many tokens.")
    seq_len: WholeNumber | None = Field(
        None, ge=2, description="Length that the scale is pinned to, in tokens. Default: each query's own position."
    )
    attention: Literal["fused", "naive"] = Field(
        "fused", description="naive: the dense reference, quadratic in memory, which can return attention weights."
    )

    @model_validator(mode="after")
    def _check_pinned(self) -> Dynamic:
        if self.seq_len is not None and self.max_position_embeddings not in (None, self.seq_len):
            raise ConfigError(
                f"method {self.name}: seq_len {self.seq_len} and max_position_embeddings "
                f"{self.max_position_embeddings} contradict each other; leave one of them out"
            )
        return self

    @property
    def changes_attention(self) -> bool:
        return self.log_n or self.seq_len is None

    def _settle(self, original: int) -> Lengths:
        target = self.max_position_embeddings or self.seq_len or 4 * original
        if self.seq_len is None and target < original:
            raise ConfigError(
                f"method {self.name}: max_position_embeddings {target} is below the trained length {original}"
            )
        target = max(target, original)
        return Lengths(original, target / original, target)

    def scale(self, spec: RopeSpec, length: int) -> float:
        """The scale s for a text of ``length`` tokens."""
        ratio = max(1.0, length / self.lengths(spec).original)
        return self.factor * ratio - (self.factor - 1)

    def scaled_to(self, spec: RopeSpec, length: int) -> tuple[Tensor, float]:
        """Frequencies fp32 ``[d/2]`` and attention factor for a text of ``length`` tokens."""
        scale = self.scale(spec, length)
        if scale == 1:
            return default_inv_freq(spec.rope_theta, spec.rotary_dim), 1.0
        return self._static(spec, scale).scaled_rope(spec)

    def scaled_rope(self, spec: RopeSpec) -> tuple[Tensor, float]:
        return self.scaled_to(spec, self.seq_len or self.lengths(spec).original)

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        return self._static(spec, self.scale(spec, self.seq_len or 0)).rope_parameters(spec)

    def partition(self, spec: RopeSpec) -> Partition | None:
        if self.seq_len is not None:
            return super().partition(spec)
        return CausalScaling(
            inv_freq=default_inv_freq(spec.rope_theta, spec.rotary_dim),
            attention_factor=1.0,
            period=1,
            identity_length=self.lengths(spec).original,
            method=self,
            spec=spec,
            log_length=self.log_length(spec),
        )

    @abstractmethod
    def _static(self, spec: RopeSpec, scale: float) -> Method:
        """The static method with this scale."""


class DynamicNTK(Dynamic):
    """Enlarge the base further the longer the text is, for each query by its own position.

    NTK-aware scaling with b' = b * s^(d / (d - 2)), where s follows the position p of the query: n(p) is L below the
    trained length, beyond it L plus whole steps up to p + 1, and s = f * n / L - (f - 1). Keys are rotated by the
    frequencies of the query that looks at them. ``seq_len`` pins n for the whole window instead, as published.

    Reference: emozilla, Dynamically Scaled RoPE (2023), restated in the YaRN paper (https://arxiv.org/abs/2309.00071),
    section 3.3. Deviation: the publication, and Transformers, take one scale from the whole input, so that cached
    decoding, chunked prefill and batches change the result; here they don't.
    """

    title: ClassVar[str] = "Dynamic NTK"
    reference: ClassVar[str] = "https://arxiv.org/abs/2309.00071"
    untrained_factor: ClassVar[float | None] = 2.0
    evidence: ClassVar[str] = (
        "SmolLM2-135M reads on at 2 times (README); LLaMA-2-7B, one scale for all: 26.1 at 4 times (2402.17463)"
    )

    name: Literal["dynamic_ntk"] = "dynamic_ntk"

    def _static(self, spec: RopeSpec, scale: float) -> Method:
        return NTK(factor=scale, original_max_position_embeddings=self.lengths(spec).original)


class DynamicYaRN(Dynamic):
    """Interpolate slow frequencies further the longer the text is, for each query by its own position.

    YaRN with a scale s that follows the position p of the query: n(p) is L below the trained length, beyond it L plus
    whole steps up to p + 1, and s = f * n / L - (f - 1). Scores are multiplied by (0.1 ln s + 1)^2, and keys are
    rotated by the frequencies of the query that looks at them. ``seq_len`` pins n for the whole window instead.

    Reference: YaRN: Efficient Context Window Extension of Large Language Models (https://arxiv.org/abs/2309.00071),
    section 3.3 (dynamic scaling), with f = 1. Deviation: the paper takes one scale from the whole input, so that cached
    decoding, chunked prefill and batches change the result; here they don't.
    """

    title: ClassVar[str] = "Dynamic YaRN"
    reference: ClassVar[str] = "https://arxiv.org/abs/2309.00071"
    untrained_factor: ClassVar[float | None] = 2.0
    evidence: ClassVar[str] = "SmolLM2-135M reads on at 2 times (README); its authors claim more than 2 (2309.00071)"

    name: Literal["dynamic_yarn"] = "dynamic_yarn"
    beta_fast: Number = Field(32.0, gt=0, description="Turns within the trained length above which nothing changes.")
    beta_slow: Number = Field(1.0, gt=0, description="Turns within the trained length below which all is interpolated.")
    truncate: bool = Field(True, description="Round the ends of the ramp outwards to whole dimensions.")

    @model_validator(mode="after")
    def _check_ramp(self) -> DynamicYaRN:
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"method {self.name}: beta_fast {self.beta_fast:g} must be above beta_slow {self.beta_slow:g} "
                "(swapped?)"
            )
        return self

    def _static(self, spec: RopeSpec, scale: float) -> Method:
        return YaRN(
            factor=scale,
            original_max_position_embeddings=self.lengths(spec).original,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
        )


@dataclass(frozen=True, eq=False)
class CausalScaling(Partition):
    """True distances, at frequencies that follow the position of the query."""

    method: Dynamic
    spec: RopeSpec

    @property
    def keeps_turned_keys(self) -> bool:
        return True

    def describe(self) -> str:
        return (
            f"true distances; beyond {self.identity_length:,} tokens the frequencies follow each query's own position, "
            f"in steps of {self.method.step:,}"
        )

    def length_at(self, query: Tensor) -> Tensor:
        """The length n that the queries' scale is for, int64 ``[T]``."""
        beyond = (query + 1 - self.identity_length).clamp(min=0)
        steps = (beyond + self.method.step - 1) // self.method.step
        return self.identity_length + steps * self.method.step

    def relative_positions(self, query: Tensor, key: Tensor) -> Tensor:
        return query[:, None] - key

    def frequencies_at(self, query: Tensor) -> tuple[Tensor, Tensor]:
        scaled = [_scaled(self.method, self.spec, int(n)) for n in self.length_at(query)]
        gain = torch.tensor([factor**2 for _, factor in scaled], dtype=torch.float64, device="cpu")
        return torch.stack([inv_freq for inv_freq, _ in scaled]), (gain * self.log_gain(query)).float()

    def blocks(self, positions: Tensor, first: int) -> list[Block]:
        blocks = []
        while first < len(positions):
            length = int(self.length_at(positions[first]))
            end = column_of(positions, length)
            inv_freq, attention_factor = _scaled(self.method, self.spec, length)
            own = positions[first:end]
            gain = (attention_factor**2 * self.log_gain(own)).float()
            region = Region(slice(0, end), own, "lower", turned=True)
            exact = length > self.identity_length
            blocks.append(
                Block(
                    slice(first, end),
                    (region,),
                    inv_freq,
                    positions[:end],
                    None if bool((gain == 1).all()) else gain,
                    length,
                    exact,
                )
            )
            first = end
        return blocks


@functools.lru_cache(maxsize=4096)
def _scaled(method: Dynamic, spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    return method.scaled_to(spec, length)
