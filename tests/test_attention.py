"""Methods that change attention: every way of running a model gives the logits of a reference written out in full."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import ctxext
import tiny
from ctxext.attention import engine, interface, kernels, naive
from ctxext.attention.partition import Block, Partition
from ctxext.rope import RopeSpec

pytestmark = [
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
}
MAIN = ("dca", "dca_yarn", "ntk", "yarn")
DYNAMIC = ("ntk", "yarn")

FORWARD = 1e-4
"""One forward pass of the engine and one of the reference, on logits in float32."""
CACHED = 2e-4
"""The same in several passes: other products are rounded."""


@pytest.fixture(autouse=True)
def _strictly() -> Iterator[None]:
    with tiny.strictly():
        yield


def patched(setting: str = "dca", family: str = "llama", *, attention: str = "fused", **changes: Any) -> Any:
    model = tiny.model(family, **changes)
    method = SETTINGS[setting]
    ctxext.patch(
        model, type(method)(**{**{k: getattr(method, k) for k in type(method).model_fields}, "attention": attention})
    )
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
    return [L, *range(L + method.step, upto, method.step)]


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


def relative_of(method: ctxext.Method, i: int, j: int) -> int:
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

    if isinstance(method, ctxext.DCA):
        gain = max(1.0, method.temperature * math.log((i + 1) / trained) + 1)
        if method.frequencies is None:
            return base, gain
        s = method.frequencies.factor
        return yarn(s), gain * (0.1 * math.log(s) + 1) ** 2
    n = trained
    while n <= i:
        n += method.step
    s = method.factor * n / trained - (method.factor - 1)
    if isinstance(method, ctxext.DynamicNTK):
        return [(10_000.0 * s ** (d / (d - 2))) ** (-2 * k / d) for k in range(d // 2)], 1.0
    return yarn(s), (0.1 * math.log(s) + 1) ** 2


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
        for s in range(first + t + 1):
            turned = as_complex[0][0, h, t] * torch.exp(1j * relative_of(method, i, positions[s]) * theta)
            scores.append((turned * as_complex[1][0, g, s].conj()).real.sum() * scale * factor)
        weights = torch.stack(scores).softmax(0)
        out[0, h, t] = sum(w * value[0, g, s] for s, w in enumerate(weights))
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
    return scores.masked_fill(positions > own[:, None], -math.inf).softmax(-1) @ value


# 1. Relative positions


def shown(chunk_size: int, local_size: int, queries: Sequence[int], keys: Sequence[int]) -> list[list[int]]:
    partition = ctxext.DCA(chunk_size=chunk_size, local_size=local_size).partition(RopeSpec(1e4, 16, 4096))
    return partition.relative_positions(torch.tensor(queries), torch.tensor(keys)).tolist()


def test_queries_of_a_chunk_are_turned_as_in_the_papers_example() -> None:
    assert shown(10, 4, range(6, 12), [0]) == [[6], [7], [8], [9], [9], [9]]
    assert shown(10, 4, range(12, 18), [0]) == [[9]] * 6
    assert shown(10, 4, range(600, 606), [0]) == [[9]] * 6


def test_rows_of_relative_positions_are_those_written_by_hand() -> None:
    assert shown(12, 4, [20], range(21)) == [
        [11, 10, 9, 8, 7, 6, 5, 4, 11, 10, 9, 8, 7, 6, 5, 4, 4, 3, 2, 1, 0]
    ]  # fmt: skip
    assert shown(12, 4, [18], range(19)) == [[11, 10, 9, 8, 7, 6, 5, 4, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]


sizes = st.integers(2, 40).flatmap(lambda c: st.tuples(st.just(c), st.integers(1, c // 2)))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 300))
def test_relative_positions_of_dca_are_bounded_and_exact_nearby(sizes: tuple[int, int], query: int) -> None:
    chunk_size, local_size = sizes
    method = ctxext.DCA(chunk_size=chunk_size, local_size=local_size)
    row = shown(chunk_size, local_size, [query], range(query + 1))[0]
    assert row == [relative_of(method, query, j) for j in range(query + 1)]
    for distance, relative in enumerate(reversed(row)):
        assert 0 <= relative <= min(distance, chunk_size - 1)
        assert distance > local_size or relative == distance


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name.startswith("dca") and name != "dca_yarn"])
def test_a_text_of_one_chunk_is_read_as_by_the_plain_model(setting: str) -> None:
    plain, model = tiny.model(), patched(setting)
    stride = borders(setting, 1000)[0]
    for length in {1, max(1, stride - 1), stride}:
        ids = tiny.tokens(length)
        assert tiny.difference(tiny.logits(model, ids), tiny.logits(plain, ids)) < 1e-5
    ids = tiny.tokens(L + 40)
    assert tiny.difference(tiny.logits(model, ids), tiny.logits(plain, ids)) > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("setting", ["ntk", "ntk_step_1", "yarn", "yarn_default"])
def test_dynamic_methods_read_the_trained_length_as_the_plain_model_does(setting: str, family: str) -> None:
    plain, model, ids = tiny.model(family), patched(setting, family), tiny.tokens(L + 40)
    for length in (1, L - 1, L):
        assert tiny.difference(tiny.logits(model, ids[:, :length]), tiny.logits(plain, ids[:, :length])) < 5e-5
    longer, plainly = tiny.logits(model, ids), tiny.logits(plain, ids)
    assert tiny.difference(longer[:, :L], plainly[:, :L]) < 5e-5
    assert tiny.difference(longer[:, L:], plainly[:, L:]) > 1e-2


# 2. The reference, and the engine against it


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_reference_is_attention_pair_by_pair(setting: str) -> None:
    method, generator = SETTINGS[setting], torch.Generator().manual_seed(0)
    partition = method.partition(SPEC)
    border = borders(setting, 1000)[0]
    # Around the first border, with gaps, and far beyond it.
    positions = sorted(
        {0, 1, 5, border - 1, border, border + 1, border + 9, border + 10, 2 * border + 3, 7 * border, 7 * border + 2}
    )
    query, key, value = (
        torch.randn(1, h, len(positions), 16, generator=generator, dtype=torch.float64) for h in (4, 2, 2)
    )
    expected = pairwise_attention(query[:, :, 3:], key, value, positions, method, 0.3)
    where = torch.tensor(positions)
    rotated_query, rotated_key = (module_rotated(x, where, partition) for x in (query, key))
    out, weights = naive.attend(rotated_query[:, :, 3:], rotated_key, value, where, partition, 0.3)
    # Frequencies are fp32 there: at distance 450 an angle is off by up to 450 * 2^-24, a score by several times that.
    assert tiny.difference(out, expected) < 2e-4
    assert tiny.difference(weights.sum(-1), torch.ones(())) < 1e-12
    assert (weights.tril(3) == weights).all()


def lengths_around(setting: str) -> list[int]:
    """Below, at and beyond all borders, or the first and last few if there are many."""
    found = borders(setting, 2 * L + 20)
    found = [*found[:3], *found[-2:]] if len(found) > 6 else found
    return sorted({length for border in found for length in (border - 1, border, border + 1, border + 5) if length > 0})


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_engine_is_the_reference_at_every_length(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(2 * L + 25)
    for length in lengths_around(setting):
        part = ids[:, :length]
        expected = tiny.logits(dense(setting), part, use_cache=False)
        assert tiny.difference(tiny.logits(model, part), expected) < FORWARD, length


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("setting", [*MAIN, "yarn_default"])
def test_the_engine_is_the_reference_in_every_family(setting: str, family: str) -> None:
    ids = tiny.tokens(2 * L + 20)
    # Attention alone rounds as stock kernels do; routing to experts multiplies it.
    room = 3 * FORWARD if family == "qwen2_moe" else FORWARD
    for key_heads in (2, 1) if family in ("llama", "qwen3") else (2,):
        heads = {"num_key_value_heads": key_heads}
        model, reference = patched(setting, family, **heads), patched(setting, family, attention="naive", **heads)
        expected = tiny.logits(reference, ids, use_cache=False)
        for length in (L + 3, 2 * L + 20):
            assert tiny.difference(tiny.logits(model, ids[:, :length]), expected[:, :length]) < room
    ctxext.unpatch(model)
    assert tiny.difference(tiny.logits(model, ids), expected) > 1e-2


# 3. Blocks


@st.composite
def columns(draw: Any) -> tuple[list[int], int]:
    gaps = draw(st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=50))
    positions = list(itertools.accumulate(gaps))
    shift = draw(st.sampled_from([1, 0, 5, 60]))
    return [position - gaps[0] + shift for position in positions], draw(st.integers(0, len(gaps) - 1))


methods = st.one_of(
    sizes.map(lambda s: ctxext.DCA(chunk_size=s[0], local_size=s[1], temperature=0.5)),
    st.integers(1, 30).map(lambda n: ctxext.DynamicNTK(step=n)),
    st.integers(1, 30).map(lambda n: ctxext.DynamicYaRN(step=n, factor=1)),
)


@settings(max_examples=150, deadline=None)
@given(methods, columns())
def test_blocks_cover_every_pair_once_at_its_relative_position(
    method: ctxext.Method, columns: tuple[list[int], int]
) -> None:
    positions, first = columns
    partition, where = method.partition(SPEC), torch.tensor(positions)
    count = torch.zeros(len(positions), len(positions), dtype=torch.int64)
    end = first
    for block in partition.blocks(where, first):
        assert block.queries.start == end < block.queries.stop
        end, length = block.queries.stop, block.queries.stop - block.queries.start
        keys_at = where % partition.period if block.key_positions is None else block.key_positions
        for region in block.regions:
            for t in range(length):
                column = block.queries.start + t
                stop = region.keys.stop - (length - 1 - t if region.causal else 0)
                count[column, region.keys.start : stop] += 1
                at = positions[column] % partition.period + (0 if region.turn is None else int(region.turn[t]))
                for s in range(region.keys.start, stop):
                    assert at - int(keys_at[s]) == relative_of(method, positions[column], positions[s])
                frequencies, gain = frequencies_of(method, positions[column])
                torch.testing.assert_close(block.inv_freq.tolist(), frequencies, rtol=1e-5, atol=0)  # fp32
                assert (1.0 if block.gain is None else float(block.gain[t])) == pytest.approx(gain, rel=1e-5)
    assert end == len(positions)
    expected = torch.ones_like(count).tril()
    expected[:first] = 0
    assert torch.equal(count, expected)


# 4. Every way of running


WIDTH = 119  # a multiple of nothing, beyond several borders


def ways() -> dict[str, Callable[[Any, Tensor], Tensor]]:
    def steps_of(first: int, size: int) -> Callable[[Any, Tensor], Tensor]:
        return lambda model, ids: pieces(model, ids, [*range(first, WIDTH, size), WIDTH])

    def static(model: Any, ids: Tensor) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=WIDTH + 9)
        return tiny.in_pieces(model, ids, (30, 61, 64, 65, 66, 90, WIDTH), cache)

    return {
        "prefill then single steps": steps_of(60, 1),
        "prefill then blocks of three": steps_of(62, 3),
        "prefill then blocks of five": steps_of(10, 5),
        "pieces of forty-seven": steps_of(47, 47),
        "a static cache": static,
    }


ON_LLAMA = [(name, "llama") for name in SETTINGS if name != "yarn_default"]


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize(("setting", "family"), [*ON_LLAMA, ("dca_yarn", "qwen3"), ("yarn", "qwen3")])
def test_every_way_through_a_cache_gives_the_same_logits(setting: str, way: str, family: str) -> None:
    ids = tiny.tokens(WIDTH, 2)
    logits = ways()[way](patched(setting, family), ids)
    assert tiny.difference(logits, tiny.logits(dense(setting, family), ids, use_cache=False)) < CACHED


def greedy(model: Any, ids: Tensor, new: int = 18, **options: Any) -> Any:
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **options}
    return model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)


def new_cache(model: Any) -> dict[str, Any]:
    return {cache_name(model): DynamicCache(config=model.config)}


def assert_generated_as_if_alone(generated: Any, setting: str, family: str, mask: Tensor) -> None:
    """Each step's logits are those of the reference on the whole row without padding."""
    new = len(generated.logits)
    mask = torch.cat((mask, mask.new_ones(len(mask), new)), dim=1)
    for i, logits in enumerate(torch.stack(generated.logits, dim=1)):
        expected = alone(setting, family, generated.sequences[i], mask[i])[-new - 1 : -1]
        assert tiny.difference(logits, expected) < CACHED, f"row {i}"


GENERATE: dict[str, dict[str, Any]] = {
    "plainly": {},
    "in chunks of sixteen": {"prefill_chunk_size": 16},
    "in chunks of seven": {"prefill_chunk_size": 7},
    "statically": {"cache_implementation": "static", "disable_compile": True},
    "without a cache": {"use_cache": False, "max_new_tokens": 4, "min_new_tokens": 4},
}


@pytest.mark.parametrize("how", GENERATE)
@pytest.mark.parametrize(
    ("setting", "family"), [*((name, "llama") for name in MAIN), ("dca", "qwen3"), ("yarn", "qwen3")]
)
def test_generate_gives_the_reference_logits_for_every_row(setting: str, how: str, family: str) -> None:
    model = patched(setting, family)
    ids, mask = padded((57, 3, 94, 70))
    # Older releases prefill in chunks only into a cache that comes along.
    given_cache = new_cache if how.startswith("in chunks") else lambda model: {}
    generated = greedy(model, ids, attention_mask=mask, **GENERATE[how], **given_cache(model))
    assert_generated_as_if_alone(generated, setting, family, mask)
    ids = tiny.tokens(55)
    generated = greedy(model, ids, **GENERATE[how], **given_cache(model))
    assert_generated_as_if_alone(generated, setting, family, torch.ones_like(ids))


@pytest.mark.parametrize("setting", MAIN)
def test_a_second_turn_on_the_cache_of_the_first_is_one_text(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(58)
    first = greedy(model, ids, 10)
    cache = getattr(first, "cache", None) or first.past_key_values
    both = torch.cat((first.sequences, tiny.tokens(21, seed=5)), dim=1)
    second = greedy(model, both, 20, **{cache_name(model): cache})
    assert_generated_as_if_alone(second, setting, "llama", torch.ones_like(both))


LEFT = (5, 119, 41, 64, 73)


@pytest.mark.parametrize("positions", [False, True], ids=["", "with position_ids"])
@pytest.mark.parametrize("ends", [(WIDTH,), (16, 32, 48, 64, 80, 96, 112, WIDTH), (70, *range(71, WIDTH + 1))], ids=len)
@pytest.mark.parametrize("setting", MAIN)
def test_left_padded_rows_are_as_if_alone(setting: str, ends: Sequence[int], *, positions: bool) -> None:
    ids, mask = padded(LEFT)
    given_positions = ranks(mask).masked_fill(mask == 0, 1) if positions else None
    logits = pieces(patched(setting), ids, ends, mask, given_positions)
    assert_rows_as_if_alone(logits, setting, "llama", ids, mask)


@pytest.mark.parametrize("setting", MAIN)
def test_left_padded_rows_are_as_if_alone_in_a_static_cache_and_without_one(setting: str) -> None:
    model, (ids, mask) = patched(setting, "qwen3"), padded(LEFT)
    cache = StaticCache(config=model.config, max_cache_len=WIDTH + 20)
    logits = pieces(model, ids, (30, 60, 64, 65, 90, WIDTH), mask, cache=cache)
    assert_rows_as_if_alone(logits, setting, "qwen3", ids, mask)
    for kind in (torch.bool, torch.float32):
        logits = tiny.logits(model, ids, attention_mask=mask.to(kind), use_cache=False)
        assert_rows_as_if_alone(logits, setting, "qwen3", ids, mask)


@pytest.mark.parametrize("setting", MAIN)
def test_a_row_of_nothing_but_padding_is_finite_and_disturbs_nobody(setting: str) -> None:
    model, (ids, mask) = patched(setting), padded((0, 100, 66))
    assert not mask[0].any()
    for ends in ((100,), (50, 80, 100)):
        assert_rows_as_if_alone(pieces(model, ids, ends, mask), setting, "llama", ids, mask)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("setting", MAIN)
def test_right_padded_rows_are_as_if_alone(setting: str, *, cached: bool) -> None:
    model, (ids, mask) = patched(setting), padded(LEFT, left=False)
    logits = pieces(model, ids, (40, 80, WIDTH), mask) if cached else tiny.logits(model, ids, attention_mask=mask)
    assert_rows_as_if_alone(logits, setting, "llama", ids, mask)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("setting", MAIN)
def test_padding_between_two_turns_is_not_counted(setting: str, *, static: bool) -> None:
    model = patched(setting)
    (ids, mask), (more, more_mask) = padded((60, 71, 12), left=False), padded((20, 9, 45), left=True, seed=8)
    ids = torch.cat((ids, more, tiny.tokens(6, 3, seed=9)), dim=1)
    mask = torch.cat((mask, more_mask, torch.ones(3, 6, dtype=torch.int64)), dim=1)
    cache = StaticCache(config=model.config, max_cache_len=200) if static else None
    ends = (71, 71 + 45, *range(71 + 46, 71 + 45 + 7))
    assert_rows_as_if_alone(pieces(model, ids, ends, mask, cache=cache), setting, "llama", ids, mask)
    assert_rows_as_if_alone(pieces(model, ids, ends, mask, ranks(mask)), setting, "llama", ids, mask)


@pytest.mark.parametrize("setting", MAIN)
def test_assisted_generation_is_greedy_generation(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(60)
    expected = model.generate(ids, max_new_tokens=25, do_sample=False)
    assert expected.shape[1] > L + 8
    unlike, alike = tiny.model(seed=3), patched(setting)
    ctxext.patch(unlike, SETTINGS[setting])
    for options in ({"assistant_model": unlike}, {"assistant_model": alike}, {"prompt_lookup_num_tokens": 4}):
        found = model.generate(ids, max_new_tokens=25, do_sample=False, **options)
        assert torch.equal(found[:, : expected.shape[1]], expected)  # older releases may add a token too many


@pytest.mark.parametrize("setting", MAIN)
def test_beam_search_with_a_cache_is_beam_search_without(setting: str) -> None:
    model, (ids, mask) = patched(setting), padded((57, 70))
    options = {
        "attention_mask": mask,
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_new_tokens": 9,
        "do_sample": False,
    }
    with_cache, without = (model.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(with_cache, without)


# The dynamic methods keep rotated keys in the cache object; everything that can happen to a cache must be noticed.


def warm(model: Any, ids: Tensor, upto: int, cache: Any = None) -> DynamicCache:
    """A cache that holds the tokens before ``upto``, the last ones read singly, so that rotated keys are kept."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    pieces(model, ids, (upto - 4, upto - 3, upto - 2, upto - 1, upto), cache=cache)
    return cache


@pytest.mark.parametrize("setting", DYNAMIC)
def test_a_cached_step_rotates_no_key_twice(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, rotated = patched(setting), tiny.tokens(140), []
    original = engine.rotate

    def rotate(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rotated.append(x.shape[2])
        return original(x, *args, **kwargs)

    monkeypatch.setattr(engine, "rotate", rotate)
    cache = warm(model, ids, 69)
    rotated.clear()
    pieces(model, ids[:, 69:70], (1,), cache=cache)
    assert rotated
    assert max(rotated) == 1


@pytest.mark.parametrize("upto", [69, 85])
@pytest.mark.parametrize("setting", MAIN)
def test_cropping_and_going_on_with_other_tokens_is_another_text(setting: str, upto: int) -> None:
    model, ids, other = patched(setting), tiny.tokens(90), tiny.tokens(50, seed=7)
    for removed in (1, 3, 13, 40):
        cache = warm(model, ids, upto)
        cache.crop(-removed)
        for size in (removed, 1, 1):  # back to the old length first
            kept = ids[:, : upto - removed]
            done = cache.get_seq_length() - kept.shape[1]
            logits = pieces(model, other[:, done : done + size], (size,), cache=cache)
            expected = alone(setting, "llama", torch.cat((kept, other[:, : done + size]), dim=1)[0])
            assert tiny.difference(logits[0], expected[-size:]) < CACHED


REARRANGED: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "swap": (lambda cache: cache.reorder_cache(torch.tensor([1, 0, 2])), [1, 0, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("left", [False, True], ids=["", "left-padded"])
@pytest.mark.parametrize("how", REARRANGED)
@pytest.mark.parametrize("setting", ["dca_yarn", "yarn"])
def test_rows_of_a_cache_can_be_rearranged(setting: str, how: str, *, left: bool) -> None:
    model = patched(setting)
    ids, mask = padded((69, 68, 67) if left else (69, 69, 69))
    change, rows = REARRANGED[how]
    cache = DynamicCache(config=model.config)
    pieces(model, ids, (66, 67, 68, 69), mask, cache=cache)
    change(cache)
    ids, mask = ids[rows], mask[rows]
    for seed in range(3):
        more = tiny.tokens(1, len(rows), seed=20 + seed)
        ids, mask = torch.cat((ids, more), dim=1), torch.cat((mask, torch.ones_like(more)), dim=1)
        with torch.no_grad():
            logits = step(model, more, cache, attention_mask=mask)
        for i in range(len(rows)):
            assert tiny.difference(logits[i, 0], alone(setting, "llama", ids[i], mask[i])[-1]) < CACHED


def by_layers(cache: Any) -> Any:
    """A copy that shares the tensors."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


def rebuilt(cache: Any) -> Any:
    """A new cache of the same keys and values, vouched for: of itself it would be refused."""
    twin = DynamicCache()
    for i, layer in enumerate(cache.layers):
        twin.update(layer.keys, layer.values, i)
    setattr(twin.layers[0], interface._RECORD, getattr(cache.layers[0], interface._RECORD))
    return twin


def through_a_file(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "by layers": by_layers,
    "rebuilt": rebuilt,
    "through a file": through_a_file,
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("original_first", [False, True], ids=["copy first", "original first"])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("setting", ["dca_yarn", "ntk"])
def test_a_copied_cache_goes_on_by_itself(setting: str, way: str, *, original_first: bool, inference: bool) -> None:
    model, ids = patched(setting), tiny.tokens(69)
    with torch.inference_mode(inference):
        caches = [warm(model, ids, 69)]
        caches.append(COPIES[way](caches[0]))
        texts = [ids, ids]
        turns = [0, 1] if original_first else [1, 0]
        for turn, which in enumerate([*turns, *turns, turns[1], turns[0]]):
            more = tiny.tokens(1, seed=30 + turn)
            texts[which] = torch.cat((texts[which], more), dim=1)
            logits = pieces(model, more, (1,), cache=caches[which])
            assert tiny.difference(logits[0, -1], alone(setting, "llama", texts[which][0])[-1]) < CACHED


@pytest.mark.parametrize("setting", MAIN)
def test_a_shallow_copy_of_a_cache_is_the_same_cache(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(80)
    expected = alone(setting, "llama", ids[0])
    cache = warm(model, ids, 69)
    twin = copy.copy(cache)
    for i, which in enumerate([twin, cache, cache, twin, twin, cache]):
        logits = pieces(model, ids[:, 69 + i : 70 + i], (1,), cache=which)
        assert tiny.difference(logits[0, 0], expected[69 + i]) < CACHED


@pytest.mark.parametrize("setting", MAIN)
def test_two_caches_take_turns_on_one_model(setting: str) -> None:
    model, texts = patched(setting), [tiny.tokens(90, seed=s) for s in (1, 2)]
    expected = [alone(setting, "llama", text[0]) for text in texts]
    caches = [warm(model, texts[0], 66), warm(model, texts[1], 70)]
    for _ in range(15):
        for text, cache, reference in zip(texts, caches, expected, strict=True):
            past = cache.get_seq_length()
            logits = pieces(model, text[:, past : past + 1], (1,), cache=cache)
            assert tiny.difference(logits[0, 0], reference[past]) < CACHED


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "enable_grad": torch.enable_grad}


@pytest.mark.parametrize("modes", list(itertools.permutations(MODES, 2)), ids="-".join)
@pytest.mark.parametrize("setting", ["dca", *DYNAMIC])
def test_a_cache_filled_in_one_mode_goes_on_in_another(setting: str, modes: tuple[str, str]) -> None:
    # Frozen, because autograd refuses inference tensors, on any model.
    model, ids = patched(setting).requires_grad_(False), tiny.tokens(76)
    cache = DynamicCache(config=model.config)
    outputs = []
    for start, end in itertools.pairwise([0, *range(66, 77)]):
        with MODES[modes[0 if end < 69 or end in (72, 73) else 1]]():
            outputs.append(step(model, ids[:, start:end], cache))
    assert tiny.difference(torch.cat(outputs, dim=1)[0], alone(setting, "llama", ids[0])) < CACHED


def overwritten(cache: Any, write: Callable[[Tensor], None]) -> None:
    for layer in cache.layers:
        write(layer.keys)


def write_at(keys: Tensor) -> None:
    keys[:, :, 3:9] = 0.5


def write_in_a_view(keys: Tensor) -> None:
    keys.transpose(1, 2)[:, 3:9].fill_(0.5)


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("write", [write_at, write_in_a_view])
@pytest.mark.parametrize("setting", ["dca", *DYNAMIC])
def test_keys_that_were_overwritten_are_the_ones_that_count(
    setting: str, write: Callable[[Tensor], None], *, inference: bool
) -> None:
    model, ids = patched(setting), tiny.tokens(70)
    with torch.no_grad(), torch.inference_mode(inference):
        cache = warm(model, ids, 69)
        before = copy.deepcopy(cache)
        overwritten(cache, write)
        expected = pieces(model, ids[:, 69:], (1,), cache=rebuilt(cache))
        assert tiny.difference(pieces(model, ids[:, 69:], (1,), cache=before), expected) > 1e-2
        assert tiny.difference(pieces(model, ids[:, 69:], (1,), cache=cache), expected) < CACHED


def test_keys_put_back_by_hand_are_the_ones_that_count() -> None:
    model, ids, other = patched("ntk"), tiny.tokens(70), tiny.tokens(69, seed=4)
    cache, second = warm(model, ids, 69), warm(model, other, 69)
    kept = [(layer.keys, layer.values) for layer in cache.layers]
    replaced = [layer.keys for layer in second.layers]  # alive, so that only another identity tells
    expected = pieces(model, ids[:, 69:], (1,), cache=copy.deepcopy(cache))
    for layer, (keys, values) in zip(second.layers, kept, strict=True):
        layer.keys, layer.values = keys, values
    assert tiny.difference(pieces(model, ids[:, 69:], (1,), cache=second), expected) < CACHED
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        layer.keys, layer.values = keys, values
    assert tiny.difference(pieces(model, ids[:, 69:], (1,), cache=cache), expected) < CACHED
    assert len(replaced) == 2


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("setting", MAIN)
def test_a_mask_that_changes_for_cached_tokens_is_refused(setting: str, rows: int) -> None:
    # Positions count a row's tokens: cached keys would be taken for others than they were rotated to.
    model, ids, mask = patched(setting), tiny.tokens(76, rows), torch.ones(rows, 76, dtype=torch.int64)
    mask[0, :5] = 0  # of two rows the second is full, as all would be if the mask was forgotten
    cache = DynamicCache(config=model.config)
    pieces(model, ids, (66, 75), mask, cache=cache)
    others = torch.ones_like(mask)
    others[0, 70:75] = 0  # as many tokens, but others
    for changed in ({}, {"attention_mask": torch.ones_like(mask)}, {"attention_mask": others}):
        with pytest.raises(ctxext.UnsupportedModelError, match="attention_mask of the 75 cached tokens isn't the one"):
            step(model, ids[:, 75:], copy.deepcopy(cache) if rows == 1 else cache, **changed)
    with torch.no_grad():
        logits = step(model, ids[:, 75:], cache, attention_mask=mask)
    assert tiny.difference(logits[0, 0], alone(setting, "llama", ids[0], mask[0])[-1]) < CACHED


@pytest.mark.parametrize("setting", MAIN)
def test_a_cache_of_the_plain_model_is_refused(setting: str) -> None:
    model, ids = tiny.model(), tiny.tokens(80)
    cache = warm(model, ids, 73)
    ctxext.patch(model, SETTINGS[setting])
    with pytest.raises(ctxext.UnsupportedModelError, match="73 tokens that were not read under this patch"):
        step(model, ids[:, 73:74], cache)


@pytest.mark.parametrize("setting", MAIN)
def test_a_cache_made_by_hand_is_refused(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(80)
    cache = rebuilt(warm(model, ids, 73))
    delattr(cache.layers[0], interface._RECORD)
    with pytest.raises(ctxext.UnsupportedModelError, match="73 tokens that were not read under this patch"):
        step(model, ids[:, 73:74], cache)


@pytest.mark.parametrize(
    "methods",
    [
        (ctxext.DynamicNTK(step=16), ctxext.DynamicYaRN(step=16)),
        (ctxext.DynamicYaRN(step=16), ctxext.DynamicYaRN(step=16, factor=4)),
        (ctxext.DynamicNTK(step=16), ctxext.DynamicNTK(step=8, factor=3)),
        (ctxext.DCA(chunk_size=24, local_size=8), ctxext.DCA(chunk_size=24, local_size=4)),
    ],
    ids=["method", "factor", "step", "dca"],
)
def test_a_cache_of_other_settings_is_refused(methods: tuple[ctxext.Method, ctxext.Method]) -> None:
    model, ids = tiny.model(), tiny.tokens(80)
    ctxext.patch(model, methods[0])
    cache = warm(model, ids, 73)
    expected = pieces(model, ids[:, 73:74], (1,), cache=copy.deepcopy(cache))
    ctxext.patch(model, methods[1], replace=True)
    with pytest.raises(ctxext.UnsupportedModelError, match="73 tokens that were not read under this patch"):
        step(model, ids[:, 73:74], cache)
    ctxext.patch(model, methods[0], replace=True)
    assert torch.equal(pieces(model, ids[:, 73:74], (1,), cache=cache), expected)


@pytest.mark.parametrize("setting", MAIN)
def test_a_change_of_dtype_leaves_nothing_behind(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(90)
    wide = patched(setting, attention="naive").double()
    cache = warm(model, ids, 69)
    narrow = tiny.logits(model, ids)
    model.double()
    expected = tiny.logits(wide, ids, use_cache=False)
    # Cosines and sines of stock rotary embeddings stay fp32 within.
    assert tiny.difference(tiny.logits(model, ids), expected) < 1e-5
    logits = pieces(model, ids[:, 69:], (1, 2, 5, 21), cache=cache)
    assert tiny.difference(logits, expected[:, 69:]) < CACHED
    model.float()
    assert torch.equal(tiny.logits(model, ids), narrow)


class Text:
    """A cache, and the tokens that are in it."""

    def __init__(self, cache: Any, ids: Tensor, mask: Tensor) -> None:
        self.cache, self.ids, self.mask = cache, ids, mask

    def rearranged(self, rows: list[int]) -> None:
        self.ids, self.mask = self.ids[rows], self.mask[rows]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("setting", ["dca_yarn", "ntk", "yarn", "yarn_default", "ntk_step_1"])
def test_calls_in_any_order_give_what_a_fresh_model_gives(setting: str, seed: int) -> None:
    model, choose = patched(setting).requires_grad_(False), random.Random(seed)
    texts: list[Text] = []
    log: list[str] = []
    for turn in range(45):
        if len(texts) < 2:
            lengths = choose.choice([(66,), (70, 70), (66, 61, 1), (30, 75)])
            left = choose.random() < 0.6
            ids, mask = padded(lengths, left=left, seed=turn)
            text = Text(DynamicCache(config=model.config), ids, mask)
            logits = pieces(model, ids, (20, ids.shape[1]), mask, cache=text.cache)
            assert_rows_as_if_alone(logits, setting, "llama", ids, mask)
            texts.append(text)
        text = choose.choice(texts)
        batch, length = text.ids.shape
        action = choose.choice(
            ["append"] * 8 + ["crop", "fork", "layers", "reorder", "select", "repeat", "other", "drop"]
        )
        log.append(action)
        if action == "append":
            new = choose.choice([1, 1, 1, 1, 2, 6, 19])
            more, more_mask = tiny.tokens(new, batch, seed=100 + turn), torch.ones(batch, new, dtype=torch.int64)
            if batch > 1 and choose.random() < 0.1:
                more_mask[choose.randrange(batch)] = 0
            text.ids, text.mask = torch.cat((text.ids, more), dim=1), torch.cat((text.mask, more_mask), dim=1)
            whole = bool(text.mask.all()) and choose.random() < 0.5
            mode = choose.choice(list(MODES))
            log[-1] += f" {new} to {length} in {mode}"
            with MODES[mode]():
                logits = step(model, more, text.cache, **({} if whole else {"attention_mask": text.mask}))
            assert logits.isfinite().all(), log
            for i in range(batch):
                here = more_mask[i].bool()
                if here.any():
                    expected = alone(setting, "llama", text.ids[i], text.mask[i])[-int(here.sum()) :]
                    assert tiny.difference(logits[i, here], expected) < CACHED, log
            if length > 130:
                texts.remove(text)
        elif action == "crop":
            removed = choose.choice([1, 1, 2, 5, 20])
            text.cache.crop(-removed)
            text.ids, text.mask = text.ids[:, :-removed], text.mask[:, :-removed]
        elif action in ("fork", "layers"):
            twin = {"fork": copy.deepcopy, "layers": by_layers}[action](text.cache)
            texts.append(Text(twin, text.ids, text.mask))
        elif action == "reorder":
            rows = [choose.randrange(batch) for _ in range(batch)]
            text.cache.reorder_cache(torch.tensor(rows))
            text.rearranged(rows)
        elif action == "select" and batch > 1:
            rows = sorted(choose.sample(range(batch), batch - 1))
            text.cache.batch_select_indices(torch.tensor(rows))
            text.rearranged(rows)
        elif action == "repeat" and batch < 3:
            text.cache.batch_repeat_interleave(2)
            text.rearranged([i for i in range(batch) for _ in range(2)])
        elif action == "other":  # a pass without a cache, and a training step, in between
            ids = tiny.tokens(80, seed=turn)
            assert tiny.difference(tiny.logits(model, ids)[0], alone(setting, "llama", ids[0])) < CACHED
        elif action == "drop":
            texts.remove(text)


# 5. Gradients


SMALL = RopeSpec(10_000.0, 8, 16)
PARTITIONS: dict[str, ctxext.Method] = {
    "dca": ctxext.DCA(chunk_size=12, local_size=5),
    "dca_yarn": ctxext.DCA(chunk_size=12, local_size=5, frequencies=ctxext.YaRN(factor=2), temperature=0.4),
    "dca_smallest": ctxext.DCA(chunk_size=2, local_size=1),
    "ntk": ctxext.DynamicNTK(step=3),
    "yarn": ctxext.DynamicYaRN(step=5, factor=2),
}


def states(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def gappy(length: int) -> Tensor:
    """Ascending positions of which some are left out."""
    return torch.tensor(
        [position for position in range(4 * length) if position % 11 != 4 and position % 7 != 3][:length]
    )


@pytest.mark.parametrize("positions", [torch.arange, gappy], ids=["consecutive", "with gaps"])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (13, 37), (1, 29), (37, 38)])
@pytest.mark.parametrize("name", PARTITIONS)
def test_gradients_of_the_engine_are_those_of_dense_attention(
    name: str, queries: int, keys: int, heads: int, key_heads: int, positions: Callable[[int], Tensor]
) -> None:
    partition, where = PARTITIONS[name].partition(SMALL), positions(keys)
    shapes = ((2, heads, queries, 8), (2, key_heads, keys, 8), (2, key_heads, keys, 8), (2, heads, queries, 8))
    *leaves, grad = states(*shapes)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    blocks = partition.blocks(where, keys - queries)

    def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rotated = module_rotated(query, where[-queries:], partition), module_rotated(key, where, partition)
        return engine.attend(*rotated, value, blocks, 0.6)

    out, expected = fused(*leaves), dense_attention(*leaves, where, partition, 0.6)
    assert tiny.difference(out, expected) < 1e-6 * expected.abs().max()
    found, reference = (torch.autograd.grad(x, leaves, grad) for x in (out, expected))
    for gradient, wanted in zip(found, reference, strict=True):
        assert tiny.difference(gradient, wanted) < 1e-6 * wanted.abs().max()
    # A sum hands down a gradient without memory of its own.
    found, reference = (
        torch.autograd.grad(f(*leaves).sum(), leaves)
        for f in (fused, lambda *x: dense_attention(*x, where, partition, 0.6))
    )
    for gradient, wanted in zip(found, reference, strict=True):
        assert tiny.difference(gradient, wanted) < 1e-6 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_a_gradient_for_one_input_alone_is_the_same(which: int) -> None:
    partition, where = PARTITIONS["dca_yarn"].partition(SMALL), torch.arange(31)
    leaves = states((1, 4, 31, 8), (1, 2, 31, 8), (1, 2, 31, 8))
    blocks = partition.blocks(where, 0)
    everything = [leaf.clone().requires_grad_() for leaf in leaves]
    wanted = torch.autograd.grad(engine.attend(*everything, blocks, 0.4).square().sum(), everything)[which]
    leaves[which].requires_grad_()
    (found,) = torch.autograd.grad(engine.attend(*leaves, blocks, 0.4).square().sum(), leaves[which])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", PARTITIONS)
def test_gradcheck_passes(name: str) -> None:
    method = PARTITIONS[name]
    spec = RopeSpec(10_000.0, 4, 3) if not isinstance(method, ctxext.DCA) else RopeSpec(10_000.0, 4, 16)
    partition = method.partition(spec)
    blocks = partition.blocks(torch.arange(2, 11), 3)
    leaves = [leaf.requires_grad_() for leaf in states((1, 2, 6, 4), (1, 1, 9, 4), (1, 1, 9, 4))]
    # The kernel's own rounding is that of float64, but its sums over a row are in another order every time.
    assert torch.autograd.gradcheck(lambda *x: engine.attend(*x, blocks, 0.7), leaves, atol=1e-6)


def projection_gradients(model: Any, ids: Tensor, **inputs: Any) -> dict[str, Tensor]:
    mask = inputs.get("attention_mask")
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    model(ids, labels=labels, use_cache=False, **inputs).loss.backward()
    return {
        name: p.grad for name, p in model.named_parameters() if any(x in name for x in ("q_proj", "k_proj", "v_proj"))
    }


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert len(wanted) >= 6
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        assert tiny.difference(found[name], gradient) < 1e-4 * gradient.abs().max(), name


def inputs_for(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    if kind == "left-padded":
        ids, mask = padded((90, 20, 67))
        return ids, {"attention_mask": mask}
    ids = tiny.tokens(101, 2)
    if kind == "packed":
        documents = torch.cat([torch.arange(n) for n in (70, 3, 28)])
        return ids, {"position_ids": documents[None].expand(2, -1)}
    return ids, {}


@pytest.mark.parametrize("kind", ["plain", "left-padded", "packed"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("setting", MAIN)
def test_gradients_of_the_model_are_those_of_the_reference(setting: str, family: str, kind: str) -> None:
    ids, inputs = inputs_for(kind)
    found, wanted = (
        projection_gradients(patched(setting, family, attention=attention).train(), ids, **inputs)
        for attention in ("fused", "naive")
    )
    assert_same_gradients(found, wanted)


@pytest.mark.parametrize("kind", ["plain", "left-padded"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("setting", MAIN)
def test_gradient_checkpointing_changes_no_gradient(setting: str, kind: str, *, reentrant: bool) -> None:
    ids, inputs = inputs_for(kind)
    model = patched(setting).train()
    # The newer name came with Transformers 5.2x; the older one warns since.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = projection_gradients(model, ids, **inputs)
    assert_same_gradients(found, projection_gradients(patched(setting, attention="naive"), ids, **inputs))


@pytest.mark.parametrize("setting", MAIN)
def test_gradients_flow_through_a_cache(setting: str) -> None:
    model, whole, ids = patched(setting), patched(setting), tiny.tokens(90)
    cache = DynamicCache(config=model.config)
    outputs = [step(model, ids[:, a:b], cache) for a, b in ((0, 50), (50, 70), (70, 71), (71, 90))]
    torch.cat(outputs, dim=1).logsumexp(-1).sum().backward()
    whole(ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if "_proj" in name}
    assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, wanted)


class Largest(TorchDispatchMode):
    """The most elements that a tensor held which an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("name", ["dca", "dca_yarn", "ntk", "yarn"])
def test_no_tensor_grows_faster_than_the_length(name: str) -> None:
    method, heads, dim = PARTITIONS[name], 4, 8
    if not isinstance(method, ctxext.DCA):
        method = method.model_copy(update={"step": 100})
    for length in (300, 600):
        partition = method.partition(SMALL)
        leaves = [
            x.float().requires_grad_()
            for x in states((1, heads, length, dim), (1, 2, length, dim), (1, 2, length, dim))
        ]
        blocks = partition.blocks(torch.arange(length), 0)
        with Largest() as forward:
            out = engine.attend(*leaves, blocks, 0.3)
        grad = torch.ones_like(out)
        with Largest() as backward:
            out.backward(grad)
        for seen in (forward, backward):
            # Nothing larger than the queries themselves; scores would be 300 and 600 / 8 times that.
            assert 0 < seen.elements <= heads * dim * length


# 6. Kernels


ROOM = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""A few units in the last place of numbers around one: probabilities and results are both rounded to the dtype."""


@pytest.mark.parametrize("dtype", ROOM, ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(33, 33, True), (33, 33, False), (5, 70, False), (70, 3, False), (1, 1, True)]
)
def test_the_fused_kernel_is_plain_attention(
    queries: int, keys: int, heads: int, key_heads: int, dtype: torch.dtype, *, causal: bool
) -> None:
    shapes = ((2, heads, queries, 16), (2, key_heads, keys, 16), (2, key_heads, keys, 16), (2, heads, queries, 16))
    query, key, value, grad = states(*shapes, dtype=dtype)
    out, lse = kernels.forward(query, key, value, 0.25, causal=causal)
    plain_out, plain_lse = kernels.PLAIN.forward(query, key, value, 0.25, causal)
    scores = torch.einsum("bhtd,bhsd->bhts", query.double(), key.double().repeat_interleave(heads // key_heads, 1)) / 4
    if causal:
        scores = scores.masked_fill(torch.ones(queries, keys).triu(1).bool(), -math.inf)
    expected = scores.softmax(-1) @ value.double().repeat_interleave(heads // key_heads, 1)
    assert (out.dtype, out.shape) == (dtype, query.shape)
    assert (lse.dtype, lse.shape) == (torch.float64 if dtype == torch.float64 else torch.float32, query.shape[:3])
    for found, wanted in (
        (out, expected),
        (plain_out, expected),
        (lse, scores.logsumexp(-1)),
        (plain_lse, scores.logsumexp(-1)),
    ):
        assert tiny.difference(found, wanted) < ROOM[dtype] * max(1.0, float(wanted.abs().max()))

    # The log-sum-exp of more regions than this one comes as a slice of a larger tensor.
    spread = torch.stack((lse, lse), dim=-1)[..., 0]
    wide = torch.zeros(2, heads, queries + 7, dtype=lse.dtype)
    wide[:, :, 4 : 4 + queries] = lse
    wanted = kernels.PLAIN.backward(grad, query, key, value, plain_out, plain_lse, 0.25, causal)
    for sliced in (lse, wide[:, :, 4 : 4 + queries], spread):
        found = kernels.backward(grad, query, key, value, out, sliced, 0.25, causal=causal)
        for gradient, reference in zip(found, wanted, strict=True):
            assert gradient.shape == reference.shape
            assert tiny.difference(gradient, reference) < ROOM[dtype] * max(1.0, float(reference.abs().max()))


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_take_states_that_are_not_contiguous(*, causal: bool) -> None:
    query, key, value, grad = (
        x.transpose(1, 2) for x in states((2, 21, 4, 8), (2, 21, 2, 8), (2, 21, 2, 8), (2, 21, 4, 8))
    )
    tight = [x.contiguous() for x in (query, key, value, grad)]
    out, lse = kernels.forward(query, key, value, 0.3, causal=causal)
    wanted, wanted_lse = kernels.forward(*tight[:3], 0.3, causal=causal)
    assert tiny.difference(out, wanted) < 1e-12
    assert tiny.difference(lse, wanted_lse) < 1e-12
    found = kernels.backward(grad, query, key, value, out, lse, 0.3, causal=causal)
    reference = kernels.backward(tight[3], *tight[:3], wanted, wanted_lse, 0.3, causal=causal)
    assert max(tiny.difference(a, b) for a, b in zip(found, reference, strict=True)) < 1e-12


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [30.0, 120.0, 500.0, 3000.0])
@pytest.mark.parametrize("name", ["dca", "ntk", "yarn"])
def test_large_scores_stay_finite_and_right(name: str, size: float, sign: int) -> None:
    """Regions are merged whose log-sum-exps lie hundreds apart."""
    partition, where = PARTITIONS[name].partition(SMALL), torch.arange(40)
    query, key, value, grad = (x.float() for x in states((1, 2, 40, 8), (1, 1, 40, 8), (1, 1, 40, 8), (1, 2, 40, 8)))
    key = sign * key
    key[:, :, ::5] *= 4
    scale = size / float((query @ key.transpose(-1, -2)).abs().max())
    blocks = partition.blocks(where, 0)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = engine.attend(
        module_rotated(query, where, partition), module_rotated(key, where, partition), value, blocks, scale
    )
    found = torch.autograd.grad(out, leaves, grad)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = dense_attention(*wide, where, partition, scale)
    wanted = torch.autograd.grad(expected, wide, grad.double())
    # A score of this size is known to a few units in its last place, and a probability is relatively as uncertain.
    room = 1e-5 + 4 * size * 2**-20
    assert out.isfinite().all()
    assert tiny.difference(out, expected) < room
    # Where all probability is on one key, gradients vanish by cancellation: they are known relative to the terms.
    slope = scale * float((grad @ value.detach().transpose(-1, -2)).abs().max())
    terms = (
        slope * float(key.detach().abs().max()),
        slope * float(query.detach().abs().max()),
        float(grad.abs().max()),
    )
    for gradient, reference, term in zip(found, wanted, terms, strict=True):
        assert gradient.isfinite().all()
        assert tiny.difference(gradient, reference) < room * term


def test_regions_a_thousand_apart_are_merged_without_overflow() -> None:
    """All keys of the previous chunks point along the query, or against it."""
    partition, where = PARTITIONS["dca"].partition(SMALL), torch.arange(30)
    value = states((1, 1, 30, 8), dtype=torch.float32)[0]
    for first, second in ((1000.0, -1000.0), (-1000.0, 1000.0)):
        query, key = torch.ones(1, 1, 30, 8), torch.ones(1, 1, 30, 8)
        key[:, :, :20] *= first / 8
        key[:, :, 20:] *= second / 8
        # Bare of rotation, for the sake of the size.
        blocks = [block._replace(inv_freq=torch.zeros(4)) for block in partition.blocks(where, 0)]
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = engine.attend(*leaves, blocks, 1.0)
        scores = (query @ key.transpose(-1, -2)).double().masked_fill(torch.ones(30, 30).triu(1).bool(), -math.inf)
        # A log-sum-exp around 1000 is rounded to 2^-14.
        assert tiny.difference(out, scores.softmax(-1) @ value.double()) < 1e-4
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("name", PARTITIONS)
def test_bfloat16_is_float32_up_to_its_rounding(name: str) -> None:
    partition, where = PARTITIONS[name].partition(SMALL), torch.arange(45)
    query, key, value = states((2, 4, 45, 8), (2, 2, 45, 8), (2, 2, 45, 8), dtype=torch.bfloat16)
    blocks = partition.blocks(where, 0)
    out = engine.attend(query, key, value, blocks, 0.35)
    expected = engine.attend(query.float(), key.float(), value.float(), blocks, 0.35)
    assert out.dtype == torch.bfloat16
    # Rotated queries and keys are rounded (2^-9 each of a score up to about 8), and so are probabilities and results.
    size = float(value.float().abs().max())
    assert tiny.difference(out, expected) < (8 * 2 * 2**-9 + 2 * 2**-8) * size


@pytest.mark.parametrize("setting", MAIN)
def test_bfloat16_models_are_as_near_to_float32_as_plain_ones(setting: str) -> None:
    ids = tiny.tokens(101)
    errors = []
    for model in (tiny.model(initializer_range=0.05), patched(setting, initializer_range=0.05)):
        wide = tiny.logits(model, ids)
        narrow = tiny.logits(model.bfloat16(), ids)
        assert narrow.dtype == torch.bfloat16
        errors.append((narrow.float() - wide).norm() / wide.norm())
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize("setting", MAIN)
def test_autocast_trains_and_generates(setting: str) -> None:
    ids, errors = tiny.tokens(101), []
    for model in (tiny.model(initializer_range=0.05), patched(setting, initializer_range=0.05)):
        wide = tiny.logits(model, ids)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(ids, labels=ids, use_cache=False)
            model.generate(ids, max_new_tokens=3, do_sample=False)
        output.loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        errors.append(((output.logits.float() - wide).norm() / wide.norm()).item())
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize("setting", MAIN)
def test_autocast_may_come_and_go_between_steps(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(80)
    cache = DynamicCache(config=model.config)
    pieces(model, ids[:, :66], (66,), cache=cache)
    for i, on in enumerate((False, True, True, False, False, True, False)):
        expected_cache = rebuilt(cache)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            more = ids[:, 66 + i : 67 + i]
            found, expected = (pieces(model, more, (1,), cache=c) for c in (cache, expected_cache))
        assert tiny.difference(found, expected) < CACHED


# 7. What comes in


DOCUMENTS = (70, 1, 28, 66)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("setting", MAIN)
def test_packed_documents_are_as_if_alone(setting: str, family: str) -> None:
    model, ids = patched(setting, family), tiny.tokens(sum(DOCUMENTS), 2)
    position_ids = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    for positions in (position_ids, position_ids.expand(2, -1)):
        logits = tiny.logits(model, ids, position_ids=positions, use_cache=False)
        for i, (start, end) in itertools.product(
            range(2), itertools.pairwise(itertools.accumulate(DOCUMENTS, initial=0))
        ):
            assert tiny.difference(logits[i, start:end], alone(setting, family, ids[i, start:end])) < FORWARD


@pytest.mark.parametrize("setting", MAIN)
def test_rows_of_a_batch_may_be_packed_differently_and_padded(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(110, 2)
    positions = torch.stack(
        (
            torch.cat((torch.zeros(9), torch.arange(80), torch.arange(21))),
            torch.cat((torch.arange(100), torch.zeros(10))),
        )
    ).long()
    mask = torch.ones(2, 110, dtype=torch.int64)
    mask[0, :9] = mask[1, 100:] = 0
    logits = tiny.logits(model, ids, position_ids=positions, attention_mask=mask, use_cache=False)
    assert logits.isfinite().all()
    for i, start, end in ((0, 9, 89), (0, 89, 110), (1, 0, 100)):
        assert tiny.difference(logits[i, start:end], alone(setting, "llama", ids[i, start:end])) < FORWARD


@pytest.mark.parametrize("setting", MAIN)
def test_packed_documents_with_a_cache_are_refused(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(100)
    positions = torch.cat((torch.arange(60), torch.arange(40)))[None]
    for extra in ({}, {"use_cache": True}, {cache_name(model): DynamicCache(config=model.config), "use_cache": False}):
        with pytest.raises(ctxext.UnsupportedModelError, match="use_cache=False for packed documents"):
            model(ids, position_ids=positions, **extra)


@pytest.mark.parametrize("setting", MAIN)
def test_positions_with_gaps_are_the_reference_s(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(90, 2)
    plain = tiny.logits(model, ids)
    for positions in (gappy(90), torch.arange(90) + 1000, torch.arange(90) * 7):
        found, expected = (
            tiny.logits(m, ids, position_ids=positions[None], use_cache=False) for m in (model, dense(setting))
        )
        assert tiny.difference(found, expected) < FORWARD
        assert tiny.difference(found, plain) > 1e-2


@pytest.mark.parametrize("setting", MAIN)
def test_shifted_positions_with_a_cache_are_refused(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(80)
    for shifted in (torch.arange(80)[None] + 1, torch.arange(80)[None] * 2):
        with pytest.raises(ctxext.UnsupportedModelError, match="must count each row's tokens from 0"):
            model(ids, position_ids=shifted)
    cache = warm(model, ids, 70)
    for wrong in (69, 71, 0):
        with pytest.raises(ctxext.UnsupportedModelError, match="must count each row's tokens from 0"):
            step(model, ids[:, 70:71], cache, position_ids=torch.tensor([[wrong]]))


MASKS = {
    "four dimensions": (torch.ones(1, 1, 80, 80, dtype=torch.bool), "attention_mask of shape"),
    "four dimensions, additive": (torch.zeros(1, 1, 80, 80), "attention_mask of shape"),
    "one additive row for all queries": (torch.zeros(1, 1, 1, 80), "attention_mask"),
    "three dimensions": (torch.ones(1, 80, 80), "attention_mask of shape"),
    "too short": (torch.ones(1, 79), r"attention_mask has shape \(1, 79\)"),
    "of another batch": (torch.ones(2, 80), r"attention_mask has shape \(2, 80\)"),
    "no tensor": ([[1] * 80], "attention_mask of shape list"),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("setting", ["dca", "ntk"])
def test_masks_that_say_more_than_padding_are_refused(setting: str, mask: str) -> None:
    given_mask, text = MASKS[mask]
    with pytest.raises(ctxext.UnsupportedModelError, match=text):
        patched(setting)(tiny.tokens(80), attention_mask=given_mask)


@pytest.mark.parametrize("setting", MAIN)
def test_a_mask_for_the_new_tokens_only_is_refused(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(80)
    cache = warm(model, ids, 70)
    with pytest.raises(ctxext.UnsupportedModelError, match="70 of them in the cache"):
        step(model, ids[:, 70:71], cache, attention_mask=torch.ones(1, 1))


@pytest.mark.parametrize("setting", MAIN)
def test_negative_positions_are_refused(setting: str) -> None:
    with pytest.raises(ctxext.UnsupportedModelError, match="negative"):
        patched(setting)(tiny.tokens(20), position_ids=torch.arange(-5, 15)[None], use_cache=False)


@pytest.mark.parametrize("setting", MAIN)
def test_dropout_is_refused_in_training_only(setting: str) -> None:
    model, ids = patched(setting, attention_dropout=0.1), tiny.tokens(90)
    assert tiny.difference(tiny.logits(model, ids)[0], alone(setting, "llama", ids[0])) < FORWARD
    with pytest.raises(ctxext.UnsupportedModelError, match=r"attention_dropout 0\.1"):
        model.train()(ids)


@pytest.mark.parametrize("setting", MAIN)
def test_attention_weights_are_refused_unless_they_exist(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(20)
    with pytest.raises(ctxext.UnsupportedModelError, match="attention='naive'"):
        model(ids, output_attentions=True)
    with pytest.raises(ctxext.UnsupportedModelError, match="attention='naive'"):
        model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("setting", MAIN)
def test_attention_weights_of_the_reference_are_right(setting: str, family: str) -> None:
    model, (ids, mask) = patched(setting, family, attention="naive"), padded((90, 40, 67))
    with torch.no_grad():
        output = model(ids, attention_mask=mask, output_attentions=True)
        single = model(ids[1:2, 50:], output_attentions=True)
    assert len(output.attentions) == 2
    for weights, expected in zip(output.attentions, single.attentions, strict=True):
        assert weights.shape == (3, 4, 90, 90)
        # Sums of fp32 numbers that are below one.
        assert tiny.difference(weights.sum(-1), mask[:, None].expand(-1, 4, -1)) < 1e-5
        assert (weights * (1 - mask[:, None, None])).abs().max() == 0
        assert torch.equal(weights, weights.tril())
        assert tiny.difference(weights[1, :, 50:, 50:], expected[0]) < FORWARD


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("setting", MAIN)
def test_generate_returns_attention_weights_of_the_reference(setting: str, *, static: bool) -> None:
    model, (ids, mask) = patched(setting, attention="naive"), padded((70, 40))
    options = {"cache_implementation": "static", "disable_compile": True} if static else {}
    generated = greedy(model, ids, 4, attention_mask=mask, output_attentions=True, **options)
    assert len(generated.attentions) == 4
    for n, layers in enumerate(generated.attentions):
        for weights in layers:
            new = weights.shape[2]
            assert new == (70 if n == 0 else 1)
            queries = torch.cat((mask, mask.new_ones(2, n)), dim=1)[:, -new:]
            assert tiny.difference(weights.sum(-1), queries[:, None].expand(-1, 4, -1)) < 1e-5
            assert weights[1, :, :, :30].abs().max() == 0
            assert weights.shape[-1] >= 70 + n
            assert static or weights.shape[-1] == 70 + n


@pytest.mark.parametrize("setting", MAIN)
def test_the_decoder_takes_its_arguments_by_position_too(setting: str) -> None:
    model, (ids, mask) = patched(setting), padded((90, 30))
    expected = tiny.logits(model, ids, attention_mask=mask)
    with torch.no_grad():
        hidden = model.model(ids, mask, ranks(mask)).last_hidden_state
        assert tiny.difference(model.lm_head(hidden), expected) == 0
        cache = DynamicCache(config=model.config)
        hidden = torch.cat(
            (model.model(ids[:, :80], mask[:, :80], None, cache)[0], model.model(ids[:, 80:], mask, None, cache)[0]),
            dim=1,
        )
    assert tiny.difference(model.lm_head(hidden), expected) < CACHED


@pytest.mark.parametrize("setting", MAIN)
def test_embeddings_stand_in_for_ids(setting: str) -> None:
    model, (ids, mask) = patched(setting), padded((90, 30))
    embeds = model.get_input_embeddings()(ids)
    with torch.no_grad():
        logits = model(inputs_embeds=embeds, attention_mask=mask).logits
        assert torch.equal(logits, model(ids, attention_mask=mask).logits)
        assert torch.equal(
            model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=6, do_sample=False),
            model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)[:, 90:],
        )


def test_a_compiled_model_gives_the_same_logits() -> None:
    torch._dynamo.reset()
    model, ids = patched("ntk", num_hidden_layers=1), tiny.tokens(90)
    compiled, cache = torch.compile(model, backend="eager"), DynamicCache(config=model.config)
    inputs = {"use_cache": True, cache_name(model): cache}
    outputs = [tiny.logits(compiled, ids[:, a:b], **inputs) for a, b in ((0, 70), (70, 71), (71, 90))]
    assert tiny.difference(torch.cat(outputs, dim=1), tiny.logits(model, ids)) < CACHED
    torch._dynamo.reset()


def test_a_layer_called_without_its_decoder_is_an_error() -> None:
    model, hidden = patched(), torch.zeros(1, 4, 64)
    embeddings = model.model.rotary_emb(hidden, torch.arange(4)[None])
    with pytest.raises(ctxext.PatchError, match="without its decoder"):
        model.model.layers[0](hidden, position_embeddings=embeddings)


# 8. Rotation


@pytest.mark.parametrize("exact", [False, True])
def test_rotating_back_is_the_inverse(*, exact: bool) -> None:
    (x,) = states((2, 3, 50, 16))
    positions, inv_freq = torch.arange(50) * 977, SETTINGS["dca"].partition(SPEC).inv_freq
    turned = engine.rotate(x, positions, inv_freq, exact=exact)
    assert tiny.difference(turned, x) > 1
    assert tiny.difference(engine.rotate(turned, positions, inv_freq, back=True, exact=exact), x) < 1e-12
    gain = torch.rand(50) + 0.5
    both = engine.rotate(
        engine.rotate(x, positions, inv_freq, gain, exact=exact), positions, inv_freq, gain, back=True, exact=exact
    )
    assert tiny.difference(both, x * gain.double()[:, None] ** 2) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rotation_is_exact_at_a_million(dtype: torch.dtype) -> None:
    (x,) = states((1, 2, 40, 16), dtype=dtype)
    positions, inv_freq = torch.arange(1_000_000, 1_000_040), SETTINGS["dca"].partition(SPEC).inv_freq
    angles = positions[:, None].double() * inv_freq.double()
    turn = torch.polar(torch.ones_like(angles), angles)
    z = torch.complex(*(half.contiguous() for half in x.double().chunk(2, dim=-1))) * turn
    expected = torch.cat((z.real, z.imag), dim=-1)
    found = engine.rotate(x, positions, inv_freq)
    assert found.dtype == dtype
    # The product, the cosine and the result are each rounded to the dtype, fp32 at least.
    room = {torch.float64: 1e-9, torch.float32: 4e-6, torch.bfloat16: 2**-8 * float(expected.abs().max())}[dtype]
    assert tiny.difference(found, expected) < room


def test_rotation_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    (x,) = states((2, 3, 50, 16))
    positions, inv_freq, gain = torch.arange(50) * 31, SETTINGS["dca"].partition(SPEC).inv_freq, torch.rand(50)
    whole = engine.rotate(x, positions, inv_freq, gain)
    for size in (1, 700):
        monkeypatch.setattr(engine, "ROTATED", size)
        assert torch.equal(engine.rotate(x, positions, inv_freq, gain), whole)


def test_a_temperature_is_not_rounded_to_the_dtype_of_the_queries() -> None:
    # In bfloat16 1.02 would be 1.0234375, and the result 102.5.
    query = torch.full((1, 1, 4, 8), 100.0, dtype=torch.bfloat16)
    block = Block(slice(0, 4), (), torch.ones(4), gain=torch.full((4,), 1.02))
    assert torch.equal(engine._turned(query, None, block), torch.full_like(query, 102.0))
