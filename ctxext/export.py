"""An extended model as a folder that other programs load without ctxext, and the commands with which they do.

The commands are made in ``engines``; adapters that stay adapters are saved by ``save_adapter``.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml
from huggingface_hub import metadata_load

from ctxext import __version__
from ctxext.adapters import merge
from ctxext.adapters import save_adapter as save_adapter
from ctxext.config import load_method
from ctxext.engines import Engine, RopeFormat, Target, commands, written
from ctxext.errors import ConfigError, nearest
from ctxext.families import extension_record
from ctxext.files import check_new_folder, new_folder
from ctxext.models import BUILTIN_MODELS, find_local, is_adapter, load_model, load_skeleton, model_id
from ctxext.patching import active_patch, unwrap

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ctxext.methods import Method


@dataclass(frozen=True)
class Exported:
    """What :func:`export` made.

    Attributes:
        folder: where the model is, or None where only commands were asked for.
        commands: with which the engine runs it, each a list of arguments.
        notes: what a user should know, one sentence each.
    """

    folder: Path | None
    commands: list[list[str]]
    notes: list[str]

    def __str__(self) -> str:
        lines = [] if self.folder is None else [f"wrote {self.folder}"]
        return "\n".join([*lines, *self.notes, *(shlex.join(command) for command in self.commands)])


def export(
    name: str,
    method: Method | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    engine: Engine = "transformers",
    rope_format: RopeFormat = "v5",
    dtype: str | torch.dtype = "auto",
    base: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    replace_scaling: bool = False,
    overwrite: bool = False,
    command: str | None = None,
) -> Exported:
    """Extend a model and write it, an adapter merged into it, with tokenizer, generation config and model card.

    A static method is then part of the folder's config, so that Transformers alone loads the extended model. A method
    that changes attention is recorded there, and the folder is the plain model to all programs but ctxext. A checkpoint
    that was extended before may come without ``method``, and stays as it is.

    Args:
        name: what ``load_model`` takes, an adapter's folder too.
        method: what ``patch`` takes.
        folder: new or empty, unless ``overwrite`` replaces an earlier export. It appears whole or not at all. None
            writes nothing, and gives commands that run the base model as if it were extended.
        engine: what the model is for.
        rope_format: "v5" (``rope_parameters``), or "v4" (``rope_scaling`` and ``rope_theta``) for engines that read
            the config as releases 4 of Transformers did.
        dtype: of the weights; "auto" leaves them as stored. An adapter is merged in it: in float32 without rounding.
        base: handed to ``load_model``, like the next three.
        revision: commit of a hub model.
        trust_remote_code: run code that the checkpoint carries.
        replace_scaling: start from the unscaled base of a scaled checkpoint.
        overwrite: replace an earlier export.
        command: how this was called, for the model card.

    Raises:
        ConfigError: there is nothing to export, or the folder can't be used or written.
        UnsupportedModelError: the engine can't run the method, or not exactly.
        ModelLoadError, PatchError: from ``load_model``.
    """
    _check_choices(engine, rope_format)
    method = None if method is None else load_method(method)
    local, place = find_local(name), None if folder is None else Path(folder)
    _check_place(place, local, engine, overwrite=overwrite)
    origin: dict[str, Any] = {
        "base": base,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "replace_scaling": replace_scaling,
    }
    gguf = local is not None and local.is_file()
    loading = {"dtype": dtype, "device": "cpu", **origin}
    # Reading a GGUF file's metadata twice would take longer than what is refused early could save.
    loaded = load_model(name, method, **loading) if gguf and place is not None else None
    skeleton = load_skeleton(name, method, **origin) if loaded is None else loaded[0]
    if (
        active_patch(skeleton) is None
        and extension_record(skeleton.config) is None
        and not (local and is_adapter(local))
    ):
        raise ConfigError(f"{name!r} is not extended, and no method was given: give --config, or -s method.name=...")
    place_or_base = place or (local if gguf else name)
    target = Target(str(place_or_base), folder=place is not None, gguf=gguf, revision=revision)
    to_run = commands(engine, skeleton, target, rope_format)
    notes = _notes(skeleton, engine, place)
    if place is not None:
        model, tokenizer = loaded or load_model(name, method, **loading)
        card = model_card(model, name, notes=notes, commands=to_run, command=command)
        write_checkpoint(model, tokenizer, place, rope_format=rope_format, overwrite=overwrite, card=card)
    return Exported(place, to_run, notes)


def write_checkpoint(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike[str],
    *,
    rope_format: RopeFormat = "v5",
    overwrite: bool = False,
    card: str | None = None,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a loaded model, patched or not, as a folder that appears whole or not at all.

    LoRA adapters around the model are merged into it, which takes them off. The tokenizer is told that the model reads
    further, so that nothing is cut to the trained length.

    Args:
        model: a model or a ``PeftModel``; other wrappers are looked through.
        tokenizer: the model's.
        folder: new or empty, unless ``overwrite`` replaces an earlier export.
        rope_format: see :func:`export`.
        overwrite: replace an earlier export.
        card: text of README.md. Default: :func:`model_card`.
        state: all weights, where the model itself holds only a part of them.

    Raises:
        ConfigError: the folder can't be used or written, or ``state`` was given for a model with adapters, whose
            weights are not merged in it.
    """
    if state is not None and any(hasattr(module, "peft_config") for module in (model, unwrap(model))):
        raise ConfigError("adapters can't be merged into weights that are given as state; save the adapter by itself")
    bare = merge(model)
    length = bare.config.max_position_embeddings
    if tokenizer.model_max_length < length:
        tokenizer.model_max_length = length
    if card is None:
        card = model_card(bare, bare.name_or_path or type(bare).__name__)
    with new_folder(Path(folder), overwrite=overwrite, replaceable=_is_export) as temporary:
        bare.save_pretrained(temporary, state_dict=state)
        tokenizer.save_pretrained(str(temporary))
        if rope_format == "v4":
            _rewrite_config(temporary / "config.json")
        (temporary / "README.md").write_text(card, encoding="utf-8")


def model_card(
    model: nn.Module,
    name: str,
    *,
    notes: list[str] | None = None,
    commands: list[list[str]] | None = None,
    command: str | None = None,
) -> str:
    """The README.md of an exported model: method, lengths, how to run it, and how it was made."""
    bare = unwrap(model)
    record = extension_record(bare.config)
    shown = model_id(name)
    metadata: dict[str, Any] = {"library_name": "transformers", "tags": ["ctxext", "long-context"]}
    if shown == name and name not in BUILTIN_MODELS:
        metadata["base_model"] = name
    lines = ["---", yaml.safe_dump(metadata, sort_keys=False).strip(), "---", "", f"# {shown}, context extended", ""]
    if record is not None:
        settings = yaml.safe_dump(
            {"method": record["method"]}, sort_keys=False, default_flow_style=None, width=120
        ).strip()
        patch = active_patch(bare)
        length = bare.config.max_position_embeddings if patch is None else patch.max_length
        lines += [f"Trained to {record['original_max_position_embeddings']:,} tokens, extended to {length:,}:", ""]
        lines += ["```yaml", settings, "```", ""]
    lines += [*(notes or []), ""] if notes else []
    if commands:
        lines += ["```", *(shlex.join(arguments) for arguments in commands), "```", ""]
    lines += [f"Made with ctxext {__version__}" + (":" if command else "."), ""]
    lines += ["```", command, "```", ""] if command else []
    return "\n".join(lines)


def _check_place(place: Path | None, local: Path | None, engine: Engine, *, overwrite: bool) -> None:
    """Refuse a folder that can't be written, and none where the engine needs one."""
    if place is None:
        if engine == "transformers":
            raise ConfigError("Transformers takes no settings on its command line: give a folder (--output)")
        if local is not None and is_adapter(local):
            raise ConfigError("an adapter has to be merged to be run elsewhere: give a folder (--output)")
        return
    check_new_folder(place, overwrite=overwrite, replaceable=_is_export)
    here, there = place.resolve(), None if local is None else local.resolve()
    if there is not None and (there in (here, *here.parents) or here in there.parents):
        raise ConfigError(f"{place} is, is part of, or holds the model's own folder: give another")


def _notes(model: PreTrainedModel, engine: Engine, folder: Path | None) -> list[str]:
    patch = active_patch(model)
    if patch is not None and patch.method.changes_attention:
        return [
            f"Only ctxext runs {patch.method.name}: ctxext.load_model({str(folder)!r}) puts it on. To Transformers "
            f"alone this is the plain model, trained to {model.config.max_position_embeddings:,} tokens."
        ]
    return ["Transformers loads it without ctxext."] if engine == "transformers" else []


def _rewrite_config(path: Path) -> None:
    """Turn a config.json of Transformers 5 into what releases 4 read."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= written(config.pop("rope_parameters"), "v4")
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_export(folder: Path) -> bool:
    """Whether a folder has a model card that :func:`model_card` made."""
    try:
        metadata = metadata_load(folder / "README.md")
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return "ctxext" in ((metadata or {}).get("tags") or ())


def _check_choices(engine: str, rope_format: str) -> None:
    for option, value, choices in (
        ("--for", engine, get_args(Engine)),
        ("--rope-format", rope_format, get_args(RopeFormat)),
    ):
        if value not in choices:
            near = nearest(value, choices)
            hint = f": did you mean {near}?" if near else ""
            raise ConfigError(f"{option} {value} is not one of {', '.join(choices)}{hint}")
