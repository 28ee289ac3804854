"""The two aggregates of ctxext as metrics of the ``evaluate`` library: token-weighted perplexity, passkey accuracy."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import datasets
import evaluate

from ctxext.evaluation.passkey import score
from ctxext.evaluation.statistics import exponential


class _InMemoryMetric(evaluate.Metric):  # type: ignore[misc]  # the library has no types
    """A metric that leaves no file behind; ``evaluate`` wants a cache folder at construction even if it isn't used."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            super().__init__(keep_in_memory=True, cache_dir=folder)


class TokenPerplexity(_InMemoryMetric):
    """``compute(nll_sum=[...], tokens=[...]) -> {"nll", "perplexity", "tokens"}``, weighted by tokens.

    ``nll_sum`` holds one sum of losses in nats per document (or per any other part), ``tokens`` the number of tokens in
    it. ``nll`` is total over total, never a mean of means, and None without tokens. ``perplexity`` is its exponential,
    None where that is too large for a float: the loss is then all there is to report.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Perplexity from sums of token losses, weighted by tokens.",
            citation="",
            inputs_description="nll_sum: summed losses in nats, one per document; tokens: tokens in each sum.",
            features=datasets.Features({"nll_sum": datasets.Value("float64"), "tokens": datasets.Value("int64")}),
        )

    def _compute(self, *, nll_sum: list[float], tokens: list[int]) -> dict[str, Any]:
        total = sum(tokens)
        nll = math.fsum(nll_sum) / total if total else None
        return {"nll": nll, "perplexity": None if nll is None else exponential(nll), "tokens": total}


class PasskeyAccuracy(_InMemoryMetric):
    """``compute(predictions=[decoded continuations], references=[keys]) -> {"trials", "correct", "accuracy"}``.

    A continuation is right if ``passkey.score`` says so. ``accuracy`` is None without trials.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of continuations whose first run of digits is the key.",
            citation="",
            inputs_description="predictions: decoded continuations; references: the keys, as text.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, *, predictions: list[str], references: list[str]) -> dict[str, Any]:
        correct = sum(score(text, key) for text, key in zip(predictions, references, strict=True))
        trials = len(references)
        return {"trials": trials, "correct": correct, "accuracy": correct / trials if trials else None}
