"""The record of one evaluation: what was measured, on what, with which versions; written as strictly valid JSON."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch

from ctxext.evaluation.files import plain
from ctxext.evaluation.passkey import PasskeyResult
from ctxext.evaluation.perplexity import PerplexityResult
from ctxext.evaluation.scoring import bare_model

SCHEMA_VERSION = 1


def result_record(
    task: str,
    result: PerplexityResult | PasskeyResult,
    *,
    model: Any,
    model_id: str,
    tokenizer: Any,
    dataset_id: str | None = None,
    method: Mapping[str, Any] | None = None,
    patch: Mapping[str, Any] | None = None,
    configuration: Mapping[str, Any],
    seed: int | None,
    dtype: str | torch.dtype,
) -> dict[str, Any]:
    """The JSON-ready record of ``result``.

    ``method`` is the method's settings (None for the unpatched model), ``patch`` what inspecting the live model showed
    (frequency fingerprint, patched modules), ``configuration`` the resolved configuration of the run. Two records can
    be compared if their ``protocol``, and for perplexity their ``dataset``, agree.
    """
    model = bare_model(model)
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "task": task,
        "rows": result.rows,
        "protocol": result.protocol,
        "method": method,
        "patch": patch,
        "configuration": configuration,
        "counts": result.counts,
        "provenance": {
            **_versions(),
            "platform": platform.platform(),
            "device": _device_name(model),
            "model": model_id,
            "model_type": getattr(model.config, "model_type", None),
            "tokenizer": {"class": type(tokenizer).__name__, "vocabulary": len(tokenizer)},
            "dtype": str(dtype).removeprefix("torch."),
            "attn_implementation": getattr(model.config, "_attn_implementation", None),
            "seed": seed,
            "created_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "wall_seconds": result.wall_seconds,
            "peak_memory_bytes": result.peak_memory_bytes,
        },
    }
    if isinstance(result, PerplexityResult):
        fingerprint, ids = result.dataset_fingerprint, result.document_ids
        record["dataset"] = {"id": dataset_id, "fingerprint": fingerprint, "document_ids": ids}
    else:
        record["samples"] = result.samples
    return plain(record)  # type: ignore[no-any-return]  # a mapping comes back as a dict


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in ("ctxext", "torch", "transformers", "datasets"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a source tree that isn't installed
            versions[name] = None
    return {**versions, "python": platform.python_version()}


def _device_name(model: Any) -> str:
    device = torch.device(getattr(model, "device", "cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
