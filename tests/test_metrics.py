"""The aggregates as `evaluate` metrics: weighted right, quiet, offline, and without files."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import evaluate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxext.evaluation.metrics import PasskeyAccuracy, TokenPerplexity


def test_metrics_are_evaluate_metrics() -> None:
    assert isinstance(TokenPerplexity(), evaluate.Metric)
    assert isinstance(PasskeyAccuracy(), evaluate.Metric)


def test_perplexity_weighs_by_tokens_not_by_parts() -> None:
    nll_sums, tokens = [3000.0] + [10.0] * 10, [1000] + [10] * 10
    result = TokenPerplexity().compute(nll_sum=nll_sums, tokens=tokens)
    assert result == {"nll": 3100 / 1100, "perplexity": math.exp(3100 / 1100), "tokens": 1100}
    assert result["nll"] != pytest.approx((3 + 10 * 1) / 11)  # the mean of the parts' means


def test_perplexity_is_not_the_mean_of_perplexities() -> None:
    result = TokenPerplexity().compute(nll_sum=[100.0, 300.0], tokens=[100, 100])
    assert result["perplexity"] == pytest.approx(math.exp(2))
    assert (math.exp(1) + math.exp(3)) / 2 > 11


def test_overflow_leaves_the_loss_and_no_perplexity() -> None:
    assert TokenPerplexity().compute(nll_sum=[80_000.0], tokens=[100]) == {
        "nll": 800.0,
        "perplexity": None,
        "tokens": 100,
    }


def test_nothing_to_average_is_none() -> None:
    assert TokenPerplexity().compute(nll_sum=[], tokens=[]) == {"nll": None, "perplexity": None, "tokens": 0}
    assert TokenPerplexity().compute(nll_sum=[0.0], tokens=[0])["nll"] is None
    assert PasskeyAccuracy().compute(predictions=[], references=[]) == {"trials": 0, "correct": 0, "accuracy": None}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 10**9)), min_size=1), st.randoms())
def test_the_order_of_the_parts_does_not_matter(parts: list[tuple[float, int]], random: object) -> None:
    shuffled = sorted(parts, key=lambda part: random.random())  # type: ignore[attr-defined]
    results = [
        TokenPerplexity().compute(nll_sum=[nll for nll, _ in order], tokens=[n for _, n in order])
        for order in (parts, shuffled)
    ]
    assert results[0] == results[1]


def test_accuracy_counts_first_runs_of_digits() -> None:
    predictions = [" 12345.", "123456", "the key is 12345", "5 12345", ""]
    result = PasskeyAccuracy().compute(predictions=predictions, references=["12345"] * 5)
    assert result == {"trials": 5, "correct": 2, "accuracy": 0.4}


def test_parts_can_be_added_one_by_one() -> None:
    metric = PasskeyAccuracy()
    for prediction in ("12345", "54321"):
        metric.add(prediction=prediction, reference="12345")
    assert metric.compute() == {"trials": 2, "correct": 1, "accuracy": 0.5}


def test_metrics_work_in_threads_at_the_same_time() -> None:
    def compute(n: int) -> float:
        return TokenPerplexity().compute(nll_sum=[float(n)] * 50, tokens=[1] * 50)["nll"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(compute, range(64))) == [float(n) for n in range(64)]


def test_metrics_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    TokenPerplexity().compute(nll_sum=[1.0], tokens=[1])
    PasskeyAccuracy().compute(predictions=["1"], references=["1"])
    assert capfd.readouterr() == ("", "")


def test_metrics_leave_no_file_at_home_and_print_nothing_in_a_fresh_process(tmp_path: Path) -> None:
    code = """
from ctxext.evaluation.metrics import PasskeyAccuracy, TokenPerplexity
for _ in range(2):
    TokenPerplexity().compute(nll_sum=[1.0], tokens=[1])
    PasskeyAccuracy().compute(predictions=["1"], references=["1"])
"""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    environment = kept | {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
