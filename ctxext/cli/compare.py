"""``ctxext eval compare``: several methods on one checkpoint. ``ctxext report``: results as documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxext.config import Config
    from ctxext.evaluation.compare import Entry


def compare(
    model: options.Model = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    method: Annotated[
        list[Path] | None,
        typer.Option("--method", help="YAML file with a section 'method'; may be repeated. The plain model is first."),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="perplexity, positions, passkey, ruler, longppl; may be repeated. Default: perplexity, passkey."
        ),
    ] = None,
    length: Annotated[list[int] | None, typer.Option(help="Lengths of all tasks, in tokens; may be repeated.")] = None,
    dataset: options.Dataset = None,
    max_documents: Annotated[int | None, typer.Option(help="Stop after this many documents.")] = None,
    trials: Annotated[int | None, typer.Option(help="Prompts for each cell of passkey and ruler.")] = None,
    limit: options.Limit = None,
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
    """Which method works, up to which length, at what cost for short text, and how sure that is."""
    texts = {"dataset": dataset, "max_documents": max_documents}
    prompts = {"length": length or None, "trials": trials}
    configuration = options.configure(
        config,
        settings,
        limit=limit,
        model=options.model_section(
            model, dtype, device, revision, trust_remote_code, replace_scaling, attn_implementation
        ),
        compare={"methods": _methods(method), "tasks": task or None},
        perplexity={"length": length or None, **texts},
        positions={"length": max(length) if length else None, **texts},
        longppl={"length": max(length) if length else None, **texts},
        passkey=prompts,
        ruler=prompts,
    )
    from ctxext.errors import ConfigError

    if configuration.method is not None:
        raise ConfigError("compare takes its methods from --method or the section compare.methods: leave 'method' out")
    _compare(configuration, options.Results(output, resume, overwrite, as_json, dry_run))


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or comparisons.")],
    form: Annotated[str, typer.Option("--format", "-f", help="md, csv, json or html.")] = "md",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write instead of printing.")] = None,
) -> None:
    """Tables of results, or one HTML page with their pictures."""
    from ctxext.files import write_bytes
    from ctxext.reporting import report as make

    text = make(runs, form)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_bytes(text.encode(), output)
        typer.echo(f"wrote {output}", err=True)


def _methods(files: list[Path] | None) -> dict[str, Any] | None:
    from ctxext.config import load_method

    return {file.stem: load_method(file) for file in files} if files else None


def _compare(configuration: Config, wanted: options.Results) -> None:
    import json

    from ctxext.errors import ConfigError
    from ctxext.evaluation.compare import compare, summary
    from ctxext.evaluation.tasks import prepare, shown
    from ctxext.inspection import inspect
    from ctxext.processes import is_main_process
    from ctxext.reporting import comparison_table

    section = configuration.compare
    if not any(section.methods.values()):
        raise ConfigError("no methods to compare: give --method FILE, or a section compare.methods")
    if "longppl" in section.tasks and configuration.longppl.keys is None:
        raise ConfigError(
            "LongPPL compares methods on one key set: make one with 'ctxext eval longppl --write-keys FILE', "
            "and give it as -s longppl.keys=FILE"
        )
    tasks = {str(name): prepare(name, configuration) for name in section.tasks}
    if not wanted.dry_run and is_main_process():
        _check_folder(wanted)
    model, tokenizer = options.load(configuration)
    if wanted.dry_run:
        typer.echo(f"for each of {1 + sum(method is not None for method in section.methods.values())} models:")
        for name, prepared in tasks.items():
            typer.echo(f"{name}: ", nl=False)
            options.print_estimate(prepared, model, tokenizer)
        return
    entries = compare(
        model,
        tokenizer,
        section.methods,
        tasks,
        configuration,
        folder=wanted.output,
        resume=wanted.resume,
        overwrite=wanted.overwrite,
        progress=lambda label, task, prepared: options.progress_bar(f"{label}, {task}: {prepared.unit}"),
    )
    if not is_main_process():
        return
    compared = summary(entries, inspect(model).original_max_position_embeddings)
    compared["provenance"] = _provenance(entries)
    compared["configuration"] = shown(configuration.resolved("model", "compare", *section.tasks))
    if wanted.as_json:
        typer.echo(json.dumps(compared, indent=2, allow_nan=False))
    else:
        typer.echo(comparison_table(compared))
    if wanted.output is not None:
        _write(compared, wanted.output)
    if any(entry.reasons or any(r["status"] != "complete" for r in entry.records.values()) for entry in entries):
        raise typer.Exit(3)


def _provenance(entries: Sequence[Entry]) -> dict[str, Any]:
    """Model, versions and machine, as the first result has them."""
    from ctxext.errors import CtxextError

    for entry in entries:
        for record in entry.records.values():
            kept: dict[str, Any] = record["provenance"]
            return {key: value for key, value in kept.items() if key not in ("wall_seconds", "parts_reused", "seed")}
    reasons = [reason for entry in entries for reason in entry.reasons.values()]
    raise CtxextError(f"nothing could be measured: {reasons[0]}")


def _check_folder(wanted: options.Results) -> None:
    """Refuse a folder of other files, or a comparison that is there, before anything is loaded."""
    from ctxext.errors import ConfigError

    folder = wanted.output
    if folder is None:
        if wanted.resume or wanted.overwrite:
            raise ConfigError("--resume and --overwrite are about an output folder: give one with --output")
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder}: this is a file; give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (wanted.resume or wanted.overwrite):
        raise ConfigError(f"--output {folder}: isn't empty: go on with --resume, or start again with --overwrite")


def _write(compared: dict[str, Any], folder: Path) -> None:
    from ctxext.errors import CtxextError
    from ctxext.files import write_bytes, write_json
    from ctxext.plotting import plot_compared
    from ctxext.reporting import comparison_table, html_report

    write_json(compared, folder / "compare.json")
    write_bytes(comparison_table(compared).encode(), folder / "table.md")
    try:
        plot_compared(compared, folder)
        write_bytes(html_report([folder]).encode(), folder / "report.html")
    except CtxextError as error:
        typer.echo(f"no pictures and no report: {error}", err=True)
    typer.echo(f"wrote {folder}", err=True)
