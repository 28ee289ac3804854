"""Pictures. matplotlib is imported only here, and only when one is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
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
    relative[~partition.attended(points, points)] = math.nan
    image = left.imshow(relative.numpy(), extent=(0, length, length, 0), cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=left, label="relative position")
    left.set(xlabel="position of the key", ylabel="position of the query", title="Relative position of every score")

    last = points[-1:]
    inv_freq, _ = partition.frequencies_at(last)
    seen = partition.relative_positions(last, points)[0].float()
    seen[~partition.attended(last, points)[0]] = math.nan
    plain = (last - points).float() * partition.inv_freq[-1]
    right.plot((last - points).numpy(), plain.numpy(), color="0.55", linestyle="--", label="without the method")
    right.plot((last - points).numpy(), (seen * inv_freq[0, -1]).numpy(), color="C0", label="patched")
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


def plot_record(record: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """The picture of one result, ``<task>.png`` in ``folder``; a result of one row has none."""
    if len(record["rows"]) > 1:
        _PICTURES[record["task"]](record, Path(folder) / f"{record['task']}.png")


def _plot_perplexity(record: Mapping[str, Any], path: Path) -> None:
    figure, axes = _figure()
    rows = [row for row in record["rows"] if row["perplexity"] is not None]
    values = [row["perplexity"] for row in rows]
    lengths = [row["length"] for row in rows]
    if all(row["ci95"] for row in rows):
        axes.fill_between(
            lengths, *zip(*(row["ci95"] for row in rows), strict=True), color="C0", alpha=0.2, linewidth=0
        )
    axes.plot(lengths, values, color="C0", marker="o", label="all tokens")
    if all(row.get("perplexity_last") for row in rows):
        last = [row["perplexity_last"] for row in rows]
        axes.plot(lengths, last, color="C1", marker=".", linestyle="--", label="tokens since the length before")
        axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yscale("log")
    axes.set(xlabel="length in tokens", ylabel="perplexity", title=_title(record))
    _save(figure, path)


def _plot_positions(record: Mapping[str, Any], path: Path) -> None:
    figure, axes = _figure()
    plot_curve(axes, record["rows"], color="C0")
    trained = record["summary"]["trained"]
    if trained < record["summary"]["longest"]:
        axes.axvline(trained, color="0.5", linewidth=1, linestyle="--")
        axes.annotate(" trained length", (trained, 0.98), xycoords=("data", "axes fraction"), va="top", color="0.4")
    axes.set(xlabel="position in tokens", ylabel="loss in nats", title=_title(record))
    _save(figure, path)


def plot_curve(axes: Any, rows: Sequence[Mapping[str, Any]], *, color: str, label: str | None = None) -> None:
    """A loss curve over positions with its intervals, from rows of ``evaluation.positions.curve``."""
    middles = [max(1.0, math.sqrt(max(1, row["low"]) * row["high"])) for row in rows]
    if all(row["ci95"] for row in rows):
        bounds = list(zip(*(row["ci95"] for row in rows), strict=True))
        axes.fill_between(middles, *bounds, color=color, alpha=0.2, linewidth=0)
    axes.plot(middles, [row["nll"] for row in rows], color=color, marker=".", label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _plot_passkey(record: Mapping[str, Any], path: Path) -> None:
    rows = record["rows"]
    forced = all("answer_nll" in row for row in rows)
    depths = sorted({row["depth"] for row in rows})
    figure, axes = _figure(height=max(4.2, 0.32 * len(depths) + 1.8), columns=1 + forced, width=6.0)
    first = axes[0] if forced else axes
    names = [f"{depth:.0%}" for depth in depths]
    keys = [(row["depth"], row["length"]) for row in rows]
    _heatmap(
        figure, first, dict(zip(keys, (row["accuracy"] for row in rows), strict=True)), depths, names, "share found"
    )
    first.set(ylabel="depth of the key", title="Keys found")
    if forced:
        losses = dict(zip(keys, (row["answer_nll"] for row in rows), strict=True))
        _heatmap(figure, axes[1], losses, depths, names, "nats a token", limits=None, cmap="cividis_r")
        axes[1].set(title="Loss of the right answer")
    figure.suptitle(f"{_title(record)}, {rows[0]['trials']} prompts a cell")
    _save(figure, path)


def _plot_ruler(record: Mapping[str, Any], path: Path) -> None:
    rows = record["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = _figure(height=0.4 * len(tasks) + 1.8)
    values = {(row["task"], row["length"]): row["score"] for row in rows}
    _heatmap(figure, axes, values, tasks, tasks, "score")
    axes.set(title=f"{_title(record)}, {rows[0]['trials']} prompts a cell")
    _save(figure, path)


def _plot_search(record: Mapping[str, Any], path: Path) -> None:
    """The objective by trial, and by each parameter that was searched; one colour for each method."""
    rows = [row for row in record["rows"] if row["objective"] is not None]
    names = list(dict.fromkeys(name for row in rows for name in row["parameters"] if name != "method"))
    colours = {label: f"C{i % 10}" for i, label in enumerate(dict.fromkeys(row["method"] for row in rows))}
    columns = min(4, 1 + len(names))
    lines = math.ceil((1 + len(names)) / columns)
    figure, axes = _figure(width=3.4, height=3.0 * lines, columns=columns, rows=lines)
    first, *others = list(getattr(axes, "flat", [axes]))
    best = record["summary"]["best"]
    _objectives(first, [row["trial"] for row in rows], rows, best["trial"], colours)
    so_far = [min(row["objective"] for row in rows[: i + 1]) for i in range(len(rows))]
    first.plot([row["trial"] for row in rows], so_far, color="0.55", drawstyle="steps-post", zorder=0)
    first.set(xlabel="trial", ylabel="objective")
    for ax, name in zip(others, names, strict=False):
        shown = [row for row in rows if name in row["parameters"]]
        values = [row["parameters"][name] for row in shown]
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
        _objectives(ax, values if numbers else [str(value) for value in values], shown, best["trial"], colours)
        ax.set(xlabel=name)
        ax.sharey(first)
    for ax in others[len(names) :]:
        ax.set_axis_off()
    # What fails far from the rest would hide the differences that matter.
    middle = sorted(row["objective"] for row in rows)[len(rows) // 2]
    if middle > best["objective"]:
        height = middle - best["objective"]
        first.set_ylim(best["objective"] - 0.3 * height, best["objective"] + 4 * height)
    marks = [first.plot([], [], "o", color=colour, label=label)[0] for label, colour in colours.items()]
    marks += [first.plot([], [], "s", color="0.6", label="defaults")[0]]
    marks += [first.plot([], [], "*", color="0.6", markersize=12, label="the best")[0]]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize="small")
    figure.suptitle(f"{record['provenance']['model']}: search for {record['protocol']['target']:,} tokens")
    _save(figure, path)


def _objectives(
    axes: Any, values: Sequence[Any], rows: Sequence[Mapping[str, Any]], best: int, colours: Mapping[str, str]
) -> None:
    """Trials as dots, defaults as squares, the best as a star."""
    for value, row in zip(values, rows, strict=True):
        marker = "*" if row["trial"] == best else "s" if row["is_default"] else "o"
        size = 13 if row["trial"] == best else 5
        axes.plot([value], [row["objective"]], marker, color=colours[row["method"]], markersize=size)


_PICTURES = {
    "perplexity": _plot_perplexity,
    "positions": _plot_positions,
    "passkey": _plot_passkey,
    "ruler": _plot_ruler,
    "search": _plot_search,
}


def plot_compared(summary: Mapping[str, Any], folder: str | os.PathLike[str]) -> list[Path]:
    """The pictures of a comparison (``evaluation.compare.summary``) in ``folder``, and their paths.

    Perplexity by length (``perplexity.png``), loss by position (``positions.png``) and passkeys by length and depth
    (``passkey.png``); what wasn't measured has none.
    """
    folder = Path(folder)
    drawn = []
    for name, draw, key in (
        ("perplexity", _compared_perplexity, "perplexity"),
        ("positions", _compared_positions, "curve"),
        ("passkey", _compared_passkeys, "passkey"),
    ):
        entries = [entry for entry in summary["entries"] if key in entry]
        if entries:
            draw(entries, summary["trained"], folder / f"{name}.png")
            drawn.append(folder / f"{name}.png")
    return drawn


def _compared_perplexity(entries: Sequence[Mapping[str, Any]], trained: int, path: Path) -> None:
    figure, axes = _figure(width=8)
    for i, entry in enumerate(entries):
        rows = [row for row in entry["perplexity"]["rows"] if row["perplexity"] is not None]
        lengths, style = [row["length"] for row in rows], _style(i)
        axes.plot(lengths, [row["perplexity"] for row in rows], label=entry["label"], **style)
        if all(row["ci95"] for row in rows):
            bounds = list(zip(*(row["ci95"] for row in rows), strict=True))
            axes.fill_between(lengths, *bounds, color=style["color"], alpha=0.12, linewidth=0)
    axes.set_yscale("log")
    axes.set(xlabel="length in tokens", ylabel="perplexity of all tokens up to there", title="Reading on")
    _by_length(axes, trained)
    _save(figure, path)


def _compared_positions(entries: Sequence[Mapping[str, Any]], trained: int, path: Path) -> None:
    figure, axes = _figure(width=8)
    for i, entry in enumerate(entries):
        plot_curve(axes, entry["curve"], label=entry["label"], **_style(i))
    axes.set(xlabel="position in tokens", ylabel="loss in nats", title="Loss by position")
    _by_length(axes, trained)
    _save(figure, path)


def _compared_passkeys(entries: Sequence[Mapping[str, Any]], trained: int, path: Path) -> None:
    columns = min(4, len(entries))
    lines = math.ceil(len(entries) / columns)
    depths = sorted({row["depth"] for row in entries[0]["passkey"]["rows"]})
    figure, axes = _figure(width=2.9, height=lines * (0.12 * len(depths) + 1.6), columns=columns, rows=lines)
    flat = [axes] if len(entries) == 1 else list(getattr(axes, "flat", axes))
    for ax, entry in zip(flat, entries, strict=False):
        values = {(row["depth"], row["length"]): row["accuracy"] for row in entry["passkey"]["rows"]}
        _heatmap(figure, ax, values, depths, [f"{depth:.0%}" for depth in depths], "", bar=False, numbers=False)
        found = sum(row["correct"] for row in entry["passkey"]["rows"])
        asked = sum(row["trials"] for row in entry["passkey"]["rows"])
        ax.set_title(f"{entry['label']}: {found} of {asked}", fontsize="medium")
        ax.tick_params(labelsize="x-small")
    for ax in flat[len(entries) :]:
        ax.set_axis_off()
    figure.suptitle("Passkeys found by length and depth (yellow: all, blue: none)")
    _save(figure, path)


def plot_training(log: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Loss of each step, and the perplexities that were measured on the way, from the lines of a fine-tune's log."""
    evaluations = [entry for entry in log if "evaluation" in entry]
    steps = [entry for entry in log if "loss" in entry]
    figure, axes = _figure(columns=2 if evaluations else 1)
    left, right = axes if evaluations else (axes, None)
    left.plot([entry["step"] for entry in steps], [entry["loss"] for entry in steps], color="C0")
    left.set(xlabel="step", ylabel="loss of the training text (nats per token)", title="Training")
    if right is not None:
        for i, row in enumerate(evaluations[0]["evaluation"]):
            values = [entry["evaluation"][i]["perplexity"] for entry in evaluations]
            right.plot([entry["step"] for entry in evaluations], values, **_style(i), label=f"{row['length']:,} tokens")
        right.set(xlabel="step", ylabel="perplexity", title="Held-out text", yscale="log")
        right.legend(frameon=False)
    _save(figure, path)


def plot_finetunes(logs: Mapping[str, Sequence[Mapping[str, Any]]], trained: int, path: str | os.PathLike[str]) -> None:
    """Perplexity by length before (dashed) and after training, for each log of a fine-tune by its title."""
    figure, axes = _figure()
    for i, (title, log) in enumerate(logs.items()):
        evaluations = [entry for entry in log if "evaluation" in entry]
        for entry, line in ((evaluations[0], "--"), (evaluations[-1], "-")):
            rows = entry["evaluation"]
            label = f"{title}, {entry['step']} steps" if entry["step"] else f"{title}, untrained"
            axes.plot(
                [row["length"] for row in rows], [row["perplexity"] for row in rows], line, marker="o", label=label,
                **_style(i),
            )  # fmt: skip
    axes.set(xlabel="length in tokens", ylabel="perplexity of held-out text", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    _by_length(axes, trained)
    _save(figure, path)


def _style(i: int) -> dict[str, Any]:
    return {"color": f"C{i % 10}"}


def _by_length(axes: Any, trained: int) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.axvline(trained, color="0.5", linewidth=1, linestyle="--")
    axes.annotate(" trained length", (trained, 0.98), xycoords=("data", "axes fraction"), va="top", color="0.4")
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _heatmap(
    figure: Any,
    axes: Any,
    values: Mapping[tuple[Any, int], float],
    order: Sequence[Any],
    names: Sequence[str],
    label: str,
    *,
    limits: tuple[float, float] | None = (0, 1),
    cmap: str = "cividis",
    bar: bool = True,
    numbers: bool = True,
) -> None:
    """Cells by line (in ``order``, shown as ``names``) and length; what wasn't measured is hatched."""
    lengths = sorted({length for _, length in values})
    grid = [[values.get((line, length), math.nan) for length in lengths] for line in order]
    low, high = limits or (None, None)
    axes.set_facecolor("0.9")
    axes.patch.set_hatch("///")
    image = axes.imshow(grid, cmap=cmap, vmin=low, vmax=high, aspect="auto")
    if bar:
        figure.colorbar(image, ax=axes, label=label)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(order)), names)
    axes.set(xlabel="length in tokens")
    if numbers and len(lengths) <= 12 and len(order) <= 32:
        dark = image.norm
        for i, line in enumerate(grid):
            for j, value in enumerate(line):
                if not math.isnan(value):
                    shade = dark(value) if cmap == "cividis" else 1 - dark(value)
                    text = f"{value:.0%}" if limits else f"{value:.2f}"
                    axes.text(j, i, text, ha="center", va="center", color="black" if shade > 0.55 else "white", size=8)


def _title(record: Mapping[str, Any]) -> str:
    method = record["method"]
    return f"{record['provenance']['model']}: {method['name'] if method else 'plain'}"


def _within_and_beyond(rows: list[dict[str, Any]], trained: int) -> tuple[float, float]:
    """Perplexity of the text up to the trained length, and of all that follows it."""
    short, long = next(row for row in rows if row["length"] == trained), rows[-1]
    total = long["nll"] * long["tokens"] - short["nll"] * short["tokens"]
    return short["perplexity"], math.exp(total / (long["tokens"] - short["tokens"]))


def _figure(
    width: float = 7.0, height: float = 4.2, columns: int = 1, *, rows: int = 1, sharey: bool = False
) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CtxextError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, sharey=sharey)


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise CtxextError(f"{path}: the picture can't be written: {error}") from None
