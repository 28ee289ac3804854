"""Loss by position: where a model's reading fails, from records of one long window per document.

The losses are made by perplexity.py (protocol ``prefix``); a point of the curve is the loss of the tokens with so many
positions before them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ctxext.errors import ConfigError
from ctxext.evaluation.records import TokenLosses, within
from ctxext.evaluation.statistics import Estimate, clustered_mean

TOLERANCE = 0.05
"""Nats by which the loss may rise above that at the trained length before reading counts as failing."""


def default_edges(longest: int) -> list[int]:
    """0, 64, 128, 256, 512, 1,024 and every 1,024 after that, up to ``longest``."""
    edges = [0, 64, 128, 256, 512, *range(1024, longest, 1024)]
    return [edge for edge in edges if edge < longest] + [longest]


def curve(records: Sequence[TokenLosses], edges: Sequence[int]) -> list[dict[str, Any]]:
    """Mean loss of the tokens with ``low`` to ``high - 1`` positions before them, for each pair of ``edges``.

    JSON-ready rows with ``low``, ``high``, ``nll``, ``ci95`` over documents, ``tokens`` and ``documents``; intervals
    without a token are left out.
    """
    rows = []
    for low, high in itertools.pairwise(edges):
        estimate = _mean(within(records, low, high))
        if estimate is not None:
            tokens = sum(map(len, within(records, low, high)))
            ci95 = None if estimate.ci95 is None else list(estimate.ci95)
            row = {"low": low, "high": high, "nll": estimate.value, "ci95": ci95, "tokens": tokens}
            rows.append({**row, "documents": estimate.clusters})
    return rows


@dataclass(frozen=True)
class Reach:
    """How far a model reads.

    ``plateau`` is its mean loss over the second half of the trained length. ``onset`` is the first edge from which the
    loss lies above that by more than the tolerance, with 95 % certainty and twice in a row; None if there is none up to
    ``longest``. ``gain`` is the plateau less the loss over the second half of ``longest``: what more context buys.
    """

    trained: int
    longest: int
    plateau: float
    onset: int | None
    gain: Estimate

    @property
    def effective_length(self) -> int:
        """Positions that are read without failing, of those that were measured."""
        return self.longest if self.onset is None else self.onset


def reach(records: Sequence[TokenLosses], trained: int, edges: Sequence[int], *, tolerance: float = TOLERANCE) -> Reach:
    """Onset of failure beyond the trained length, document by document against its own loss at the trained length.

    Raises:
        ConfigError: fewer than two documents (one says nothing about chance), or none that reaches the trained length.
    """
    longest = edges[-1]
    kept = [record for record in records if len(within([record], trained // 2, trained)[0])]
    if len(kept) < 2:
        raise ConfigError(f"where reading fails needs two documents of {trained} tokens, {len(kept)} given")
    at_trained = within(kept, trained // 2, trained)
    plateaus = {record.document: float(record.loss.mean(dtype=np.float64)) for record in at_trained}
    starts = [edge for edge in edges[:-1] if edge >= trained]
    failing = []
    for low, high in itertools.pairwise([*starts, longest]):
        rise = _difference(within(kept, low, high), plateaus)
        failing.append(rise is not None and rise.ci95 is not None and rise.ci95[0] > tolerance)
    twice = (edge for edge, pair in zip(starts, itertools.pairwise(failing), strict=False) if all(pair))
    late = _difference(within(kept, longest // 2, longest), plateaus)
    if late is None or late.clusters < 2:
        raise ConfigError(f"fewer than two documents go beyond {longest // 2} tokens: measure a shorter length")
    gain = Estimate(-late.value, late.se, _negated(late.ci95), late.p, late.method, late.clusters)
    plateau = _mean(at_trained)
    assert plateau is not None  # every kept document has tokens there
    return Reach(trained, longest, plateau.value, next(twice, None), gain)


def _mean(records: Sequence[TokenLosses]) -> Estimate | None:
    scored = [record for record in records if len(record)]
    if not scored:
        return None
    return clustered_mean([float(record.loss.sum(dtype=np.float64)) for record in scored], [len(r) for r in scored])


def _difference(records: Sequence[TokenLosses], plateaus: dict[str, float]) -> Estimate | None:
    """Mean loss above each document's own plateau."""
    scored = [record for record in records if len(record)]
    if not scored:
        return None
    sums = [float((record.loss.astype(np.float64) - plateaus[record.document]).sum()) for record in scored]
    return clustered_mean(sums, [len(record) for record in scored])


def _negated(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if interval is None else (-interval[1], -interval[0])
