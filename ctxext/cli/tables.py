"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_record(record: Mapping[str, Any]) -> None:
    """Print the rows of a result on stdout, under a line that says what was measured and how."""
    from ctxext.reporting import conclusions, protocol_name

    console = Console()
    parts = (record["task"], protocol_name(record["protocol"]), record["provenance"]["model"], method_name(record))
    console.print(" · ".join(parts), highlight=False, markup=False)
    console.print(_TABLES[record["task"]](record["rows"]))
    for line in conclusions(record):
        console.print(line, highlight=False, markup=False)
    counts = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in record["counts"].items() if value)
    console.print(counts, highlight=False, markup=False, style="dim")


def method_name(record: Mapping[str, Any]) -> str:
    """The method of a result with its settings, or what the plain model is."""
    method, patch = record["method"], record["patch"] or {}
    if method is not None:
        settings = ", ".join(f"{key} {value}" for key, value in method.items() if key != "name")
        return f"{method['name']} ({settings})"
    own = patch.get("checkpoint_method") or (None if patch.get("scaling") == "default" else patch.get("scaling"))
    return f"as saved, scaled with {own}" if own else "plain"


def _perplexity(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = [name for name in ("window", "stride", "length", "targets") if name in rows[0]]
    columns = [name for name in columns if name != "length" or "window" not in columns]
    table = Table(*columns, "tokens", "NLL", "perplexity", "95 % interval", box=None, header_style="bold")
    by_length = "nll_last" in rows[0]
    if by_length:
        table.add_column("perplexity since the row above")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        cells = [f"{row[column]:,}" for column in columns]
        cells += [f"{row['tokens']:,}", f"{row['nll']:.4f}", _number(row["perplexity"])]
        cells.append(" - ".join(map(_number, row["ci95"])) if row["ci95"] else "one document")
        if by_length:
            cells.append(_number(row["perplexity_last"]) if row["tokens_last"] else "-")
        table.add_row(*cells)
    return table


def _passkey(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("length", "depth", "correct", "accuracy", "95 % interval", box=None, header_style="bold")
    forced = "answer_nll" in rows[0]
    if forced:
        table.add_column("NLL of the answer")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        low, high = row["wilson95"]
        cells = [f"{row['length']:,}", f"{row['depth']:.2f}", f"{row['correct']}/{row['trials']}"]
        cells += [f"{row['accuracy']:.0%}", f"{low:.0%} - {high:.0%}"]
        if forced:
            cells.append(f"{row['answer_nll']:.3f}" if "answer_nll" in row else "-")
        table.add_row(*cells)
    return table


def _positions(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("positions", "tokens", "documents", "NLL", "95 % interval", box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        interval = "one document" if row["ci95"] is None else f"{row['ci95'][0]:.3f} - {row['ci95'][1]:.3f}"
        cells = [f"{row['low']:,} - {row['high'] - 1:,}", f"{row['tokens']:,}", f"{row['documents']:,}"]
        table.add_row(*cells, f"{row['nll']:.4f}", interval)
    return table


def _ruler(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("task", "length", "score", "95 % interval", "strict", "all found", box=None, header_style="bold")
    for column in list(table.columns)[1:]:
        column.justify = "right"
    for row in rows:
        low, high = row["wilson95"]
        cells = [row["task"], f"{row['length']:,}", f"{row['score']:.1%}", f"{low:.0%} - {high:.0%}"]
        table.add_row(*cells, f"{row['strict']:.1%}", f"{row['correct']}/{row['trials']}")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "overflow"
    return f"{value:.3f}" if value < 1000 else f"{value:.3g}"


def _longppl(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        "length", "key tokens", "share", "LongPPL", "95 % interval", "all tokens", box=None, header_style="bold"
    )
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        interval = " - ".join(map(_number, row["ci95"])) if row["ci95"] else "one document"
        cells = [f"{row['length']:,}", f"{row['tokens']:,}", f"{row['share']:.1%}"]
        value = _number(row["perplexity"]) if row["tokens"] else "-"
        table.add_row(*cells, value, interval, _number(row["perplexity_all"]))
    return table


def _search(rows: Sequence[Mapping[str, Any]]) -> Table:
    from ctxext.reporting import trial_cells

    header, lines = trial_cells(rows)
    table = Table(*header, box=None, header_style="bold")
    for column in table.columns[2:-1]:
        column.justify = "right"
    for line in lines:
        table.add_row(*map(escape, line))
    return table


_TABLES = {
    "longppl": _longppl,
    "perplexity": _perplexity,
    "positions": _positions,
    "passkey": _passkey,
    "ruler": _ruler,
    "search": _search,
}
