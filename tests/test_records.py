"""Aggregates of stored losses, on numbers that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ctxext.evaluation.records import TokenLosses, summarise, within


def record(name: str, *windows: tuple[int, float], first: int = 0) -> TokenLosses:
    """A document scored in windows of so many tokens, each token with the same loss and of two bytes."""
    loss = np.concatenate([np.full(n, nll, dtype=np.float32) for n, nll in windows])
    context = np.concatenate([np.arange(1, n + 1) for n, _ in windows]).astype(np.int32)
    number = np.concatenate([np.full(n, first + i) for i, (n, _) in enumerate(windows)]).astype(np.int32)
    token = np.arange(len(loss), dtype=np.int32)
    return TokenLosses(name, token, loss, context, number, np.full_like(token, 2))


def test_the_token_mean_and_the_window_mean_are_both_there_and_differ() -> None:
    row = summarise([record("a", (1000, 3.0), *[(10, 1.0)] * 10)])
    assert row["nll"] == pytest.approx((3000 + 100) / 1100)
    assert row["compatible"]["windows"] == 11
    assert row["compatible"]["window_mean_perplexity"] == pytest.approx(math.exp((3 + 10) / 11))
    assert row["perplexity"] == pytest.approx(math.exp(3100 / 1100))


def test_the_mean_over_documents_is_of_losses_and_not_of_perplexities() -> None:
    row = summarise([record("a", (10, 1.0)), record("b", (30, 3.0), first=1)])
    assert row["document_perplexity"] == pytest.approx(math.exp(2))
    assert row["perplexity"] == pytest.approx(math.exp(2.5))


def test_a_window_across_two_documents_is_one_window() -> None:
    row = summarise([record("a", (10, 1.0)), record("b", (30, 3.0))])
    assert row["compatible"]["windows"] == 1
    assert row["compatible"]["window_mean_perplexity"] == pytest.approx(math.exp(2.5))


def test_bits_per_byte() -> None:
    assert summarise([record("a", (10, math.log(2)))])["bits_per_byte"] == pytest.approx(0.5)


def test_nothing_scored_is_said_to_be_nothing() -> None:
    row = summarise(within([record("a", (10, 1.0))], 50, 60))
    assert (row["documents"], row["tokens"], row["nll"], row["perplexity"], row["ci95"]) == (0, 0, None, None, None)


def test_scores_are_chosen_by_what_stood_before_them() -> None:
    [chosen] = within([record("a", (10, 1.0), (5, 2.0))], 4, 7)
    assert chosen.context.tolist() == [4, 5, 6, 4, 5]
    assert chosen.token.tolist() == [3, 4, 5, 13, 14]
    assert chosen.loss.tolist() == [1, 1, 1, 2, 2]


def test_a_perplexity_too_large_for_a_number_is_none() -> None:
    assert summarise([record("a", (10, 1000.0)), record("b", (10, 900.0), first=1)])["ci95"][1] is None


def test_an_interval_of_few_documents_does_not_go_below_a_perplexity_of_one() -> None:
    row = summarise([record("a", (10, 0.1)), record("b", (10, 2.0), first=1)])
    assert row["ci95"][0] == 1.0
