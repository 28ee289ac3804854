"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_record(record: Mapping[str, Any]) -> None:
    """Print the rows of a result on stdout, under a line that says what was measured and how."""
    method = record["configuration"].get("method")
    name = "plain" if method is None else ", ".join(f"{key} {value}" for key, value in method.items() if key != "name")
    title = name if method is None else f"{method['name']} ({name})" if name else method["name"]
    protocol = record["protocol"]
    console = Console()
    console.print(
        f"{record['task']} · {protocol['name']} v{protocol['version']} · {record['provenance']['model']} · {title}",
        highlight=False,
    )
    console.print(_perplexity(record["rows"]) if record["task"] == "perplexity" else _passkey(record["rows"]))
    counts = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in record["counts"].items() if value)
    console.print(counts, highlight=False, style="dim")


def _perplexity(rows: Sequence[Mapping[str, Any]]) -> Table:
    sliding = "window" in rows[0]
    columns = ["window", "stride"] if sliding else ["length"]
    table = Table(*columns, "tokens", "NLL", "perplexity", box=None, header_style="bold")
    if not sliding:
        table.add_column("perplexity since the row above")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        cells = [f"{row[column]:,}" for column in columns]
        cells += [f"{row['tokens']:,}", f"{row['nll']:.4f}", _number(row["perplexity"])]
        if not sliding:
            cells.append(_number(row["perplexity_last"]))
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
