"""What an evaluation will take, before it is run: inputs, tokens, time and memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctxext import memory
from ctxext.evaluation.runs import DryRun, Planned
from ctxext.evaluation.scoring import SLICE_LOGITS, bare_model, evaluating
from ctxext.evaluation.tasks import Prepared

PROBES = (256, 1024)
"""Lengths in tokens of the passes from which the time of longer ones is worked out."""


@dataclass(frozen=True)
class Estimate:
    """Documents (0 for prompts), inputs (windows or prompts), their tokens, seconds for all, bytes at the peak.

    Bytes include the weights.

    Seconds and bytes are rough: prompts that share a beginning take less, generated answers take more.
    """

    documents: int
    inputs: int
    tokens: int
    longest: int
    seconds: float
    memory_bytes: int


def estimate(prepared: Prepared, model: Any, tokenizer: Any) -> Estimate:
    """Find out what the evaluation would run on a loaded model, and time two short passes.

    Raises what the evaluation itself raises before its first pass: data that is too short, say.
    """
    run = DryRun()
    with suppress(Planned):
        prepared.evaluate(model, tokenizer, run, None)
    lengths = [length for batch in run.batches for length in batch]
    return Estimate(
        documents=run.documents,
        inputs=len(lengths),
        tokens=sum(lengths),
        longest=max(lengths),
        seconds=_seconds(model, lengths),
        memory_bytes=_memory(model, max(lengths), run.at_once, cached=prepared.unit == "prompts"),
    )


def _seconds(model: Any, lengths: Sequence[int]) -> float:
    """By a fit of time = linear * length + quadratic * length^2 to the two probes."""
    (short, first), (long, second) = ((length, _timed(model, length)) for length in PROBES)
    quadratic = max(0.0, (second / long - first / short) / (long - short))
    linear = max(0.0, second / long - quadratic * long)
    return sum(linear * length + quadratic * length**2 for length in lengths)


def _timed(model: Any, length: int) -> float:
    base = bare_model(model)
    ids: Tensor = (torch.arange(length) % 97)[None].to(base.device)
    taken = []
    with evaluating(base):
        for _ in range(2):  # the first one may compile or allocate
            started = time.perf_counter()
            float(base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, -1, 0])
            taken.append(time.perf_counter() - started)
    return min(taken)


def _memory(model: Any, longest: int, batch: int, *, cached: bool) -> int:
    """Weights, a layer's activations, a slice of logits, and for prompts the keys and values of all layers."""
    base = bare_model(model)
    weights: int = sum(p.numel() * p.element_size() for p in base.parameters())
    found, given = memory.sizes(base), memory.Input(longest, batch, base.dtype.itemsize)
    cache = memory.cache_bytes(found, given, filling=True) if cached else 0
    return weights + cache + memory.forward_activations(found, given) + 3 * 4 * SLICE_LOGITS
