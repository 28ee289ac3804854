"""Partitions whose borders follow the diagonal: which relative position a score sees depends on the true distance.

Self-Extend, ReRoPE, LM-Infinite and StreamingLLM are such; each names its bands, and all of them run on what is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ctxext.attention.partition import Block, Partition, Region, Shape, column_of

Positions = Callable[[Tensor], Tensor]
"""From true positions int64 ``[n]`` to those that are shown, int64 or fp64 ``[n]``."""


class Band(NamedTuple):
    """The scores whose true distance lies in one range.

    Attributes:
        nearest: the smallest distance, in tokens.
        farthest: the first distance beyond the band, or None for no end.
        keys: only keys at positions below it, or None for all.
        shown: position at which a query is shown to these keys, or None for its true distance to them.
        turned: whether the keys are shown at the partition's ``key_position`` rather than at their own position.
    """

    nearest: int = 0
    farthest: int | None = None
    keys: int | None = None
    shown: Positions | None = None
    turned: bool = False


TRUE_DISTANCES = Band()


@dataclass(frozen=True, eq=False)
class Bands(Partition):
    """Bands of distances that don't overlap; what is in none of them is not attended to.

    The rotary module rotates to ``position mod period``, so that angles are no less exact at any length than within the
    first period; ``period`` is at least the reach of every band at true distances, and of every key that is shown
    unturned.

    Attributes:
        bands: the first one begins at distance 0.
        key_position: at which keys of turned bands are shown.
        turned_keys: only keys at positions below it are ever turned, or None for all.
        description: what it does, in one sentence for people.
    """

    bands: tuple[Band, ...]
    key_position: Positions | None = None
    turned_keys: int | None = None
    description: str = "true distances"

    @property
    def keeps_turned_keys(self) -> bool:
        return self.key_position is not None and self.turned_keys is None

    def describe(self) -> str:
        return self.description

    @property
    def ends(self) -> tuple[int, int] | None:
        """How many first and how many last tokens are all that is attended to, or None if all are."""
        if any(band.farthest is None and band.keys is None for band in self.bands):
            return None
        return max(band.keys or 0 for band in self.bands), max(
            band.farthest or 0 for band in self.bands if band.keys is None
        )

    def relative_positions(self, query: Tensor, key: Tensor) -> Tensor:
        query = query[:, None]
        relative = query - key
        for band in self.bands:
            if band.shown is not None:
                at = self.key_position(key) if band.turned and self.key_position is not None else key
                shown = band.shown(query) - at
                relative = torch.where(self._within(band, query, key), shown, relative.to(shown.dtype))
        return relative

    def attended(self, query: Tensor, key: Tensor) -> Tensor:
        within = [self._within(band, query[:, None], key) for band in self.bands]
        return torch.stack(within).any(dim=0)

    @staticmethod
    def _within(band: Band, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        within = distance >= band.nearest
        if band.farthest is not None:
            within &= distance < band.farthest
        return within if band.keys is None else within & (key < band.keys)

    def blocks(self, positions: Tensor, first: int) -> list[Block]:
        own = positions[first:]
        borders = [self._borders(band, positions, own) for band in self.bands]
        key_turn = self._key_turn(positions, borders)
        blocks = []
        for cut in self._cuts(borders, positions, own):
            queries = own[cut]
            regions = [
                region
                for band, (starts, stops) in zip(self.bands, borders, strict=True)
                for region in self._regions(band, starts[cut], stops[cut], positions, queries)
            ]
            columns = slice(first + cut.start, first + cut.stop)
            blocks.append(Block(columns, tuple(regions), self.inv_freq, key_turn, self.gain(queries)))
        return blocks

    @staticmethod
    def _borders(band: Band, positions: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """First column of the band and first one beyond it, int64 ``[T]`` each."""
        stops = torch.searchsorted(positions, own - band.nearest, right=True)
        if band.keys is not None:
            stops = stops.clamp(max=column_of(positions, band.keys))
        if band.farthest is None:
            return torch.zeros_like(stops), stops
        return torch.searchsorted(positions, own - band.farthest, right=True).minimum(stops), stops

    def _key_turn(self, positions: Tensor, borders: list[tuple[Tensor, Tensor]]) -> Tensor | None:
        """By how much keys are turned further than they are cached, or None if no band has any such."""
        turned = (stops > starts for band, (starts, stops) in zip(self.bands, borders, strict=True) if band.turned)
        if self.key_position is None or not any(bool(some.any()) for some in turned):
            return None
        if self.turned_keys is not None:
            positions = positions[: column_of(positions, self.turned_keys)]
        return self.key_position(positions) - positions % self.period

    def _cuts(self, borders: list[tuple[Tensor, Tensor]], positions: Tensor, own: Tensor) -> list[slice]:
        """Runs of queries for whom every border stays, or moves on by one column with each query.

        Within a run no band begins or ends and no border crosses into another of the rotary module's periods. A band of
        which both borders move is wider than its run is long, so that its two triangles lie apart.
        """
        begin = self._period_begins(positions, own)
        state, widths = [own // self.period], []
        for starts, stops in borders:
            state += [(stops > starts).long(), (starts < begin).long(), (stops <= begin).long()]
            widths.append(stops - starts)
        moves = torch.stack([border.diff() for pair in borders for border in pair])
        broken = (torch.stack(state).diff() != 0).any(dim=0) | (moves > 1).any(dim=0)
        changed = (moves.diff() != 0).any(dim=0) & ~broken[:-1]
        broken[1:] |= changed
        ends = [*(broken.nonzero()[:, 0] + 1).tolist(), len(own)]
        cuts, start = [], 0
        for end in ends:
            most = end - start
            if most > 1:
                both = moves[::2, start].logical_and(moves[1::2, start]).tolist()
                rooms = [int(width[start]) - 1 for width, moving in zip(widths, both, strict=True) if moving]
                most = max(1, min([most, *(room for room in rooms if room >= 0)]))
            cuts += [slice(i, min(i + most, end)) for i in range(start, end, most)]
            start = end
        return cuts

    def _period_begins(self, positions: Tensor, own: Tensor) -> Tensor:
        """First column of the rotary module's period that each query is in."""
        return torch.searchsorted(positions, own // self.period * self.period)

    def _regions(self, band: Band, starts: Tensor, stops: Tensor, positions: Tensor, queries: Tensor) -> list[Region]:
        """What a run of queries sees of a band."""
        first, last = (int(starts[0]), int(stops[0])), (int(starts[-1]), int(stops[-1]))
        if first[0] == first[1]:
            return []
        parts: list[tuple[int, int, Shape]]
        if first == last:
            parts = [(*first, "full")]
        elif first[0] == last[0]:
            parts = [(first[0], last[1], "lower")]
        elif first[1] == last[1]:
            parts = [(*first, "upper")]
        else:
            parts = [(first[0], first[1] - 1, "upper"), (first[1] - 1, last[1], "lower")]
        if band.shown is not None:
            turn = band.shown(queries) - queries % self.period
            shown = turn if bool(turn.any()) else None
            return [Region(slice(start, stop), shown, shape, band.turned) for start, stop, shape in parts]
        regions = []
        begin = int(self._period_begins(positions, queries[:1]))
        earlier = torch.full_like(queries, self.period)
        for start, stop, shape in parts:
            if stop <= begin:
                regions.append(Region(slice(start, stop), earlier, shape))
            elif start >= begin:
                regions.append(Region(slice(start, stop), None, shape))
            else:  # the triangle lies on one side of the border, because none of its edge crosses it
                regions.append(Region(slice(start, begin), earlier, "upper" if shape == "upper" else "full"))
                regions.append(Region(slice(begin, stop), None, "lower" if shape == "lower" else "full"))
        return regions
