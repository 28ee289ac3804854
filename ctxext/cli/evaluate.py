"""``ctxext eval``: one evaluation of one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli import options

if TYPE_CHECKING:
    from ctxext.config import Config

app = typer.Typer(help="Measure a model, plain or extended.", no_args_is_help=True)


@app.command()
def perplexity(
    model: options.Model = None,
    dataset: options.Dataset = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    config_name: options.ConfigName = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    dataset_revision: options.DatasetRevision = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="prefix: one window per document. sliding: every token, windows overlap. stream: LongLoRA's and DCA's "
            "tables. rolling: as lm-evaluation-harness. same-target: a document's end, with ever more before it."
        ),
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Input positions (prefix, rolling, same-target); repeat for more rows.")
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option(help="Input positions of a window (sliding, stream); may be repeated.")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens from window to window (sliding, stream).")] = None,
    targets: Annotated[int | None, typer.Option(help="Tokens scored at the end of a document (same-target).")] = None,
    mode: Annotated[
        str | None, typer.Option(help="pass, or decode: token by token through a cache, as generation does.")
    ] = None,
    max_documents: Annotated[int | None, typer.Option(help="Stop after this many documents.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Cut each document to its first tokens.")] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Skip shorter documents. Default: the longest length, so that rows compare.")
    ] = None,
    bos: options.Bos = None,
    batch_size: options.BatchSize = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.RemoteCode = None,
    replace_scaling: options.ReplaceScaling = None,
    limit: options.Limit = None,
    output: options.Output = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Perplexity of documents, weighted by tokens."""
    from ctxext.evaluation.protocols import BY_WINDOW

    configuration = options.configure(
        config,
        settings,
        limit=limit,
        model=options.model_section(
            model, dtype, device, revision, trust_remote_code, replace_scaling, attn_implementation
        ),
        perplexity={
            "dataset": dataset,
            "dataset_revision": dataset_revision,
            "config_name": config_name,
            "split": split,
            "text_column": text_column,
            "protocol": protocol,
            # A protocol asked for here takes the place of the file's, with what belongs to it.
            "length": length or ([] if protocol in BY_WINDOW else None),
            "window": window or ([] if protocol is not None and protocol not in BY_WINDOW else None),
            "stride": stride,
            "targets": targets,
            "mode": mode,
            "max_documents": max_documents,
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "batch_size": batch_size,
            "bos": bos,
        },
    )
    _evaluate("perplexity", configuration, options.Results(output, resume, overwrite, as_json, dry_run))


@app.command()
def positions(
    model: options.Model = None,
    dataset: Annotated[
        str | None, typer.Option(help="As for perplexity. Default: builtin:python-stdlib, many long documents.")
    ] = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    config_name: options.ConfigName = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    dataset_revision: options.DatasetRevision = None,
    length: Annotated[int | None, typer.Option(help="Positions of each document; shorter ones are skipped.")] = None,
    max_documents: Annotated[int | None, typer.Option(help="Stop after this many documents.")] = None,
    bos: options.Bos = None,
    batch_size: options.BatchSize = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.RemoteCode = None,
    replace_scaling: options.ReplaceScaling = None,
    limit: options.Limit = None,
    output: options.Output = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Loss by position, from one pass over each document, and the length up to which the model reads."""
    configuration = options.configure(
        config,
        settings,
        limit=limit,
        model=options.model_section(
            model, dtype, device, revision, trust_remote_code, replace_scaling, attn_implementation
        ),
        positions={
            "dataset": dataset,
            "config_name": config_name,
            "split": split,
            "text_column": text_column,
            "dataset_revision": dataset_revision,
            "length": length,
            "max_documents": max_documents,
            "batch_size": batch_size,
            "bos": bos,
        },
    )
    _evaluate("positions", configuration, options.Results(output, resume, overwrite, as_json, dry_run))


@app.command()
def passkey(
    model: options.Model = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of prompt and answer; repeat for more rows.")] = None,
    depth: Annotated[
        list[float] | None, typer.Option(help="Where the key stands: 0 start, 1 end; may be repeated.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Keys per length and depth.")] = None,
    seed: options.Seed = None,
    answers: options.Answers = None,
    distractors: Annotated[int | None, typer.Option(help="Keys of other people, which aren't asked for.")] = None,
    filler: Annotated[
        str | None, typer.Option(help="A data set to hide keys in, instead of five short sentences.")
    ] = None,
    controls: Annotated[
        int | None, typer.Option(help="Short prompts with, and as many without the key. Default 10, 0 for none.")
    ] = None,
    bos: options.Bos = None,
    batch_size: options.BatchSize = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.RemoteCode = None,
    replace_scaling: options.ReplaceScaling = None,
    limit: options.Limit = None,
    output: options.Output = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Find a five-digit key in filler text, at several lengths and depths."""
    configuration = options.configure(
        config,
        settings,
        limit=limit,
        model=options.model_section(
            model, dtype, device, revision, trust_remote_code, replace_scaling, attn_implementation
        ),
        passkey={
            "length": length or None,
            "depth": depth or None,
            "trials": trials,
            "seed": seed,
            "answers": answers,
            "distractors": distractors,
            "filler": filler,
            "controls": controls,
            "batch_size": batch_size,
            "bos": bos,
        },
    )
    _evaluate("passkey", configuration, options.Results(output, resume, overwrite, as_json, dry_run))


@app.command()
def ruler(
    model: options.Model = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of prompt and answer; repeat for more rows.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="niah_single, vt, cwe, ...; may be repeated. Default: all nine.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Prompts per task and length.")] = None,
    seed: options.Seed = None,
    answers: options.Answers = None,
    bos: options.Bos = None,
    batch_size: options.BatchSize = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.RemoteCode = None,
    replace_scaling: options.ReplaceScaling = None,
    limit: options.Limit = None,
    output: options.Output = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """RULER-style tasks, without external data: finding, tracing, counting."""
    configuration = options.configure(
        config,
        settings,
        limit=limit,
        model=options.model_section(
            model, dtype, device, revision, trust_remote_code, replace_scaling, attn_implementation
        ),
        ruler={
            "length": length or None,
            "task": task or None,
            "trials": trials,
            "seed": seed,
            "answers": answers,
            "batch_size": batch_size,
            "bos": bos,
        },
    )
    _evaluate("ruler", configuration, options.Results(output, resume, overwrite, as_json, dry_run))


@app.command()
def longppl(
    model: options.Model = None,
    dataset: Annotated[
        str | None, typer.Option(help="As for perplexity. Default: builtin:python-stdlib, many long documents.")
    ] = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    config_name: options.ConfigName = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    dataset_revision: options.DatasetRevision = None,
    length: Annotated[int | None, typer.Option(help="Positions of each document.")] = None,
    keys: Annotated[
        str | None, typer.Option(help="Key set: a file, or the folder of a run that made one. Default: make one.")
    ] = None,
    write_keys: Annotated[Path | None, typer.Option(help="Write the key set to this file, for other models.")] = None,
    short: Annotated[int | None, typer.Option(help="Positions of the short context that keys need more than.")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between windows of short context.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Nats that long context must gain on a key token. 2.")] = None,
    beta: Annotated[float | None, typer.Option(help="Log-likelihood that a key token must reach. -2.")] = None,
    overlap: Annotated[str | None, typer.Option(help="contained or any: which tokens belong to a key.")] = None,
    max_documents: Annotated[int | None, typer.Option(help="Stop after this many documents.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Skip shorter documents. Default: length.")] = None,
    bos: options.Bos = None,
    batch_size: options.BatchSize = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.RemoteCode = None,
    replace_scaling: options.ReplaceScaling = None,
    limit: options.Limit = None,
    output: options.Output = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Perplexity of the tokens that only long context predicts (LongPPL)."""
    configuration = options.configure(
        config,
        settings,
        limit=limit,
        model=options.model_section(
            model, dtype, device, revision, trust_remote_code, replace_scaling, attn_implementation
        ),
        longppl={
            "dataset": dataset,
            "config_name": config_name,
            "split": split,
            "text_column": text_column,
            "dataset_revision": dataset_revision,
            "length": length,
            "keys": keys,
            "short": short,
            "stride": stride,
            "alpha": alpha,
            "beta": beta,
            "overlap": overlap,
            "max_documents": max_documents,
            "min_tokens": min_tokens,
            "batch_size": batch_size,
            "bos": bos,
        },
    )
    result = _evaluate("longppl", configuration, options.Results(output, resume, overwrite, as_json))
    if write_keys is not None and result is not None:
        from ctxext.evaluation.keysets import write_keys as write

        write(result.keys, write_keys)
        typer.echo(f"wrote {write_keys}", err=True)


def _evaluate(task: str, configuration: Config, wanted: options.Results) -> Any:
    """The result, in the process that prints; None in the others of several processes."""
    # Everything is imported before the run: a broken installation must not show after it.
    from ctxext.evaluation import metrics  # noqa: F401
    from ctxext.evaluation.runs import Run
    from ctxext.evaluation.tasks import measure, prepare
    from ctxext.processes import is_main_process

    prepared = prepare(task, configuration)
    run = None if wanted.dry_run else Run(wanted.output, resume=wanted.resume, overwrite=wanted.overwrite)
    loaded, tokenizer = options.load(configuration)
    if wanted.dry_run:
        options.print_estimate(prepared, loaded, tokenizer)
        return None
    with options.progress_bar(prepared.unit) as progress:
        record, result = measure(task, prepared, configuration, loaded, tokenizer, run, progress)
    if is_main_process():
        _finish(record, wanted)
    if record["status"] != "complete":
        raise typer.Exit(3)
    return result if is_main_process() else None


def _finish(record: dict[str, Any], wanted: options.Results) -> None:
    import json

    from ctxext.cli.tables import print_record

    if wanted.as_json:
        typer.echo(json.dumps(record, indent=2, allow_nan=False))
    else:
        print_record(record)
    if record["status"] != "complete":
        first = next(sample["error"] for sample in record["samples"] if sample["error"])
        typer.echo(
            f"prompts that failed, and count as wrong: {record['counts']['errors']}; the first: {first}", err=True
        )
    if wanted.output is not None:
        from ctxext.evaluation.artefacts import write_artefacts

        for line in write_artefacts(record, wanted.output):
            typer.echo(line, err=True)
