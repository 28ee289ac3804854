"""ReRoPE and Leaky ReRoPE."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ctxext.attention.bands import Band, Bands
from ctxext.errors import ConfigError
from ctxext.methods.base import Number, WholeNumber
from ctxext.methods.remapped import Banded
from ctxext.rope import RopeSpec


class ReRoPE(Banded):
    """Rectify the distance: keep it below a window, and let it grow no further, or more slowly, beyond.

    A query at position i and a key at j <= i are given the relative position::

        i - j                                if i - j < w
        w                                    otherwise (ReRoPE)
        w + (i - j - w) / k                  otherwise, with leak k > 1 (Leaky ReRoPE)

    So a text of at most w tokens is read as by the unpatched model, and with ReRoPE no relative position is ever above
    w, whatever the length. Positions of Leaky ReRoPE are fractions of a token. ``frequencies`` puts a static method
    inside.

    Reference: Jianlin Su, Rectified Rotary Position Embeddings (2023, https://kexue.fm/archives/9708); w and k there.
    Published with w = 1,024 for a model trained at 4,096 tokens, a quarter, which is the default here.
    """

    title: ClassVar[str] = "ReRoPE"
    reference: ClassVar[str] = "https://kexue.fm/archives/9708"
    untrained_factor: ClassVar[float | None] = math.inf
    evidence: ClassVar[str] = (
        "positions stay in the trained range at any length; LLaMA-2: loss 1.400 at 4 times its length, 1.500 at 1"
    )

    name: Literal["rerope"] = "rerope"
    window: WholeNumber | None = Field(
        None, ge=1, description="Distances below it are true, in tokens. Default: a quarter of the trained length."
    )
    leak: Number | None = Field(
        None, gt=1, description="Tokens by which the distance grows for one position beyond the window. Default: never."
    )

    def size(self, spec: RopeSpec) -> int:
        """``window`` on a given model.

        Raises:
            ConfigError: relative positions would leave the range that the model reads.
        """
        original, _, target = self.lengths(spec)
        window, reach = self.window or max(1, original // 4), self.reach(spec)
        if window >= reach:
            raise ConfigError(
                f"method {self.name}: window {window} must be below the {reach} positions that the model reads"
            )
        if self.leak is not None and target > window:
            largest = window + (target - 1 - window) / self.leak
            if largest > reach - 1:
                least = (target - 1 - window) / (reach - 1 - window) if window < reach - 1 else math.inf
                raise ConfigError(
                    f"method {self.name}: with leak {self.leak:g} a text of {target} tokens has relative positions up "
                    f"to {largest:.0f}, and the model reads {reach}; give a leak of {least:.3g} or more, lower the "
                    "window, or lower max_position_embeddings (the target length)"
                )
        return window

    def bands(self, spec: RopeSpec) -> Bands:
        window = self.size(spec)
        leak = math.inf if self.leak is None else self.leak
        shown = partial(_rectified, leak=leak, offset=window - window / leak)
        beyond = f"{window:,}" if leak == math.inf else f"one position for {leak:g} tokens"
        return Bands(
            *self.scaled_rope(spec),
            period=self._period(window),
            identity_length=window,
            bands=(Band(0, window), Band(window, shown=shown, turned=True)),
            key_position=partial(_rectified, leak=leak),
            description=f"true distances below {window:,} tokens; beyond, {beyond}",
        )


def _rectified(positions: Tensor, leak: float, offset: float = 0.0) -> Tensor:
    return positions.to(torch.float64) / leak + offset
