"""``ctxext run``."""

from __future__ import annotations

from typing import Annotated

import typer

from ctxext.cli import options


def run(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="-- PROGRAM",
            help="script.py, -m module, or a command such as lm_eval, accelerate or torchrun, and its arguments.",
        ),
    ],
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    replace_scaling: options.ReplaceScaling = None,
) -> None:
    """Run a program that knows nothing of ctxext, and extend every supported model that it loads.

    The exit status is the program's own, or 2 if it succeeded without loading a model that was extended.
    """
    from ctxext.autopatching import run_program
    from ctxext.config import load_config
    from ctxext.errors import ConfigError

    configuration = load_config(config, settings=settings or ())
    if configuration.method is None:
        raise ConfigError("no method; give --config FILE, or -s method.name=yarn -s method.factor=4")
    in_file = configuration.model is not None and configuration.model.replace_scaling
    replace = in_file if replace_scaling is None else replace_scaling
    raise typer.Exit(run_program(program, configuration.method, replace_scaling=replace))
