"""Models inside the wrappers of PEFT, PyTorch and accelerate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from accelerate import Accelerator, dispatch_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ctxext
import tiny

pytestmark = [
    pytest.mark.usefixtures("strictly"),
    pytest.mark.filterwarnings("error:.*deprecated"),
    # PEFT still asks recent releases of Transformers by an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    # Compiling DDP leaves its broadcast out of the graph.
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]

YARN = tiny.METHODS["yarn"]
EITHER = ["yarn", "dca"]
"""A static method, and one that changes attention."""


@pytest.fixture(autouse=True)
def _compiled_afresh() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("gloo") / "init"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def small() -> Any:
    """One layer, because a compiler traces each."""
    return tiny.model(num_hidden_layers=1)


def with_lora(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    # Weights at random, because an adapter that starts at zero changes nothing.
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, settings).eval()


def with_prompt(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def prepared(model: nn.Module) -> Any:
    return Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model, evaluation_mode=True)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "peft lora": with_lora,
    "peft prompt": with_prompt,
    "ddp": DistributedDataParallel,
    "data parallel": nn.DataParallel,
    "compile": compiled,
    "compile in place": compiled_in_place,
    "accelerator": prepared,
    "compile of lora": lambda model: compiled(with_lora(model)),
    "ddp of lora": lambda model: DistributedDataParallel(with_lora(model)),
    "ddp of compile": lambda model: DistributedDataParallel(compiled(model)),
    "compile of ddp": lambda model: compiled(DistributedDataParallel(model)),
}


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize(
    ("method", "wrapper", "by"),
    [("yarn", wrapper, "handle") for wrapper in WRAPPERS]
    + [("yarn", wrapper, by) for wrapper in ("peft lora", "ddp", "compile") for by in ("wrapper", "model")]
    + [("dca", wrapper, "handle") for wrapper in WRAPPERS if "compile" not in wrapper]
    # A compiler traces around changed attention, which takes it seconds.
    + [("dca", "compile of ddp", "handle"), ("dca", "ddp", "wrapper"), ("dca", "peft lora", "model")],
)
def test_a_wrapped_model_is_patched_inside_its_wrapper_and_restored(method: str, wrapper: str, by: str) -> None:
    model, ids = small(), tiny.tokens(101)
    wrapped = WRAPPERS[wrapper](model)
    config, plain = model.config, tiny.logits(wrapped, ids)
    handle = ctxext.patch(wrapped, tiny.METHODS[method])
    assert handle.model is model
    assert tiny.difference(tiny.logits(wrapped, ids), plain) > 1e-2
    assert ctxext.inspect(wrapped).consistent
    assert ctxext.inspect(wrapped).method["name"] == method
    {"handle": handle.remove, "wrapper": lambda: ctxext.unpatch(wrapped), "model": lambda: ctxext.unpatch(model)}[by]()
    assert torch.equal(tiny.logits(wrapped, ids), plain)
    assert model.config is config
    assert getattr(wrapped, "config", config) is config


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("wrapper", [wrapper for wrapper in WRAPPERS if " of " not in wrapper])
@pytest.mark.parametrize("method", EITHER)
def test_wrapping_and_patching_may_come_in_either_order(method: str, wrapper: str) -> None:
    ids = tiny.tokens(101)
    wrapped_first = WRAPPERS[wrapper](small())
    ctxext.patch(wrapped_first, tiny.METHODS[method])
    model = small()
    ctxext.patch(model, tiny.METHODS[method])
    patched_first = WRAPPERS[wrapper](model)
    # bf16 under the accelerator, and compiled graphs, still do the same arithmetic.
    assert torch.equal(tiny.logits(patched_first, ids), tiny.logits(wrapped_first, ids))
    with pytest.raises(ctxext.PatchError, match="already patched"):
        ctxext.patch(patched_first, YARN)


@pytest.mark.parametrize("method", EITHER)
def test_lora_weights_act_on_a_patched_model_and_can_be_switched_off(method: str) -> None:
    ids = tiny.tokens(101)
    model = with_lora(small())
    ctxext.patch(model, tiny.METHODS[method])
    extended = tiny.logits(model, ids)
    bare = small()
    ctxext.patch(bare, tiny.METHODS[method])
    with model.disable_adapter():
        assert torch.equal(tiny.logits(model, ids), tiny.logits(bare, ids))
    assert tiny.difference(extended, tiny.logits(bare, ids)) > 1e-2


@pytest.mark.parametrize("method", EITHER)
def test_only_lora_weights_are_trained_on_a_patched_model(method: str) -> None:
    ids = tiny.tokens(101)
    model = with_lora(small())
    ctxext.patch(model, tiny.METHODS[method])
    model(ids, labels=ids, use_cache=False).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("method", EITHER)
def test_a_merged_adapter_leaves_the_patch_on(method: str) -> None:
    ids = tiny.tokens(101)
    model = with_lora(small())
    ctxext.patch(model, tiny.METHODS[method])
    extended = tiny.logits(model, ids)
    merged = model.merge_and_unload()
    assert ctxext.inspect(merged).method["name"] == method
    assert ctxext.inspect(merged).consistent
    assert tiny.difference(tiny.logits(merged, ids), extended) < 1e-3  # weights were added in another order


@pytest.mark.parametrize("method", EITHER)
def test_a_copy_of_a_wrapped_model_is_independent(method: str) -> None:
    ids = tiny.tokens(101)
    model = with_lora(small())
    plain = tiny.logits(model, ids)
    ctxext.patch(model, tiny.METHODS[method])
    twin = copy.deepcopy(model)
    ctxext.unpatch(twin)
    assert torch.equal(tiny.logits(twin, ids), plain)
    assert tiny.difference(tiny.logits(model, ids), plain) > 1e-2


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("steps", [0, 1], ids=["before training", "during training"])
@pytest.mark.parametrize("method", EITHER)
def test_a_model_patched_under_ddp_gets_the_gradients_of_the_bare_model(method: str, steps: int) -> None:
    ids = tiny.tokens(101)
    bare = small()
    ctxext.patch(bare, tiny.METHODS[method])
    bare(ids, labels=ids, use_cache=False).loss.backward()
    wrapped = DistributedDataParallel(small())
    for _ in range(steps):
        wrapped(ids, labels=ids, use_cache=False).loss.backward()
        wrapped.zero_grad()
    ctxext.patch(wrapped, tiny.METHODS[method])
    wrapped(ids, labels=ids, use_cache=False).loss.backward()
    for (name, parameter), expected in zip(wrapped.module.named_parameters(), bare.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad), name


@pytest.mark.usefixtures("_process_group")
def test_a_config_that_a_wrapper_was_given_is_the_models_again_once_the_patch_is_off() -> None:
    wrapped = DistributedDataParallel(small())
    wrapped.config = config = wrapped.module.config
    ctxext.patch(wrapped, YARN).remove()
    assert wrapped.config is wrapped.module.config is config


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("holds_config", [False, True])
@pytest.mark.parametrize("method", EITHER)
def test_a_model_patched_through_a_wrapper_is_copied_without_it(method: str, holds_config: bool) -> None:
    wrapped, ids = DistributedDataParallel(small()), tiny.tokens(101)
    if holds_config:
        wrapped.config = wrapped.module.config
    ctxext.patch(wrapped, tiny.METHODS[method])
    twin = copy.deepcopy(wrapped.module)
    assert torch.equal(tiny.logits(twin, ids), tiny.logits(wrapped.module, ids))
    ctxext.unpatch(twin)
    assert ctxext.inspect(wrapped).method["name"] == method
    assert ctxext.inspect(wrapped).consistent


def hooked(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]


def everywhere(model: nn.Module, folder: Path) -> Any:
    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


def layer_by_layer(model: nn.Module, folder: Path) -> Any:
    devices = {"model.layers.0": "disk"} | dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    return dispatch_model(model, devices, main_device="cpu", offload_dir=folder, force_hooks=True)


def offloaded(model: nn.Module, folder: Path) -> Any:
    devices = {"model": "disk", "lm_head": "cpu"}
    return dispatch_model(model, devices, main_device="cpu", offload_dir=folder, offload_buffers=True, force_hooks=True)


@pytest.mark.parametrize("place", [everywhere, layer_by_layer, offloaded])
@pytest.mark.parametrize("method", EITHER)
def test_hooks_of_accelerate_stay_where_they_are(method: str, place: Callable[..., Any], tmp_path: Path) -> None:
    ids, expected = tiny.tokens(101), small()
    model = place(small(), tmp_path)
    hooks, plain = hooked(model), tiny.logits(model, ids)
    assert hooks
    assert torch.equal(plain, tiny.logits(expected, ids))
    ctxext.patch(expected, tiny.METHODS[method])
    handle = ctxext.patch(model, tiny.METHODS[method])
    assert torch.equal(tiny.logits(model, ids), tiny.logits(expected, ids))
    assert hooked(model) == hooks
    assert ctxext.inspect(model).consistent
    handle.remove()
    assert torch.equal(tiny.logits(model, ids), plain)
    assert hooked(model) == hooks


def test_the_rotary_embedding_of_a_dispatched_model_is_hooked_as_its_predecessor(tmp_path: Path) -> None:
    model = layer_by_layer(small(), tmp_path)
    before = model.model.rotary_emb._hf_hook
    ctxext.patch(model, YARN)
    now = model.model.rotary_emb._hf_hook
    assert type(now) is type(before)
    assert now.execution_device == before.execution_device
    assert now is not before
