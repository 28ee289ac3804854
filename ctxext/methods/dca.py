"""Dual Chunk Attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, SerializeAsAny, field_validator, model_validator
from torch import Tensor

from ctxext.attention.partition import Block, Partition, Region, column_of
from ctxext.errors import ConfigError
from ctxext.methods.base import Lengths, Method, Number, WholeNumber
from ctxext.rope import RopeSpec, default_inv_freq


class DCA(Method):
    """Cut the text into chunks and keep every relative position within the trained range, without training.

    With stride s = ``chunk_size`` - ``local_size``, r(i) = i mod s and chunk(i) = i div s, a query at position i and a
    key at j <= i are given the relative position::

        same chunk       r(i) - r(j)                                  the true distance
        previous chunk   min(r(i) + s, chunk_size - 1) - r(j)         the true distance up to local_size
        earlier chunks   chunk_size - 1 - r(j)

    So it is never above ``chunk_size`` - 1, never above the true distance, and exact up to ``local_size``; a text of at
    most s tokens is read as by the unpatched model. Keys are rotated at r(j) whatever the query, so a cached key is
    final. ``frequencies`` puts a static method inside, whose frequencies then rotate these positions.

    Reference: Training-Free Long-Context Scaling of Large Language Models (https://arxiv.org/abs/2402.17463), section
    3. c in the paper is ``chunk_size``, w is ``local_size``; the names are those of Qwen2.5-1M checkpoints, whose
    ``dual_chunk_attention_config`` gives the defaults. The authors' code, unlike the paper and this class, lets the
    relative position reach ``chunk_size``. ``temperature`` is not in the paper; it multiplies the scores of query i by
    max(1, temperature * ln((i + 1) / L) + 1), where other implementations take the length of the whole input for i + 1.
    """

    title: ClassVar[str] = "Dual Chunk Attention"
    reference: ClassVar[str] = "https://arxiv.org/abs/2402.17463"
    untrained_factor: ClassVar[float | None] = math.inf
    evidence: ClassVar[str] = (
        "positions stay in the trained range at any length; LLaMA-2-7B: 7.87 at its own, 7.89 at 8 times (2402.17463)"
    )

    name: Literal["dca"] = "dca"
    factor: Number | None = Field(
        None,
        ge=1,
        le=1e6,
        description="How many times the trained length ctxext's tools read; changes no score. Default: 4.",
    )
    chunk_size: WholeNumber | None = Field(
        None, ge=2, description="Relative positions stay below it, in tokens. Default: the checkpoint's, or L."
    )
    local_size: WholeNumber | None = Field(
        None,
        ge=1,
        description="Distances up to it are exact, in tokens; at most half of chunk_size, and by default a quarter, or "
        "what the checkpoint says.",
    )
    frequencies: SerializeAsAny[Method] | None = Field(
        None, description="A static method inside, e.g. {name: ntk, factor: 2}. Default: the model's own frequencies."
    )
    temperature: Number = Field(
        0.0, ge=0, description="Sharpens attention beyond L: factor max(1, temperature ln(n/L) + 1); 0 is off."
    )
    attention: Literal["fused", "naive"] = Field(
        "fused", description="naive: the dense reference, quadratic in memory, which can return attention weights."
    )

    @field_validator("frequencies", mode="before")
    @classmethod
    def _parse_frequencies(cls, value: Any) -> Any:
        from ctxext.config import parse_inner_method  # which knows all methods, this one among them

        return parse_inner_method(value, "method.frequencies") if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _check_sizes(self) -> DCA:
        if self.frequencies is not None and self.frequencies.changes_attention:
            raise ConfigError(
                f"method dca: frequencies: {self.frequencies.name} changes attention itself; give a static method"
            )
        if self.frequencies is not None and self.frequencies.learns:
            raise ConfigError(
                f"method dca: frequencies: {self.frequencies.name} learns its frequencies, which are fixed in here; "
                "export the trained model, and give its factors as longrope"
            )
        if self.chunk_size is not None and self.local_size is not None:
            self._check_local_size(self.local_size, self.chunk_size)
        return self

    def _check_local_size(self, local_size: int, chunk_size: int) -> None:
        # Beyond half, relative positions to earlier chunks would be larger than the true distance.
        if 2 * local_size > chunk_size:
            raise ConfigError(
                f"method dca: local_size {local_size} must be at most half of chunk_size {chunk_size}"
                + (" (swapped?)" if local_size > chunk_size else "")
            )

    @property
    def changes_attention(self) -> bool:
        return True

    def for_config(self, config: Any) -> DCA:
        """Fill in what the checkpoint's ``dual_chunk_attention_config`` says and the settings don't."""
        recorded = getattr(config, "dual_chunk_attention_config", None)
        if not isinstance(recorded, Mapping):
            return self
        keys = ["chunk_size", "local_size"]
        if getattr(config, "ctxext", None) is None:  # else that record knows the trained length
            keys.append("original_max_position_embeddings")
        given = {key: recorded[key] for key in keys if getattr(self, key) is None and recorded.get(key) is not None}
        if self.chunk_size is not None:
            given.pop("local_size", None)  # it belongs to the checkpoint's own chunk_size
        from ctxext.config import parse_method

        settings = {key: getattr(self, key) for key in type(self).model_fields}
        method = parse_method({**settings, **given}, "config.dual_chunk_attention_config")
        assert isinstance(method, DCA)  # by its name
        return method

    def lengths(self, spec: RopeSpec) -> Lengths:
        if self.factor is None and self.max_position_embeddings is None:
            original = self.original_max_position_embeddings or spec.original_max_position_embeddings
            return Lengths(original, 4.0, 4 * original)
        return super().lengths(spec)

    def sizes(self, spec: RopeSpec) -> tuple[int, int]:
        """``chunk_size`` and ``local_size`` on a given model.

        Raises:
            ConfigError: they don't fit each other or the model.
        """
        original = self.lengths(spec).original
        chunk_size = self.chunk_size or original
        local_size = self.local_size or max(1, chunk_size // 4)
        reach = max(
            original, self.frequencies.lengths(self._trained(spec)).target if self.frequencies is not None else 0
        )
        if chunk_size > reach:
            raise ConfigError(
                f"method dca: chunk_size {chunk_size} is beyond the {reach} positions that the model reads; lower it, "
                "or give frequencies that reach further"
            )
        self._check_local_size(local_size, chunk_size)
        return chunk_size, local_size

    def _trained(self, spec: RopeSpec) -> RopeSpec:
        """The rotary embedding with the trained length that this method goes by."""
        return replace(spec, original_max_position_embeddings=self.lengths(spec).original)

    def scaled_rope(self, spec: RopeSpec) -> tuple[Tensor, float]:
        if self.frequencies is not None:
            return self.frequencies.scaled_rope(self._trained(spec))
        return default_inv_freq(spec.rope_theta, spec.rotary_dim), 1.0

    def partition(self, spec: RopeSpec) -> DualChunk:
        chunk_size, local_size = self.sizes(spec)
        inv_freq, attention_factor = self.scaled_rope(spec)
        original = self.lengths(spec).original
        return DualChunk(
            inv_freq=inv_freq,
            attention_factor=attention_factor,
            period=chunk_size - local_size,
            identity_length=chunk_size - local_size,
            chunk_size=chunk_size,
            temperature=self.temperature,
            original=original,
        )

    def config_entries(self, spec: RopeSpec) -> dict[str, Any]:
        if self.frequencies is not None:
            return {}  # an engine that reads the entry would run these chunks at the plain frequencies
        chunk_size, local_size = self.sizes(spec)
        entry = {
            "chunk_size": chunk_size,
            "local_size": local_size,
            "original_max_position_embeddings": self.lengths(spec).original,
        }
        return {"dual_chunk_attention_config": entry}


@dataclass(frozen=True, eq=False)
class DualChunk(Partition):
    """The three relative positions of :class:`DCA`; ``period`` is the stride."""

    chunk_size: int
    temperature: float
    original: int

    def describe(self) -> str:
        return (
            f"chunks of {self.period:,} tokens; relative positions stay below {self.chunk_size:,} and are exact up to "
            f"{self.chunk_size - self.period:,}"
        )

    def relative_positions(self, query: Tensor, key: Tensor) -> Tensor:
        chunk, rest = (query // self.period)[:, None], (query % self.period)[:, None]
        previous = (rest + self.period).clamp(max=self.chunk_size - 1)
        shown = torch.where(chunk == key // self.period, rest, previous)
        shown = torch.where(chunk > key // self.period + 1, self.chunk_size - 1, shown)
        return shown - key % self.period

    def frequencies_at(self, query: Tensor) -> tuple[Tensor, Tensor]:
        gain = (self.temperature * ((query + 1).to(torch.float64) / self.original).log() + 1).clamp(min=1)
        return self.inv_freq.expand(len(query), -1), gain.float()

    def blocks(self, positions: Tensor, first: int) -> list[Block]:
        blocks = []
        while first < len(positions):
            chunk = int(positions[first]) // self.period
            start, end = (column_of(positions, (chunk + i) * self.period) for i in (0, 1))
            previous = column_of(positions, (chunk - 1) * self.period)
            own = positions[first:end]
            rest = own % self.period
            regions = [Region(slice(start, end), causal=True)]
            if previous < start:
                turn = (rest + self.period).clamp(max=self.chunk_size - 1) - rest
                regions.append(Region(slice(previous, start), turn))
            if previous > 0:
                regions.append(Region(slice(0, previous), self.chunk_size - 1 - rest))
            gain = self.frequencies_at(own)[1] if self.temperature else None
            blocks.append(Block(slice(first, end), tuple(regions), self.inv_freq, gain=gain))
            first = end
        return blocks
