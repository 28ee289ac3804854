"""Pictures. matplotlib is imported only here, and only when one is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ctxext.errors import CtxextError

if TYPE_CHECKING:
    from ctxext.attention.partition import Partition
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


def plot_relative_positions(
    partition: Partition, trained: int, path: str | os.PathLike[str], *, title: str = "", length: int | None = None
) -> None:
    """What scores see: the relative position of every pair, and how fast the slowest frequencies turn by distance.

    Args:
        partition: of a patch.
        trained: trained length in tokens.
        path: the picture.
        title: shown above it.
        length: tokens; default three times the trained length.
    """
    figure, (left, right) = _figure(columns=2)
    length = length or 3 * trained
    points = torch.linspace(0, length - 1, min(length, 600)).round().long()
    relative = partition.relative_positions(points, points).float()
    relative[points > points[:, None]] = math.nan
    image = left.imshow(relative.numpy(), extent=(0, length, length, 0), cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=left, label="relative position")
    left.set(xlabel="position of the key", ylabel="position of the query", title="Relative position of every score")

    last = points[-1:]
    inv_freq, _ = partition.frequencies_at(last)
    seen = partition.relative_positions(last, points)[0]
    plain = (last - points).float() * partition.inv_freq[-1]
    right.plot((last - points).numpy(), plain.numpy(), color="0.55", linestyle="--", label="without the method")
    right.plot((last - points).numpy(), (seen.float() * inv_freq[0, -1]).numpy(), color="C0", label="patched")
    right.axhline(trained * float(partition.inv_freq[-1]), color="C2", linewidth=1, label="at the trained length")
    right.set(
        xlabel=f"true distance from the query at position {int(last):,}",
        ylabel="angle in radians",
        title="Slowest frequency",
    )
    right.legend(frameon=False)
    figure.suptitle(title)
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


def plot_methods(results: Mapping[str, Any], trained: int, path: str | os.PathLike[str]) -> None:
    """One line per method: perplexity within and beyond the trained length, and passkeys found with 95 % intervals.

    Args:
        results: for each label, the records of the tasks ``perplexity`` (with a row at ``trained`` and longer ones) and
            ``passkey`` (or None).
        trained: trained length in tokens.
        path: the picture.
    """
    from matplotlib.ticker import LogLocator

    from ctxext.evaluation.statistics import wilson95

    figure, (left, right) = _figure(height=0.3 * len(results) + 1.5, columns=2, sharey=True)
    lines = range(len(results))
    short, beyond = zip(*(_within_and_beyond(r["perplexity"]["rows"], trained) for r in results.values()), strict=True)
    left.hlines(lines, short, beyond, color="0.8", zorder=1)
    left.plot(short, lines, "o", color="0.55", label=f"the first {trained:,} tokens")
    left.plot(beyond, lines, "o", color="C0", label="the tokens after them")
    for i, (value, other) in enumerate(zip(beyond, short, strict=True)):
        text = f"   {value:.2f}   " if value < 1000 else f"   {value:.3g}   "
        left.annotate(text, (value, i), va="center", ha="right" if value < other else "left", fontsize="small")
    left.set_xscale("log")
    left.margins(x=0.15)
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_formatter("")
    left.set(xlabel="perplexity", title="Reading on")
    left.set_yticks(lines, list(results))
    left.invert_yaxis()
    left.legend(frameon=False, fontsize="small")
    for i, records in enumerate(results.values()):
        if records["passkey"] is None:
            continue
        correct, trials = (sum(row[key] for row in records["passkey"]["rows"]) for key in ("correct", "trials"))
        low, high = wilson95(correct, trials)
        share = correct / trials
        right.errorbar(share, i, xerr=[[share - low], [high - share]], fmt="o", color="C1", ecolor="0.5", capsize=3)
        right.annotate(f"{correct} of {trials}  ", (low, i), va="center", ha="right", fontsize="small")
    for axes in (left, right):
        axes.grid(axis="y", color="0.93")
        axes.set_axisbelow(True)
    right.set(
        xlim=(-0.15, 1.02),
        xticks=[0, 0.2, 0.4, 0.6, 0.8, 1],
        xlabel="share of passkeys found, and 95 % interval",
        title="Finding a passkey",
    )
    _save(figure, path)


def _within_and_beyond(rows: list[dict[str, Any]], trained: int) -> tuple[float, float]:
    """Perplexity of the text up to the trained length, and of all that follows it."""
    short, long = next(row for row in rows if row["length"] == trained), rows[-1]
    total = long["nll"] * long["tokens"] - short["nll"] * short["tokens"]
    return short["perplexity"], math.exp(total / (long["tokens"] - short["tokens"]))


def _figure(width: float = 7.0, height: float = 4.2, columns: int = 1, *, sharey: bool = False) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CtxextError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, sharey=sharey)


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise CtxextError(f"{path}: the picture can't be written: {error}") from None
