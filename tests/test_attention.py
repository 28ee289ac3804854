"""The engine against a reference written out in full; its kernels and rotations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import attending
import ctxext
import tiny
from attending import (
    CACHED,
    FORWARD,
    MAIN,
    PARTITIONS,
    SETTINGS,
    SMALL,
    SPEC,
    L,
    borders,
    dense,
    dense_attention,
    module_rotated,
    pairwise_attention,
    patched,
    pieces,
    rebuilt,
    states,
)
from ctxext.attention import engine, kernels, naive
from ctxext.attention.partition import Block

pytestmark = attending.MARKS


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
    for key_heads in (2, 1):
        heads = {"num_key_value_heads": key_heads}
        model, reference = patched(setting, family, **heads), patched(setting, family, attention="naive", **heads)
        expected = tiny.logits(reference, ids, use_cache=False)
        for length in (L + 3, 2 * L + 20):
            assert tiny.difference(tiny.logits(model, ids[:, :length]), expected[:, :length]) < room
    ctxext.unpatch(model)
    assert tiny.difference(tiny.logits(model, ids), expected) > 1e-2


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_kernel_is_trusted_only_if_it_gives_plain_attentions_results(dtype: torch.dtype) -> None:
    def in_powers_of_two(*call: Any) -> tuple[Tensor, Tensor]:
        out, lse = kernels.CPU.forward(*call)
        return out, lse / math.log(2)

    def scaled_twice(*call: Any) -> tuple[Tensor, ...]:
        query, *rest = kernels.CPU.backward(*call)
        return query * 1.1, *rest

    def agrees(forward: Any, backward: Any) -> bool:
        return kernels._agrees_with_plain(forward, backward, "cpu", dtype, 64)

    assert agrees(kernels.CPU.forward, kernels.CPU.backward)
    assert not agrees(in_powers_of_two, kernels.PLAIN.backward)
    assert not agrees(kernels.CPU.forward, scaled_twice)


def test_kernels_get_a_log_sum_exp_that_is_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
        assert all(lse.is_contiguous() for lse in call[5:6])
        grads: tuple[Tensor, Tensor, Tensor] = kernels.CPU.backward(*call)
        return grads

    monkeypatch.setattr(kernels, "_kernel", lambda *_: kernels.Kernel(kernels.CPU.forward, backward))
    leaves = [x.float().requires_grad_() for x in states((2, 4, 60, 8), (2, 2, 60, 8), (2, 2, 60, 8))]
    engine.attend(*leaves, PARTITIONS["dca"].partition(SMALL).blocks(torch.arange(60), 0), 0.3).sum().backward()


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
