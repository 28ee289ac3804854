"""What a method that changes attention has to say: which relative position, and which frequencies, each score sees.

A method's file defines its own :class:`Partition`; the engine runs it, ``naive`` checks it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

NO_PERIOD = 2**62
"""Period of a rotary module that rotates to the true positions."""

Shape = Literal["full", "lower", "upper"]


class Region(NamedTuple):
    """A part of a block's scores in which every query has one rotation.

    Attributes:
        keys: columns, as many as the block has queries at least unless the shape is full.
        turn: int64 or fp64 ``[T]``, positions by which each query is rotated further than the rotary module has, or
            None.
        shape: which of the keys a query sees. ``full``: all of them; ``lower``: only the last query sees all, each one
            before it one less at the end; ``upper``: only the first query sees all, each one after it one less at the
            start.
        turned: whether the keys are those that the block's ``key_turn`` makes of the cached ones.
    """

    keys: slice
    turn: Tensor | None = None
    shape: Shape = "full"
    turned: bool = False


class Block(NamedTuple):
    """Consecutive queries that share their regions.

    Attributes:
        queries: their columns, counted like those of the keys.
        regions: disjoint; together all columns that each query attends to.
        inv_freq: fp32 ``[d/2]``, what ``turn`` and ``key_turn`` rotate by.
        key_turn: int64 or fp64 ``[S]``, positions by which the keys of turned regions are rotated further than the
            cached ones are, from the first column on; None if no region needs it.
        gain: fp32 ``[T]``, factor on each query's scores, or None.
        step: equal for blocks that turn a key in the same way; within one pass they have the same ``key_turn``.
        exact: rotate without rounding error; otherwise as stock rotary embeddings do, for equality with them.
    """

    queries: slice
    regions: tuple[Region, ...]
    inv_freq: Tensor
    key_turn: Tensor | None = None
    gain: Tensor | None = None
    step: int = 0
    exact: bool = True


def moved(blocks: list[Block], device: torch.device) -> list[Block]:
    """The blocks with their tensors on a device, each of them moved once however many blocks share it.

    They stay where they are if the device has no fp64 for their angles.
    """
    if device.type in ("cpu", "mps"):
        return blocks
    there: dict[int, Tensor] = {}

    def move(x: Tensor) -> Tensor:
        if id(x) not in there:
            there[id(x)] = x.to(device)
        return there[id(x)]

    def maybe(x: Tensor | None) -> Tensor | None:
        return None if x is None else move(x)

    return [
        block._replace(
            regions=tuple(region._replace(turn=maybe(region.turn)) for region in block.regions),
            inv_freq=move(block.inv_freq),
            key_turn=maybe(block.key_turn),
            gain=maybe(block.gain),
        )
        for block in blocks
    ]


@dataclass(frozen=True, eq=False)
class Partition(ABC):
    """How scores depend on the positions of query and key.

    Attributes:
        inv_freq: fp32 ``[d/2]``, the frequencies that the rotary module rotates by.
        attention_factor: factor on the rotary module's cosine and sine.
        period: the rotary module rotates to ``position mod period``; 1 leaves queries and keys as they are.
        identity_length: below it, every score is that of the rotary embedding ``inv_freq`` alone.
        log_length: length beyond which log-n attention sharpens the scores, or None.
    """

    inv_freq: Tensor
    attention_factor: float
    period: int
    identity_length: int
    log_length: int | None = field(default=None, kw_only=True)

    @property
    def keeps_turned_keys(self) -> bool:
        """Whether decoding keeps a second set of all keys beside the cache, turned for the latest query."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """What it does, in one sentence for people."""

    @abstractmethod
    def relative_positions(self, query: Tensor, key: Tensor) -> Tensor:
        """Relative position, int64 or fp64 ``[T, S]``, of queries at positions ``[T]`` and keys at ``[S]``.

        Where a query doesn't attend to a key it means nothing.
        """

    def attended(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether queries at positions ``[T]`` attend to keys at ``[S]``: bool ``[T, S]``."""
        return key <= query[:, None]

    @abstractmethod
    def blocks(self, positions: Tensor, first: int) -> list[Block]:
        """The queries in columns ``first`` to the end, cut into blocks.

        Args:
            positions: int64 ``[S]`` on the CPU, strictly ascending: the position of every column.
            first: column of the first query; the columns before it are keys only.
        """

    def frequencies_at(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Frequencies fp32 ``[T, d/2]`` and factor on the scores fp32 ``[T]`` for queries at positions ``[T]``.

        The factor doesn't hold what the rotary module's ``attention_factor`` has done already.
        """
        return self.inv_freq.expand(len(query), -1), self.log_gain(query).float()

    def log_gain(self, query: Tensor) -> Tensor:
        """Log-n attention's factor on the scores of queries at positions ``[T]``: fp64 ``[T]``, 1 up to its length."""
        if self.log_length is None:
            return torch.ones(len(query), dtype=torch.float64, device=query.device)
        return ((query + 1).to(torch.float64).log() / math.log(self.log_length)).clamp(min=1)

    def gain(self, query: Tensor) -> Tensor | None:
        """The factor of :meth:`frequencies_at`, or None where it is 1 for all."""
        factor = self.frequencies_at(query)[1]
        return None if bool((factor == 1).all()) else factor


def column_of(positions: Tensor, position: int) -> int:
    """The first column at or after a position."""
    return int(torch.searchsorted(positions, position))
