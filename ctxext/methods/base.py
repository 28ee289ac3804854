"""The contract of a context-extension method, and how lengths are settled."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from torch import nn

from ctxext.attention.bands import TRUE_DISTANCES, Bands
from ctxext.attention.partition import NO_PERIOD, Partition
from ctxext.errors import ConfigError
from ctxext.rope import RopeSpec, default_inv_freq


def _number(value: Any) -> Any:
    """Read ``"4.0"`` and YAML's ``1e6`` (a string to PyYAML) as the numbers they mean; refuse booleans."""
    if isinstance(value, bool):
        raise ValueError("expected a number, not a boolean")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError("expected a number") from None
    return value


def _whole_number(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)  # a float would round numbers above 2**53
    value = _number(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
"""A finite float; accepts numeric strings, refuses booleans, NaN and infinity."""

WholeNumber = Annotated[int, BeforeValidator(_whole_number)]
"""An int; accepts numeric strings and floats without a fraction, refuses booleans."""


class Lengths(NamedTuple):
    """How far a method reaches, in tokens."""

    original: int
    factor: float
    target: int


class Method(BaseModel, ABC):
    """A context-extension method: its settings and its mathematics in one frozen value.

    A method is defined by :meth:`frequencies`. Any two of ``original_max_position_embeddings`` (default: the model's
    own), ``factor`` and ``max_position_embeddings`` give the third; values that contradict each other are an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: ClassVar[str]
    """Name for people, e.g. ``NTK-aware``."""
    reference: ClassVar[str]
    """Where the method was published."""
    untrained_factor: ClassVar[float | None] = None
    """Largest factor at which perplexity without training, published or measured for the README, stays within a quarter
    of that at the trained length: 1 if at none, infinite by the method's definition, None if nobody has shown it."""
    evidence: ClassVar[str] = "no figures without training are published or were measured here"
    """What that rests on, in one line with its source."""
    no_log_n: ClassVar[str | None] = None
    """Why ``log_n`` is refused, if it is."""

    name: str
    factor: Number | None = Field(
        None,
        ge=1,
        le=1e6,
        description="How many times longer than the trained length the model shall read (s in the papers).",
    )
    original_max_position_embeddings: WholeNumber | None = Field(
        None, ge=2, description="Trained length in tokens (L in the papers). Default: the model's own."
    )
    max_position_embeddings: WholeNumber | None = Field(
        None, ge=2, description="Target length in tokens. Default: factor times the trained length."
    )
    log_n: bool = Field(
        False,
        description="Log-n attention: multiply the scores of the query at position p by max(1, ln(p + 1) / ln L).",
    )

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Only what differs from the defaults, so that messages stay short."""
        fields = type(self).model_fields
        return [(key, value) for key, value in super().__repr_args__() if key is None or value != fields[key].default]

    @model_validator(mode="after")
    def _check_log_n(self) -> Method:
        if self.log_n and self.no_log_n is not None:
            raise ConfigError(f"method {self.name}: log_n is not supported: {self.no_log_n}")
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Method:
        if self.original_max_position_embeddings is not None:
            self._settle(self.original_max_position_embeddings)
        return self

    def lengths(self, spec: RopeSpec) -> Lengths:
        """Trained length, factor and target length on a given model.

        Raises:
            ConfigError: neither ``factor`` nor ``max_position_embeddings`` is set, or they contradict each other.
        """
        original = self.original_max_position_embeddings or spec.original_max_position_embeddings
        settled = self._settle(original)
        if settled is None:
            raise ConfigError(
                f"method {self.name}: give factor or max_position_embeddings (the target length); "
                f"the trained length is {original}"
            )
        return settled

    def _settle(self, original: int) -> Lengths | None:
        factor, target = self.factor, self.max_position_embeddings
        if factor is not None and target is not None and abs(factor * original - target) >= 1:
            raise ConfigError(
                f"method {self.name}: factor {factor:g} times the trained length {original} is {factor * original:g}, "
                f"not max_position_embeddings {target}; leave one of them out, "
                "or correct original_max_position_embeddings"
            )
        if factor is None:
            if target is None:
                return None
            if target < original:
                raise ConfigError(
                    f"method {self.name}: max_position_embeddings {target} is below the trained length {original}"
                )
            factor = target / original
        # Rounded first, because 2.3 * 100 is 229.99999999999997.
        return Lengths(original, factor, target if target is not None else int(round(factor * original, 6)))

    @abstractmethod
    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        """Frequencies in radians per token, fp32 ``[d/2]``, and the attention factor on cosine and sine."""

    @property
    def changes_attention(self) -> bool:
        """Whether scores depend on more than fixed frequencies, so that stock attention can't compute them."""
        return self.log_n

    def partition(self, spec: RopeSpec) -> Partition | None:
        """What attention has to do for a method that changes it; None for stock attention.

        The rotary module then rotates as the partition says, and :meth:`scaled_rope` gives the frequencies within its
        ``identity_length``. A method that overrides this passes :meth:`log_length` on.
        """
        if not self.log_n:
            return None
        inv_freq, attention_factor = self.scaled_rope(spec)
        original = self.lengths(spec).original
        return Bands(
            inv_freq, attention_factor, NO_PERIOD, original, bands=(TRUE_DISTANCES,), log_length=self.log_length(spec)
        )

    def log_length(self, spec: RopeSpec) -> int | None:
        """The length beyond which log-n attention sharpens the scores (the trained one), or None if it is off."""
        return self.lengths(spec).original if self.log_n else None

    @property
    def learns(self) -> bool:
        """Whether :meth:`learned_rope` gives a module, with weights to be trained and saved."""
        return type(self).learned_rope is not Method.learned_rope

    def learned_rope(self, spec: RopeSpec) -> nn.Module | None:
        """A new module with what the method learns, if anything; then not together with :meth:`partition`.

        Called with a factor (1 is the trained length), it gives frequencies in radians per token, fp32 ``[d/2]``; as
        long as it is untrained those of :meth:`scaled_rope`. Its weights are fp32 on the CPU, the same in every new
        module. Where they are kept, see ``ctxext.learned``.
        """
        return None

    def for_config(self, config: Any) -> Method:
        """The method with those defaults filled in that a checkpoint's config has a say in."""
        return self

    def config_entries(self, spec: RopeSpec) -> dict[str, Any]:
        """Further keys for the config of a checkpoint saved with this method."""
        return {}

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        """The ``rope_parameters`` with which Transformers alone computes the same frequencies.

        Every static method can be written as ``longrope`` with equal factors for short and long input; methods that
        Transformers knows by name override this.
        """
        return as_longrope(spec, self.lengths(spec), *self.scaled_rope(spec))


def as_longrope(spec: RopeSpec, lengths: Lengths, inv_freq: torch.Tensor, attention_factor: float) -> dict[str, Any]:
    """Transformers' ``longrope`` for any frequencies ``[d/2]``, in radians per token."""
    base = default_inv_freq(spec.rope_theta, spec.rotary_dim)
    factors = (base.double() / inv_freq.double()).tolist()
    return longrope_parameters(spec, lengths, factors, attention_factor)


def longrope_parameters(
    spec: RopeSpec, lengths: Lengths, factors: list[float], attention_factor: float
) -> dict[str, Any]:
    """Transformers' ``longrope`` with the same factors below and above the trained length."""
    return {
        "rope_type": "longrope",
        "rope_theta": spec.rope_theta,
        "factor": lengths.factor,
        "original_max_position_embeddings": lengths.original,
        "attention_factor": attention_factor,
        "short_factor": factors,
        "long_factor": list(factors),
    }
