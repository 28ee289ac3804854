"""The curve of losses by position, and the length up to which a model reads, on losses whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

import ctxext
from ctxext.evaluation.positions import curve, default_edges, reach
from ctxext.evaluation.records import TokenLosses


def documents(
    loss: dict[int, float], *, count: int = 12, length: int = 4096, noise: float = 0.3, seed: int = 0
) -> list[TokenLosses]:
    """Texts whose mean loss from each position on is as given, each with a level of its own."""
    rng, records = np.random.default_rng(seed), []
    context = np.arange(1, length, dtype=np.int32)
    starts = sorted(loss)
    mean = np.array([loss[start] for start in starts])[np.searchsorted(starts, context, side="right") - 1]
    for i in range(count):
        values = mean + noise * rng.standard_normal() + rng.standard_normal(length - 1)
        records.append(
            TokenLosses(f"d{i}", context - 1, values.astype(np.float32), context, context * 0 + i, context * 0 + 1)
        )
    return records


def test_edges_end_at_the_longest_length() -> None:
    assert default_edges(100) == [0, 64, 100]
    assert default_edges(3000) == [0, 64, 128, 256, 512, 1024, 2048, 3000]
    assert default_edges(2048) == [0, 64, 128, 256, 512, 1024, 2048]


def test_the_curve_is_the_mean_of_each_stretch() -> None:
    records = documents({0: 4.0, 512: 3.0}, noise=0.0)
    rows = curve(records, [0, 512, 1024, 4096, 8192])
    assert [(row["low"], row["high"], row["tokens"]) for row in rows] == [
        (0, 512, 12 * 511),
        (512, 1024, 12 * 512),
        (1024, 4096, 12 * 3072),
    ]
    whole = np.concatenate([record.loss[:511] for record in records])
    assert rows[0]["nll"] == pytest.approx(whole.mean(), rel=1e-5)
    assert rows[0]["ci95"][0] < rows[0]["nll"] < rows[0]["ci95"][1]
    assert rows[1]["documents"] == 12


def test_the_curve_up_to_a_length_is_the_prefix_of_that_length() -> None:
    records = documents({0: 4.0, 512: 3.0})
    rows = curve(records, [0, 512, 1024])
    total = sum(row["nll"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows)
    assert total == pytest.approx(np.mean([record.loss[:1023].mean() for record in records]), rel=1e-5)


def test_failure_is_found_where_it_begins() -> None:
    found = reach(documents({0: 3.0, 2560: 3.3, 3072: 5.0}), 2048, default_edges_256(4096))
    assert (found.onset, found.effective_length) == (2560, 2560)
    assert found.plateau == pytest.approx(3.0, abs=0.3)
    assert found.gain.ci95[1] < 0


def test_a_model_that_reads_on_has_no_onset_and_gains() -> None:
    found = reach(documents({0: 3.0, 2048: 2.9}), 2048, default_edges_256(4096))
    assert (found.onset, found.effective_length) == (None, 4096)
    assert found.gain.value == pytest.approx(0.1, abs=0.03)
    assert found.gain.ci95[0] > 0


def test_one_bad_stretch_is_no_failure() -> None:
    assert reach(documents({0: 3.0, 2560: 4.0, 2816: 3.0}), 2048, default_edges_256(4096)).onset is None


def test_what_fails_at_the_very_end_is_not_said_to_be_read() -> None:
    assert reach(documents({0: 3.0, 3840: 4.0}), 2048, default_edges_256(4096)).onset == 3840
    assert reach(documents({0: 3.0, 2048: 4.0}, length=2304), 2048, [0, 1024, 2048, 2304]).onset == 2048


def test_a_rise_within_the_tolerance_is_no_failure() -> None:
    assert reach(documents({0: 3.0, 2560: 3.04}), 2048, default_edges_256(4096)).onset is None


def test_documents_of_very_different_levels_are_compared_with_themselves() -> None:
    assert reach(documents({0: 3.0, 2560: 3.2}, noise=2.0), 2048, default_edges_256(4096)).onset == 2560


@pytest.mark.parametrize(("count", "length"), [(1, 4096), (5, 1000)])
def test_too_little_text_is_refused(count: int, length: int) -> None:
    with pytest.raises(ctxext.ConfigError, match="needs two documents of 2048 tokens"):
        reach(documents({0: 3.0}, count=count, length=length), 2048, default_edges_256(4096))


def default_edges_256(longest: int) -> list[int]:
    return list(range(0, longest + 1, 256))
