"""The README's comparison of methods on SmolLM2-135M: perplexity and passkey retrieval, as one table and one picture.

Each result comes from the command line that a user would type, and is kept in a folder of its own: what is there isn't
measured again, so a run can be interrupted.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from ctxext.evaluation.statistics import wilson95
from ctxext.plotting import plot_methods

MODEL = "builtin:smollm2-135m"
DATASET = "builtin:python-docs"
TRAINED, PASSKEY, LENGTH, LONG = 8192, 12_288, 16_384, 32_768
# Whether a key is found depends on where it stands far more than on its digits: many depths say more than many keys.
DEPTHS = tuple(round((i + 0.5) / 30, 4) for i in range(30))


class Row(NamedTuple):
    """One line of the table: options of the command line, and what changes at four times the trained length."""

    name: str
    title: str
    options: tuple[str, ...]
    long: tuple[str, ...] = ()


def _config(name: str, *settings: str) -> tuple[str, ...]:
    return ("--config", f"configs/{name}.yaml", *itertools.chain(*(("-s", setting) for setting in settings)))


ROWS = (
    Row("plain", "plain", ()),
    Row("pi-2x", "PI x2", _config("pi-2x"), ("-s", "method.factor=4")),
    Row("ntk-2x", "NTK x2", _config("ntk-2x"), ("-s", "method.factor=4")),
    Row("yarn-2x", "YaRN x2", _config("yarn-2x"), ("-s", "method.factor=4")),
    Row(
        "dynamic-ntk-pinned",
        "Dynamic NTK, whole window",
        _config("dynamic-ntk", f"method.seq_len={LENGTH}"),
        ("-s", f"method.seq_len={LONG}"),
    ),
    Row("dynamic-ntk", "Dynamic NTK, causal", _config("dynamic-ntk")),
    Row("dynamic-yarn", "Dynamic YaRN, causal", _config("dynamic-yarn")),
    Row("dca", "DCA", _config("dca")),
    Row("dca-ntk-2x", "DCA + NTK x2", _config("dca-ntk-2x")),
    Row("self-extend", "Self-Extend", _config("self-extend")),
    Row("rerope", "ReRoPE", _config("rerope")),
    Row("leaky-rerope", "Leaky ReRoPE, k = 8", _config("rerope", "method.leak=8")),
    Row("lm-infinite", "LM-Infinite", _config("lm-infinite")),
    Row("streaming-llm", "StreamingLLM", _config("streaming-llm")),
    Row("yarn-log-n", "YaRN x2, log-n", _config("yarn-2x", "method.log_n=true"), ("-s", "method.factor=4")),
)


def main(
    output: Annotated[Path, typer.Option(help="Folder for results, table and picture.")] = Path("results/reproduce"),
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 where that is fast.")] = "float32",
    passkey_length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a passkey prompt with its answer; may be repeated. Default: 12,288."),
    ] = None,
    trials: Annotated[int, typer.Option(help="Prompts for each of the thirty depths.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="A row to measure; may be repeated. Default: all.")] = None,
    skip_long: Annotated[bool, typer.Option("--skip-long", help="No perplexity at 32,768 tokens.")] = False,
    skip_passkey: Annotated[bool, typer.Option("--skip-passkey", help="Perplexity only.")] = False,
) -> None:
    """Measure what is missing, then write the table and the picture from what is there."""
    if unknown := set(only or ()) - {row.name for row in ROWS}:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: no such row ({', '.join(row.name for row in ROWS)})")
    chosen = [row for row in ROWS if not only or row.name in only]
    lengths = (TRAINED // 2, TRAINED, 3 * TRAINED // 2, LENGTH)
    for row in chosen:
        _measure(row, "perplexity", dtype, output, _lengths(lengths), "--max-documents", "1", "--dataset", DATASET)
    if not skip_long:
        for row in _best(output, 4):
            long = row._replace(name=f"{row.name}-32k", options=row.options + row.long)
            extra = ("--max-documents", "1", "--dataset", DATASET)
            _measure(long, "perplexity", dtype, output, _lengths((LONG,)), *extra)
    if not skip_passkey:
        depths = tuple(itertools.chain(*(("--depth", str(depth)) for depth in DEPTHS)))
        for row, length in itertools.product(chosen, passkey_length or [PASSKEY]):
            extra = ("--trials", str(trials), "--answers", "generated", "--controls", "0")
            _measure(row, f"passkey-{length}", dtype, output, _lengths((length,)), *depths, *extra)
    table = _table(output)
    (output / "table.md").write_text(table, encoding="utf-8")
    plot_methods(_results(output), TRAINED, output / "methods.png")
    typer.echo(table)
    typer.echo(f"wrote {output / 'table.md'} and {output / 'methods.png'}")


def _measure(row: Row, task: str, dtype: str, output: Path, *options: Any) -> None:
    folder = output / f"{row.name}-{task}"
    if (folder / "results.json").exists():
        return
    flat = [item for option in options for item in (option if isinstance(option, tuple) else (option,))]
    command = [
        "eval",
        task.partition("-")[0],
        "--model",
        MODEL,
        "--dtype",
        dtype,
        *row.options,
        *flat,
        "--output",
        str(folder),
        "--resume",
    ]
    Console(stderr=True).print(f"ctxext {' '.join(command)}", highlight=False)
    subprocess.run([sys.executable, "-m", "ctxext", *command], check=True, stdout=subprocess.DEVNULL)


def _lengths(lengths: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(itertools.chain(*(("--length", str(length)) for length in lengths)))


def _read(output: Path, name: str, task: str) -> dict[str, Any] | None:
    file = output / f"{name}-{task}" / "results.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _results(output: Path) -> dict[str, dict[str, Any]]:
    """Records by title and task, of what has been measured."""
    tasks = {"perplexity": "perplexity", "passkey": f"passkey-{PASSKEY}"}
    found = {row.title: {key: _read(output, row.name, task) for key, task in tasks.items()} for row in ROWS}
    return {title: records for title, records in found.items() if records["perplexity"] is not None}


def _best(output: Path, count: int) -> list[Row]:
    """The rows with the lowest perplexity at the longest length that all have."""
    measured = [(row, _read(output, row.name, "perplexity")) for row in ROWS]
    ranked = sorted(
        ((record["rows"][-1]["perplexity"], i, row) for i, (row, record) in enumerate(measured) if record is not None)
    )
    return [row for _, _, row in ranked[:count]]


def _table(output: Path) -> str:
    found = {int(folder.parent.name.rpartition("-")[2]) for folder in output.glob("*-passkey-*/results.json")}
    lengths = sorted(found) or [PASSKEY]
    columns = ["to 4,096", "to 8,192", "to 16,384", "12k-16k alone", "to 32,768"]
    columns += [f"passkey at {length:,} | 95 % interval" for length in lengths]
    lines = [f"| method | {' | '.join(columns)} |", "|---" * (6 + 2 * len(lengths)) + "|"]
    for row in ROWS:
        perplexity = _read(output, row.name, "perplexity")
        if perplexity is None:
            continue
        by_length = {cells["length"]: cells for cells in perplexity["rows"]}
        long = _read(output, f"{row.name}-32k", "perplexity")
        cells = [_number(by_length[length]["perplexity"]) for length in (TRAINED // 2, TRAINED, LENGTH)]
        cells.append(_number(by_length[LENGTH]["perplexity_last"]))
        cells.append("" if long is None else _number(long["rows"][-1]["perplexity"]))
        for length in lengths:
            passkey = _read(output, row.name, f"passkey-{length}")
            if passkey is None:
                cells += ["", ""]
                continue
            correct, trials = (sum(cell[key] for cell in passkey["rows"]) for key in ("correct", "trials"))
            low, high = wilson95(correct, trials)
            cells += [f"{correct} of {trials}", f"{100 * low:.0f}-{100 * high:.0f} %"]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.3g}"


if __name__ == "__main__":
    typer.run(main)
