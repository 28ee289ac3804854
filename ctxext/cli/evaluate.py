"""``ctxext eval``: perplexity and passkey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Hub id, pg19, proofpile, govreport, wikitext, .txt/.jsonl/.parquet file, folder, "
            "builtin:python-docs or builtin:python-stdlib."
        ),
    ] = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    dataset_revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a hub data set. Default: the present one, or the pinned."),
    ] = None,
    config_name: Annotated[str | None, typer.Option(help="Configuration of a hub data set.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a hub data set. Default: test, validation or train.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="Column that holds the text. Default: text.")] = None,
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
    output: options.Output = None,
    as_json: options.Json = False,
) -> None:
    """Perplexity of documents, weighted by tokens."""
    from ctxext.evaluation.protocols import BY_WINDOW

    configuration = options.configure(
        config,
        settings,
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
            "max_documents": max_documents,
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "batch_size": batch_size,
            "bos": bos,
        },
    )
    # Everything is imported before the run: a broken installation must not show after it.
    from ctxext.data import dataset_id, load_documents
    from ctxext.evaluation import metrics, results  # noqa: F401
    from ctxext.evaluation.perplexity import check_arguments, evaluate_perplexity

    chosen = configuration.perplexity
    arguments: dict[str, Any] = {
        "protocol": chosen.protocol,
        "lengths": chosen.length,
        "windows": chosen.window,
        "stride": chosen.stride,
        "targets": chosen.targets,
        "max_documents": chosen.max_documents,
        "max_tokens": chosen.max_tokens,
        "min_tokens": chosen.min_tokens,
        "batch_size": chosen.batch_size,
    }
    check_arguments(**arguments)
    _check_output(output)
    documents = load_documents(
        chosen.dataset,
        config_name=chosen.config_name,
        split=chosen.split,
        text_column=chosen.text_column,
        revision=chosen.dataset_revision,
    )
    loaded, tokenizer = options.load(configuration)
    with _progress("tokens") as progress:
        result = evaluate_perplexity(loaded, tokenizer, documents, **arguments, bos=chosen.bos, progress=progress)
    name = dataset_id(chosen.dataset, revision=chosen.dataset_revision)
    record = _record("perplexity", result, configuration, loaded, tokenizer, dataset=name)
    _finish(record, output, as_json=as_json)


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
    seed: Annotated[int | None, typer.Option(help="Same seed, same prompts, whatever the method.")] = None,
    bos: options.Bos = None,
    batch_size: options.BatchSize = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.RemoteCode = None,
    replace_scaling: options.ReplaceScaling = None,
    output: options.Output = None,
    as_json: options.Json = False,
) -> None:
    """Find a five-digit key in filler text, at several lengths and depths."""
    configuration = options.configure(
        config,
        settings,
        model=options.model_section(
            model, dtype, device, revision, trust_remote_code, replace_scaling, attn_implementation
        ),
        passkey={
            "length": length or None,
            "depth": depth or None,
            "trials": trials,
            "seed": seed,
            "batch_size": batch_size,
            "bos": bos,
        },
    )
    from ctxext.evaluation import metrics, results  # noqa: F401
    from ctxext.evaluation.passkey import check_arguments, evaluate_passkey

    chosen = configuration.passkey
    arguments: dict[str, Any] = {
        "lengths": chosen.length,
        "depths": chosen.depth,
        "trials": chosen.trials,
        "batch_size": chosen.batch_size,
    }
    check_arguments(**arguments)
    _check_output(output)
    loaded, tokenizer = options.load(configuration)
    with _progress("prompts") as progress:
        result = evaluate_passkey(loaded, tokenizer, **arguments, seed=chosen.seed, bos=chosen.bos, progress=progress)
    record = _record("passkey", result, configuration, loaded, tokenizer, seed=chosen.seed)
    _finish(record, output, as_json=as_json)


def _record(
    task: str,
    result: Any,
    configuration: Config,
    model: Any,
    tokenizer: Any,
    *,
    dataset: str | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    from ctxext.evaluation.results import result_record
    from ctxext.inspection import inspect
    from ctxext.models import model_id

    settings = configuration.model
    assert settings is not None  # options.configure has checked
    resolved = configuration.resolved("model", "method", task)
    resolved["model"]["name"] = model_id(settings.name)
    if dataset is not None:
        resolved[task]["dataset"] = dataset
    return result_record(
        task,
        result,
        model=model,
        model_id=model_id(settings.name),
        tokenizer=tokenizer,
        dataset_id=dataset,
        method=resolved["method"],
        patch=inspect(model).summary(),
        configuration=resolved,
        seed=seed,
        dtype=model.dtype,
    )


def _check_output(path: Path | None) -> None:
    """Find out before the run, not after it, that its result can't be written."""
    import tempfile

    from ctxext.errors import ConfigError

    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--output {path}: this is a folder; give a file name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or not path.exists():
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise ConfigError(f"--output {path}: can't be written: {error.strerror}") from None


def _finish(record: dict[str, Any], output: Path | None, *, as_json: bool) -> None:
    import json

    from ctxext.cli.tables import print_record
    from ctxext.evaluation.files import write_json

    if as_json:
        typer.echo(json.dumps(record, indent=2, allow_nan=False))
    else:
        print_record(record)
    if output is not None:
        write_json(record, output)
        typer.echo(f"wrote {output}", err=True)


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
