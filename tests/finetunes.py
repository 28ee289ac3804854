"""Fine-tunes of tiny models, as several test files run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import ctxext
import tiny
from ctxext.checkpoints import Checkpoints, read_log
from ctxext.config import FinetuneSection
from ctxext.data import Document
from ctxext.training import Finetune, own_state

TEXTS = [f"The {i}th text counts: " + " ".join(str(i * n) for n in range(60)) for i in range(12)]

SETTINGS: dict[str, Any] = {
    "sequence_length": 96,
    "steps": 6,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 2,
    "learning_rate": 1e-3,
    "save_every": 2,
    "precision": "fp32",
}


def documents() -> Iterator[Document]:
    return iter([Document(f"d{i}", text) for i, text in enumerate(TEXTS)])


def load(checkpoint: Path, method: ctxext.Method | None = tiny.METHODS["yarn"]) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    if method is not None:
        ctxext.patch(model, method)
    return model, AutoTokenizer.from_pretrained(checkpoint)


def train(
    checkpoint: Path | tuple[Any, Any],
    folder: Path,
    *,
    method: ctxext.Method | None = tiny.METHODS["yarn"],
    read: Callable[[], Iterator[Document]] = documents,
    evaluate: Any = None,
    report: Any = None,
    resume: bool = False,
    **changes: Any,
) -> tuple[Finetune, list[dict[str, Any]]]:
    """The finished job and its log."""
    model, tokenizer = load(checkpoint, method) if isinstance(checkpoint, Path) else checkpoint
    settings = FinetuneSection(**{**SETTINGS, **changes})
    checkpoints = Checkpoints(folder, resume=resume, overwrite=False, keep=settings.keep)
    try:
        checkpoints.begin({})
        with own_state():
            job = Finetune(model, tokenizer, read, settings, checkpoints, evaluate)
            job.plan()
            job.run(report)
    finally:
        checkpoints.close()
    return job, read_log(folder)


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in log if "loss" in entry]


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
