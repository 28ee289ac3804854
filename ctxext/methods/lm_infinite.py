"""LM-Infinite."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field

from ctxext.attention.bands import Band, Bands
from ctxext.errors import ConfigError
from ctxext.methods.base import WholeNumber
from ctxext.methods.remapped import Banded
from ctxext.rope import RopeSpec


class LMInfinite(Banded):
    """Attend to the first tokens and to the last ones only, at distances that grow no further than a limit.

    A query at position i attends to a key at j <= i if i - j < ``n_local`` or j < ``n_global``, at the relative
    position min(i - j, ``distance_limit``). What lies between is not seen: the model reads on without end, but finds
    nothing there. A text that is no longer than ``n_local`` and the limit is read as by the unpatched model.
    ``frequencies`` puts a static method inside.

    Reference: LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models
    (https://arxiv.org/abs/2308.16137), section 4. Defaults as published: 100 global tokens (the paper: 10 to 100 do),
    local tokens and limit the trained length (one more than the largest distance in training). Its further option, to
    attend to some tokens in the middle in a few layers, is not here.
    """

    title: ClassVar[str] = "LM-Infinite"
    reference: ClassVar[str] = "https://arxiv.org/abs/2308.16137"
    untrained_factor: ClassVar[float | None] = math.inf
    evidence: ClassVar[str] = (
        "positions stay in the trained range at any length, but the middle is not seen (2308.16137)"
    )

    no_log_n: ClassVar[str | None] = "it sees the same number of tokens however long the text is"

    name: Literal["lm_infinite"] = "lm_infinite"
    n_global: WholeNumber = Field(100, ge=1, description="First tokens that all later ones attend to.")
    n_local: WholeNumber | None = Field(
        None, ge=1, description="Last tokens attended to, itself included. Default: the trained length."
    )
    distance_limit: WholeNumber | None = Field(
        None, ge=1, description="Largest relative position, in tokens. Default: the trained length."
    )

    def sizes(self, spec: RopeSpec) -> tuple[int, int]:
        """``n_local`` and ``distance_limit`` on a given model.

        Raises:
            ConfigError: the limit is beyond what the model reads.
        """
        original, reach = self.lengths(spec).original, self.reach(spec)
        n_local, limit = self.n_local or original, self.distance_limit or original
        if limit > reach:
            raise ConfigError(
                f"method {self.name}: distance_limit {limit} is beyond the {reach} positions that the model reads"
            )
        return n_local, limit

    def bands(self, spec: RopeSpec) -> Bands:
        n_local, limit = self.sizes(spec)
        at_limit = partial(torch.full_like, fill_value=limit)
        # At the limit itself true and limited distance are one, so where the true ones end is free by one token.
        near = min(n_local, limit)
        bands = [Band(0, near)]
        if n_local > limit:
            bands.append(Band(limit, n_local, shown=at_limit, turned=True))
        elif limit > n_local:
            bands.append(Band(n_local, limit, keys=self.n_global))
        bands.append(Band(max(n_local, limit), None, self.n_global, at_limit, turned=True))
        return Bands(
            *self.scaled_rope(spec),
            period=self._period(max(limit, self.n_global)),
            identity_length=near,
            bands=tuple(bands),
            key_position=torch.zeros_like,
            turned_keys=None if n_local > limit else self.n_global,
            description=f"the first {self.n_global:,} and the last {n_local:,} tokens, at distances up to {limit:,}",
        )
