"""What every evaluation stands on: token losses in bounded memory, equal batches, a measured run, argument checks.

Which tokens are scored, and how they are averaged, is decided in perplexity.py.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from ctxext.errors import ConfigError, UnsupportedModelError
from ctxext.patching import active_patch, unwrap

SLICE_LOGITS = 2**24
"""Logits held at a time: 64 MiB in float32, whatever the vocabulary and the length."""

Item = TypeVar("Item")


@dataclass
class Cost:
    """What a run took: wall-clock seconds, and peak memory in bytes.

    On CUDA the peak is what torch allocated during the run; elsewhere the process's peak resident size so far, or None
    where the system doesn't tell (Windows).
    """

    wall_seconds: float = 0.0
    peak_memory_bytes: int | None = None


def bare_model(model: Any) -> Any:
    """The Transformers model inside PEFT, DDP and other wrappers; what is no module is taken as it is."""
    return unwrap(model) if isinstance(model, nn.Module) else model


@torch.inference_mode()
def token_nll(
    model: Any, input_ids: Tensor, n_targets: int, *, rows: int | None = None, feed_last: bool = True
) -> Tensor:
    """Negative log-likelihood of the last ``n_targets`` ids of every row, each given all ids before it.

    The decoder runs once without a key/value cache. The output head sees only the scored positions, ``rows`` of them
    at a time (default: ``SLICE_LOGITS`` logits), so ``[B, T, vocabulary]`` logits never exist; the cross-entropy is
    taken in float32. Call ``check_head`` once per model first. Without ``feed_last`` the last id is a target only, and
    the input a position shorter.

    input_ids: ``[B, T]``, rows of equal length without padding. Returns ``[B, n_targets]`` float32 on the CPU, in nats.
    """
    length = input_ids.shape[1]
    if not 1 <= n_targets < length:
        raise ConfigError(f"n_targets {n_targets} must be between 1 and {length - 1} for an input of {length} tokens")
    model = bare_model(model)
    ids = input_ids.to(model.device)
    head = model.get_output_embeddings()
    fed = ids if feed_last else ids[:, :-1]
    hidden = model.get_decoder()(input_ids=fed, attention_mask=None, use_cache=False).last_hidden_state
    hidden = hidden[:, length - 1 - n_targets : length - 1].flatten(0, 1)  # [B * n_targets, D]
    labels = ids[:, length - n_targets :].flatten()
    rows = rows or max(1, SLICE_LOGITS // _vocabulary_size(model))
    losses = []
    for start in range(0, len(hidden), rows):
        logits = head(hidden[start : start + rows]).float()
        targets = labels[start : start + rows].to(logits.device)
        losses.append(cross_entropy(logits, targets, reduction="none").cpu())
    return torch.cat(losses).view(-1, n_targets)


def cache_argument(model: Any) -> str:
    """The name under which the model takes a cache: Transformers changed it during 5.x."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def decoded_nll(model: Any, input_ids: Tensor, n_targets: int, *, feed_last: bool = True) -> Tensor:
    """As ``token_nll``, but read token by token through a key/value cache, as in generation.

    As slow as generation; ``feed_last`` makes no difference. Equal to ``token_nll`` up to rounding for every method
    that is the same in all ways of running.
    """
    model = bare_model(model)
    ids = input_ids.to(model.device)
    first = ids.shape[1] - n_targets
    if not 1 <= n_targets < ids.shape[1]:
        raise ConfigError(f"n_targets {n_targets} must be between 1 and {ids.shape[1] - 1}")
    cache: dict[str, Any] = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
    losses = []
    for position in range(ids.shape[1] - 1):
        out = model(input_ids=ids[:, position : position + 1], **cache)
        if position + 1 >= first:
            targets = ids[:, position + 1].to(out.logits.device)
            losses.append(cross_entropy(out.logits[:, -1].float(), targets, reduction="none").cpu())
    return torch.stack(losses, dim=1)


@torch.inference_mode()
def check_head(model: Any) -> None:
    """Raise UnsupportedModelError unless the model's logits are its output head applied to its decoder's states.

    Models that scale or cap their logits, or keep the head elsewhere, would be scored wrongly by ``token_nll``.
    """
    model = bare_model(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not hasattr(model, "get_decoder"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no decoder with an output head: perplexity needs a causal language model"
        )
    ids = (torch.arange(8) % _vocabulary_size(model))[None].to(model.device)
    states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    expected = model(input_ids=ids, use_cache=False).logits.float()
    finite = expected[expected.isfinite()].abs()
    # The same arithmetic twice: equal but for kernels that add in no fixed order.
    tolerance = 8 * torch.finfo(states.dtype).eps * (float(finite.max()) if len(finite) else 0.0)
    if not torch.allclose(head(states).float(), expected, rtol=0.0, atol=tolerance, equal_nan=True):
        raise UnsupportedModelError(
            f"{type(model).__name__} does more than its output head after the decoder (scaled or capped logits?): "
            "its token losses can't be computed in slices"
        )


def check_positions(model: Any) -> None:
    """Raise UnsupportedModelError for a rotary embedding that depends on the length of the input.

    Transformers' own ``dynamic``, and ``longrope`` with other factors for long input, take their frequencies from the
    longest input seen so far: rows, batches and the order of runs would change each other.
    """
    parameters = getattr(getattr(bare_model(model), "config", None), "rope_parameters", None) or {}
    rope_type = parameters.get("rope_type")
    if rope_type == "dynamic" or (
        rope_type == "longrope" and list(parameters["short_factor"]) != list(parameters["long_factor"])
    ):
        raise UnsupportedModelError(
            f"the checkpoint's own {rope_type} scaling depends on the length of the input, so that its results would "
            "depend on batches and order; give a method, with replace_scaling=True (--replace-scaling)"
        )


def check_length(model: Any, longest: int) -> None:
    """Raise ConfigError for an input longer than the ``max_length`` of a patch that changes attention.

    The config of such a model keeps the trained length, so the patch alone says how far it is meant to read.
    """
    patch = active_patch(model) if isinstance(model, nn.Module) else None
    if patch is not None and patch.partition is not None and longest > patch.max_length:
        raise ConfigError(
            f"{longest:,} tokens are more than method {patch.method.name} is set to read ({patch.max_length:,}); raise "
            f"that with method.max_position_embeddings={longest}, which changes no score"
        )


def _vocabulary_size(model: Any) -> int:
    return int(getattr(model.get_output_embeddings(), "out_features", None) or model.config.vocab_size)


@contextmanager
def evaluating(model: Any) -> Iterator[Cost]:
    """Evaluation mode without gradients; on leaving, every module's mode is as before and the Cost is filled in."""
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    device = torch.device(getattr(bare_model(model), "device", "cpu"))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cost, started = Cost(), time.perf_counter()
    for module in training:
        module.training = False
    try:
        with torch.no_grad():  # not inference mode, in which dynamic methods can't keep rotated keys
            yield cost
    finally:
        for module in training:
            module.training = True
        cost.wall_seconds = time.perf_counter() - started
        cost.peak_memory_bytes = peak_memory(device)


def peak_memory(device: torch.device) -> int | None:
    """Bytes: on CUDA the peak of what torch allocated, elsewhere the process's peak resident size so far, or None."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def equal_batches(items: Iterable[Item], size: int, key: Callable[[Item], object]) -> Iterator[list[Item]]:
    """Lists of up to ``size`` items with equal keys: batches that need no padding."""
    waiting: defaultdict[object, list[Item]] = defaultdict(list)
    for item in items:
        group = waiting[key(item)]
        group.append(item)
        if len(group) == size:
            yield waiting.pop(key(item))
    yield from waiting.values()


def require_whole(name: str, value: Any, minimum: int) -> None:
    """Raise ConfigError unless ``value`` is a whole number of at least ``minimum``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, got {value!r}")


def require_distinct(name: str, values: Sequence[Any]) -> None:
    """Raise ConfigError if ``values`` is empty or holds a value twice."""
    if not values:
        raise ConfigError(f"{name}: none given; give at least one (--{name.removesuffix('s')})")
    if len(set(values)) < len(values):
        raise ConfigError(f"{name} holds a value twice: {list(values)}")
