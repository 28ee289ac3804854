"""The record of one evaluation: what was measured, on what, with which versions; written as strictly valid JSON."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch

from ctxext.evaluation.scoring import bare_model
from ctxext.files import plain

SCHEMA_VERSION = 1


def result_record(
    task: str,
    result: Any,
    *,
    model: Any,
    model_id: str,
    tokenizer: Any,
    revision: str | None = None,
    dataset_id: str | None = None,
    method: Mapping[str, Any] | None = None,
    patch: Mapping[str, Any] | None = None,
    configuration: Mapping[str, Any],
    seed: int | None,
    reused: int = 0,
) -> dict[str, Any]:
    """The JSON-ready record of ``result``, which is what any of the evaluations returned.

    ``method`` is the method's settings (None for the unpatched model), ``patch`` what inspecting the live model showed
    (frequency fingerprint, patched modules), ``configuration`` the resolved configuration of the run, ``reused`` how
    many of its parts an earlier, interrupted run had done. ``status`` is ``partial`` if a part failed. Two records can
    be compared if their ``protocol``, and for texts their ``dataset``, agree.
    """
    model = bare_model(model)
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "task": task,
        "status": "partial" if result.counts.get("errors") else "complete",
        "rows": result.rows,
        "protocol": result.protocol,
        "method": method,
        "patch": patch,
        "configuration": configuration,
        "counts": result.counts,
        "provenance": {
            **versions(),
            "platform": platform.platform(),
            "device": _device_name(model),
            "model": model_id,
            "revision": revision,
            "model_type": getattr(model.config, "model_type", None),
            "tokenizer": {
                "class": type(tokenizer).__name__,
                "vocabulary": len(tokenizer),
                "fingerprint": tokenizer_fingerprint(tokenizer),
            },
            "dtype": str(model.dtype).removeprefix("torch."),
            "attn_implementation": getattr(model.config, "_attn_implementation", None),
            "seed": seed,
            "created_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "wall_seconds": result.wall_seconds,
            "peak_memory_bytes": result.peak_memory_bytes,
            "parts_reused": reused,
        },
    }
    record |= {key: getattr(result, key) for key in ("by_length", "summary", "samples") if hasattr(result, key)}
    if hasattr(result, "dataset_fingerprint"):
        fingerprint, ids = result.dataset_fingerprint, getattr(result, "document_ids", [])
        record["dataset"] = {"id": dataset_id, "fingerprint": fingerprint, "document_ids": ids}
    return plain(record)  # type: ignore[no-any-return]  # a mapping comes back as a dict


def run_settings(
    task: str,
    *,
    model: Any,
    model_id: str,
    revision: str | None,
    tokenizer: Any,
    bos: str,
    answers: str | None,
    dataset_id: str | None,
    method: Mapping[str, Any] | None,
    patch: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """All that decides what a window or prompt gives, except for itself: runs that agree in it may share parts."""
    model = bare_model(model)
    return {
        "task": task,
        "model": model_id,
        "revision": revision,
        "method": method,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
        "device": torch.device(model.device).type,
        "bos": bos,
        "answers": answers,
        "dataset": dataset_id,
        # After what people set, which says more where both differ.
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "weights": weights_fingerprint(model),
        "config": config_fingerprint(model),
        "patch": None if patch is None else patch.get("fingerprint"),
        "versions": {
            name: version for name, version in versions().items() if name in ("ctxext", "torch", "transformers")
        },
    }


def weights_fingerprint(model: torch.nn.Module) -> str:
    """The sha256 of every parameter's name, shape and 64 of its values, evenly spaced: tells checkpoints apart.

    Of adapters also the factors that they are added with, which are no parameters.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        if isinstance(scaling := getattr(module, "scaling", None), dict):
            digest.update(f"{name}{sorted(scaling.items())}".encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[torch.arange(64, device=flat.device) * (len(flat) - 1) // 63] if len(flat) else flat
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def config_fingerprint(model: Any) -> str:
    """The sha256 of the model's configuration and of what ends its answers, without names, versions and dtype."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    settings = {"generation eos_token_id": ends, **model.config.to_dict()}
    for name in ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"):
        settings.pop(name, None)
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """The sha256 of what the tokenizer does: its definition (of slow ones the vocabulary), and what starts and ends."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    definition = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    definition += json.dumps([getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")])
    return hashlib.sha256(definition.encode("utf-8", "surrogatepass")).hexdigest()


def versions() -> dict[str, str | None]:
    """Versions of the packages that a result may depend on, and of Python."""
    found: dict[str, str | None] = {}
    for name in ("ctxext", "torch", "transformers", "datasets"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a source tree that isn't installed
            found[name] = None
    return {**found, "python": platform.python_version()}


def _device_name(model: Any) -> str:
    device = torch.device(getattr(model, "device", "cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
