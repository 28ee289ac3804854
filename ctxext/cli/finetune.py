"""``ctxext finetune``: a short fine-tune of an extended model."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli import options

if TYPE_CHECKING:
    from ctxext.training import Plan


def finetune(
    model: options.Model = None,
    dataset: Annotated[str | None, typer.Option(help="Text to train on: what ctxext eval takes as --dataset.")] = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a block.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.RemoteCode = None,
    replace_scaling: options.ReplaceScaling = None,
    output: options.Output = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and end there.")] = False,
) -> None:
    """Train an extended model for a few hundred steps, by the recipe of section finetune (default: YaRN's).

    Several processes or GPUs: accelerate launch --config_file FILE -m ctxext finetune ...
    """
    from ctxext.errors import ConfigError
    from ctxext.finetuning import finetune as run
    from ctxext.processes import is_main_process

    configuration = options.configure(
        config,
        settings,
        model=options.model_section(
            model, dtype, device, revision, trust_remote_code, replace_scaling, attn_implementation
        ),
        finetune={"dataset": dataset, "sequence_length": sequence_length, "steps": steps},
    )
    if output is None:
        raise ConfigError("no folder for checkpoints and result: give --output")
    with _progress(configuration.finetune.steps) as report:
        result = run(
            configuration,
            output,
            lambda: options.load(configuration),
            resume=resume,
            overwrite=overwrite,
            dry_run=dry_run,
            command=shlex.join(["ctxext", *sys.argv[1:]]),
            announce=_announce,
            report=report,
        )
    if dry_run or not is_main_process():
        return
    for line in _pictures(output):
        typer.echo(line)
    typer.echo(f"wrote {result}")


def _announce(plan: Plan) -> None:
    from ctxext.processes import is_main_process

    if not is_main_process():
        return
    per_process = plan.global_batch // plan.processes
    typer.echo(
        f"{plan.steps:,} steps of {plan.global_batch} blocks ({per_process} in each of {plan.processes} "
        f"process{'es' if plan.processes > 1 else ''}), {plan.tokens:,} tokens"
    )
    typer.echo(
        f"{plan.trainable:,} of {plan.parameters:,} parameters; trained to {plan.trained:,} tokens, target "
        f"{plan.target:,}; {100 * plan.beyond:.0f} % of the scored tokens stand beyond the trained length"
    )
    for note in plan.notes:
        typer.echo(f"warning: {note}", err=True)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A bar on stderr with loss, speed, learning rate and memory; evaluations stay as lines above it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ctxext.processes import is_main_process

    columns = (
        TextColumn("steps"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_main_process()) as bar:
        task = bar.add_task("", total=steps, start=False)

        def report(entry: Mapping[str, Any]) -> None:
            bar.start_task(task)
            if "evaluation" in entry:
                rows = ", ".join(map(_perplexity, entry["evaluation"]))
                bar.console.print(f"step {entry['step']}: perplexity {rows}", highlight=False)
                return
            memory = entry["memory_bytes"]
            shown = (
                f"loss {entry['loss']:.4f}  {entry['tokens_per_second']:,.0f} tokens/s  lr {entry['learning_rate']:.2g}"
            )
            bar.update(
                task, completed=entry["step"], description=shown + (f"  {memory / 1e9:.1f} GB" if memory else "")
            )

        yield report


def _perplexity(row: Mapping[str, Any]) -> str:
    value = row["perplexity"]
    return f"{'overflow' if value is None else f'{value:.2f}'} to {row['length']:,}"


def _pictures(output: Path) -> list[str]:
    """Draw the log where matplotlib is there; lines to print."""
    import importlib.util

    from ctxext.checkpoints import PICTURE, read_log

    if importlib.util.find_spec("matplotlib") is None:
        return ['no picture without matplotlib: pip install "ctxext[plot]"']
    from ctxext.plotting import plot_training

    plot_training(read_log(output), output / PICTURE)
    return [f"wrote {output / PICTURE}"]
