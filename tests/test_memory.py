"""Memory worked out from sizes is what passes of every architecture really hold, counted tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from live import LiveBytes
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

import ctxext
import tiny
from ctxext import loss, memory
from ctxext.loss import summed_loss

LENGTH = 256
RANK = 2
# Proportions of real models: layers that outweigh the embeddings, and an MLP wider than the hidden states.
SHAPE = {"num_hidden_layers": 3, "intermediate_size": 160, "vocab_size": 384}


@pytest.fixture(autouse=True)
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "SLICE_LOGITS", 2**14)
    monkeypatch.setattr(memory, "SLICE_LOGITS", 2**14)


def skip_old_experts(family: str) -> None:
    if ("moe" in family or family == "mixtral") and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("earlier releases hold more while they sort tokens by expert")


def live(model: Any, ids: torch.Tensor, run: Any) -> int:
    tensors = [ids, *model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    with LiveBytes(tensors) as count:
        run()
    return count.peak


def passing(held: memory.Memory) -> int:
    """What a pass adds to what is there before it."""
    return held.cache + held.activations + held.logits


def given(batch: int, dtype: torch.dtype) -> memory.Input:
    return memory.Input(LENGTH, batch, dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_inference_holds_what_is_foreseen(family: str, dtype: torch.dtype) -> None:
    skip_old_experts(family)
    model = tiny.model(family, **SHAPE).to(dtype)
    ids = tiny.tokens(LENGTH, batch=2)
    sizes = memory.sizes(model)
    tiny.logits(model, ids)  # what is made once, is made here
    last = live(model, ids, lambda: tiny.logits(model, ids, logits_to_keep=1))
    whole = live(model, ids, lambda: tiny.logits(model, ids))
    assert passing(memory.prefill(sizes, given(2, dtype))) == pytest.approx(last, rel=0.1)
    assert passing(memory.all_logits(sizes, given(2, dtype))) == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bf16", "LoRA", "LoRA in bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_moe", "mixtral"])
def test_a_training_step_holds_what_is_foreseen(family: str, kind: str, checkpointing: bool, labels: bool) -> None:
    skip_old_experts(family)
    bf16, rank = "bf16" in kind, RANK if "LoRA" in kind else 0
    dtype = torch.bfloat16 if kind == "LoRA in bf16" else torch.float32
    base = tiny.model(family, **SHAPE).to(dtype).train()
    sizes = memory.sizes(base)
    if checkpointing:
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # renamed during 5.x
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(base, LoraConfig(r=rank, target_modules=names)) if rank else base
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    ids = tiny.tokens(LENGTH, batch=2)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if labels:
                value = model(input_ids=ids, labels=ids, use_cache=False).loss
            else:
                value = summed_loss(base, ids, ids, torch.arange(LENGTH)[None])
        value.backward()

    options = {"bf16": bf16, "lora_rank": rank, "checkpointing": checkpointing, "sliced_loss": not labels}
    foreseen = memory.training(sizes, given(2, dtype), **options)
    # A plan never says less than what the optimiser may need after the pass.
    measured = max(live(model, ids, step), foreseen.states // 3)
    assert passing(foreseen) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_adapters_are_counted(family: str) -> None:
    model = tiny.model(family)
    rows = memory.sizes(model).adapter_rows
    peft = get_peft_model(model, LoraConfig(r=RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    assert RANK * rows == sum(p.numel() for p in peft.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["yarn", "dca", "dynamic_yarn"])
def test_methods_that_change_attention_add_nothing_to_a_pass(name: str) -> None:
    model, ids = tiny.model(**SHAPE), tiny.tokens(LENGTH)
    foreseen = passing(memory.prefill(memory.sizes(model), given(1, torch.float32)))
    with ctxext.patch(model, tiny.METHODS[name]):
        tiny.logits(model, ids)
        measured = live(model, ids, lambda: tiny.logits(model, ids, logits_to_keep=1))
    assert measured == pytest.approx(foreseen, rel=0.15)


@pytest.mark.parametrize("name", ["yarn", "dca", "dynamic_ntk"])
def test_decoding_keeps_the_cache_and_for_dynamic_methods_half_of_it_again(name: str) -> None:
    model, ids = tiny.model(num_hidden_layers=3), tiny.tokens(2048)
    with ctxext.patch(model, tiny.METHODS[name]):
        cache = DynamicCache(config=model.config)
        count = LiveBytes([*model.parameters(), ids])
        with count:
            tiny.in_pieces(model, ids, [1024, 2047, 2048], cache)
    rotated = name.startswith("dynamic")
    foreseen = memory.decode(memory.sizes(model), memory.Input(2048, 1, 4), rotated_keys=rotated)
    assert count.now == pytest.approx(foreseen.cache, rel=0.1)


@pytest.mark.parametrize(("family", "changes"), [("mistral", {}), ("qwen2", {"use_sliding_window": True})])
def test_layers_with_a_sliding_window_keep_no_more_than_the_window(family: str, changes: dict[str, Any]) -> None:
    layers = {"qwen2": {"layer_types": ["full_attention", "sliding_attention"]}}.get(family, {})
    model = tiny.model(family, sliding_window=32, **changes, **layers)
    cache = DynamicCache(config=model.config)
    tiny.in_pieces(model, tiny.tokens(LENGTH), [LENGTH - 1, LENGTH], cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert memory.cache_bytes(memory.sizes(model), given(1, torch.float32)) == held


def test_a_sliding_window_costs_a_mask_that_grows_with_the_square() -> None:
    model, ids = tiny.model("mistral", sliding_window=32, **SHAPE), tiny.tokens(1024)
    tiny.logits(model, ids)
    measured = live(model, ids, lambda: tiny.logits(model, ids, logits_to_keep=1))
    foreseen = passing(memory.prefill(memory.sizes(model), memory.Input(1024, 1, 4)))
    assert foreseen == pytest.approx(measured, rel=0.25)
