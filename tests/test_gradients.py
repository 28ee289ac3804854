"""Gradients of the engine are those of dense attention, and its memory grows with the length only."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from live import LiveBytes
from packaging.version import Version
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import attending
import ctxext
import tiny
from attending import (
    MAIN,
    PARTITIONS,
    SMALL,
    cache_name,
    dense_attention,
    gappy,
    module_rotated,
    padded,
    patched,
    states,
    step,
)
from ctxext.attention import engine
from ctxext.rope import RopeSpec

pytestmark = attending.MARKS


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
    spec = RopeSpec(10_000.0, 4, 3 if name in ("ntk", "yarn", "yarn_log") else 16)
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


@pytest.mark.parametrize("setting", MAIN)
def test_a_cache_that_checkpointing_would_leave_out_is_refused(setting: str) -> None:
    model, ids = patched(setting).train(), tiny.tokens(90)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        step(model, ids[:, :50], cache)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    with pytest.raises(ctxext.UnsupportedModelError, match="keys of 40 tokens where there are 90: Transformers leaves"):
        step(model, ids[:, 50:], cache)
    # An empty one is only left out, and without gradients a cache is used, and goes on.
    expected = tiny.logits(patched(setting), ids)
    assert tiny.difference(step(model, ids, DynamicCache()), expected) < 1e-4
    if Version(version("transformers")) >= Version("5.20"):
        with torch.no_grad():
            first = model(ids[:, :50], use_cache=True)
            logits = step(model, ids[:, 50:], getattr(first, cache_name(model), None) or first.past_key_values)
        assert tiny.difference(logits, expected[:, 50:]) < 2e-4


class Largest(TorchDispatchMode):
    """The most elements that a tensor held which an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("name", ["dca", "dca_yarn", "ntk", "yarn", "self_extend", "leaky", "streaming"])
def test_what_the_way_back_holds_at_once_grows_like_the_length(name: str) -> None:
    method = PARTITIONS[name]
    if name in ("ntk", "yarn"):
        method = method.model_copy(update={"step": 25})  # many steps, each with rotated keys of its own
    peaks = []
    for length in (400, 1600):
        shapes = (1, 4, length, 8), (1, 2, length, 8), (1, 2, length, 8)
        leaves = [x.float().requires_grad_() for x in states(*shapes)]
        blocks = method.partition(SMALL).blocks(torch.arange(length), 0)
        parts = [(block.inv_freq, block.key_turn, block.gain, *(r.turn for r in block.regions)) for block in blocks]
        held = [x for part in parts for x in part if x is not None]
        out = engine.attend(*leaves, blocks, 0.3)
        with LiveBytes([*leaves, out, *held]) as live:
            out.backward(torch.ones_like(out))
        peaks.append(live.peak)
    assert peaks[1] < 1.2 * 4 * peaks[0]


@pytest.mark.parametrize("name", ["dca", "dca_yarn", "ntk", "yarn", "self_extend", "leaky", "streaming"])
def test_no_tensor_grows_faster_than_the_length(name: str) -> None:
    method, heads, dim = PARTITIONS[name], 4, 8
    if name in ("ntk", "yarn"):
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
