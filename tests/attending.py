"""What the tests of methods that change attention share: settings, ways of running, and the formulas once more."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import ctxext
import tiny
from ctxext.attention import interface
from ctxext.attention.bands import Bands
from ctxext.attention.partition import Partition
from ctxext.methods.dynamic import Dynamic
from ctxext.rope import RopeSpec

MARKS = [
    pytest.mark.usefixtures("strictly"),
    pytest.mark.filterwarnings("error:.*deprecated"),
    # PyTorch's own compiler still uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

L = tiny.TRAINED
SPEC = RopeSpec(10_000.0, 16, L)

SETTINGS: dict[str, ctxext.Method] = {
    "dca": ctxext.DCA(chunk_size=24, local_size=8),
    "dca_default": ctxext.DCA(),
    "dca_yarn": ctxext.DCA(chunk_size=24, local_size=8, frequencies=ctxext.YaRN(factor=2), temperature=0.3),
    "dca_local_1": ctxext.DCA(chunk_size=13, local_size=1),
    "dca_half": ctxext.DCA(chunk_size=22, local_size=11),
    "dca_smallest": ctxext.DCA(chunk_size=2, local_size=1),
    "ntk": ctxext.DynamicNTK(step=16),
    "ntk_step_1": ctxext.DynamicNTK(step=1, factor=1),
    "yarn": ctxext.DynamicYaRN(step=7, factor=2),
    "yarn_default": ctxext.DynamicYaRN(),
    "ntk_log": ctxext.DynamicNTK(step=16, log_n=True),
    "static_log": ctxext.YaRN(factor=2, log_n=True),
    "self_extend": ctxext.SelfExtend(neighbor_window=19, group_size=6),
    "self_extend_pi_log": ctxext.SelfExtend(neighbor_window=8, frequencies=ctxext.PI(factor=2), log_n=True),
    "self_extend_window_1": ctxext.SelfExtend(neighbor_window=1, group_size=7),
    "rerope": ctxext.ReRoPE(window=17),
    "leaky": ctxext.ReRoPE(window=20, leak=6.5),
    "lm_infinite": ctxext.LMInfinite(n_global=5, n_local=23, distance_limit=23),
    "lm_infinite_capped": ctxext.LMInfinite(n_global=3, n_local=40, distance_limit=18),
    "lm_infinite_global": ctxext.LMInfinite(n_global=6, n_local=16, distance_limit=31),
    "streaming": ctxext.StreamingLLM(n_sink=3, window=20),
    "streaming_default": ctxext.StreamingLLM(),
}
MAIN = ("dca_yarn", "ntk", "yarn", "leaky", "streaming")
"""One of each: final keys, turned keys without and with a gain, bands with turned keys, bands that see less."""
DYNAMIC = ("ntk", "yarn", "leaky")

SMALL = RopeSpec(10_000.0, 8, 16)
PARTITIONS: dict[str, ctxext.Method] = {
    "dca": ctxext.DCA(chunk_size=12, local_size=5),
    "dca_yarn": ctxext.DCA(chunk_size=12, local_size=5, frequencies=ctxext.YaRN(factor=2), temperature=0.4),
    "dca_smallest": ctxext.DCA(chunk_size=2, local_size=1),
    "ntk": ctxext.DynamicNTK(step=3),
    "yarn": ctxext.DynamicYaRN(step=5, factor=2),
    "yarn_log": ctxext.YaRN(factor=2, log_n=True),
    "self_extend": ctxext.SelfExtend(neighbor_window=7, group_size=8),
    "self_extend_window_1": ctxext.SelfExtend(neighbor_window=1, group_size=9),
    "rerope": ctxext.ReRoPE(window=6),
    "leaky": ctxext.ReRoPE(window=6, leak=7.5, log_n=True),
    "lm_infinite": ctxext.LMInfinite(n_global=3, n_local=9, distance_limit=9),
    "lm_infinite_capped": ctxext.LMInfinite(n_global=2, n_local=12, distance_limit=5),
    "lm_infinite_global": ctxext.LMInfinite(n_global=3, n_local=4, distance_limit=11),
    "streaming": ctxext.StreamingLLM(n_sink=2, window=7),
}

FORWARD = 1e-4
"""One forward pass of the engine and one of the reference, on logits in float32."""
CACHED = 2e-4


def patched(setting: str = "dca", family: str = "llama", *, attention: str = "fused", **changes: Any) -> Any:
    model = tiny.model(family, **changes)
    method = SETTINGS[setting]
    settings = {k: getattr(method, k) for k in type(method).model_fields}
    if "attention" in settings:
        ctxext.patch(model, type(method)(**{**settings, "attention": attention}))
    else:
        planner = ctxext.patch(model, method).planner
        assert planner is not None
        planner.naive = attention == "naive"
    return model


@functools.lru_cache
def dense(setting: str, family: str = "llama") -> Any:
    """The reference model, which has no cache and no fast path."""
    return patched(setting, family, attention="naive")


def alone(setting: str, family: str, row: Tensor, mask: Tensor | None = None) -> Tensor:
    """Reference logits ``[n, V]`` of the tokens of one row, without whatever is padding."""
    row = row if mask is None else row[mask.bool()]
    return tiny.logits(dense(setting, family), row[None], use_cache=False)[0]


def borders(setting: str, upto: int) -> list[int]:
    """Positions at which a chunk or a step begins."""
    method = SETTINGS[setting]
    if isinstance(method, ctxext.DCA):
        chunk_size, local_size = method.sizes(SPEC)
        return list(range(chunk_size - local_size, upto, chunk_size - local_size))
    if isinstance(method, Dynamic):
        return [L, *range(L + method.step, upto, method.step)]
    partition = method.partition(SPEC)
    assert isinstance(partition, Bands)
    ends = {end for band in partition.bands for end in (band.farthest, band.nearest) if end}
    return sorted(ends | {end + (band.keys or 0) for band in partition.bands for end in ends} | {L})


def cache_name(model: Any) -> str:
    # Transformers 5.24 renames the argument.
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def step(model: Any, ids: Tensor, cache: Any, past: int | None = None, **inputs: Any) -> Tensor:
    """Logits of further tokens after those in a cache."""
    if "cache_position" in inspect.signature(model.forward).parameters:
        past = int(cache.get_seq_length()) if past is None else past
        inputs["cache_position"] = torch.arange(past, past + ids.shape[1])
    return model(ids, use_cache=True, **{cache_name(model): cache}, **inputs).logits


def pieces(
    model: Any,
    ids: Tensor,
    ends: Sequence[int],
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    cache: Any = None,
) -> Tensor:
    """Logits of pieces that end at ``ends``, with the mask of what was seen so far."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    # A static cache of older releases takes the zero keys of padding for free space.
    past = 0 if isinstance(cache, StaticCache) else cache.get_seq_length()
    outputs = []
    with torch.no_grad():
        for start, end in itertools.pairwise([0, *ends]):
            inputs = {} if mask is None else {"attention_mask": mask[:, :end]}
            if positions is not None:
                inputs["position_ids"] = positions[:, start:end]
            outputs.append(step(model, ids[:, start:end], cache, past + start, **inputs))
    return torch.cat(outputs, dim=1)


def padded(rows: Sequence[int], *, left: bool = True, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Ids and mask of a batch of rows with so many tokens."""
    width = max(rows)
    ids, mask = tiny.tokens(width, len(rows), seed=seed), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, length in enumerate(rows):
        mask[i, width - length :] = 1
        if not left:
            mask[i] = mask[i].flip(0)
    return ids.masked_fill(mask == 0, 0), mask


def ranks(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def assert_rows_as_if_alone(
    logits: Tensor, setting: str, family: str, ids: Tensor, mask: Tensor, tolerance: float = CACHED
) -> None:
    """All finite, padding included, and every row as the reference gives it without its padding."""
    assert logits.isfinite().all()
    for i in range(len(ids)):
        if mask[i].any():
            difference = tiny.difference(logits[i, mask[i].bool()], alone(setting, family, ids[i], mask[i]))
            assert difference < tolerance, f"row {i}"


# The formulas, once more and independently: for single positions, in Python's own arithmetic.


def relative_of(method: ctxext.Method, i: int, j: int, trained: int = L) -> float | None:
    """Relative position, or None where i doesn't attend to j."""
    if isinstance(method, ctxext.SelfExtend):
        w, g = method.sizes(RopeSpec(10_000.0, 16, trained))
        return i - j if i - j < w else i // g + w - w // g - j // g
    if isinstance(method, ctxext.ReRoPE):
        w = method.window or trained // 4
        return i - j if i - j < w else w if method.leak is None else w + (i - j - w) / method.leak
    if isinstance(method, ctxext.LMInfinite):
        seen = i - j < (method.n_local or trained) or j < method.n_global
        return min(i - j, method.distance_limit or trained) if seen else None
    if isinstance(method, ctxext.StreamingLLM):
        w = method.window or trained - method.n_sink
        if i - j < w:
            return i - j
        return min(i, method.n_sink + w - 1) - j if j < method.n_sink else None
    if not isinstance(method, ctxext.DCA):
        return i - j
    c = method.chunk_size or L
    s = c - (method.local_size or c // 4)
    if i // s == j // s:
        return i % s - j % s
    if i // s - j // s == 1:
        return min(i % s + s, c - 1) - j % s
    return c - 1 - j % s


def frequencies_of(method: ctxext.Method, i: int, d: int = 16, trained: int = L) -> tuple[list[float], float]:
    """Radians per position, and the factor on the scores, of a query at position i."""
    base = [10_000.0 ** (-2 * k / d) for k in range(d // 2)]

    def yarn(s: float) -> list[float]:
        if s == 1:
            return base
        dims = [d * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(10_000)) for turns in (32, 1)]
        low, high = max(math.floor(dims[0]), 0), min(math.ceil(dims[1]), d - 1)
        ramp = [min(max((k - low) / max(high - low, 0.001), 0), 1) for k in range(d // 2)]
        return [f / s * r + f * (1 - r) for f, r in zip(base, ramp, strict=True)]

    log_gain = max(1.0, math.log(i + 1) / math.log(trained)) if method.log_n else 1.0
    if not isinstance(method, Dynamic):
        temperature = getattr(method, "temperature", 0.0)
        gain = log_gain * max(1.0, temperature * math.log((i + 1) / trained) + 1)
        inner = method if isinstance(method, ctxext.YaRN) else method.frequencies
        if isinstance(inner, ctxext.PI):
            return [f / inner.factor for f in base], gain
        if inner is None:
            return base, gain
        return yarn(inner.factor), gain * (0.1 * math.log(inner.factor) + 1) ** 2
    n = trained
    while n <= i:
        n += method.step
    s = method.factor * n / trained - (method.factor - 1)
    if isinstance(method, ctxext.DynamicNTK):
        return [(10_000.0 * s ** (d / (d - 2))) ** (-2 * k / d) for k in range(d // 2)], log_gain
    return yarn(s), log_gain * (0.1 * math.log(s) + 1) ** 2


def pairwise_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: list[int], method: ctxext.Method, scale: float
) -> Tensor:
    """One pair after the other, a rotation being the product with a complex number; states not rotated at all."""
    _, heads, length, dim = query.shape
    first = len(positions) - length
    as_complex = [torch.complex(x[..., : dim // 2].contiguous(), x[..., dim // 2 :].contiguous()) for x in (query, key)]
    out = torch.zeros_like(query)
    for h, t in itertools.product(range(heads), range(length)):
        g = h * key.shape[1] // heads
        i = positions[first + t]
        frequencies, factor = frequencies_of(method, i)
        theta = torch.tensor(frequencies, dtype=torch.float64)
        scores = []
        seen = [s for s in range(first + t + 1) if relative_of(method, i, positions[s]) is not None]
        for s in seen:
            turned = as_complex[0][0, h, t] * torch.exp(1j * relative_of(method, i, positions[s]) * theta)
            scores.append((turned * as_complex[1][0, g, s].conj()).real.sum() * scale * factor)
        weights = torch.stack(scores).softmax(0)
        out[0, h, t] = sum(w * value[0, g, s] for s, w in zip(seen, weights, strict=True))
    return out


def module_rotated(x: Tensor, positions: Tensor, partition: Partition) -> Tensor:
    """What the rotary module makes of bare states, in their own dtype and differentiably."""
    angles = (positions % partition.period)[:, None].to(x.dtype) * partition.inv_freq.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos() * partition.attention_factor, angles.sin() * partition.attention_factor
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, partition: Partition, scale: float
) -> Tensor:
    """Bare states in, every score from the rotation by its relative position, one softmax; differentiable."""
    own, groups = positions[-query.shape[2] :], query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    inv_freq, gain = (x.to(query.dtype) for x in partition.frequencies_at(own))
    angles = partition.relative_positions(own, positions)[..., None].to(query.dtype) * inv_freq[:, None]
    (q1, q2), (k1, k2) = query.chunk(2, dim=-1), key.chunk(2, dim=-1)
    even = torch.einsum("bhtd,bhsd,tsd->bhts", q1, k1, angles.cos()) + torch.einsum(
        "bhtd,bhsd,tsd->bhts", q2, k2, angles.cos()
    )
    odd = torch.einsum("bhtd,bhsd,tsd->bhts", q1, k2, angles.sin()) - torch.einsum(
        "bhtd,bhsd,tsd->bhts", q2, k1, angles.sin()
    )
    scores = (even + odd) * (gain[:, None] * scale * partition.attention_factor**2)
    return scores.masked_fill(~partition.attended(own, positions), -math.inf).softmax(-1) @ value


def greedy(model: Any, ids: Tensor, new: int = 18, **options: Any) -> Any:
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **options}
    return model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)


def warm(model: Any, ids: Tensor, upto: int, cache: Any = None) -> DynamicCache:
    """A cache that holds the tokens before ``upto``, the last ones read singly, so that rotated keys are kept."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    pieces(model, ids, (upto - 4, upto - 3, upto - 2, upto - 1, upto), cache=cache)
    return cache


def rebuilt(cache: Any) -> Any:
    """A new cache of the same keys and values, vouched for: of itself it would be refused."""
    twin = DynamicCache()
    for i, layer in enumerate(cache.layers):
        twin.update(layer.keys, layer.values, i)
    setattr(twin.layers[0], interface._RECORD, getattr(cache.layers[0], interface._RECORD))
    return twin


def states(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def gappy(length: int) -> Tensor:
    """Ascending positions of which some are left out."""
    return torch.tensor(
        [position for position in range(4 * length) if position % 11 != 4 and position % 7 != 3][:length]
    )
