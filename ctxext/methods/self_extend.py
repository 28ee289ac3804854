"""Self-Extend."""

from __future__ import annotations

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


class SelfExtend(Banded):
    """Keep near distances, and count the far ones in groups of tokens, so that they stay in the trained range.

    With window W and group size G a query at position i and a key at j <= i are given the relative position::

        i - j                                          if i - j < W
        floor(i / G) - floor(j / G) + W - floor(W / G)      otherwise

    A text of n tokens then needs about (n - W) / G + W positions; a text of at most W tokens is read as by the
    unpatched model. ``frequencies`` puts a static method inside.

    Reference: LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning (https://arxiv.org/abs/2401.01325),
    section 3. ``neighbor_window`` and ``group_size`` are w_n and G_s there. Deviation: the authors' code shifts the
    grouped positions by one more, or not, depending on whether it prefills or decodes when G doesn't divide W; here the
    shift is W - floor(W / G) always.
    """

    title: ClassVar[str] = "Self-Extend"
    reference: ClassVar[str] = "https://arxiv.org/abs/2401.01325"
    untrained_factor: ClassVar[float | None] = 4.0
    evidence: ClassVar[str] = "LLaMA-2-7B-chat and others keep reading PG19 at 4 times their length (2401.01325)"

    name: Literal["self_extend"] = "self_extend"
    factor: Number | None = Field(
        None, ge=1, le=1e6, description="How many times the trained length is read, which sets group_size. Default: 4."
    )
    neighbor_window: WholeNumber | None = Field(
        None, ge=1, description="Distances below it are true, in tokens. Default: a quarter of the trained length."
    )
    group_size: WholeNumber | None = Field(
        None, ge=1, description="Tokens that share a position beyond it. Default: as few as the target length needs."
    )

    def sizes(self, spec: RopeSpec) -> tuple[int, int]:
        """``neighbor_window`` and ``group_size`` on a given model.

        Raises:
            ConfigError: they don't fit the model, or don't bring the target length into the range that it reads.
        """
        original, _, target = self.lengths(spec)
        window, reach = self.neighbor_window or max(1, original // 4), self.reach(spec)
        if window > reach:
            raise ConfigError(
                f"method {self.name}: neighbor_window {window} is beyond the {reach} positions that the model reads"
            )
        if self.group_size is not None:
            if (needed := self._needed(target, window, self.group_size)) > reach:
                raise ConfigError(
                    f"method {self.name}: with group_size {self.group_size} and neighbor_window {window} a text of "
                    f"{target} tokens needs {needed} positions, and the model reads {reach}; raise group_size, or "
                    "lower neighbor_window or max_position_embeddings (the target length)"
                )
            return window, self.group_size
        if target <= reach:
            return window, 1
        room = reach - window - 1
        if room < 2:
            raise ConfigError(
                f"method {self.name}: neighbor_window {window} leaves no room for grouped positions within the {reach} "
                "that the model reads; lower it"
            )
        group = max(1, -(-(target - 1 - window) // (room + 1)))
        while self._needed(target, window, group) > reach:  # rounding takes a little more
            group += 1
        return window, group

    @staticmethod
    def _needed(length: int, window: int, group: int) -> int:
        """Positions that a text of so many tokens needs: one more than its largest relative position."""
        return length if length <= window else max(window, (length - 1) // group + window - window // group + 1)

    def bands(self, spec: RopeSpec) -> Bands:
        window, group = self.sizes(spec)
        grouped = partial(_grouped, group=group)
        return Bands(
            *self.scaled_rope(spec),
            period=self._period(window),
            identity_length=window,
            bands=(
                Band(0, window),
                Band(window, shown=partial(grouped, shift=window - window // group), turned=True),
            ),
            key_position=grouped,
            description=f"true distances below {window:,} tokens; beyond, {group:,} tokens share a position",
        )


def _grouped(positions: Tensor, group: int, shift: int = 0) -> Tensor:
    return torch.div(positions, group, rounding_mode="floor") + shift
