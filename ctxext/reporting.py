"""Results as documents: Markdown and CSV tables, and one HTML page that needs nothing beside it.

Everything is made from what runs and comparisons have written; no model is needed.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ctxext.errors import ConfigError
from ctxext.evaluation.artefacts import command
from ctxext.evaluation.compare import CHANGES
from ctxext.evaluation.longppl import FEW_DOCUMENTS
from ctxext.evaluation.passkey import CONTROL_LENGTH
from ctxext.evaluation.runs import read_run

FORMATS = ("md", "csv", "json", "html")


def report(folders: Sequence[Path], form: str) -> str:
    """The results in ``folders`` (runs or comparisons) as ``md``, ``csv``, ``json`` or ``html``.

    Raises:
        ConfigError: an unknown format, or a folder without a finished run or comparison.
    """
    if form not in FORMATS:
        raise ConfigError(f"format {form!r} is unknown: give one of {', '.join(FORMATS)}")
    if not folders:
        raise ConfigError("nothing to report: give the folders of runs or comparisons")
    if form == "html":
        return html_report(folders)
    contents = [read_result(folder) for folder in folders]
    if form == "json":
        return json.dumps(contents, indent=2, allow_nan=False) + "\n"
    if form == "csv":
        return _csv(contents)
    return "\n".join(f"## {title(content)}\n\n{markdown_table(content)}" for content in contents)


def read_result(folder: Path) -> dict[str, Any]:
    """What a comparison (compare.json) or a run (results.json) in ``folder`` has written."""
    compared = folder / "compare.json"
    if not compared.is_file():
        return read_run(folder)[0]
    try:
        content: dict[str, Any] = json.loads(compared.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{compared}: can't be read: {error}") from None
    return content


def title(content: Mapping[str, Any]) -> str:
    """What was measured, on which model."""
    model = content["provenance"]["model"]
    if "entries" in content:
        return f"{len(content['entries'])} methods on {model}"
    method = content["method"]
    return f"{content['task']} of {model}, {method['name'] if method else 'plain'}"


def markdown_table(content: Mapping[str, Any]) -> str:
    """The table of a comparison, or the rows of a run."""
    if "entries" in content:
        return comparison_table(content)
    if content["task"] == "search":
        return search_tables(content)
    header, rows = _run_cells(content)
    return _markdown(header, rows) + "".join(f"\n{note}\n" for note in run_notes(content))


def search_tables(record: Mapping[str, Any]) -> str:
    """What a search found, the comparison on held-out text, and all trials, the best first."""
    summary = record["summary"]
    text = f"{summary['verdict']}.\n"
    if summary["differences"]:
        documents = record["counts"]["held_out_documents"]
        text += f"\n{_markdown(*held_out_cells(summary))}\n{intervals_mean(documents)}\n"
    return f"{text}\n{_markdown(*trial_cells(record['rows']))}"


def protocol_name(protocol: Mapping[str, Any]) -> str:
    """Name and version of a protocol."""
    version = str(protocol["version"])
    return version if version.startswith(protocol["name"]) else f"{protocol['name']} v{version}"


def run_notes(record: Mapping[str, Any]) -> list[str]:
    """How the rows of a run were measured, how many parts failed, and what follows from the rows, in sentences."""
    notes = [_how(record["task"], record["protocol"], record.get("dataset"))]
    if errors := record["counts"].get("errors"):
        notes.append(f"{errors} of {record['counts']['samples']} prompts failed, and count as wrong.")
    return notes + conclusions(record)


def _how(task: str, protocol: Mapping[str, Any], dataset: Mapping[str, Any] | None) -> str:
    """Protocol and text, and what an interval can't say."""
    note = f"{task}: {protocol_name(protocol)}"
    if dataset is not None:
        documents = len(dataset["document_ids"])
        note += f", {documents} document{'s' if documents != 1 else ''} of {dataset['id']}"
        if documents == 1:
            note += "; one document says nothing about others, so there are no intervals"
        elif documents < FEW_DOCUMENTS:
            note += ": few, so that the intervals are wide and rough"
    if task == "passkey":
        note += f", keys at {len(protocol['depths'])} depths, {protocol['trials']} at each"
        if protocol["trials"] > 1:
            note += "; what pools depths counts them and not keys, because keys at one depth are found or lost together"
    return note + "."


def conclusions(record: Mapping[str, Any]) -> list[str]:
    """What the summary of a result says, in sentences."""
    summary, lines = record.get("summary") or {}, []
    if record["task"] == "positions" and "plateau" in summary:
        onset, gain = summary["onset"], summary["gain"]
        if onset is None:
            lines.append(f"reads all {summary['longest']:,} positions that were measured without failing")
        else:
            lines.append(f"fails from position {onset:,} on (trained length {summary['trained']:,})")
        low, high = summary["gain_ci95"] or (gain, gain)
        lines.append(f"context beyond the trained length gains {gain:.3f} nats a token ({low:.3f} to {high:.3f})")
    if record["task"] == "longppl":
        [row] = record["rows"]
        if row["insufficient"]:
            lines.append("insufficient: too few key tokens or documents for a conclusion (500 and 10 are wanted)")
        if row["keys"] == "self":
            lines.append("keys found with this very model: not comparable with other checkpoints on keys of their own")
    if record["task"] == "passkey":
        lines += _passkey_conclusions(summary)
    if record["task"] == "search":
        lines += _search_conclusions(record)
    if record["task"] == "ruler" and "effective_length" in summary:
        effective, threshold = summary["effective_length"], summary["threshold"]
        reached = "no length" if effective is None else f"up to {effective:,} tokens"
        lines.append(f"mean score of at least {threshold:.1%}: {reached}")
    return lines


def _passkey_conclusions(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    if summary.get("controls"):
        short, empty = summary["controls"]["short"], summary["controls"]["no_needle"]
        lines.append(
            f"controls: {short['correct']} of {short['trials']} in {CONTROL_LENGTH:,} tokens, "
            f"{empty['correct']} of {empty['trials']} without the key"
        )
    if summary.get("floor"):
        lines.append("task floor: the model can't do this task even in short prompts, so that the grid says little")
    if summary.get("agreement") is not None and summary["agreement"] < 0.99:
        lines.append(f"forced and generated answers agree in {summary['agreement']:.0%} of the prompts only")
    return lines


def _search_conclusions(record: Mapping[str, Any]) -> list[str]:
    summary, lines = record["summary"], []
    if summary["differences"]:
        (first, *names), rows = held_out_cells(summary)
        for against, *cells in rows:
            found = ", ".join(f"{name} {cell}" for name, cell in zip(names, cells, strict=True))
            lines.append(f"held out, {first} {against}: {found}")
        lines.append(intervals_mean(record["counts"]["held_out_documents"]))
    return [*lines, summary["verdict"]]


def held_out_cells(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A line for each default that the best setting of a search was compared with: differences in nats a token."""
    header = [f"{summary['best']['title']} against", "text", "answers of passkey prompts", "within the trained length"]
    lines = []
    for row in summary["differences"]:
        cells = [
            _change(row.get(part), summary["noise_floor_nll"], plain=False) for part in ("text", "passkey", "trained")
        ]
        lines.append([row["against"] + (f": {row['reason']}" if row["reason"] else ""), *cells])
    return header, lines


def intervals_mean(documents: int) -> str:
    """What the intervals of a search's held-out comparison stand for."""
    if documents == 1:
        return "One held-out document: no interval, because it says nothing about others."
    return (
        f"Differences in nats a token on the same {documents} documents; below zero the best setting "
        "is better. 95 % intervals over documents, each of which counts as one sample however long it is; p by "
        "Holm's method."
    )


def trial_cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Trials by objective, then those without one."""
    header = ["trial", "method", "objective", "text", "answers", "lost within the trained length", "settings"]
    ordered = sorted(rows, key=lambda row: (row["objective"] is None, row["objective"] or 0.0, row["trial"]))
    lines = []
    for row in ordered:
        numbers = [
            "-" if row[key] is None else f"{row[key]:.4f}" for key in ("objective", "text", "passkey", "trained")
        ]
        said = " ".join(part for part in (row["settings"], f"({row['reason']})" if row["reason"] else "") if part)
        lines.append([str(row["trial"]), row["method"], *numbers, said])
    return header, lines


def comparison_table(compared: Mapping[str, Any]) -> str:
    """One line for each method: perplexity by length, what short text costs, what is found, with 95 % intervals."""
    header, rows = _compared_cells(compared)
    notes = [f"{label}, {task}: {reason}" for label, task, reason in _reasons(compared)] + _asked(compared)
    return _markdown(header, rows) + "".join(f"\n{note}\n" for note in notes)


def _reasons(compared: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Label, task and reason of what couldn't be measured, or failed in part."""
    return [
        (entry["label"], task, reason)
        for entry in compared["entries"]
        for task, reason in [*entry["reasons"].items(), *entry.get("failures", {}).items()]
    ]


def _asked(compared: Mapping[str, Any]) -> list[str]:
    """What the columns are of, in sentences."""
    tasks = compared.get("tasks", {})
    notes = [_how(task, asked["protocol"], asked["dataset"]) for task, asked in tasks.items()]
    if notes and not {"perplexity", "positions"} & set(tasks):
        notes.append("What short texts cost wasn't measured: that takes the task perplexity.")
    return notes


def html_report(folders: Sequence[Path]) -> str:
    """One self-contained page: tables, pictures, what was run on what, and how to run it again.

    Raises:
        CtxextError: matplotlib or jinja2 is missing.
    """
    from jinja2 import Environment, PackageLoader

    sections = []
    for folder in folders:
        content = read_result(folder)
        compared = "entries" in content
        header, rows = _compared_cells(content) if compared else _run_cells(content)
        sections.append(
            {
                "title": title(content),
                "header": header,
                "rows": rows,
                "pictures": _pictures(content),
                "reasons": _reasons(content) if compared else [],
                "notes": _asked(content) if compared else run_notes(content),
                "provenance": content["provenance"],
                "configuration": yaml.safe_dump(_without_nulls(content["configuration"]), sort_keys=False),
                "command": f"{command('compare' if compared else content['task'])} --config config.yaml",
            }
        )
    environment = Environment(loader=PackageLoader("ctxext", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html.j2").render(sections=sections)


def _pictures(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and data address of every picture of a result."""
    from ctxext.plotting import plot_compared, plot_record

    with tempfile.TemporaryDirectory() as folder:
        if "entries" in content:
            plot_compared(content, folder)
        else:
            plot_record(content, folder)
        return [
            (file.stem, "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode())
            for file in sorted(Path(folder).glob("*.png"))
        ]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _compared_cells(compared: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    entries = compared["entries"]
    columns: list[tuple[str, Any]] = [("method", lambda entry: entry["label"])]
    for size in _sizes(entries, "perplexity", "rows"):
        columns.append((f"perplexity to {size:,}", lambda entry, size=size: _perplexity(entry, size)))
    if any(entry.get("short") for entry in entries):
        name = f"change of loss within {compared['trained']:,}"
        columns.append(
            (name, lambda entry: _change(entry.get("short"), compared["noise_floor_nll"], plain=entry is entries[0]))
        )
    for task, title, cell in (("passkey", "passkeys", _found), ("ruler", "RULER tasks", _score)):
        for size in _sizes(entries, task, "by_length"):
            columns.append((f"{title} in {size:,}", lambda entry, size=size, cell=cell: cell(entry, size)))
            key = f"{task}_change"
            if any(_change_at(entry, key, size) for entry in entries):
                columns.append(
                    (
                        "right answers more than plain",
                        lambda entry, key=key, size=size: _share(
                            _change_at(entry, key, size), plain=entry is entries[0]
                        ),
                    )
                )
    for size in _sizes(entries, "longppl", "rows"):
        columns.append((f"LongPPL in {size:,}", lambda entry, size=size: _longppl(entry, size)))
    if any(entry.get("longppl_change") for entry in entries):
        columns.append(
            (
                "change of loss on key tokens",
                lambda entry: _change(
                    entry.get("longppl_change"), compared["noise_floor_nll"], plain=entry is entries[0]
                ),
            )
        )
    if any("positions" in entry for entry in entries):
        columns.append(("reads up to", _reads))
    return [name for name, _ in columns], [[cell(entry) for _, cell in columns] for entry in entries]


def _sizes(entries: Sequence[Mapping[str, Any]], task: str, rows: str) -> list[int]:
    return sorted({row["length"] for entry in entries if task in entry for row in entry[task][rows]})


def _row(entry: Mapping[str, Any], task: str, rows: str, size: int) -> Mapping[str, Any] | None:
    return next((row for row in entry.get(task, {}).get(rows, []) if row["length"] == size), None)


def _perplexity(entry: Mapping[str, Any], size: int) -> str:
    row = _row(entry, "perplexity", "rows", size)
    if row is None:
        return "-"
    value = _number(row["perplexity"])
    return value if row["ci95"] is None else f"{value} ({' to '.join(map(_number, row['ci95']))})"


def _change(difference: Mapping[str, Any] | None, noise: float, *, plain: bool) -> str:
    if plain or difference is None:
        return "" if plain else "-"
    low, high = difference["ci95"] or [difference["difference"]] * 2
    same = abs(difference["difference"]) < noise
    value = "≈ 0" if same else f"{difference['difference']:+.4f}"
    if difference["ci95"] is None or (same and max(abs(low), abs(high)) < noise):
        return value
    return f"{value} ({low:+.4f} to {high:+.4f}){_p(difference)}"


def _found(entry: Mapping[str, Any], size: int) -> str:
    row = _row(entry, "passkey", "by_length", size)
    if row is None:
        return "-"
    if row["errors"] == row["trials"]:
        return "failed"
    low, high = row["wilson95"]
    floor = ", task floor" if entry["passkey"].get("summary", {}).get("floor") else ""
    return f"{row['correct']} of {row['trials']} ({low:.0%} to {high:.0%}){_failed(row)}{floor}"


def _failed(row: Mapping[str, Any]) -> str:
    return f", {row['errors']} failed" if row["errors"] else ""


def _change_at(entry: Mapping[str, Any], key: str, size: int) -> Mapping[str, Any] | None:
    return next((change for change in entry.get(key) or () if change["length"] == size), None)


def _share(difference: Mapping[str, Any] | None, *, plain: bool) -> str:
    if plain or difference is None:
        return "" if plain else "-"
    low, high = difference["ci95"]
    return f"{difference['difference']:+.0%} ({low:+.0%} to {high:+.0%}){_p(difference)}"


def _p(difference: Mapping[str, Any]) -> str:
    p = difference.get("p_holm")
    if p is None:
        return ""
    return ", p < 0.001" if p < 0.001 else f", p = {p:.3f}"


def _score(entry: Mapping[str, Any], size: int) -> str:
    row = _row(entry, "ruler", "by_length", size)
    if row is None:
        return "-"
    if row["errors"] == row["trials"]:
        return "failed"
    low, high = row["wilson95"]
    return f"{row['score']:.0%} ({low:.0%} to {high:.0%}){_failed(row)}"


def _longppl(entry: Mapping[str, Any], size: int) -> str:
    row = _row(entry, "longppl", "rows", size)
    if row is None or row["perplexity"] is None:
        return "-"
    interval = "" if row["ci95"] is None else f" ({' to '.join(map(_number, row['ci95']))})"
    return f"{_number(row['perplexity'])}{interval}{', insufficient' if row['insufficient'] else ''}"


def _reads(entry: Mapping[str, Any]) -> str:
    summary = entry.get("positions", {}).get("summary", {})
    if "effective_length" not in summary:
        return "-"
    more = " or more" if summary["onset"] is None else ""
    return f"{summary['effective_length']:,}{more}"


def _number(value: float | None) -> str:
    if value is None:
        return "overflow"
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.3g}"


def _run_cells(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The rows of a run, with the columns that all have."""
    rows = record["rows"]
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = [key for key in keys if all(_is_plain(row.get(key)) for row in rows)]
    return columns, [[_cell(row.get(key)) for key in columns] for row in rows]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str)) or _is_interval(value)


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if _is_interval(value):
        return f"{_cell(value[0])} to {_cell(value[1])}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _csv(contents: Sequence[Mapping[str, Any]]) -> str:
    """Long form: one line for each figure."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["model", "method", "task", "length", "part", "figure", "value"])
    for content in contents:
        writer.writerows(_figures(content))
    return out.getvalue()


def _figures(content: Mapping[str, Any]) -> Iterator[list[Any]]:
    model = content["provenance"]["model"]
    if "entries" in content:
        for entry in content["entries"]:
            for task in ("perplexity", "positions", "longppl", "passkey", "ruler"):
                for row in entry.get(task, {}).get("rows", []):
                    yield from _row_figures(model, entry["label"], task, row)
            for name in CHANGES:
                changes = entry.get(name)
                for change in changes if isinstance(changes, list) else [changes] if changes else []:
                    yield from _row_figures(model, entry["label"], name, change)
        for label, task, reason in _reasons(content):
            yield [model, label, task, None, None, "reason", reason]
    else:
        method = content["method"]["name"] if content["method"] else "plain"
        for row in content["rows"]:
            yield from _row_figures(model, method, content["task"], row)


def _row_figures(model: str, method: str, task: str, row: Mapping[str, Any]) -> Iterator[list[Any]]:
    length = row.get("length", row.get("high"))
    part = row.get("depth", row.get("task", row.get("low", row.get("trial", ""))))
    for key, value in row.items():
        if key in ("length", "depth", "task", "low", "high", "trial"):
            continue
        if _is_interval(value):
            yield [model, method, task, length, part, f"{key}_low", value[0]]
            yield [model, method, task, length, part, f"{key}_high", value[1]]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield [model, method, task, length, part, key, value]
