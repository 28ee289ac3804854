"""What methods share that give scores other relative positions than the true ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator
from torch import Tensor

from ctxext.attention.bands import Bands
from ctxext.errors import ConfigError
from ctxext.methods.base import Lengths, Method, Number
from ctxext.rope import RopeSpec, default_inv_freq


class Remapped(Method):
    """A method that changes which relative position a score sees; a static method inside may change the frequencies.

    The trained length is the only one that matters to its definition: how far ctxext's tools read is a setting of its
    own, four times the trained length unless ``factor`` or ``max_position_embeddings`` says otherwise.
    """

    factor: Number | None = Field(
        None,
        ge=1,
        le=1e6,
        description="How many times the trained length ctxext's tools read; changes no score. Default: 4.",
    )
    frequencies: SerializeAsAny[Method] | None = Field(
        None, description="A static method inside, e.g. {name: ntk, factor: 2}. Default: the model's own frequencies."
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
    def _check_frequencies(self) -> Remapped:
        if self.frequencies is not None and self.frequencies.changes_attention:
            raise ConfigError(
                f"method {self.name}: frequencies: {self.frequencies.name} changes attention itself; give a static "
                "method"
            )
        if self.frequencies is not None and self.frequencies.learns:
            raise ConfigError(
                f"method {self.name}: frequencies: {self.frequencies.name} learns its frequencies, which are fixed in "
                "here; export the trained model, and give its factors as longrope"
            )
        return self

    @property
    def changes_attention(self) -> bool:
        return True

    def lengths(self, spec: RopeSpec) -> Lengths:
        if self.factor is None and self.max_position_embeddings is None:
            original = self.original_max_position_embeddings or spec.original_max_position_embeddings
            return Lengths(original, 4.0, 4 * original)
        return super().lengths(spec)

    def trained(self, spec: RopeSpec) -> RopeSpec:
        """The rotary embedding with the trained length that this method goes by."""
        return replace(spec, original_max_position_embeddings=self.lengths(spec).original)

    def reach(self, spec: RopeSpec) -> int:
        """How many positions the model reads with its frequencies: the trained length, or that of ``frequencies``."""
        original = self.lengths(spec).original
        return (
            original if self.frequencies is None else max(original, self.frequencies.lengths(self.trained(spec)).target)
        )

    def scaled_rope(self, spec: RopeSpec) -> tuple[Tensor, float]:
        if self.frequencies is not None:
            return self.frequencies.scaled_rope(self.trained(spec))
        return default_inv_freq(spec.rope_theta, spec.rotary_dim), 1.0


PERIOD = 2**15
"""Tokens after which the rotary module of a banded method begins again, unless a band reaches further."""


class Banded(Remapped):
    """A method whose relative positions depend on the true distance, by bands of it.

    Keys are cached as the rotary module leaves them. Whatever a band does to them depends on their own position alone,
    so it is done once for each key.
    """

    @abstractmethod
    def bands(self, spec: RopeSpec) -> Bands:
        """The bands on a given model."""

    def partition(self, spec: RopeSpec) -> Bands:
        return replace(self.bands(spec), log_length=self.log_length(spec))

    def _period(self, reach: int) -> int:
        """The least multiple of ``PERIOD`` that true distances below ``reach`` fit into."""
        return -(-reach // PERIOD) * PERIOD
