"""``ctxext export``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext.cli import options


def export(
    model: options.Model = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the model, new or empty.")] = None,
    engine: Annotated[str, typer.Option("--for", help="transformers, vllm, sglang or llama.cpp.")] = "transformers",
    print_only: Annotated[
        bool, typer.Option("--print-only", help="Write nothing: print how the engine runs the base model extended.")
    ] = False,
    rope_format: Annotated[
        str, typer.Option(help="v5, or v4: rope_scaling and rope_theta in config.json, as older engines read.")
    ] = "v5",
    base: options.Base = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    trust_remote_code: options.RemoteCode = None,
    replace_scaling: options.ReplaceScaling = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in the folder.")] = False,
) -> None:
    """Write an extended model, adapters merged, for other programs, and print how they run it."""
    section = options.model_section(model, dtype, None, revision, trust_remote_code, replace_scaling)
    configuration = options.configure(config, settings, model={**section, "base": base})
    from ctxext.errors import ConfigError
    from ctxext.export import export as export_model

    if print_only == (output is not None):
        raise ConfigError("give either --output FOLDER, or --print-only")
    chosen = configuration.model
    assert chosen is not None  # configure() has checked
    choices: dict[str, Any] = {"engine": engine, "rope_format": rope_format}  # checked there
    exported = export_model(
        chosen.name,
        configuration.method,
        output,
        **choices,
        dtype=chosen.dtype,
        base=chosen.base,
        revision=chosen.revision,
        trust_remote_code=chosen.trust_remote_code,
        replace_scaling=chosen.replace_scaling,
        overwrite=overwrite,
        command=shlex.join(["ctxext", *sys.argv[1:]]),
    )
    typer.echo(str(exported))
