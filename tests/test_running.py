"""Patched models in every way of running: attention, caches, batches, generation, compilation."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import ctxext
import tiny
from patches import ATTENTION, METHODS, gradients, greedy, native, patched

pytestmark = [
    pytest.mark.usefixtures("strictly"),
    pytest.mark.filterwarnings("error:.*deprecated"),
    # PyTorch's own compiler still uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


def attending(method: str, attention: str) -> PreTrainedModel:
    """A patched model on one of the ways to compute attention that its method has."""
    model, settings = tiny.model(), tiny.METHODS[method]
    if not settings.changes_attention:
        ctxext.patch(model, settings)
        model.set_attn_implementation(attention)
    else:
        ctxext.patch(model, type(settings)(**{**dict(settings), "attention": attention}))
    return model


WAYS = [(method, way) for method in tiny.STATIC for way in ("sdpa", "eager")]
WAYS += [(method, way) for method in ATTENTION for way in ("fused", "naive")]


def checkpointing(model: PreTrainedModel) -> None:
    # The newer name came with Transformers 5.2x; the older one warns since.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("method", tiny.STATIC)
def test_eager_attention_and_sdpa_agree(method: str, family: str) -> None:
    model, ids = patched(method, family), tiny.tokens(101)
    sdpa = tiny.logits(model, ids)
    model.set_attn_implementation("eager")
    assert tiny.difference(tiny.logits(model, ids), sdpa) < 1e-4


@pytest.mark.slow  # compiles a kernel with a C++ compiler
def test_flex_attention_agrees() -> None:
    model, ids = patched(), tiny.tokens(101)
    sdpa = tiny.logits(model, ids)
    model.set_attn_implementation("flex_attention")
    assert tiny.difference(tiny.logits(model, ids), sdpa) < 1e-4


def test_the_softmax_scale_is_untouched_and_cosine_and_sine_carry_the_factor_once() -> None:
    model = patched()
    assert all(layer.self_attn.scaling == 16**-0.5 for layer in model.model.layers)
    cos, sin = model.model.rotary_emb(torch.zeros(1, 50, 64), torch.arange(50)[None])
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, (0.1 * math.log(4) + 1) ** 2))


def test_static_yarn_acts_on_short_input() -> None:
    ids = tiny.tokens(16)
    assert tiny.difference(tiny.logits(patched(), ids), tiny.logits(tiny.model(), ids)) > 1e-2


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_pieces_through_a_cache_equal_a_full_forward(method: str, family: str) -> None:
    model, ids = patched(method, family), tiny.tokens(101)
    ends = [20, 63, 64, 65, 66, 90, 101]
    pieces = tiny.in_pieces(model, ids, ends, DynamicCache(config=model.config))
    assert tiny.difference(pieces, tiny.logits(model, ids)) < 2e-4  # logits of up to 15, kernels of other shapes


@pytest.mark.parametrize("method", METHODS)
def test_decoding_through_a_static_cache_equals_a_full_forward(method: str) -> None:
    model, ids = patched(method), tiny.tokens(101)
    pieces = tiny.in_pieces(model, ids, [50, *range(51, 102)], StaticCache(config=model.config, max_cache_len=128))
    assert tiny.difference(pieces, tiny.logits(model, ids)) < 2e-4


@pytest.mark.parametrize("positions", [True, False], ids=["with position_ids", "without position_ids"])
@pytest.mark.parametrize(("method", "attention"), WAYS)
def test_a_left_padded_row_equals_the_row_alone(method: str, attention: str, positions: bool) -> None:
    model = attending(method, attention)
    long, short = tiny.tokens(150, seed=2), tiny.tokens(30, seed=3)
    ids = torch.cat((long, torch.cat((torch.zeros(1, 120, dtype=torch.long), short), dim=1)))
    mask = torch.ones_like(ids)
    mask[1, :120] = 0
    inputs = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else {}
    batch = tiny.logits(model, ids, attention_mask=mask, **inputs)
    assert tiny.difference(batch[0], tiny.logits(model, long)[0]) < 1e-4
    # Stock attention then shifts positions by 120, and every angle by as much; fp32 rounds those a little differently.
    assert tiny.difference(batch[1, 120:], tiny.logits(model, short)[0]) < (
        5e-4 if method in tiny.STATIC and not positions else 1e-4
    )


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_a_batch_without_masks_equal_the_rows_alone(method: str) -> None:
    model, ids = patched(method), tiny.tokens(101, batch=3)
    batch = tiny.logits(model, ids)
    for row in range(3):
        assert tiny.difference(batch[row], tiny.logits(model, ids[row : row + 1])[0]) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_packed_documents_equal_the_documents_alone(method: str) -> None:
    model, first, second = patched(method), tiny.tokens(40, seed=2), tiny.tokens(80, seed=3)
    positions = torch.cat((torch.arange(40), torch.arange(80)))[None]
    packed = tiny.logits(model, torch.cat((first, second), dim=1), position_ids=positions, use_cache=False)
    assert tiny.difference(packed[:, :40], tiny.logits(model, first)) < 1e-4
    assert tiny.difference(packed[:, 40:], tiny.logits(model, second)) < 1e-4


def test_a_forward_does_not_depend_on_earlier_ones() -> None:
    model, ids = patched("longrope"), tiny.tokens(20)
    first = tiny.logits(model, ids)
    tiny.logits(model, tiny.tokens(300))
    assert torch.equal(tiny.logits(model, ids), first)


@pytest.mark.parametrize("method", METHODS)
def test_generation_with_and_without_caches_gives_the_same_tokens(method: str) -> None:
    reference = native(method) if method in tiny.STATIC else attending(method, "naive")
    expected = greedy(reference, use_cache=False)
    assert torch.equal(greedy(patched(method)), expected)
    assert torch.equal(greedy(patched(method), cache_implementation="static", disable_compile=True), expected)


@pytest.mark.parametrize("method", METHODS)
def test_assisted_generation_gives_the_same_tokens(method: str) -> None:
    assert torch.equal(greedy(patched(method), assistant_model=tiny.model(seed=1)), greedy(patched(method)))


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("method", METHODS)
def test_recomputation_sees_the_same_frequencies(method: str, family: str) -> None:
    ids = tiny.tokens(101)
    expected = gradients(patched(method, family).train(), ids)
    model = patched(method, family).train()
    checkpointing(model)
    for name, gradient in gradients(model, ids).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_patched_model_compiles_as_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    model, ids = patched(num_hidden_layers=1), tiny.tokens(101)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    # Fused kernels sum in another order.
    assert tiny.difference(tiny.logits(compiled, ids), tiny.logits(model, ids)) < (
        1e-3 if backend == "inductor" else 1e-5
    )
