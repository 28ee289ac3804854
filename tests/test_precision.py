"""Frequencies stay exact in every dtype, on every device and whatever the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ctxext
import tiny
from ctxext import patching
from patches import ATTENTION, METHODS, YARN, gradients, patched

pytestmark = [
    pytest.mark.usefixtures("strictly"),
    pytest.mark.filterwarnings("error:.*deprecated"),
    # PyTorch's own compiler still uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_frequencies_stay_exact_through_casts(cast: str, when: str) -> None:
    model = tiny.model(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    if when == "before":
        getattr(model, cast)()
    ctxext.patch(model, ctxext.PI(factor=4))
    if when == "after":
        getattr(model, cast)()
    exact = torch.tensor([1e6 ** (-i / 8) / 4 for i in range(8)], dtype=torch.float64)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.double(), exact, rtol=1e-6, atol=0)
    assert ctxext.inspect(model).consistent


def test_a_cast_while_patched_does_not_reach_the_original_module() -> None:
    model = patched()
    model.bfloat16().float()
    ctxext.unpatch(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, tiny.model().model.rotary_emb.inv_freq)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_loaded_in_another_dtype_keeps_exact_frequencies(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    ctxext.patch(model, YARN)
    assert torch.equal(model.model.rotary_emb.inv_freq, patched().model.rotary_emb.inv_freq)
    # What attention gets, and what it gives back.
    seen: list[torch.dtype] = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend(part.dtype for part in kwargs["position_embeddings"]), with_kwargs=True
    )
    attention.register_forward_hook(lambda module, args, output: seen.append(output[0].dtype))
    tiny.logits(model, tiny.tokens(101))
    assert seen == [dtype] * 3


def test_position_100_000_is_right_in_bf16() -> None:
    model = tiny.model(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).bfloat16()
    ctxext.patch(model, ctxext.PI(factor=4))
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = model.model.rotary_emb(torch.zeros(1, 3, 64).bfloat16(), torch.tensor([[99_999, 100_000, 131_071]]))
    angles = torch.tensor([[99_999], [100_000], [131_071]]).double() * 1e6 ** (-torch.arange(8).double() / 8) / 4
    # bf16 holds a cosine to 0.004, fp32 such an angle to 0.004; frequencies rounded to bf16 would be off by 2.
    torch.testing.assert_close(cos[0, :, :8].double(), angles.cos(), rtol=0, atol=0.01)
    torch.testing.assert_close(sin[0, :, :8].double(), angles.sin(), rtol=0, atol=0.01)


def test_one_token_far_out_needs_no_table() -> None:
    model, ids = patched(), tiny.tokens(1)
    # A lone token sees only itself, so its position can't matter, and no table can be too short.
    far = tiny.logits(model, ids, position_ids=torch.tensor([[100_000]]))
    assert tiny.difference(far, tiny.logits(model, ids)) < 1e-4


def test_autocast_does_not_reach_the_rotation() -> None:
    model = patched()
    inputs = torch.zeros(1, 1, 64), torch.tensor([[100_003]])
    outside = model.model.rotary_emb(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        inside = model.model.rotary_emb(*inputs)
    assert torch.equal(torch.stack(inside), torch.stack(outside))


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_patched_on_the_meta_device_is_right_once_filled(method: str, assign: bool) -> None:
    ids, source = tiny.tokens(101), tiny.model()
    with torch.device("meta"):
        model = tiny.model()
    ctxext.patch(model, tiny.METHODS[method])
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(tiny.logits(model, ids), tiny.logits(patched(method), ids))
    assert ctxext.inspect(model).consistent
    ctxext.unpatch(model)
    assert torch.equal(tiny.logits(model, ids), tiny.logits(source, ids))


@pytest.mark.parametrize("method", METHODS)
def test_patching_does_not_depend_on_the_default_device(method: str) -> None:
    model = tiny.model()
    with torch.device("meta"):
        ctxext.patch(model, tiny.METHODS[method])
    assert torch.equal(tiny.logits(model, tiny.tokens(101)), tiny.logits(patched(method), tiny.tokens(101)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_patching_does_not_depend_on_the_default_dtype(method: str, dtype: torch.dtype) -> None:
    model = tiny.model()
    torch.set_default_dtype(dtype)
    try:
        ctxext.patch(model, tiny.METHODS[method])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(tiny.logits(model, tiny.tokens(101)), tiny.logits(patched(method), tiny.tokens(101)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_running_does_not_depend_on_the_default_dtype(method: str, dtype: torch.dtype) -> None:
    model, ids = patched(method), tiny.tokens(101)
    expected = tiny.logits(model, ids)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(tiny.logits(model, ids), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ["yarn", *ATTENTION])
def test_a_model_patched_without_gradients_can_be_trained(method: str, mode: Any) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    with mode():
        ctxext.patch(model, tiny.METHODS[method])
    expected = gradients(patched(method), ids)
    for name, gradient in gradients(model, ids).items():
        assert torch.equal(gradient, expected[name]), name


def test_patching_survives_frameworks_that_build_floating_ranges_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: patched(name).model.rotary_emb.inv_freq for name in METHODS}
    models = {name: tiny.model() for name in METHODS}
    arange = torch.arange

    def downcasting(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = arange(*args, **kwargs)
        return result.bfloat16() if result.is_floating_point() else result

    # DeepSpeed's zero.Init does this. Transformers itself then computes other frequencies, which is not at issue.
    monkeypatch.setattr(patching, "_prove", lambda patch: None)
    monkeypatch.setattr(patching, "_check_live_matches_config", lambda rotary, config: None)
    monkeypatch.setattr(torch, "arange", downcasting)
    for name, model in models.items():
        ctxext.patch(model, tiny.METHODS[name])
        assert torch.equal(model.model.rotary_emb.inv_freq, expected[name]), name
