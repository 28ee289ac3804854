"""Loss by position: where a model's reading fails, from records of one long window per document.

The losses are perplexity.py's (protocol ``prefix``); a point of the curve is the loss of the tokens with so many
positions before them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ctxext.data import Document
from ctxext.errors import ConfigError
from ctxext.evaluation.perplexity import evaluate_perplexity
from ctxext.evaluation.records import TokenLosses, within
from ctxext.evaluation.runs import Run
from ctxext.evaluation.statistics import Estimate, clustered_mean

TOLERANCE = 0.05
"""Nats by which the loss may rise above that at the trained length before reading counts as failing."""


@dataclass(frozen=True)
class PositionsResult:
    """Rows (one per interval of positions), how far the model reads, and what is needed to repeat them."""

    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    protocol: dict[str, Any]
    counts: dict[str, int]
    document_ids: list[str]
    dataset_fingerprint: str
    wall_seconds: float
    peak_memory_bytes: int | None
    losses: list[TokenLosses] = field(default_factory=list, repr=False)
    parts: list[str] = field(default_factory=list, repr=False)


def evaluate_positions(
    model: Any,
    tokenizer: Any,
    documents: Iterable[Document],
    *,
    length: int,
    trained: int,
    max_documents: int | None = None,
    batch_size: int = 1,
    bos: Literal["auto", "always", "never"] = "auto",
    run: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PositionsResult:
    """The loss curve of ``model`` over the first ``length`` positions of documents, from one pass over each.

    ``trained`` is the trained length in tokens, from which failing is counted. With one document, or a ``length`` of no
    more than that, there is a curve, but ``summary`` can't say how far the model reads. Documents, ``run`` and
    ``progress`` are as in ``evaluate_perplexity``, whose parts of protocol ``prefix`` these are.

    Raises ConfigError for arguments out of range, DataError if no document is long enough.
    """
    settings: dict[str, Any] = {"max_documents": max_documents, "batch_size": batch_size, "bos": bos}
    result = evaluate_perplexity(model, tokenizer, documents, lengths=[length], **settings, run=run, progress=progress)
    records = result.losses[length]
    edges = sorted({*default_edges(length), *([trained] if trained < length else [])})
    summary: dict[str, Any] = {"trained": trained, "longest": length}
    if length > trained and len(records) > 1:
        reached = reach(records, trained, edges)
        summary |= {
            "plateau": reached.plateau,
            "onset": reached.onset,
            "effective_length": reached.effective_length,
            "gain": reached.gain.value,
            "gain_ci95": reached.gain.ci95,
        }
    kept = {key: result.protocol[key] for key in ("max_documents", "min_tokens", "bos", "bos_id")}
    return PositionsResult(
        rows=curve(records, edges),
        summary=summary,
        protocol={"name": "positions", "version": 1, "length": length, "tolerance": TOLERANCE, **kept},
        counts=result.counts,
        document_ids=result.document_ids,
        dataset_fingerprint=result.dataset_fingerprint,
        wall_seconds=result.wall_seconds,
        peak_memory_bytes=result.peak_memory_bytes,
        losses=records,
        parts=result.parts,
    )


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
    loss lies above that by more than the tolerance, with 95 % certainty and twice in a row, or once at the very end;
    None if there is none up to ``longest``. ``gain`` is the plateau less the loss over the second half of ``longest``:
    what more context buys.
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
    # What nothing follows can't be confirmed; a model isn't said to read it.
    twice = (edge for edge, pair in zip(starts, itertools.pairwise([*failing, True]), strict=True) if all(pair))
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
