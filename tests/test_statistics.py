"""Intervals hold the truth as often as they say, and tests agree with published values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ctxext
from ctxext.evaluation.statistics import clustered_mean, holm, paired_proportions, wilson95


def draw(rng: np.random.Generator, documents: int, truth: float = 2.5) -> tuple[list[float], list[int]]:
    """Summed losses of documents of very different lengths, each with a mean of its own around ``truth``."""
    tokens = rng.integers(200, 4000, documents)
    own = truth + 0.4 * rng.standard_normal(documents)
    noise = rng.standard_normal(documents) * np.sqrt(tokens)
    return (own * tokens + noise).tolist(), tokens.tolist()


@pytest.mark.parametrize("documents", [6, 10, 12, 15, 20, 30])
def test_intervals_over_documents_hold_the_truth_as_often_as_they_say(documents: int) -> None:
    rng = np.random.default_rng(1)
    held = [
        low <= 2.5 <= high
        for low, high in (clustered_mean(*draw(rng, documents), resamples=400).ci95 for _ in range(500))
    ]
    assert 0.92 <= np.mean(held) <= 0.97


def test_an_interval_over_tokens_would_be_too_narrow() -> None:
    rng, held = np.random.default_rng(1), []
    for _ in range(500):
        sums, tokens = draw(rng, 30)
        half = 1.96 / math.sqrt(sum(tokens))  # tokens have a standard deviation of 1
        held.append(abs(sum(sums) / sum(tokens) - 2.5) < half)
    assert np.mean(held) < 0.5


def test_the_mean_is_the_tokens_and_not_the_documents() -> None:
    assert clustered_mean([300.0, 10.0], [100, 10]).value == pytest.approx(310 / 110)


def test_the_standard_error_of_equal_documents_is_that_of_their_means() -> None:
    means = [1.0, 2.0, 4.0, 4.5]
    estimate = clustered_mean([100 * mean for mean in means], [100] * 4)
    assert estimate.se == pytest.approx(np.std(means, ddof=1) / 2)
    assert estimate.method == "t"
    # t of 3 degrees of freedom has 97.5 % below 3.182.
    assert estimate.ci95 == pytest.approx((2.875 - 3.1824 * estimate.se, 2.875 + 3.1824 * estimate.se), abs=1e-3)


def test_one_document_has_no_interval() -> None:
    estimate = clustered_mean([250.0], [100])
    assert (estimate.value, estimate.se, estimate.ci95, estimate.p, estimate.method) == (2.5, None, None, None, None)


def test_documents_without_difference_have_an_interval_of_no_width() -> None:
    estimate = clustered_mean([0.0] * 12, [100] * 12)
    assert (estimate.value, estimate.ci95, estimate.p) == (0.0, (0.0, 0.0), 1.0)


def test_the_same_seed_gives_the_same_interval() -> None:
    sums, tokens = draw(np.random.default_rng(0), 40)
    first, second, third = (clustered_mean(sums, tokens, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert first.ci95 != third.ci95


@pytest.mark.parametrize(("sums", "tokens"), [([], []), ([1.0, 0.0], [5, 0])])
def test_an_interval_of_nothing_is_refused(sums: list[float], tokens: list[int]) -> None:
    with pytest.raises(ctxext.ConfigError, match="at least one document, and tokens in every one"):
        clustered_mean(sums, tokens)


@pytest.mark.parametrize(
    ("correct", "trials", "low", "high"),
    # 0 of n by hand: 0 to z^2 / (n + z^2).
    [
        (10, 10, 0.7225, 1.0),
        (0, 10, 0.0, 0.2775),
        (9, 10, 0.5958, 0.9821),
        (5, 10, 0.2366, 0.7634),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_shares_have_wilsons_interval(correct: int, trials: int, low: float, high: float) -> None:
    assert wilson95(correct, trials) == pytest.approx([low, high], abs=1e-4)


def answers(both: int, first: int, second: int, neither: int) -> tuple[list[bool], list[bool]]:
    counts = (both, first, second, neither)
    pairs = [pair for pair, n in zip([(1, 1), (1, 0), (0, 1), (0, 0)], counts, strict=True) for _ in range(n)]
    return [bool(a) for a, _ in pairs], [bool(b) for _, b in pairs]


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    # From an implementation that was checked against the seven rows of Table III of Newcombe's paper.
    [
        ((27, 3, 0, 0), -0.0310, 0.2562),
        ((27, 0, 0, 3), -0.1097, 0.1097),
        ((15, 0, 15, 0), -0.6685, -0.2969),
        ((0, 0, 1, 29), -0.1667, 0.0834),
        ((10, 0, 20, 0), -0.8077, -0.4548),
    ],
)
def test_paired_shares_have_newcombes_interval(counts: tuple[int, int, int, int], low: float, high: float) -> None:
    assert paired_proportions(*answers(*counts)).ci95 == pytest.approx((low, high), abs=5e-5)


def test_mcnemars_test_counts_the_prompts_that_only_one_got_right() -> None:
    result = paired_proportions(*answers(5, 8, 1, 6))
    assert (result.trials, result.first_only, result.second_only) == (20, 8, 1)
    assert result.difference == pytest.approx(7 / 20)
    assert result.p == pytest.approx(2 * (1 + 9) / 2**9)  # at most one of nine fair coins, on either side
    assert paired_proportions(*answers(3, 0, 0, 3)).p == 1.0


def test_prompts_that_are_answered_together_count_as_one() -> None:
    first, second = answers(4, 8, 4, 4)
    groups = [i // 4 for i in range(20)]  # both, only the first twice, only the second, neither
    result, one_each = paired_proportions(first, second, groups), paired_proportions(*answers(1, 2, 1, 1))
    assert (result.trials, result.groups, result.first_only, result.second_only) == (20, 5, 8, 4)
    assert (result.difference, result.ci95, result.p) == (one_each.difference, one_each.ci95, one_each.p)
    # Groups that are divided count in part, and by their sign.
    result = paired_proportions([True, True, True, False], [False, False, True, False], [0, 0, 1, 1])
    assert (result.difference, result.p) == (0.5, 1.0)


def test_the_other_way_round_only_the_sign_changes() -> None:
    first, second = answers(5, 8, 1, 6)
    one, other = paired_proportions(first, second), paired_proportions(second, first)
    assert one.difference == -other.difference
    assert one.p == other.p
    assert one.ci95 == pytest.approx((-other.ci95[1], -other.ci95[0]))


@pytest.mark.parametrize(("first", "second"), [([], []), ([True], [True, False])])
def test_unpaired_answers_are_refused(first: list[bool], second: list[bool]) -> None:
    with pytest.raises(ctxext.ConfigError, match="as many on both sides"):
        paired_proportions(first, second)


def test_what_two_methods_share_in_each_document_is_no_part_of_their_differences_error() -> None:
    first, tokens = draw(np.random.default_rng(2), 30)
    second = [total + 0.01 * n + noise for total, n, noise in zip(first, tokens, [3.0, -3.0] * 15, strict=True)]
    one, other = clustered_mean(first, tokens), clustered_mean(second, tokens)
    paired = clustered_mean([b - a for a, b in zip(first, second, strict=True)], tokens)
    assert paired.value == pytest.approx(0.01, abs=1e-3)
    assert (paired.se or math.inf) < math.hypot(one.se or 0, other.se or 0) / 50


def test_holms_p_values_are_those_of_the_definition() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holms_p_values_keep_the_order_and_lie_between_plain_and_bonferroni(p_values: list[float]) -> None:
    raised = holm(p_values)
    assert all(p <= q <= min(1, p * len(p_values)) for p, q in zip(p_values, raised, strict=True))
    ranks = sorted(range(len(p_values)), key=p_values.__getitem__)
    assert sorted(raised) == [raised[i] for i in ranks]
