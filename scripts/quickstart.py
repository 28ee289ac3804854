"""Plain RoPE against YaRN on a real checkpoint: perplexity to 16k tokens and passkey retrieval, as table and picture.

Everything it needs comes from installed packages: SmolLM2-135M-Instruct (trained to 8,192 tokens) and the language
reference inside Python's standard library.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import ctxext
from ctxext.data import load_documents
from ctxext.evaluation.passkey import evaluate_passkey
from ctxext.evaluation.perplexity import evaluate_perplexity
from ctxext.evaluation.results import result_record
from ctxext.files import write_json
from ctxext.plotting import plot_comparison

MODEL = "builtin:smollm2-135m"
DATASET = "builtin:python-docs"
STEP, LONGEST = 1024, 16_384
Grid = tuple[tuple[int, ...], tuple[float, ...], int]
PASSKEY_GRIDS = (
    # (lengths, depths, trials): the first that fits the time left is run. A smaller grid is a part of a larger one.
    ((4096, 12_288), (0.1, 0.5, 0.9), 3),
    ((4096, 12_288), (0.1, 0.5, 0.9), 2),
    ((4096, 12_288), (0.1, 0.5, 0.9), 1),
    ((4096, 12_288), (0.5, 0.9), 1),
    ((12_288,), (0.5, 0.9), 1),
    ((12_288,), (0.5,), 1),
)


def main(
    output: Annotated[Path, typer.Option(help="Folder for quickstart.json and quickstart.png.")] = Path("results"),
    factor: Annotated[float, typer.Option(help="YaRN's factor.")] = 2.0,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32. Default: the faster here.")] = None,
    minutes: Annotated[
        float, typer.Option(help="Time to keep to, set-up included: the passkey grid is the largest that fits.")
    ] = 7.5,
    started: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Measure the plain model, patch it, measure again."""
    started = started or time.time()
    dtype = dtype or faster_dtype()
    output.mkdir(parents=True, exist_ok=True)
    errors = Console(stderr=True)
    model, tokenizer = ctxext.load_model(MODEL, dtype=dtype)
    method = ctxext.YaRN(factor=factor)
    results: dict[str, Any] = {"plain": {}, "yarn": {}}
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=errors) as progress:
        results["plain"]["perplexity"] = perplexity(model, tokenizer, "plain", None, dtype, progress)
        with ctxext.patch(model, method):
            report = str(ctxext.inspect(model))
            results["yarn"]["perplexity"] = perplexity(model, tokenizer, "yarn", method, dtype, progress)
        one_pass = results["plain"]["perplexity"]["provenance"]["wall_seconds"]
        grid = largest_grid(one_pass, 60 * minutes - (time.time() - started))
        results["plain"]["passkey"] = passkey(model, tokenizer, "plain", None, dtype, grid, progress)
        with ctxext.patch(model, method):
            results["yarn"]["passkey"] = passkey(model, tokenizer, "yarn", method, dtype, grid, progress)
    errors.print(f"finished in {time.time() - started:.0f} s, {dtype}\n")

    typer.echo(report)
    print_tables(results)
    write_json(results, output / "quickstart.json")
    plot_comparison(results, 8192, output / "quickstart.png")
    typer.echo(f"\nwrote {output / 'quickstart.json'} and {output / 'quickstart.png'}")


def perplexity(
    model: Any, tokenizer: Any, name: str, method: ctxext.Method | None, dtype: str, progress: Progress
) -> dict[str, Any]:
    """Perplexity of the model as it is now, in steps of 1,024 tokens from one pass."""
    settings: dict[str, Any] = {"lengths": tuple(range(STEP, LONGEST + 1, STEP)), "max_documents": 1}
    bar = progress.add_task(f"{name}: perplexity to {LONGEST:,} tokens", total=None)
    result = evaluate_perplexity(
        model, tokenizer, load_documents(DATASET), **settings, progress=_advance(progress, bar)
    )
    return _record("perplexity", result, model, tokenizer, method, settings)


def passkey(
    model: Any, tokenizer: Any, name: str, method: ctxext.Method | None, dtype: str, grid: Grid, progress: Progress
) -> dict[str, Any]:
    """Passkey retrieval of the model as it is now."""
    lengths, depths, trials = grid
    settings: dict[str, Any] = {"lengths": lengths, "depths": depths, "trials": trials, "seed": 0}
    bar = progress.add_task(f"{name}: passkey", total=None)
    result = evaluate_passkey(model, tokenizer, **settings, progress=_advance(progress, bar))
    return _record("passkey", result, model, tokenizer, method, settings)


def faster_dtype() -> str:
    """The faster of bfloat16 and float32: not every processor multiplies bfloat16 by itself."""
    seconds = {}
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        states, weights = torch.ones(1024, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
        torch.nn.functional.linear(states, weights)  # warms up
        start = time.perf_counter()
        for _ in range(8):
            torch.nn.functional.linear(states, weights)
        seconds[name] = time.perf_counter() - start
    return "bfloat16" if torch.cuda.is_available() else min(seconds, key=seconds.__getitem__)


def largest_grid(one_pass: float, seconds: float) -> Grid:
    """The largest passkey grid that two methods finish in the time left, or the smallest there is.

    Args:
        one_pass: seconds that a pass of ``LONGEST`` tokens took. A prompt's time is taken as quadratic in its length,
            with a tenth on top for decoding.
        seconds: time left.
    """
    for lengths, depths, trials in PASSKEY_GRIDS:
        needed = 2 * trials * len(depths) * sum(1.1 * one_pass * (length / LONGEST) ** 2 for length in lengths)
        if needed <= seconds:
            break
    return lengths, depths, trials


def print_tables(results: dict[str, Any]) -> None:
    """The two tables of the README."""
    console = Console()
    by_length = {
        name: {row["length"]: row for row in records["perplexity"]["rows"]} for name, records in results.items()
    }
    table = Table("perplexity", "to 4,096", "to 8,192", "to 16,384", "8k-12k", "12k-16k", box=None)
    for name, rows in by_length.items():
        parts = [_between(rows, 8192, 12_288), _between(rows, 12_288, 16_384)]
        table.add_row(name, *(f"{rows[n]['perplexity']:.2f}" for n in (4096, 8192, 16_384)), *map(_format, parts))
    console.print(table)
    lengths = sorted({row["length"] for row in results["plain"]["passkey"]["rows"]})
    table = Table("passkey", *(f"{length:,} tokens" for length in lengths), box=None)
    for name, records in results.items():
        cells = []
        for length in lengths:
            rows = [row for row in records["passkey"]["rows"] if row["length"] == length]
            cells.append(f"{sum(row['correct'] for row in rows)} of {sum(row['trials'] for row in rows)}")
        table.add_row(name, *cells)
    console.print(table)


def _between(rows: dict[int, Any], low: int, high: int) -> float:
    total = rows[high]["nll"] * rows[high]["tokens"] - rows[low]["nll"] * rows[low]["tokens"]
    return math.exp(total / (rows[high]["tokens"] - rows[low]["tokens"]))


def _format(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.3g}"


def _record(
    task: str,
    result: Any,
    model: Any,
    tokenizer: Any,
    method: ctxext.Method | None,
    settings: dict[str, Any],
) -> dict[str, Any]:
    return result_record(
        task,
        result,
        model=model,
        model_id=MODEL,
        tokenizer=tokenizer,
        dataset_id=DATASET if task == "perplexity" else None,
        method=None if method is None else method.model_dump(exclude_none=True, mode="json"),
        patch=ctxext.inspect(model).summary(),
        configuration=json.loads(json.dumps(settings)),
        seed=settings.get("seed"),
    )


def _advance(progress: Progress, bar: Any) -> Any:
    return lambda done, total: progress.update(bar, completed=done, total=total or None)


if __name__ == "__main__":
    typer.run(main)
