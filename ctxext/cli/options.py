"""Options that several commands share, and their way into the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from ctxext.config import Config
    from ctxext.evaluation.tasks import Prepared

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Hub id, folder, .gguf file, or builtin:smollm2-135m.")
]
Base = Annotated[
    str | None, typer.Option(help="Base model of an adapter folder, if it is no longer where the adapter says.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; its section 'method' says how to extend.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="SECTION.KEY=VALUE", help="Override a key, e.g. -s method.factor=8."),
]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: an accelerator if there is one.")]
Attention = Annotated[str | None, typer.Option("--attn-implementation", help="eager, sdpa, flash_attention_2, ...")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
RemoteCode = Annotated[bool | None, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
ReplaceScaling = Annotated[
    bool | None, typer.Option("--replace-scaling", help="Start from the unscaled base of a scaled checkpoint.")
]
BatchSize = Annotated[int | None, typer.Option(help="Inputs of equal length run together; the result is the same.")]
Bos = Annotated[str | None, typer.Option(help="auto (as the tokenizer does by default), always or never.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same prompts, whatever the method.")]
Answers = Annotated[
    str | None,
    typer.Option(
        help="generated: what the model says. forced: the right answer's loss and whether it is the likeliest."
        " both: from one reading."
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        help="Hub id, pg19, proofpile, govreport, wikitext, .txt/.jsonl/.parquet file, folder, "
        "builtin:python-docs or builtin:python-stdlib."
    ),
]
ConfigName = Annotated[str | None, typer.Option(help="Configuration of a hub data set.")]
Split = Annotated[str | None, typer.Option(help="Split of a hub data set. Default: test, validation or train.")]
TextColumn = Annotated[str | None, typer.Option(help="Column that holds the text. Default: text.")]
DatasetRevision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub data set. Default: the present one, or the pinned.")
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="At most so many documents, or prompts of each cell: to try a run out."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for the result, the records it is made of, and pictures.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the output folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Throw away the run in the output folder.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be run, how long it would take, and end there.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class Results(NamedTuple):
    """What becomes of a result."""

    output: Path | None
    resume: bool
    overwrite: bool
    as_json: bool
    dry_run: bool = False


def model_section(
    name: str | None,
    dtype: str | None,
    device: str | None,
    revision: str | None,
    trust_remote_code: bool | None,
    replace_scaling: bool | None,
    attn_implementation: str | None = None,
) -> dict[str, Any]:
    """The section ``model`` as a command's options give it; None for what was not given."""
    return {
        "name": name,
        "dtype": dtype,
        "device": device,
        "attn_implementation": attn_implementation,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "replace_scaling": replace_scaling,
    }


def configure(
    config: Path | None, settings: list[str] | None, limit: int | None = None, **sections: dict[str, Any]
) -> Config:
    """The configuration from a file and the options of a command, with at most ``limit`` documents and prompts."""
    from ctxext.config import load_config
    from ctxext.errors import ConfigError

    configuration = load_config(config, settings=settings or (), options=sections)
    if configuration.model is None:
        raise ConfigError("no model; give --model, or model.name in the file")
    return configuration if limit is None else configuration.limited(limit)


def load(configuration: Config) -> tuple[Any, Any]:
    """Model and tokenizer as configured, patched."""
    from ctxext.models import load_model
    from ctxext.processes import local_device

    settings = configuration.model
    assert settings is not None  # configure() has checked
    return load_model(
        settings.name,
        configuration.method,
        dtype=settings.dtype,
        device=settings.device or local_device(),
        attn_implementation=settings.attn_implementation,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        replace_scaling=settings.replace_scaling,
        base=settings.base,
    )


@contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, to be called with what is done and what there is in all."""
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

    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console, hidden = Console(stderr=True), not is_main_process()
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def print_estimate(prepared: Prepared, model: Any, tokenizer: Any) -> None:
    """What an evaluation would run, and what it would take."""
    from ctxext.evaluation.estimate import estimate

    found = estimate(prepared, model, tokenizer)
    kind = "windows" if prepared.unit == "tokens" else "prompts"
    documents = f"{found.documents:,} documents, " if found.documents else ""
    typer.echo(f"{documents}{found.inputs:,} {kind}, {found.tokens:,} tokens, the longest {found.longest:,}")
    typer.echo(f"about {_duration(found.seconds)}, {found.memory_bytes / 1e9:.1f} GB of memory, weights included")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
