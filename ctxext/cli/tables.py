"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_record(record: Mapping[str, Any]) -> None:
    """Print the rows of a result on stdout, under a line that says what was measured and how."""
    protocol, console = record["protocol"], Console()
    name = protocol["version"] if record["task"] == "passkey" else f"{protocol['name']} v{protocol['version']}"
    title = f"{record['task']} · {name} · {record['provenance']['model']} · {_method(record)}"
    console.print(title, highlight=False, markup=False)
    console.print(_perplexity(record["rows"]) if record["task"] == "perplexity" else _passkey(record["rows"]))
    counts = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in record["counts"].items() if value)
    console.print(counts, highlight=False, markup=False, style="dim")


def _method(record: Mapping[str, Any]) -> str:
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
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        low, high = row["wilson95"]
        table.add_row(
            f"{row['length']:,}",
            f"{row['depth']:.2f}",
            f"{row['correct']}/{row['trials']}",
            f"{row['accuracy']:.0%}",
            f"{low:.0%} - {high:.0%}",
        )
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "overflow"
    return f"{value:.3f}" if value < 1000 else f"{value:.3g}"
