"""Every method on every architecture: equal to a native model, exact undo, one instance only, saved and reloaded."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ctxext
import tiny
from ctxext import patching
from ctxext.attention.partition import Block, Partition, Region
from ctxext.rope import RopeSpec, default_inv_freq

pytestmark = [
    pytest.mark.filterwarnings("error:.*deprecated"),
    # PyTorch's own compiler still uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

YARN = tiny.METHODS["yarn"]
METHODS = list(tiny.METHODS)
ATTENTION = [name for name in METHODS if name not in tiny.STATIC]
EITHER = ["yarn", "dca"]
"""One of each kind, where the method is not what is tested."""
TARGET = 256

_FACTORS = [
    1 / ((1 - g) / 4 + g) for g in (min(max((64 * 10 ** (-i / 2) / 2 / math.pi - 1) / 7, 0), 1) for i in range(8))
]
# The static settings in Transformers' own words, from the papers' formulas.
NATIVE: dict[str, dict[str, Any]] = {
    "pi": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "ntk": {"rope_type": "default", "rope_theta": 1e4 * 4 ** (16 / 14)},
    "ntk_by_parts": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
        "short_factor": _FACTORS,
        "long_factor": _FACTORS,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    "rope_theta": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4],
        "long_factor": [1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4],
    },
}


@pytest.fixture(autouse=True)
def _strictly() -> Iterator[None]:
    with tiny.strictly():
        yield


def native(method: str, family: str = "llama", **changes: Any) -> PreTrainedModel:
    # Transformers' YaRN needs the head's width spelled out, which Mixtral's config leaves open.
    parameters = copy.deepcopy(NATIVE[method])
    return tiny.model(family, max_position_embeddings=TARGET, head_dim=16, rope_parameters=parameters, **changes)


def patched(method: str = "yarn", family: str = "llama", **changes: Any) -> PreTrainedModel:
    model = tiny.model(family, **changes)
    ctxext.patch(model, tiny.METHODS[method])
    return model


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


def gradients(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def checkpointing(model: PreTrainedModel) -> None:
    # The newer name came with Transformers 5.2x; the older one warns since.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that a patch could leave behind."""
    modules = dict(model.named_modules())
    return {
        "modules": {name: id(module) for name, module in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "configs": {name: id(vars(module).get("config")) for name, module in modules.items()},
        "settings": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "hooks": {
            name: [id(hook) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())]
            + [len(module._forward_pre_hooks_with_kwargs)]
            for name, module in modules.items()
        },
        "keys": list(model.state_dict()),
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }


def assert_as_before(model: PreTrainedModel, before: dict[str, Any]) -> None:
    now = snapshot(model)
    for name, buffer in before.pop("buffers").items():
        assert torch.equal(now["buffers"][name], buffer), name
    for what, value in before.items():
        assert now[what] == value, what


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_patch_acts_and_comes_off_without_a_trace(method: str, family: str) -> None:
    model, ids = tiny.model(family), tiny.tokens(101)
    before, plain = snapshot(model), tiny.logits(model, ids)
    handle = ctxext.patch(model, tiny.METHODS[method])
    assert tiny.difference(tiny.logits(model, ids), plain) > 1e-2
    assert handle.max_length == TARGET
    handle.remove()
    assert torch.equal(tiny.logits(model, ids), plain)
    assert_as_before(model, before)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", tiny.STATIC)
def test_a_patched_model_is_a_native_one(method: str, family: str) -> None:
    ids = tiny.tokens(101)
    ours, theirs = patched(method, family), native(method, family)
    # Where Transformers computes the same numbers, bits are equal; where NATIVE holds a formula, it rounds elsewhere.
    tolerance = {"rtol": 0.0, "atol": 0.0 if method in ("pi", "yarn", "llama3", "longrope") else 1e-4}
    torch.testing.assert_close(tiny.logits(ours, ids), tiny.logits(theirs, ids), **tolerance)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", tiny.STATIC)
def test_gradients_of_a_patched_model_are_a_native_ones(method: str, family: str) -> None:
    ids = tiny.tokens(101)
    plain, ours, theirs = (
        gradients(model, ids) for model in (tiny.model(family), patched(method, family), native(method, family))
    )
    assert max(tiny.difference(ours[name], plain[name]) for name in plain) > 1e-2
    exact = method in ("pi", "yarn", "llama3", "longrope")
    for name, gradient in theirs.items():
        # A gradient is known to fp32 relative to the largest of its tensor.
        atol = 0.0 if exact else 1e-4 * gradient.abs().max().item()
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", tiny.STATIC)
def test_a_saved_model_is_read_by_plain_transformers(method: str, family: str, tmp_path: Path) -> None:
    ids = tiny.tokens(101)
    model = patched(method, family)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(reloaded.base_model.rotary_emb).__module__.startswith("transformers.")
    assert reloaded.config.max_position_embeddings == TARGET
    assert reloaded.state_dict().keys() == tiny.model(family).state_dict().keys()
    # The method's own rounding of its factors may differ from Transformers' in the last bit.
    assert tiny.difference(tiny.logits(reloaded, ids), tiny.logits(model, ids)) < 1e-4
    assert ctxext.inspect(model).consistent
    assert ctxext.inspect(reloaded).consistent


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", ATTENTION)
def test_a_saved_model_whose_attention_was_changed_is_the_base_model_to_plain_transformers(
    method: str, family: str, tmp_path: Path
) -> None:
    model, base, ids = patched(method, family), tiny.model(family), tiny.tokens(101)
    assert tiny.difference(tiny.logits(model, ids), tiny.logits(base, ids)) > 1e-2
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    # Transformers' grouped experts round otherwise in a reloaded model, patched or not.
    assert tiny.difference(tiny.logits(reloaded, ids), tiny.logits(base, ids)) < (1e-5 if "moe" in family else 1e-30)
    assert reloaded.state_dict().keys() == base.state_dict().keys()
    assert ctxext.inspect(reloaded).consistent


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", ATTENTION)
def test_a_saved_config_of_a_method_that_changes_attention_is_the_base_with_a_record(
    method: str, family: str, tmp_path: Path
) -> None:
    tiny.model(family).save_pretrained(tmp_path / "base")
    patched(method, family).save_pretrained(tmp_path / "extended")
    base, extended = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("base", "extended"))
    added = {"ctxext", "dual_chunk_attention_config"} if method == "dca" else {"ctxext"}
    # The head's width is spelled out where an architecture's config leaves it open.
    assert {key for key in extended if extended[key] != base.get(key)} - {"head_dim"} == added
    assert base.keys() <= extended.keys()
    assert extended["head_dim"] == 16


def test_dca_is_saved_under_the_key_that_other_engines_read_too(tmp_path: Path) -> None:
    patched("dca").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dual_chunk_attention_config"] == {
        "chunk_size": 24,
        "local_size": 8,
        "original_max_position_embeddings": 64,
    }


@pytest.mark.parametrize("method", METHODS)
def test_factors_do_not_compound_over_a_saved_checkpoint(method: str, tmp_path: Path) -> None:
    ids = tiny.tokens(101)
    first = patched(method)
    first.save_pretrained(tmp_path)
    second = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    again = tiny.METHODS[method]
    if method == "rope_theta":  # nobody but the user knows how far a new base was trained
        with pytest.raises(ctxext.UnsupportedModelError, match="give original_max_position_embeddings"):
            ctxext.patch(second, again)
        again = ctxext.RopeTheta(rope_theta=1e6, factor=4, original_max_position_embeddings=64)
    assert ctxext.patch(second, again).max_length == TARGET
    assert second.config.max_position_embeddings == first.config.max_position_embeddings
    assert second.config.rope_parameters == first.config.rope_parameters
    assert torch.equal(tiny.logits(second, ids), tiny.logits(first, ids))


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_checkpoint_is_extended_further_from_its_trained_base(method: str, tmp_path: Path) -> None:
    patched(method).save_pretrained(tmp_path)
    model, fresh = AutoModelForCausalLM.from_pretrained(tmp_path), tiny.model()
    handle = ctxext.patch(model, ctxext.YaRN(factor=8, original_max_position_embeddings=64))
    ctxext.patch(fresh, ctxext.YaRN(factor=8))
    if method == "rope_theta":  # a new base is the base of whatever comes after it
        assert handle.spec.rope_theta == 1e6
    else:
        assert torch.equal(model.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq)
    assert model.config.max_position_embeddings == 512


@pytest.mark.parametrize("saved", ["yarn", "ntk", "dynamic_yarn", "dca"])
@pytest.mark.parametrize("method", ATTENTION)
def test_a_saved_checkpoint_is_given_changed_attention_from_its_trained_base(
    method: str, saved: str, tmp_path: Path
) -> None:
    patched(saved).save_pretrained(tmp_path)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tiny.tokens(101)
    ctxext.patch(model, tiny.METHODS[method])
    assert torch.equal(tiny.logits(model, ids), tiny.logits(patched(method), ids))
    assert (model.config.max_position_embeddings, model.config.rope_parameters["rope_type"]) == (64, "default")


def test_a_checkpoint_saved_with_dca_and_extended_with_another_method_does_not_ask_for_dca(tmp_path: Path) -> None:
    patched("dca").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ctxext.patch(model, YARN)
    # vLLM and SGLang run Dual Chunk Attention wherever the key is.
    assert not hasattr(model.config, "dual_chunk_attention_config")


@pytest.mark.parametrize("method", ["yarn", "longrope", "llama3"])
def test_a_trained_length_beside_the_rope_parameters_does_not_mislead_the_saved_model(
    method: str, tmp_path: Path
) -> None:
    # Transformers lets this attribute, where a config has one, override what rope_parameters say.
    model, ids = patched(method, original_max_position_embeddings=32), tiny.tokens(101)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(tiny.logits(reloaded, ids), tiny.logits(model, ids))


@pytest.mark.parametrize("method", tiny.STATIC)
def test_the_config_of_a_patched_model_builds_an_equal_model(method: str) -> None:
    model, ids = patched(method), tiny.tokens(101)
    twin = AutoModelForCausalLM.from_config(model.config).eval()
    twin.load_state_dict(model.state_dict())
    assert tiny.difference(tiny.logits(twin, ids), tiny.logits(model, ids)) < 1e-4


@pytest.mark.parametrize("method", ATTENTION)
def test_the_config_of_a_model_with_changed_attention_is_of_no_use_to_another(method: str) -> None:
    twin = AutoModelForCausalLM.from_config(patched(method).config).eval()
    with pytest.raises(ctxext.PatchError, match="given to another one; patch that model itself"):
        tiny.logits(twin, tiny.tokens(101))


def test_a_base_written_as_a_whole_number_changes_nothing() -> None:
    whole = patched(rope_parameters={"rope_type": "default", "rope_theta": 10_000})
    assert torch.equal(whole.model.rotary_emb.inv_freq, patched().model.rotary_emb.inv_freq)


def test_the_attention_implementation_stays_as_chosen() -> None:
    model = tiny.model()
    model.set_attn_implementation("eager")
    with ctxext.patch(model, YARN):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("method", ATTENTION)
def test_changed_attention_gives_way_to_the_chosen_one_once_it_is_off(method: str) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    model.set_attn_implementation("eager")
    plain = tiny.logits(model, ids)
    with ctxext.patch(model, tiny.METHODS[method]):
        assert model.config._attn_implementation == "ctxext"
    assert model.config._attn_implementation == "eager"
    assert torch.equal(tiny.logits(model, ids), plain)


@pytest.mark.parametrize("method", ATTENTION)
def test_choosing_another_attention_on_top_of_a_changed_one_is_an_error_until_it_is_off(method: str) -> None:
    model, ids = patched(method), tiny.tokens(101)
    model.set_attn_implementation("eager")
    with pytest.raises(ctxext.PatchError, match=rf"'eager' on a model patched with {method}.*unpatch\(model\) first"):
        tiny.logits(model, ids)
    ctxext.unpatch(model)
    eager = tiny.model()
    eager.set_attn_implementation("eager")
    assert torch.equal(tiny.logits(model, ids), tiny.logits(eager, ids))


@pytest.mark.parametrize("method", METHODS)
def test_state_dicts_are_interchangeable(method: str) -> None:
    model, plain = patched(method), tiny.model(seed=5)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(patched(method).state_dict(), strict=True)


@pytest.mark.parametrize(
    "method",
    [
        ctxext.PI(factor=1),
        ctxext.NTK(factor=1),
        ctxext.NTKByParts(factor=1),
        ctxext.YaRN(factor=1),
        ctxext.YaRN(factor=1, ramp="rotations"),
        ctxext.Llama3(factor=1),
        ctxext.LongRoPE(factor=1, long_factor=[1] * 8),
        ctxext.RopeTheta(rope_theta=1e4),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_factor_one_changes_no_bit_of_the_logits(method: ctxext.Method, family: str) -> None:
    model, ids = tiny.model(family), tiny.tokens(101)
    plain = tiny.logits(model, ids)
    ctxext.patch(model, method)
    assert torch.equal(tiny.logits(model, ids), plain)
    assert model.config.max_position_embeddings == 64


# How a patch is given, and its handle


@pytest.mark.parametrize("kind", ["method", "mapping", "path", "text"])
def test_a_method_may_be_a_value_a_mapping_or_a_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "yarn.yaml"
    path.write_text("method: {name: yarn, factor: 4}\n")
    given: Any = {"method": YARN, "mapping": {"name": "yarn", "factor": 4}, "path": path, "text": str(path)}[kind]
    model = tiny.model()
    assert ctxext.patch(model, given).method == YARN
    assert tiny.difference(tiny.logits(model, tiny.tokens(101)), tiny.logits(patched(), tiny.tokens(101))) == 0


@pytest.mark.parametrize(
    "given", [{"name": "ntkk", "factor": 4}, {"name": "yarn", "facter": 4}, {"factor": 4}, 4, None]
)
def test_a_wrong_method_is_refused_before_the_model_is_touched(given: Any) -> None:
    model = tiny.model()
    before = snapshot(model)
    with pytest.raises(ctxext.ConfigError):
        ctxext.patch(model, given)
    assert_as_before(model, before)


def test_a_method_that_does_not_fit_the_model_leaves_it_alone() -> None:
    model = tiny.model()
    before = snapshot(model)
    with pytest.raises(ctxext.ConfigError, match="long_factor"):
        ctxext.patch(model, ctxext.LongRoPE(factor=4, long_factor=[1] * 64))
    assert_as_before(model, before)


@pytest.mark.parametrize("method", EITHER)
def test_a_patch_is_a_context_manager(method: str) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    plain = tiny.logits(model, ids)
    with ctxext.patch(model, tiny.METHODS[method]) as handle:
        assert handle.active
        assert tiny.difference(tiny.logits(model, ids), plain) > 1e-2
    assert not handle.active
    assert torch.equal(tiny.logits(model, ids), plain)


@pytest.mark.parametrize("method", EITHER)
def test_leaving_the_block_by_an_error_takes_the_patch_off(method: str) -> None:
    model = tiny.model()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), ctxext.patch(model, tiny.METHODS[method]):
        _ = 1 / 0
    assert_as_before(model, before)


def test_removing_a_patch_twice_is_harmless() -> None:
    model = tiny.model()
    handle = ctxext.patch(model, YARN)
    handle.remove()
    ctxext.patch(model, tiny.METHODS["pi"])
    handle.remove()
    assert ctxext.inspect(model).method["name"] == "pi"


@pytest.mark.parametrize("method", EITHER)
def test_unpatch_takes_the_patch_off_and_says_when_there_is_none(method: str) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    plain = tiny.logits(model, ids)
    ctxext.patch(model, tiny.METHODS[method])
    assert tiny.difference(tiny.logits(model, ids), plain) > 1e-2
    ctxext.unpatch(model)
    assert torch.equal(tiny.logits(model, ids), plain)
    with pytest.raises(ctxext.PatchError, match="no ctxext patch is on this model"):
        ctxext.unpatch(model)


@pytest.mark.parametrize("again", [YARN, tiny.METHODS["pi"]], ids=["same method", "other method"])
def test_patching_twice_is_an_error_that_names_the_active_method(again: ctxext.Method) -> None:
    model = patched()
    before = snapshot(model)
    with pytest.raises(ctxext.PatchError, match=r"already patched with YaRN\(factor=4\.0\); pass replace=True"):
        ctxext.patch(model, again)
    assert_as_before(model, before)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("yarn", "pi"),
        ("yarn", "dca"),
        ("dca", "yarn"),
        ("dca", "dynamic_yarn"),
        ("dynamic_yarn", "dynamic_ntk"),
        ("dca", "dca"),
    ],
)
def test_replace_swaps_the_method_and_does_not_compound(first: str, second: str) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    before, plain = snapshot(model), tiny.logits(model, ids)
    old = ctxext.patch(model, tiny.METHODS[first])
    new = ctxext.patch(model, tiny.METHODS[second], replace=True)
    assert (old.active, new.active) == (False, True)
    assert torch.equal(tiny.logits(model, ids), tiny.logits(patched(second), ids))
    assert model.config.to_dict() == patched(second).config.to_dict()
    new.remove()
    assert torch.equal(tiny.logits(model, ids), plain)
    assert_as_before(model, before)


@pytest.mark.parametrize(
    "wrong",
    [
        ctxext.LongRoPE(factor=4, long_factor=[1] * 7),
        ctxext.PI(factor=4, max_position_embeddings=100),
        ctxext.DCA(chunk_size=65),
    ],
    ids=repr,
)
@pytest.mark.parametrize("method", EITHER)
def test_the_previous_patch_stays_on_when_its_replacement_fails(method: str, wrong: ctxext.Method) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    handle = ctxext.patch(model, tiny.METHODS[method])
    before, extended = snapshot(model), tiny.logits(model, ids)
    with pytest.raises(ctxext.ConfigError):
        ctxext.patch(model, wrong, replace=True)
    assert handle.active
    assert torch.equal(tiny.logits(model, ids), extended)
    assert_as_before(model, before)
    handle.remove()
    assert torch.equal(tiny.logits(model, ids), tiny.logits(tiny.model(), ids))


@pytest.mark.parametrize("seen", ["language model", "decoder"])
@pytest.mark.parametrize("given", ["language model", "decoder"])
@pytest.mark.parametrize("method", EITHER)
def test_a_patch_is_seen_from_the_language_model_and_from_its_decoder(method: str, given: str, seen: str) -> None:
    model = tiny.model()
    parts = {"language model": model, "decoder": model.model}
    ctxext.patch(parts[given], tiny.METHODS[method])
    assert ctxext.inspect(parts[seen]).method["name"] == method
    with pytest.raises(ctxext.PatchError, match="already patched with"):
        ctxext.patch(parts[seen], YARN)
    ctxext.unpatch(parts[seen])
    assert torch.equal(tiny.logits(model, tiny.tokens(101)), tiny.logits(tiny.model(), tiny.tokens(101)))


# One instance, and nothing but it


@pytest.mark.parametrize("method", METHODS)
def test_a_second_model_from_the_same_config_object_is_not_affected(method: str) -> None:
    config, ids = tiny.config(), tiny.tokens(101)
    first, second = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    second.load_state_dict(first.state_dict())
    plain, settings = tiny.logits(second, ids), config.to_dict()
    ctxext.patch(first, tiny.METHODS[method])
    assert tiny.difference(tiny.logits(first, ids), plain) > 1e-2
    assert torch.equal(tiny.logits(second, ids), plain)
    assert config.to_dict() == settings
    assert all(module.config is config for module in second.modules() if "config" in vars(module))
    assert not any(vars(module).get("config") is config for module in first.modules())


@pytest.mark.parametrize("method", EITHER)
def test_no_class_or_module_of_transformers_is_touched(method: str) -> None:
    model = tiny.model()
    owners = {type(module) for module in model.modules()} | {type(model.config)}
    owners |= {sys.modules[owner.__module__] for owner in owners}
    owners |= {sys.modules["transformers.modeling_rope_utils"], sys.modules["transformers.masking_utils"]}
    before = {owner: dict(vars(owner)) for owner in owners}
    functions = dict(ALL_ATTENTION_FUNCTIONS)
    ctxext.patch(model, tiny.METHODS[method])
    assert all(dict(vars(owner)) == before[owner] for owner in owners)
    assert dict(ALL_ATTENTION_FUNCTIONS) == functions


@pytest.mark.parametrize("method", METHODS)
def test_the_random_state_is_untouched(method: str) -> None:
    model, state = tiny.model(), torch.get_rng_state()
    ctxext.unpatch(ctxext.patch(model, tiny.METHODS[method]).model)
    assert torch.equal(torch.get_rng_state(), state)


def copied(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model)


def pickled(model: PreTrainedModel) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copied, pickled])
@pytest.mark.parametrize("original_first", [True, False])
@pytest.mark.parametrize("method", ["yarn", *ATTENTION])
def test_a_copy_of_a_patched_model_is_independent(
    method: str, duplicate: Callable[..., Any], original_first: bool
) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    plain = tiny.logits(model, ids)
    ctxext.patch(model, tiny.METHODS[method])
    extended = tiny.logits(model, ids)
    twin = duplicate(model)
    assert torch.equal(tiny.logits(twin, ids), extended)
    assert ctxext.inspect(twin).consistent
    unpatched, still_on = (model, twin) if original_first else (twin, model)
    ctxext.unpatch(unpatched)
    assert torch.equal(tiny.logits(unpatched, ids), plain)
    assert torch.equal(tiny.logits(still_on, ids), extended)
    assert unpatched.config is not still_on.config
    ctxext.unpatch(still_on)
    assert torch.equal(tiny.logits(still_on, ids), plain)
    assert not any(module._forward_pre_hooks for twins in (model, twin) for module in twins.modules())


@pytest.mark.parametrize("method", EITHER)
def test_what_the_user_changes_while_the_patch_is_on_survives_its_removal(method: str, tmp_path: Path) -> None:
    model = patched(method)
    model.resize_token_embeddings(tiny.VOCABULARY + 3, mean_resizing=False)
    ctxext.unpatch(model)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(tiny.logits(reloaded, tiny.tokens(20)), tiny.logits(model, tiny.tokens(20)))


def test_what_the_user_changes_while_the_patch_is_on_survives_its_replacement() -> None:
    model = patched()
    model.set_attn_implementation("eager")
    ctxext.patch(model, ctxext.PI(factor=4), replace=True)
    assert model.config._attn_implementation == "eager"


# Failures half-way


class InjectedError(BaseException):
    """Like an interruption, so that no handler of ordinary errors takes it for one."""


def failing_at_line(number: int, functions: set[str], action: Callable[[], Any]) -> str | None:
    """Run ``action`` with an error at the ``number``-th line inside ``functions`` of patching.py or below, if any."""
    lines = depth = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines, depth
        code = frame.f_code
        inside = code.co_filename == patching.__file__ and code.co_name in functions
        if event == "call":
            depth += inside
            return trace if "ctxext" in code.co_filename else None
        if event == "return":
            depth -= inside
        elif event == "line" and depth:
            lines += 1
            if lines == number:
                raise InjectedError(f"{code.co_filename}:{frame.f_lineno}")
        return trace

    sys.settrace(trace)
    try:
        action()
    except InjectedError as failure:
        return str(failure)
    finally:
        sys.settrace(None)
    return None


@pytest.mark.parametrize(
    ("method", "replace", "step"), [("yarn", False, 1), ("yarn", True, 3), ("dca", False, 7), ("dca", True, 11)]
)
def test_a_failure_at_any_line_leaves_the_model_as_it_was(method: str, replace: bool, step: int) -> None:
    model, ids = tiny.model(num_hidden_layers=1), tiny.tokens(80)
    handle = ctxext.patch(model, ctxext.PI(factor=2)) if replace else None
    expected = tiny.logits(model, ids)
    for number in range(1, 2000, step):
        before = snapshot(model)
        failure = failing_at_line(
            number,
            {"_prepare", "_install"},
            lambda: ctxext.patch(model, tiny.METHODS[method], replace=replace),
        )
        if failure is None:
            break
        assert handle is None or handle.active, failure
        assert torch.equal(tiny.logits(model, ids), expected), failure
        assert_as_before(model, before)
    assert number > 50, "the trace saw next to nothing"
    assert tiny.difference(tiny.logits(model, ids), expected) > 1e-2


def test_a_warning_turned_into_an_error_leaves_the_model_as_it_was() -> None:
    model = tiny.model("mistral", sliding_window=16)
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="16 tokens"):
            ctxext.patch(model, YARN)
    assert_as_before(model, before)


@pytest.mark.parametrize("method", EITHER)
def test_a_patch_that_was_tampered_with_refuses_to_come_off(method: str) -> None:
    model = patched(method)
    model.model.rotary_emb = tiny.model().model.rotary_emb
    with pytest.raises(ctxext.PatchError, match="another program has replaced"):
        ctxext.unpatch(model)


def test_a_config_that_was_edited_after_loading_is_no_base_to_build_on() -> None:
    model = tiny.model()
    model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(ctxext.PatchError, match="not in effect"):
        ctxext.patch(model, YARN)


@pytest.mark.parametrize("name", ["inv_freq", "attention_scaling"])
def test_a_rotary_module_that_was_edited_by_hand_is_no_base_to_build_on(name: str) -> None:
    model = tiny.model()
    setattr(model.model.rotary_emb, name, getattr(model.model.rotary_emb, name) * 1.5)
    with pytest.raises(ctxext.PatchError, match="not in effect"):
        ctxext.patch(model, YARN)


# Methods of users


class Squeeze(ctxext.Method):
    """Half of the frequencies interpolated, the other half kept; sharper attention."""

    title: ClassVar[str] = "Squeeze"
    reference: ClassVar[str] = "none"
    name: Literal["squeeze"] = "squeeze"
    flaw: str | None = None

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        inv_freq = default_inv_freq(spec.rope_theta, spec.rotary_dim)
        slow = torch.arange(inv_freq.numel()) >= inv_freq.numel() // 2
        result = torch.where(slow, inv_freq / self.lengths(spec).factor, inv_freq)
        flawed: dict[str | None, Any] = {"nan": result * math.nan, "too many": result.repeat(2)}
        return flawed.get(self.flaw, result), 1.1

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        if self.flaw == "other export":
            return {"rope_type": "linear", "rope_theta": spec.rope_theta, "factor": 4.0}
        if self.flaw == "no export":
            return {"rope_type": "squeeze", "rope_theta": spec.rope_theta}
        return super().rope_parameters(spec)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_method_of_a_user_is_patched_and_saved(family: str, tmp_path: Path) -> None:
    model, ids = tiny.model(family), tiny.tokens(101)
    plain = tiny.logits(model, ids)
    handle = ctxext.patch(model, Squeeze(factor=4))
    extended = tiny.logits(model, ids)
    assert tiny.difference(extended, plain) > 1e-2
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert tiny.difference(tiny.logits(reloaded, ids), extended) < 1e-4
    again = ctxext.patch(reloaded, Squeeze(factor=4))
    assert again.spec == handle.spec
    assert torch.equal(reloaded.base_model.rotary_emb.inv_freq, handle.rotary.inv_freq)


@pytest.mark.parametrize("flaw", ["nan", "too many", "other export", "no export"])
def test_a_method_that_is_wrong_is_refused_and_the_model_restored(flaw: str) -> None:
    model = tiny.model()
    before = snapshot(model)
    with pytest.raises(ctxext.CtxextError):
        ctxext.patch(model, Squeeze(factor=4, flaw=flaw))
    assert_as_before(model, before)


def test_frequencies_in_another_precision_are_taken() -> None:
    class Double(Squeeze):
        def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
            inv_freq, attention_factor = super().scaled_rope(spec)
            return inv_freq.double() * (1 + 1e-9), attention_factor

    model, reference = tiny.model(), tiny.model()
    ctxext.patch(model, Double(factor=4))
    ctxext.patch(reference, Squeeze(factor=4))
    assert tiny.difference(tiny.logits(model, tiny.tokens(101)), tiny.logits(reference, tiny.tokens(101))) < 1e-3


@dataclass(frozen=True, eq=False)
class Clamped(Partition):
    """Distances up to a limit, and the limit beyond it; every query is a block of its own."""

    limit: int
    flaw: str | None = None

    def describe(self) -> str:
        return f"distances up to {self.limit}"

    def relative_positions(self, query: Tensor, key: Tensor) -> Tensor:
        return (query[:, None] - key).clamp(max=self.limit)

    def frequencies_at(self, query: Tensor) -> tuple[Tensor, Tensor]:
        gain = torch.full((len(query),), 1.5 if self.flaw == "gain" else 1.0)
        return self.inv_freq.expand(len(query), -1) * (2 if self.flaw == "frequencies" else 1), gain

    def blocks(self, positions: Tensor, first: int) -> list[Block]:
        blocks = []
        for i in range(first, len(positions)):
            own = positions[i : i + 1]
            limit = self.limit + (self.flaw == "positions")
            keys = torch.maximum(positions[: i + 1], own - limit)
            start = int(self.flaw == "a key left out" and i > 0)
            region = Region(slice(start, i + 1), own, causal=True)
            blocks.append(Block(slice(i, i + 1), (region,), self.inv_freq, keys, step=int(own)))
        return blocks


class Near(ctxext.Method):
    """A user's method that changes attention: no distance is seen as larger than a limit."""

    title: ClassVar[str] = "Near"
    reference: ClassVar[str] = "none"
    name: Literal["near"] = "near"
    limit: int = 20
    flaw: str | None = None

    @property
    def changes_attention(self) -> bool:
        return True

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        return default_inv_freq(spec.rope_theta, spec.rotary_dim), 1.0

    def partition(self, spec: RopeSpec) -> Clamped:
        return Clamped(
            inv_freq=self.scaled_rope(spec)[0],
            attention_factor=1.0,
            period=1,
            identity_length=self.limit + 1,
            limit=self.limit,
            flaw=self.flaw,
        )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_attention_of_a_users_method_sees_the_positions_that_it_says(family: str) -> None:
    # In a model of one layer, a row of the logits depends on the positions in its own row of the scores alone, so that
    # stock attention gives one row after the other if it is handed these as the positions of the keys.
    model, plain, ids = (
        tiny.model(family, num_hidden_layers=1),
        tiny.model(family, num_hidden_layers=1),
        tiny.tokens(61),
    )
    ctxext.patch(model, Near(factor=4))
    ours = tiny.logits(model, ids)
    assert tiny.difference(ours, tiny.logits(plain, ids)) > 1e-2
    for i in range(0, 61, 4):
        positions = torch.arange(61).clamp(min=i - 20)[None]
        row = tiny.logits(plain, ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)[
            :, i
        ]
        assert tiny.difference(ours[:, i], row) < 1e-4, i


def test_a_users_method_that_changes_attention_is_inspected_saved_and_undone(tmp_path: Path) -> None:
    model, ids = tiny.model(), tiny.tokens(61)
    model.save_pretrained(tmp_path)  # notes dtype and class in the config, which taking the patch off keeps
    before, plain = snapshot(model), tiny.logits(model, ids)
    handle = ctxext.patch(model, Near(factor=4))
    extended = tiny.logits(model, ids)
    assert ctxext.inspect(model).consistent
    assert "distances up to 20" in str(ctxext.inspect(model))
    model.save_pretrained(tmp_path)
    handle.remove()
    assert torch.equal(tiny.logits(model, ids), plain)
    assert_as_before(model, before)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(tiny.logits(reloaded, ids), plain)
    ctxext.patch(reloaded, Near(factor=4))
    assert torch.equal(tiny.logits(reloaded, ids), extended)


@pytest.mark.parametrize("flaw", ["positions", "frequencies", "gain", "a key left out"])
def test_a_partition_whose_blocks_are_not_what_it_says_is_refused_and_the_model_restored(flaw: str) -> None:
    model = tiny.model()
    before = snapshot(model)
    with pytest.raises(ctxext.PatchError, match="attention does not see the relative positions of near"):
        ctxext.patch(model, Near(factor=4, flaw=flaw))
    assert_as_before(model, before)


# Precision and devices


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


# Attention, caches, batches, generation


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


def greedy(model: PreTrainedModel, **settings: Any) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    prompt = tiny.tokens(50)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, **settings
    )


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


# The advertised length


@pytest.mark.parametrize("method", tiny.STATIC)
def test_the_advertised_length_is_the_target_and_the_trained_one_is_kept(method: str) -> None:
    config = patched(method).config
    # As lm-evaluation-harness resolves a model's length.
    names = ("n_positions", "max_position_embeddings", "n_ctx")
    assert next(getattr(config, name) for name in names if hasattr(config, name)) == TARGET
    assert config.ctxext["original_max_position_embeddings"] == 64
    if NATIVE[method]["rope_type"] != "default":
        assert config.rope_parameters["original_max_position_embeddings"] == 64


@pytest.mark.parametrize("method", ATTENTION)
def test_the_advertised_length_stays_the_trained_one_where_only_the_patch_reaches_further(method: str) -> None:
    model = tiny.model()
    handle = ctxext.patch(model, ctxext.METHODS[method]())
    assert handle.max_length == 4 * 64
    assert model.config.max_position_embeddings == 64
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize("method", ATTENTION)
def test_the_target_of_the_tools_may_be_set_and_changes_no_logit(method: str) -> None:
    model, ids, settings = tiny.model(), tiny.tokens(101), tiny.METHODS[method]
    handle = ctxext.patch(model, type(settings)(**{**dict(settings), "max_position_embeddings": 640}))
    assert handle.max_length == 640
    assert torch.equal(tiny.logits(model, ids), tiny.logits(patched(method), ids))


def test_generation_below_the_target_draws_no_reminder_of_the_trained_length() -> None:
    with tiny.transformers_log() as plain:
        greedy(tiny.model())
    with tiny.transformers_log() as extended:
        greedy(patched())
    assert any("predefined maximum length (64)" in message for message in plain)
    assert not any("predefined maximum length" in message for message in extended)


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_config_records_the_method_in_plain_json(method: str, tmp_path: Path) -> None:
    patched(method).save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["ctxext"]
    assert ctxext.METHODS[method].model_validate(record["method"]) == tiny.METHODS[method]
    assert (record["rope_theta"], record["original_max_position_embeddings"]) == (10_000.0, 64)


WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [("mistral", {"sliding_window": 16}, "every layer"), ("qwen2", WINDOW, "2 of 4 layers")],
)
def test_sliding_windows_are_warned_of(family: str, changes: dict[str, Any], layers: str) -> None:
    model, ids = tiny.model(family, **changes), tiny.tokens(101)
    plain = tiny.logits(model, ids)
    with pytest.warns(UserWarning, match=f"in {layers} attention sees only the last 16 tokens") as caught:
        ctxext.patch(model, YARN)
    assert caught[0].filename == __file__
    assert tiny.difference(tiny.logits(model, ids), plain) > 1e-2
    assert f"{layers if 'of' in layers else '2 of 2 layers'} attend to a sliding window" in str(ctxext.inspect(model))
    ctxext.unpatch(model)
    assert torch.equal(tiny.logits(model, ids), plain)


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [("mistral", {"sliding_window": 16}, "2 of 2 layers"), ("qwen2", WINDOW, "2 of 4 layers")],
)
@pytest.mark.parametrize("method", ATTENTION)
def test_sliding_windows_are_refused_where_attention_is_changed(
    method: str, family: str, changes: dict[str, Any], layers: str
) -> None:
    model = tiny.model(family, **changes)
    before = snapshot(model)
    with pytest.raises(ctxext.UnsupportedModelError, match=rf"method {method}: {layers} .* window of 16 .*static"):
        ctxext.patch(model, tiny.METHODS[method])
    assert_as_before(model, before)


@pytest.mark.parametrize("method", ATTENTION)
def test_a_model_that_is_not_causal_is_refused_where_attention_is_changed(method: str) -> None:
    model = tiny.model(is_causal=False)
    before = snapshot(model)
    with pytest.raises(ctxext.UnsupportedModelError, match=rf"method {method}: the model isn't causal"):
        ctxext.patch(model, tiny.METHODS[method])
    assert_as_before(model, before)


@pytest.mark.parametrize("method", ATTENTION)
def test_layers_that_read_a_config_of_their_own_are_refused_where_attention_is_changed(method: str) -> None:
    model = tiny.model()
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    before = snapshot(model)
    with pytest.raises(ctxext.UnsupportedModelError, match="'self_attn' to read the model's own config"):
        ctxext.patch(model, tiny.METHODS[method])
    assert_as_before(model, before)


# Checkpoints that come with a scaling of their own


SCALED: dict[str, dict[str, Any]] = {
    name: {"max_position_embeddings": TARGET, "rope_parameters": NATIVE[name]}
    for name in ("yarn", "llama3", "longrope")
}


@pytest.mark.parametrize("method", ATTENTION)
def test_other_attention_starts_from_the_base_of_a_checkpoint_scaled_with_yarn(method: str) -> None:
    model, ids = tiny.model(**copy.deepcopy(SCALED["yarn"])), tiny.tokens(101)
    before, plain = snapshot(model), tiny.logits(model, ids)
    handle = ctxext.patch(model, tiny.METHODS[method])
    assert torch.equal(tiny.logits(model, ids), tiny.logits(patched(method), ids))
    assert (model.config.max_position_embeddings, handle.max_length) == (64, TARGET)
    handle.remove()
    assert torch.equal(tiny.logits(model, ids), plain)
    assert_as_before(model, before)


@pytest.mark.parametrize("scaling", ["llama3", "longrope"])
@pytest.mark.parametrize("method", ATTENTION)
def test_other_attention_replaces_a_scaling_only_when_told_to(method: str, scaling: str) -> None:
    model, ids = tiny.model(**copy.deepcopy(SCALED[scaling])), tiny.tokens(101)
    before = snapshot(model)
    with pytest.raises(ctxext.UnsupportedModelError, match=f"already scaled with {scaling}.*replace_scaling=True"):
        ctxext.patch(model, tiny.METHODS[method])
    assert_as_before(model, before)
    ctxext.patch(model, tiny.METHODS[method], replace_scaling=True)
    assert torch.equal(tiny.logits(model, ids), tiny.logits(patched(method), ids))


@pytest.mark.parametrize("method", ATTENTION)
def test_other_attention_asks_for_a_trained_length_that_a_scaled_checkpoint_does_not_record(method: str) -> None:
    model = tiny.model(max_position_embeddings=TARGET, rope_parameters=copy.deepcopy(NATIVE["pi"]))
    with pytest.raises(ctxext.UnsupportedModelError, match="give original_max_position_embeddings"):
        ctxext.patch(model, tiny.METHODS[method])
    settings = {**tiny.METHODS[method].model_dump(), "original_max_position_embeddings": 64}
    ctxext.patch(model, settings)
    assert torch.equal(tiny.logits(model, tiny.tokens(101)), tiny.logits(patched(method), tiny.tokens(101)))


def test_chunks_may_be_as_long_as_the_frequencies_inside_reach() -> None:
    ids = tiny.tokens(101)
    model, expected = tiny.model(), tiny.model()
    ctxext.patch(model, ctxext.DCA(chunk_size=128, local_size=16, frequencies=ctxext.NTK(factor=2)))
    ctxext.patch(expected, ctxext.NTK(factor=2))
    # Both read a text of one stride in the same way, by kernels of their own.
    assert tiny.difference(tiny.logits(model, ids), tiny.logits(expected, ids)) < 1e-4


RECORDED = {"chunk_size": 24, "local_size": 8, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("given", "recorded", "sizes"),
    [
        ({}, RECORDED, (24, 8)),
        ({"local_size": 4}, RECORDED, (24, 4)),
        ({"chunk_size": 32}, RECORDED, (32, 8)),
        # The recorded local_size belongs to the recorded chunk_size.
        ({"chunk_size": 12}, RECORDED, (12, 3)),
        ({}, {**RECORDED, "original_max_position_embeddings": 32, "chunk_size": 32}, (32, 8)),
        ({}, {"chunk_size": 24}, (24, 6)),
        ({}, {}, (64, 16)),
    ],
)
def test_dca_takes_what_the_checkpoint_records_and_the_settings_leave_open(
    given: dict[str, Any], recorded: dict[str, Any], sizes: tuple[int, int]
) -> None:
    model, ids = tiny.model(dual_chunk_attention_config=recorded), tiny.tokens(101)
    handle = ctxext.patch(model, ctxext.DCA(**given))
    assert handle.method.sizes(handle.spec) == sizes
    assert handle.method.lengths(handle.spec).original == recorded.get("original_max_position_embeddings", 64)
    expected = tiny.model()
    ctxext.patch(expected, ctxext.DCA(chunk_size=sizes[0], local_size=sizes[1]))
    assert torch.equal(tiny.logits(model, ids), tiny.logits(expected, ids))


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ({**RECORDED, "local_size": 13}, "local_size 13 must be at most half of chunk_size 24"),
        ({**RECORDED, "chunk_size": 128}, "chunk_size 128 is beyond the 64 positions"),
        ({**RECORDED, "chunk_size": "many"}, "many"),
    ],
)
def test_what_a_checkpoint_records_of_dca_is_checked_like_settings(recorded: dict[str, Any], said: str) -> None:
    model = tiny.model(dual_chunk_attention_config=recorded)
    before = snapshot(model)
    with pytest.raises(ctxext.ConfigError, match=said) as caught:
        ctxext.patch(model, ctxext.DCA())
    assert "\n" not in str(caught.value)
    assert_as_before(model, before)


@pytest.mark.parametrize("original", [32, 64])
def test_what_a_checkpoint_records_of_dca_is_restored_with_its_config(original: int) -> None:
    model = tiny.model(dual_chunk_attention_config={**RECORDED, "original_max_position_embeddings": original})
    before = snapshot(model)
    ctxext.patch(model, ctxext.DCA(chunk_size=12)).remove()
    assert_as_before(model, before)


PINNED = [
    # s = f n / L - (f - 1)
    (ctxext.DynamicNTK(factor=4, seq_len=128), ctxext.NTK(factor=5)),
    (ctxext.DynamicNTK(seq_len=256), ctxext.NTK(factor=7)),
    (ctxext.DynamicYaRN(factor=1, seq_len=256), ctxext.YaRN(factor=4)),
    (ctxext.DynamicYaRN(seq_len=96, truncate=False), ctxext.YaRN(factor=2, truncate=False)),
]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("pinned", "static"), PINNED, ids=repr)
def test_a_pinned_dynamic_method_runs_on_stock_attention_as_its_static_one(
    pinned: ctxext.Method, static: ctxext.Method, family: str
) -> None:
    ours, theirs, ids = tiny.model(family), tiny.model(family), tiny.tokens(101)
    ctxext.patch(ours, pinned)
    ctxext.patch(theirs, static)
    assert ours.config._attn_implementation == theirs.config._attn_implementation == "sdpa"
    assert not ours.model._forward_pre_hooks
    assert torch.equal(tiny.logits(ours, ids), tiny.logits(theirs, ids))


@pytest.mark.parametrize(("pinned", "static"), PINNED, ids=repr)
def test_a_pinned_dynamic_method_is_saved_for_plain_transformers(
    pinned: Any, static: ctxext.Method, tmp_path: Path
) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    ctxext.patch(model, pinned)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert reloaded.config.max_position_embeddings == pinned.seq_len
    assert tiny.difference(tiny.logits(reloaded, ids), tiny.logits(model, ids)) < 1e-4
    assert ctxext.inspect(reloaded).consistent


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("mistral", {"sliding_window": 4096}), ("qwen2", {"sliding_window": 16})]
)
def test_windows_that_do_not_bite_are_not_warned_of(family: str, changes: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ctxext.patch(tiny.model(family, **changes), YARN)


def test_the_fingerprint_tells_a_temperature_that_acts_only_beyond_the_trained_length() -> None:
    settings = {"chunk_size": 16, "local_size": 8}
    fingerprints = set()
    for temperature in (0.0, 0.3):
        model = tiny.model()
        ctxext.patch(model, ctxext.DCA(**settings, temperature=temperature))
        fingerprints.add(ctxext.inspect(model).fingerprint)
    assert len(fingerprints) == 2


def test_a_method_inside_dca_goes_by_the_trained_length_that_dca_is_given() -> None:
    inside = ctxext.DCA(original_max_position_embeddings=32, frequencies=ctxext.YaRN(factor=2))
    alone = ctxext.YaRN(factor=2, original_max_position_embeddings=32)
    spec = ctxext.RopeSpec(10_000.0, 16, 64)
    assert torch.equal(inside.scaled_rope(spec)[0], alone.scaled_rope(spec)[0])
    with pytest.raises(ctxext.ConfigError, match="beyond the 64 positions"):
        inside.model_copy(update={"chunk_size": 128}).sizes(spec)


def test_chunks_that_need_other_frequencies_are_not_offered_to_other_engines(tmp_path: Path) -> None:
    method = ctxext.DCA(chunk_size=100, frequencies=ctxext.NTK(factor=2))
    model = tiny.model(dual_chunk_attention_config={"chunk_size": 40, "local_size": 10})
    with ctxext.patch(model, method):
        model.save_pretrained(tmp_path)
    assert "dual_chunk_attention_config" not in json.loads((tmp_path / "config.json").read_text())
    assert model.config.dual_chunk_attention_config == {"chunk_size": 40, "local_size": 10}
