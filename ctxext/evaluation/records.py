"""Losses of single tokens, as they are stored, and every number that is made of them.

A model is needed to make records, never to read them: perplexities, intervals and curves are functions of stored ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxext.evaluation.statistics import clustered_mean, exponential


@dataclass(frozen=True)
class TokenLosses:
    """The scored tokens of one document, in the order of the windows that they were scored in.

    All arrays have one element per score. ``token`` is the token's index in the document, ``loss`` its negative
    log-likelihood in nats, ``context`` the number of positions before it in its window (start token included),
    ``window`` the number of that window, and ``size`` the bytes that the token adds to the text in UTF-8.
    """

    document: str
    token: NDArray[np.int32]
    loss: NDArray[np.float32]
    context: NDArray[np.int32]
    window: NDArray[np.int32]
    size: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.loss)

    def where(self, mask: NDArray[np.bool_]) -> TokenLosses:
        """The scores for which ``mask`` is true."""
        return TokenLosses(
            self.document, self.token[mask], self.loss[mask], self.context[mask], self.window[mask], self.size[mask]
        )


def within(records: Sequence[TokenLosses], low: int, high: int) -> list[TokenLosses]:
    """The scores with ``low`` to ``high - 1`` positions before them, of every document."""
    return [record.where((record.context >= low) & (record.context < high)) for record in records]


def summarise(records: Sequence[TokenLosses], *, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """The aggregates of documents, as JSON-ready values.

    ``perplexity`` is the headline: the exponential of all losses over all tokens. ``ci95`` is its 95 % interval over
    documents (None for one), ``se_nll`` the standard error of the mean loss. ``document_perplexity`` takes the mean of
    the documents' mean losses first, ``bits_per_byte`` is the only one that compares tokenizers. ``compatible`` holds
    what other programs call perplexity: the mean of means over windows.
    """
    from ctxext.evaluation.metrics import TokenPerplexity  # loads `evaluate`, which takes a second

    scored = [record for record in records if len(record)]
    sums, tokens = [float(record.loss.sum(dtype=np.float64)) for record in scored], [len(record) for record in scored]
    metric = TokenPerplexity().compute(nll_sum=sums, tokens=tokens)
    row = {"documents": len(scored), **{name: metric[name] for name in ("tokens", "nll", "perplexity")}}
    if not scored:
        return {**row, "ci95": None, "se_nll": None, "interval": None}
    estimate = clustered_mean(sums, tokens, resamples=resamples, seed=seed)
    size = sum(int(record.size.sum(dtype=np.int64)) for record in scored)
    means = _window_means(scored)
    return {
        **row,
        # Of few documents t may reach below a loss of 0, which there is none of.
        "ci95": None if estimate.ci95 is None else [exponential(max(0.0, bound)) for bound in estimate.ci95],
        "se_nll": estimate.se,
        "interval": estimate.method,
        "document_perplexity": exponential(float(np.mean([x / n for x, n in zip(sums, tokens, strict=True)]))),
        "bytes": size,
        "bits_per_byte": math.fsum(sums) / math.log(2) / size if size else None,
        "compatible": {"windows": len(means), "window_mean_perplexity": exponential(math.fsum(means) / len(means))},
    }


def _window_means(records: Sequence[TokenLosses]) -> list[float]:
    """Mean loss of every window; one that spans documents is one window."""
    windows = np.concatenate([record.window for record in records])
    losses = np.concatenate([record.loss for record in records]).astype(np.float64)
    _, index = np.unique(windows, return_inverse=True)
    return list(np.bincount(index, weights=losses) / np.bincount(index))
