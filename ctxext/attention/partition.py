"""What a method that changes attention has to say: which relative position, and which frequencies, each score sees.

A method's file defines its own :class:`Partition`; the engine runs it, ``naive`` checks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Region(NamedTuple):
    """A part of a block's scores in which every query has one rotation.

    Attributes:
        keys: columns that every query of the block sees here; with ``causal`` only the last query sees all of them,
            each query before it one less.
        turn: int64 ``[T]``, positions by which each query is rotated further than the rotary module has, or None.
        causal: whether the block's own tokens are the last of ``keys``.
    """

    keys: slice
    turn: Tensor | None = None
    causal: bool = False


class Block(NamedTuple):
    """Consecutive queries that share their regions.

    Attributes:
        queries: their columns, counted like those of the keys.
        regions: disjoint, together all columns up to each query's own.
        inv_freq: fp32 ``[d/2]``, what ``turn`` and ``key_positions`` rotate by.
        key_positions: int64 ``[S]``, positions that the keys are still to be rotated to, or None if they are cached in
            their final form.
        gain: fp32 ``[T]``, factor on each query's scores, or None.
        step: equal for blocks with equal ``inv_freq``.
        exact: rotate without rounding error; otherwise as stock rotary embeddings do, for equality with them.
    """

    queries: slice
    regions: tuple[Region, ...]
    inv_freq: Tensor
    key_positions: Tensor | None = None
    gain: Tensor | None = None
    step: int = 0
    exact: bool = True

    def to(self, device: torch.device) -> Block:
        """The block with its tensors on a device; they stay where they are if it has no fp64 for their angles."""
        if device.type in ("cpu", "mps"):
            return self
        return self._replace(
            regions=tuple(
                region if region.turn is None else region._replace(turn=region.turn.to(device))
                for region in self.regions
            ),
            inv_freq=self.inv_freq.to(device),
            key_positions=None if self.key_positions is None else self.key_positions.to(device),
            gain=None if self.gain is None else self.gain.to(device),
        )


@dataclass(frozen=True, eq=False)
class Partition(ABC):
    """How scores depend on the positions of query and key.

    Attributes:
        inv_freq: fp32 ``[d/2]``, the frequencies that the rotary module rotates by.
        attention_factor: factor on the rotary module's cosine and sine.
        period: the rotary module rotates to ``position mod period``; 1 leaves queries and keys as they are.
        identity_length: below it, every score is that of the rotary embedding ``inv_freq`` alone.
    """

    inv_freq: Tensor
    attention_factor: float
    period: int
    identity_length: int

    @abstractmethod
    def describe(self) -> str:
        """What it does, in one sentence for people."""

    @abstractmethod
    def relative_positions(self, query: Tensor, key: Tensor) -> Tensor:
        """Relative position int64 ``[T, S]`` of queries at positions ``[T]`` and keys at ``[S]``, for key <= query."""

    @abstractmethod
    def frequencies_at(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Frequencies fp32 ``[T, d/2]`` and factor on the scores fp32 ``[T]`` for queries at positions ``[T]``.

        The factor doesn't hold what the rotary module's ``attention_factor`` has done already.
        """

    @abstractmethod
    def blocks(self, positions: Tensor, first: int) -> list[Block]:
        """The queries in columns ``first`` to the end, cut into blocks.

        Args:
            positions: int64 ``[S]`` on the CPU, strictly ascending: the position of every column.
            first: column of the first query; the columns before it are keys only.
        """


def column_of(positions: Tensor, position: int) -> int:
    """The first column at or after a position."""
    return int(torch.searchsorted(positions, position))
