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


def test_columns_of_a_heatmap_are_in_numeric_order_and_its_colours_run_from_none_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, save = [], plotting._save
    monkeypatch.setattr(plotting, "_save", lambda figure, path: (figures.append(figure), save(figure, path)))
    # As text, 16384 would come before 512, and 4096 between them and 8192.
    cells = [(16384, 0.25), (512, 0.5), (8192, 0.75), (4096, 0.5)]
    rows = [
        {"length": length, "depth": depth, "accuracy": share, "trials": 4}
        for length, share in cells
        for depth in (1.0, 0.1)
        if (length, depth) != (8192, 0.1)
    ]
    plotting.plot_record(
        {"task": "passkey", "rows": rows, "method": None, "provenance": {"model": "tiny"}}, tmp_path / "new"
    )
    axes = figures[0].axes[0]
    [image] = axes.get_images()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "4,096", "8,192", "16,384"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["10%", "100%"]
    assert image.get_array().filled(-1).tolist() == [[0.5, 0.5, -1, 0.25], [0.5, 0.5, 0.75, 0.25]]
    assert image.get_clim() == (0, 1)
    assert (tmp_path / "new" / "passkey.png").read_bytes().startswith(b"\x89PNG")
