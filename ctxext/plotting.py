"""Pictures. matplotlib is imported only here, and only when one is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError

if TYPE_CHECKING:
    from ctxext.inspection import Inspection


def plot_wavelengths(inspection: Inspection, path: str | os.PathLike[str]) -> None:
    """Wavelength of every dimension before and after, against trained and target length."""
    figure, axes = _figure()
    base = [math.tau / f for f in inspection.base_inv_freq]
    live = [math.tau / f for f in inspection.inv_freq]
    name = inspection.method["name"] if inspection.method else inspection.scaling
    axes.semilogy(base, color="0.55", linestyle="--", marker=".", label="as trained")
    axes.semilogy(live, color="C0", marker=".", label=name)
    axes.axhline(inspection.original_max_position_embeddings, color="C2", linewidth=1, label="trained length")
    axes.axhline(inspection.max_position_embeddings, color="C3", linewidth=1, label="target length")
    axes.set(
        xlabel="dimension (index of frequency)",
        ylabel="wavelength in tokens",
        title=f"{inspection.model_type}: {name}, {inspection.original_max_position_embeddings:,} to "
        f"{inspection.max_position_embeddings:,} tokens",
    )
    axes.legend(frameon=False)
    _save(figure, path)


def plot_comparison(results: Mapping[str, Any], trained: int, path: str | os.PathLike[str]) -> None:
    """Perplexity by position and passkey accuracy by length, one colour per method.

    Args:
        results: for each label, the records of the tasks ``perplexity`` (several lengths) and ``passkey``.
        trained: trained length in tokens, drawn as a line.
        path: the picture.
    """
    figure, (left, right) = _figure(columns=2)
    for label, records in results.items():
        rows = records["perplexity"]["rows"]
        left.semilogy(
            [row["length"] for row in rows], [row["perplexity_last"] for row in rows], marker=".", label=label
        )
    left.axvline(trained, color="0.5", linewidth=1, linestyle="--")
    left.annotate(" trained length", (trained, 0.98), xycoords=("data", "axes fraction"), va="top", color="0.4")
    left.set(xlabel="position in tokens", ylabel="perplexity of the text around it", title="Reading on")
    left.legend(frameon=False)

    lengths = sorted({row["length"] for records in results.values() for row in records["passkey"]["rows"]})
    width = 0.8 / len(results)
    for i, (label, records) in enumerate(results.items()):
        for j, length in enumerate(lengths):
            rows = [row for row in records["passkey"]["rows"] if row["length"] == length]
            correct, trials = sum(row["correct"] for row in rows), sum(row["trials"] for row in rows)
            x = j + (i - (len(results) - 1) / 2) * width
            right.bar(x, correct / trials, width * 0.95, color=f"C{i}", label=label if j == 0 else None)
            right.annotate(f"{correct}/{trials}", (x, correct / trials), ha="center", va="bottom")
    right.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    right.set(ylim=(0, 1.12), xlabel="length in tokens", ylabel="share found", title="Finding a passkey")
    _save(figure, path)


def _figure(width: float = 7.0, height: float = 4.2, columns: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CtxextError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise CtxextError(f"{path}: the picture can't be written: {error}") from None
