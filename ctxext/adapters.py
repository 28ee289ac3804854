"""LoRA adapters with the method that they were trained under: saved in ``ctxext.yaml`` beside peft's files, and obeyed.

An adapter is trained for one way of rotating queries and keys. On another one it still runs, and is wrong.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import safe_open
from torch import nn

from ctxext import __version__
from ctxext.config import parse_method
from ctxext.errors import CtxextError, ModelLoadError
from ctxext.files import new_folder
from ctxext.inspection import Inspection, inspect
from ctxext.learned import read_weights
from ctxext.methods import METHODS, Method
from ctxext.models import explain, is_adapter, looks_like_path, recorded_method
from ctxext.patching import Patch, active_patch, patch, unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECORD = "ctxext.yaml"
_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterRecord:
    """What an adapter folder says about how it was trained.

    Attributes:
        folder: where it lies.
        base: name of the base model, as ``load_model`` takes it.
        revision: commit of a base model from the hub.
        method: settings of the method, or None for the base model as it is.
        rotation: what the method did on that base (see :func:`save_adapter`); None where there is no ``ctxext.yaml``.
    """

    folder: Path
    base: str
    revision: str | None = None
    method: Mapping[str, Any] | None = None
    rotation: Mapping[str, Any] | None = None


def save_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    base: str | None = None,
    overwrite: bool = False,
    state: dict[str, torch.Tensor] | None = None,
    card: str | None = None,
) -> None:
    """Write a trained adapter and, in ``ctxext.yaml``, the method that is on the model, for ``load_model`` to put on.

    What the method has learned lies beside them in a file of its own (``clex.safetensors``).

    The record also says what the method came to on this base: its ``rope_theta`` and trained length, and frequencies,
    attention factor and fingerprint of the effective rotation.

    Args:
        model: a ``PeftModel`` with one LoRA adapter around a base model, patched or not; other wrappers are looked
            through. Modules of ``modules_to_save`` are saved with it.
        folder: new or empty, unless ``overwrite`` replaces an earlier adapter. It appears whole or not at all.
        base: name of the base model. Default: what it was loaded by. A relative path is kept relative to ``folder``.
        overwrite: replace an adapter that is there.
        state: all weights, where the model itself holds only a part of them.
        card: text of README.md. Default: peft's.

    Raises:
        CtxextError: not such a model; or parameters outside of the adapter were trained, which would be lost.
        ConfigError: the folder can't be used or written.
    """
    wrapped = _peft_model(model)
    folder = Path(folder)
    bare = wrapped.get_base_model()
    base = base or bare.name_or_path
    if not base:
        raise CtxextError("the base model has no name that it could be loaded by again: give base")
    active = active_patch(bare)
    with nullcontext() if active is None else active.holding(state):
        _write_adapter(wrapped, active, folder, base, overwrite=overwrite, state=state, card=card)


def _write_adapter(
    wrapped: Any,
    active: Patch | None,
    folder: Path,
    base: str,
    *,
    overwrite: bool,
    state: dict[str, torch.Tensor] | None,
    card: str | None,
) -> None:
    bare = wrapped.get_base_model()
    report = inspect(bare)
    if not report.consistent:
        raise CtxextError(f"the adapter can't be saved: {report.problems[0]}")
    record = {
        "ctxext": __version__,
        "base_model": _portable(base, folder),
        "revision": getattr(bare.config, "_commit_hash", None),
        "method": None if active is None else active.method.model_dump(exclude_none=True, mode="json"),
        "rotation": _rotation(report),
    }
    with new_folder(folder, overwrite=overwrite, replaceable=is_adapter) as temporary:
        # Embeddings that were trained are among modules_to_save; looking for others, peft would ask the hub.
        wrapped.save_pretrained(str(temporary), save_embedding_layers=False, state_dict=state)
        if active is not None:
            active.write_weights(temporary)
        if card is not None:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        text = "# How this adapter was trained. ctxext.load_model reads it and puts the method on.\n"
        (temporary / RECORD).write_text(text + yaml.safe_dump(record, sort_keys=False, default_flow_style=None))


def read_record(folder: Path, base: str | None = None) -> AdapterRecord:
    """What an adapter folder says; ``base`` stands in for a base model that has moved.

    Raises:
        ModelLoadError: the files can't be read, or no base model is named or there.
    """
    _require_peft()
    from peft import PeftConfig

    file = folder / RECORD
    record: dict[str, Any] | None = None
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        if file.exists():
            record = dict(yaml.safe_load(file.read_text(encoding="utf-8")))
            rotation = dict(record["rotation"])
            numbers = [float(number) for number in (*rotation["inv_freq"], rotation["attention_factor"])]
            rotation |= {"inv_freq": numbers[:-1], "attention_factor": numbers[-1]}
            record |= {"method": record["method"] and dict(record["method"]), "rotation": rotation}
        named = str((settings.base_model_name_or_path if record is None else record["base_model"]) or "")
    except Exception as error:
        raise ModelLoadError(f"the adapter in {folder} can't be read: {explain(error)}") from error
    _check_kind(settings)
    revision = None
    if base is None:
        base, revision = named, settings.revision if record is None else record.get("revision")
        if record is not None and base.startswith("."):
            base = os.path.normpath(folder / base)
        missing = (looks_like_path(base) or os.path.isabs(base)) and not os.path.exists(os.path.expanduser(base))
        if not base or missing:
            raise ModelLoadError(
                f"the adapter in {folder} was trained on {base or 'a model without a name'!r}, which is not there: say "
                "where it is with base (--base, or -s model.base=...)"
            )
    if base.startswith("builtin:") or os.path.exists(os.path.expanduser(base)):
        revision = None
    if record is None:
        return AdapterRecord(folder, base, revision)
    return AdapterRecord(folder, base, revision, record["method"], record["rotation"])


def attach(model: PreTrainedModel, folder: Path, record: AdapterRecord, method: Method | None) -> Any:
    """The base model with its method (see :func:`put_on_recorded`) and the adapter on it: a ``PeftModel``.

    Raises:
        ModelLoadError: the adapter's weights don't fit the model, or not all of them are there.
    """
    from peft import PeftModel, get_peft_model_state_dict

    put_on_recorded(model, record, method)
    if not (folder / _WEIGHTS).is_file():
        raise ModelLoadError(f"the adapter in {folder} has no {_WEIGHTS}; pickled weights are not read")
    try:
        wrapped = PeftModel.from_pretrained(model, str(folder), torch_device=str(model.device)).eval()
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            found = set(file.keys())
    except Exception as error:
        raise ModelLoadError(f"the adapter in {folder} doesn't fit {record.base!r}: {explain(error)}") from error
    expected = set(get_peft_model_state_dict(wrapped, save_embedding_layers=False))
    # Embeddings that peft saved with the adapter have the names of the model's own.
    unknown = found - expected - set(wrapped.state_dict())
    if expected - found or unknown:
        what = f"its file lacks {min(expected - found)}" if expected - found else f"the model has no {min(unknown)}"
        raise ModelLoadError(f"the adapter in {folder} doesn't fit {record.base!r}: {what}")
    return wrapped


def merge(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside wrappers, with LoRA weights added to its own, in their dtype.

    Raises:
        CtxextError: there are adapters of another kind, or the sum is not finite.
    """
    bare: PreTrainedModel = unwrap(model)
    wrapped: Any = next((module for module in model.modules() if hasattr(module, "peft_config")), None)
    if wrapped is None:
        return bare
    for settings in wrapped.peft_config.values():
        _check_kind(settings)
    if not hasattr(wrapped, "merge_and_unload"):
        raise CtxextError("the adapter is not in a PeftModel, so it can't be merged: load it with ctxext.load_model")
    try:
        wrapped.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise CtxextError(f"the adapter can't be merged: {error}") from error
    vars(bare).pop("peft_config", None)
    head, embedding = (getattr(bare, f"get_{end}_embeddings")() for end in ("output", "input"))
    if bare.config.tie_word_embeddings and head.weight is not embedding.weight:
        bare.config.tie_word_embeddings = False  # one of the two was trained, and the other is no longer its equal
    return bare


def put_on_recorded(model: PreTrainedModel, record: AdapterRecord, given: Method | None) -> None:
    """Put on the base model the method that its adapter was trained under, and check that it does the same here.

    Raises:
        ModelLoadError: ``given`` is another one; or nothing is recorded, and one is given or the base brings one.
        CtxextError: the method can't be put on this base model.
    """
    where = f"the adapter in {record.folder}"
    if record.rotation is None:
        if given is not None or recorded_method(model) is not None:
            raise ModelLoadError(
                f"{where} has no {RECORD}, so nothing says that it was trained under "
                f"{(given or recorded_method(model))!r}: if it was, load the adapter with peft, call ctxext.patch, "
                "and save it with ctxext.export.save_adapter"
            )
        return
    method = _trained_under(record, given)
    if method is not None:
        weights = read_weights(method, record.folder) if method.learns else None
        patch(model, method, replace_scaling=True, weights=weights)
    report = inspect(model)
    if not _same_rotation(record.rotation, _rotation(report)):
        raise ModelLoadError(
            f"{where} was trained on a base with rope_theta {record.rotation.get('rope_theta')}, trained length "
            f"{record.rotation.get('original_max_position_embeddings')} and method {record.method}, which does "
            f"something else on {record.base!r} (rope_theta {report.rope_theta}, trained length "
            f"{report.original_max_position_embeddings}): is it the right base model?"
        )
    if given is None or given is method:
        return
    if method is not None:
        patch(model, given, replace=True, replace_scaling=True)
    if method is None or inspect(model).fingerprint != report.fingerprint:
        raise ModelLoadError(f"{where} was trained under {method or 'no method'!r}, not under {given!r}")


def _trained_under(record: AdapterRecord, given: Method | None) -> Method | None:
    settings = record.method
    if settings is None:
        return None
    if settings.get("name") in METHODS:
        return parse_method(settings, str(record.folder / RECORD))
    # A user's own class, which can't be found by its name.
    if given is None:
        raise ModelLoadError(
            f"the adapter in {record.folder} was trained under method {settings.get('name')!r}, which is none of "
            f"ctxext's ({', '.join(METHODS)}): hand the method to load_model"
        )
    if given.model_dump(exclude_none=True, mode="json") != settings:
        raise ModelLoadError(f"the adapter in {record.folder} was trained under {settings}, not under {given!r}")
    return given


def _rotation(report: Inspection) -> dict[str, Any]:
    """What a method came to: numbers that say it on another machine, and the fingerprint that says it exactly."""
    inv_freq, attention_factor = report.farthest()
    return {
        "rope_theta": report.rope_theta,
        "original_max_position_embeddings": report.original_max_position_embeddings,
        "attention_factor": attention_factor,
        "inv_freq": list(inv_freq),
        "fingerprint": report.fingerprint,
    }


def _same_rotation(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether two rotations are one, up to what processors differ in the last bits of a power."""
    if recorded.get("fingerprint") == found["fingerprint"]:
        return True
    exact = ("rope_theta", "original_max_position_embeddings")
    if any(recorded.get(key) != found[key] for key in exact):
        return False
    first, second = (
        torch.tensor([*rotation["inv_freq"], rotation["attention_factor"]], dtype=torch.float64)
        for rotation in (recorded, found)
    )
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-6, atol=0)


def _peft_model(model: nn.Module) -> Any:
    """The ``PeftModel`` inside other wrappers.

    Raises:
        CtxextError: there is none, or not one whose adapter would be all that was trained.
    """
    _require_peft()
    from accelerate.utils import extract_model_from_parallel
    from peft import PeftModel, get_peft_model_state_dict

    model = extract_model_from_parallel(getattr(model, "_orig_mod", model), keep_fp32_wrapper=True)
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PeftModel):
        raise CtxextError(f"{type(model).__name__} is no PeftModel: there is no adapter to save")
    if list(model.peft_config) != ["default"]:
        raise CtxextError(f"the model has adapters {list(model.peft_config)}: only one, named default, can be saved")
    _check_kind(model.peft_config["default"])
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    active = active_patch(model)
    learned = [] if active is None or active.learned is None else [id(p) for p in active.learned.parameters()]
    lost = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".default" not in name and name not in saved and id(parameter) not in learned
    ]
    if lost:
        raise CtxextError(
            f"{len(lost)} trainable parameters are not part of the adapter and would be lost, {lost[0]} first: name "
            "their modules in modules_to_save of the LoraConfig"
        )
    return model


def _require_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ModelLoadError("adapters need the peft package: run `pip install 'ctxext[peft]'`")


def _check_kind(settings: Any) -> None:
    kind = getattr(settings.peft_type, "value", settings.peft_type)
    if kind != "LORA":
        raise ModelLoadError(f"adapters of type {kind} are not supported: only LORA's are")


def _portable(base: str, folder: Path) -> str:
    """The name of a base model; a relative path as seen from the adapter's folder, starting with a dot."""
    path = Path(os.path.expanduser(base))
    if base.startswith("builtin:") or not path.exists() or path.is_absolute():
        return str(path) if path.is_absolute() else base
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith(".") else os.path.join(".", relative)
