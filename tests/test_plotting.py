"""Pictures show the numbers that they are given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ctxext import plotting


def records(short: float, beyond: float, correct: int | None) -> dict[str, Any]:
    """Perplexities of the first 9 of 17 tokens (8 are scored) and of those after them, and keys found out of 10."""
    whole = (8 * math.log(short) + 8 * math.log(beyond)) / 16
    rows = [
        {"length": 9, "tokens": 8, "nll": math.log(short), "perplexity": short},
        {"length": 17, "tokens": 16, "nll": whole, "perplexity": math.exp(whole)},
    ]
    cells = None if correct is None else {"rows": [{"correct": correct, "trials": 5}, {"correct": 0, "trials": 5}]}
    return {"perplexity": {"rows": rows}, "passkey": cells}


def test_the_comparison_of_methods_shows_both_perplexities_and_the_share_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, save = [], plotting._save
    monkeypatch.setattr(plotting, "_save", lambda figure, path: (figures.append(figure), save(figure, path)))
    results = {"good": records(12, 8, 5), "bad": records(11, 400, None)}
    plotting.plot_methods(results, 9, tmp_path / "new" / "methods.png")
    left, right = figures[0].axes
    within, beyond = (line.get_xdata() for line in left.get_lines())
    assert list(within) == pytest.approx([12, 11])
    assert list(beyond) == pytest.approx([8, 400])
    assert [label.get_text() for label in left.get_yticklabels()] == ["good", "bad"]
    assert [text.get_text().strip() for text in (*left.texts, *right.texts)] == ["8.00", "400.00", "5 of 10"]
    assert right.containers[0].lines[0].get_xdata() == pytest.approx([0.5])
    assert (tmp_path / "new" / "methods.png").read_bytes().startswith(b"\x89PNG")
