"""Intervals and tests: how sure a number is, and whether two methods differ.

The unit that is resampled or counted is a document or a prompt, never a token: tokens of one document go together, and
an interval that takes them for independent is too narrow by a factor of two or more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ctxext.errors import ConfigError

FEW_CLUSTERS = 30
"""Below so many documents the bootstrap's intervals are too narrow (for ten, 90 in 100 hold the truth and not 95), and
Student's t takes its place."""


@dataclass(frozen=True)
class Estimate:
    """A mean loss per token in nats, weighted by tokens, with its standard error and 95 % interval over documents.

    ``se`` and ``ci95`` are None for a single document: it says nothing about others. ``method`` is how the interval was
    made: ``cluster bootstrap``, ``t`` (few documents) or None. ``p`` is the two-sided probability of a mean at least so
    far from 0 if it were 0, by the t distribution: of use for differences.
    """

    value: float
    se: float | None
    ci95: tuple[float, float] | None
    p: float | None
    method: str | None
    clusters: int


def clustered_mean(sums: Sequence[float], tokens: Sequence[int], *, resamples: int = 2000, seed: int = 0) -> Estimate:
    """Mean over all tokens of documents that were drawn from many: sum over sum, resampled by whole documents.

    Args:
        sums: total loss of each document, or total difference of two losses.
        tokens: number of tokens in each sum.
        resamples: of the bootstrap.
        seed: of the bootstrap; the same seed gives the same interval.

    Raises:
        ConfigError: no document, or one without tokens.
    """
    from scipy import stats

    if not len(sums) or min(tokens) < 1:
        raise ConfigError("an interval needs at least one document, and tokens in every one")
    x, n = np.asarray(sums, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    clusters, value = len(x), float(x.sum() / n.sum())
    if clusters == 1:
        return Estimate(value, None, None, None, None, 1)
    # The ratio of two sums, by the delta method.
    residuals = (x - value * n) / n.mean()
    se = float(np.sqrt((residuals**2).sum() / (clusters - 1) / clusters))
    p = float(2 * stats.t.sf(abs(value) / se, clusters - 1)) if se else float(value == 0)
    if clusters < FEW_CLUSTERS or se == 0:
        half = float(stats.t.ppf(0.975, clusters - 1)) * se
        return Estimate(value, se, (value - half, value + half), p, "t", clusters)
    interval = stats.bootstrap(
        (x, n),
        lambda x, n, axis=-1: x.sum(axis=axis) / n.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(value, se, (float(interval.low), float(interval.high)), p, "cluster bootstrap", clusters)


def wilson95(correct: int, trials: int) -> list[float]:
    """The 95 % Wilson score interval of a proportion: honest at 0 and at 100 %, where the normal one has no width."""
    from scipy import stats

    interval = stats.binomtest(correct, trials).proportion_ci(method="wilson")
    return [float(interval.low), float(interval.high)]


def wilson95_mean(mean: float, trials: int) -> list[float]:
    """The Wilson interval of a mean of shares between 0 and 1, whose variance is at most that of a proportion."""
    from scipy import stats

    z2 = float(stats.norm.ppf(0.975)) ** 2
    center, half = mean + z2 / (2 * trials), math.sqrt(z2 * (mean * (1 - mean) / trials + z2 / (4 * trials**2)))
    return [max(0.0, (center - half) / (1 + z2 / trials)), min(1.0, (center + half) / (1 + z2 / trials))]


def exponential(nll: float) -> float | None:
    """``exp(nll)``, None where that is too large for a float."""
    try:
        return math.exp(nll)
    except OverflowError:
        return None


@dataclass(frozen=True)
class PairedProportions:
    """Two methods on the same prompts: how many only one got right, and whether that can be chance.

    ``difference`` is the first's share minus the second's, ``ci95`` Newcombe's interval for paired proportions, ``p``
    that of McNemar's exact test, both over ``groups`` of prompts (each prompt its own, unless given).
    """

    trials: int
    groups: int
    first_only: int
    second_only: int
    difference: float
    ci95: tuple[float, float]
    p: float


def paired_proportions(
    first: Sequence[bool], second: Sequence[bool], groups: Sequence[Hashable] | None = None
) -> PairedProportions:
    """Compare two methods that answered the same prompts, in the same order.

    ``groups`` says which prompts are answered right or wrong together, as keys at one depth are: each group then counts
    as one prompt that is right in part. The test is that of signs over the groups, which for groups of one is
    McNemar's.

    Reference: Newcombe, Improved confidence intervals for the difference between binomial proportions based on paired
    data (Statistics in Medicine 17, 1998), method 10.

    Raises:
        ConfigError: no prompts, or not the same number.
    """
    from scipy import stats

    if not first or len(first) != len(second):
        raise ConfigError(f"paired answers must be as many on both sides, got {len(first)} and {len(second)}")
    by_group: dict[Hashable, list[tuple[bool, bool]]] = {}
    for group, one, other in zip(groups or range(len(first)), first, second, strict=True):
        by_group.setdefault(group, []).append((bool(one), bool(other)))
    n = len(by_group)

    def groups_with(one: bool, other: bool) -> float:
        """Groups that were answered so; one that was so in part counts in part."""
        return math.fsum(pairs.count((one, other)) / len(pairs) for pairs in by_group.values())

    both, first_only = groups_with(True, True), groups_with(True, False)
    second_only, neither = groups_with(False, True), groups_with(False, False)
    p1, p2 = (both + first_only) / n, (both + second_only) / n
    (low1, high1), (low2, high2) = wilson95_mean(p1, n), wilson95_mean(p2, n)
    # The correlation of the two, made smaller by half a prompt where it is positive.
    product = both * neither - first_only * second_only
    product = max(product - n / 2, 0) if product > 0 else product
    margins = math.prod([both + first_only, second_only + neither, both + second_only, first_only + neither])
    phi = product / math.sqrt(margins) if margins else 0.0

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * phi * one * other + other**2))

    difference = p1 - p2
    interval = (difference - reach(p1 - low1, high2 - p2), difference + reach(high1 - p1, p2 - low2))
    signs = [sum(one - other for one, other in pairs) for pairs in by_group.values()]
    better, worse = sum(sign > 0 for sign in signs), sum(sign < 0 for sign in signs)
    p = float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
    pairs = list(zip(first, second, strict=True))
    return PairedProportions(
        trials=len(pairs),
        groups=n,
        first_only=sum(one and not other for one, other in pairs),
        second_only=sum(other and not one for one, other in pairs),
        difference=difference,
        ci95=interval,
        p=p,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values of one table, raised so that the chance of any false discovery in it stays below the level.

    Reference: Holm, A simple sequentially rejective multiple test procedure (Scand. J. Statistics 6, 1979).
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    raised = itertools.accumulate((min(1.0, p_values[i] * (len(p_values) - rank)) for rank, i in enumerate(order)), max)
    by_index = dict(zip(order, raised, strict=True))
    return [by_index[i] for i in range(len(p_values))]
