"""``ctxext plan``."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli import options

if TYPE_CHECKING:
    from ctxext.planning import Plan


def plan(
    target: Annotated[int, typer.Option("--target", "-t", help="Tokens that the model shall read.")],
    model: options.Model = None,
    method: Annotated[
        str | None, typer.Option(help="Plan for this method. Default: that of the file, or yarn.")
    ] = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    dtype: options.Dtype = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs of that length at a time.")] = 1,
    memory: Annotated[
        float | None, typer.Option(min=0, help="GB to fit into. Default: what the accelerator or this machine has.")
    ] = None,
    device: options.Device = None,
    revision: options.Revision = None,
    replace_scaling: options.ReplaceScaling = None,
    as_json: options.Json = False,
) -> None:
    """Say what extending a checkpoint to a length takes: factor, method, memory. Reads its config only."""
    configuration = options.configure(
        config, settings, model=options.model_section(model, dtype, device, revision, None, replace_scaling)
    )
    from ctxext.errors import ConfigError
    from ctxext.models import model_id, read_config
    from ctxext.planning import make_plan, memory_capacity

    section, lora = configuration.model, configuration.finetune.lora
    assert section is not None  # configure() has checked
    if method is not None and configuration.method is not None:
        raise ConfigError("--method and the file's section method: give one of them (-s method=null drops the file's)")
    if memory is not None and not 0 < memory < math.inf:
        raise ConfigError(f"--memory {memory:g}: give gigabytes, more than 0")
    found = make_plan(
        model_id(section.name),
        read_config(section.name, revision=section.revision, base=section.base),
        target,
        method or configuration.method,
        dtype=section.dtype,
        batch_size=batch_size,
        bf16=configuration.finetune.precision == "bf16",
        **({} if lora is None else {"lora_rank": lora.rank}),
        capacity=memory_capacity(section.device) if memory is None else int(memory * 1e9),
        replace_scaling=section.replace_scaling,
    )
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _print(found)


def _print(found: Plan) -> None:
    from rich.console import Console

    console = Console(width=max(Console().width, 100))

    def line(text: str = "") -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    active = "" if found.active_parameters == found.parameters else f", {found.active_parameters / 1e6:,.1f} active"
    line(f"{found.model} ({found.model_type}), {found.parameters / 1e6:,.1f} million parameters{active}")
    if found.trained is None:
        line(f"nothing is needed: it reads {found.reach:,} tokens as it is, and {found.target:,} are wanted")
    else:
        reached = int(found.round_factor * found.trained)
        line(
            f"trained to {found.trained:,} tokens; {found.target:,} need a factor of {found.factor:g}, "
            f"or in round numbers {found.round_factor:g}, which reaches {reached:,}"
        )
    line(f"\nGB at {found.target:,} tokens, {found.batch_size} at a time, {found.dtype}, fused attention")
    console.print(_memory_table(found))
    if found.capacity is not None:
        line(f"{found.capacity / 1e9:.1f} GB are there; longest is what fits into them, in tokens")
    line("labels: the loss of model(labels=...), which builds all logits; the others take it in slices")
    for note in found.notes:
        line(f"note: {note}")
    if found.verdicts:
        line("\nreaches it without training?")
    for one in found.verdicts:
        adds = "" if one.memory == "nothing" else f"; adds {one.memory}"
        line(f"{one.method:<13} {_reach(one):<14} {one.fits or one.evidence + adds}")
    if found.yaml is not None:
        line()
        typer.echo(found.yaml, nl=False)


def _memory_table(found: Plan) -> Any:
    from rich.table import Table

    columns = ("weights", "states", "cache", "activations", "logits", "total")
    heads = ("weights", "states", "cache", "activ.", "logits", "total")
    last = () if found.capacity is None else ("fits", "longest")
    table = Table("", *heads, *last, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.no_wrap = True
        column.justify = "right"
    for one in found.passes:
        cells = [f"{getattr(one.memory, column) / 1e9:.2f}" for column in columns]
        if found.capacity is not None:
            cells += ["yes" if one.memory.total <= found.capacity else "no", f"{one.longest:,}"]
        table.add_row(one.name, *cells)
    return table


def _reach(one: Any) -> str:
    """Whether the target is within reach, in a few words."""
    if one.fits is not None:
        return "not as it is"
    if one.limit is None:
        return "not known"
    if one.untrained:
        return "yes"
    return "no" if one.limit == 1 else f"about {one.limit:g} times"
