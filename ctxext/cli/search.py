"""``ctxext search``: the method and settings that read furthest, for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli import options

if TYPE_CHECKING:
    from ctxext.evaluation.tasks import Prepared


def search(
    model: options.Model = None,
    target: Annotated[int | None, typer.Option(help="Tokens that the settings have to reach.")] = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    trials: Annotated[int | None, typer.Option(help="Settings that are tried, defaults included.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no trial after so many minutes of trials; the comparison follows.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampler.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.RemoteCode = None,
    replace_scaling: options.ReplaceScaling = None,
    output: options.Output = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Search methods and their parameters, and say whether what was found beats the defaults on held-out text."""
    configuration = options.configure(
        config,
        settings,
        model=options.model_section(
            model, dtype, device, revision, trust_remote_code, replace_scaling, attn_implementation
        ),
        search={"target": target, "trials": trials, "minutes": minutes, "seed": seed},
    )
    from ctxext.errors import ConfigError
    from ctxext.search.study import search as run

    if output is None:
        raise ConfigError("no folder for trials and result: give --output")
    with _progress() as (report, progress):
        record = run(
            configuration,
            output,
            lambda: options.load(configuration),
            resume=resume,
            overwrite=overwrite,
            dry_run=_estimate if dry_run else None,
            report=report,
            progress=progress,
        )
    if record is not None:
        _finish(record, options.Results(output, resume, overwrite, as_json))


def _estimate(title: str, prepared: Prepared, model: Any, tokenizer: Any) -> None:
    typer.echo(f"{title}: ", nl=False)
    options.print_estimate(prepared, model, tokenizer)


def _finish(record: dict[str, Any], wanted: options.Results) -> None:
    import json

    from ctxext.cli.tables import print_record
    from ctxext.evaluation.artefacts import write_artefacts
    from ctxext.files import write_bytes
    from ctxext.reporting import search_tables

    assert wanted.output is not None  # search() has checked
    if wanted.as_json:
        typer.echo(json.dumps(record, indent=2, allow_nan=False))
    else:
        print_record(record)
    write_bytes(search_tables(record).encode(), wanted.output / "table.md")
    for line in write_artefacts(record, wanted.output):
        typer.echo(line, err=True)
    summary = record["summary"]
    if summary["reason"] or any(row["reason"] for row in summary["differences"]):
        raise typer.Exit(3)


@contextmanager
def _progress() -> Iterator[
    tuple[
        Callable[[Mapping[str, Any], int], None],
        Callable[[str], AbstractContextManager[Callable[[int, int], None]]],
    ]
]:
    """A bar on stderr for what is being read; trials stay as lines above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def report(row: Mapping[str, Any], trials: int) -> None:
            value = row["objective"]
            if value is None:
                said = f"none: {row['reason']}"
            else:
                said = f"{value:.4f}{', the best so far' if row['is_best'] else ''}"
            setting = " ".join(filter(None, (row["method"], row["settings"])))
            line = f"trial {row['trial']} of {trials}, {setting}: {said}"
            bars.console.print(line, highlight=False, markup=False, soft_wrap=True)

        @contextmanager
        def progress(title: str) -> Iterator[Callable[[int, int], None]]:
            task = bars.add_task(title, total=None)
            try:
                yield lambda done, total: bars.update(task, completed=done, total=total or None)
            finally:
                bars.remove_task(task)

        yield report, progress
