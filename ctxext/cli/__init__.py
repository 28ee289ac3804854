"""The command line: parses, calls, prints.

Nothing here imports torch or transformers before a command runs, so that ``ctxext --help`` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from ctxext import __version__
from ctxext.cli import compare, evaluate, export, finetune, info, plan, run, search
from ctxext.errors import CtxextError

app = typer.Typer(
    name="ctxext",
    help="Extend the context window of LLaMA- and Qwen-type models, prove that it is on, measure whether it worked.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
evaluate.app.command("compare")(compare.compare)
app.add_typer(evaluate.app, name="eval")
app.command("report")(compare.report)
app.command("plan")(plan.plan)
app.command("search")(search.search)
app.command("finetune")(finetune.finetune)
app.command("export")(export.export)
app.command("inspect")(info.inspect)
app.command("methods")(info.methods)
app.command("env")(info.env)
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)


def _version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"ctxext {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=lambda v: _version(wanted=v), is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; a user's mistake, or too little memory, becomes one line on stderr and exit status 2."""
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="ctxext")
    except CtxextError as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        from accelerate.utils.memory import should_reduce_batch_size

        if not isinstance(error, MemoryError) and not should_reduce_batch_size(error):
            raise
        _fail(
            f"out of memory: {error or type(error).__name__}; try a shorter length, a smaller --batch-size or --dtype "
            "bfloat16; --dry-run says what a run needs"
        )


def _fail(reason: str) -> NoReturn:
    print(f"ctxext: {' '.join(reason.split())}", file=sys.stderr)
    sys.exit(2)
