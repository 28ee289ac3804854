"""Every method on every architecture: equal to a native model, exact undo, one instance only, saved and reloaded."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

import ctxext
import tiny
from ctxext import patching
from ctxext.rope import RopeSpec, default_inv_freq

pytestmark = [
    pytest.mark.filterwarnings("error:.*deprecated"),
    # PyTorch's own compiler still uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

YARN = tiny.METHODS["yarn"]
METHODS = list(tiny.METHODS)
TARGET = 256

_FACTORS = [
    1 / ((1 - g) / 4 + g) for g in (min(max((64 * 10 ** (-i / 2) / 2 / math.pi - 1) / 7, 0), 1) for i in range(8))
]
# The same seven settings in Transformers' own words, from the papers' formulas.
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
    assert model.config.max_position_embeddings == TARGET
    handle.remove()
    assert torch.equal(tiny.logits(model, ids), plain)
    assert_as_before(model, before)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_patched_model_is_a_native_one(method: str, family: str) -> None:
    ids = tiny.tokens(101)
    ours, theirs = patched(method, family), native(method, family)
    # Where Transformers computes the same numbers, bits are equal; where NATIVE holds a formula, it rounds elsewhere.
    tolerance = {"rtol": 0.0, "atol": 0.0 if method in ("pi", "yarn", "llama3", "longrope") else 1e-4}
    torch.testing.assert_close(tiny.logits(ours, ids), tiny.logits(theirs, ids), **tolerance)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", METHODS)
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
@pytest.mark.parametrize("method", METHODS)
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
    ctxext.patch(second, again)
    assert second.config.max_position_embeddings == TARGET
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


@pytest.mark.parametrize("method", ["yarn", "longrope", "llama3"])
def test_a_trained_length_beside_the_rope_parameters_does_not_mislead_the_saved_model(
    method: str, tmp_path: Path
) -> None:
    # Transformers lets this attribute, where a config has one, override what rope_parameters say.
    model, ids = patched(method, original_max_position_embeddings=32), tiny.tokens(101)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(tiny.logits(reloaded, ids), tiny.logits(model, ids))


@pytest.mark.parametrize("method", METHODS)
def test_the_config_of_a_patched_model_builds_an_equal_model(method: str) -> None:
    model, ids = patched(method), tiny.tokens(101)
    twin = AutoModelForCausalLM.from_config(model.config).eval()
    twin.load_state_dict(model.state_dict())
    assert tiny.difference(tiny.logits(twin, ids), tiny.logits(model, ids)) < 1e-4


def test_a_base_written_as_a_whole_number_changes_nothing() -> None:
    whole = patched(rope_parameters={"rope_type": "default", "rope_theta": 10_000})
    assert torch.equal(whole.model.rotary_emb.inv_freq, patched().model.rotary_emb.inv_freq)


def test_the_attention_implementation_stays_as_chosen() -> None:
    model = tiny.model()
    model.set_attn_implementation("eager")
    with ctxext.patch(model, YARN):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "eager"


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


def test_a_patch_is_a_context_manager() -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    plain = tiny.logits(model, ids)
    with ctxext.patch(model, YARN) as handle:
        assert handle.active
        assert tiny.difference(tiny.logits(model, ids), plain) > 1e-2
    assert not handle.active
    assert torch.equal(tiny.logits(model, ids), plain)


def test_leaving_the_block_by_an_error_takes_the_patch_off() -> None:
    model = tiny.model()
    with pytest.raises(ZeroDivisionError), ctxext.patch(model, YARN):
        _ = 1 / 0
    assert ctxext.inspect(model).method is None


def test_removing_a_patch_twice_is_harmless() -> None:
    model = tiny.model()
    handle = ctxext.patch(model, YARN)
    handle.remove()
    ctxext.patch(model, tiny.METHODS["pi"])
    handle.remove()
    assert ctxext.inspect(model).method["name"] == "pi"


def test_unpatch_takes_the_patch_off_and_says_when_there_is_none() -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    plain = tiny.logits(model, ids)
    ctxext.patch(model, YARN)
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


def test_replace_swaps_the_method_and_does_not_compound() -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    before, plain = snapshot(model), tiny.logits(model, ids)
    old = ctxext.patch(model, YARN)
    new = ctxext.patch(model, ctxext.PI(factor=4), replace=True)
    assert (old.active, new.active) == (False, True)
    assert torch.equal(tiny.logits(model, ids), tiny.logits(patched("pi"), ids))
    new.remove()
    assert torch.equal(tiny.logits(model, ids), plain)
    assert_as_before(model, before)


@pytest.mark.parametrize(
    "wrong",
    [ctxext.LongRoPE(factor=4, long_factor=[1] * 7), ctxext.PI(factor=4, max_position_embeddings=100)],
    ids=repr,
)
def test_the_previous_patch_stays_on_when_its_replacement_fails(wrong: ctxext.Method) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    handle = ctxext.patch(model, YARN)
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
def test_a_patch_is_seen_from_the_language_model_and_from_its_decoder(given: str, seen: str) -> None:
    model = tiny.model()
    parts = {"language model": model, "decoder": model.model}
    ctxext.patch(parts[given], YARN)
    assert ctxext.inspect(parts[seen]).method["name"] == "yarn"
    with pytest.raises(ctxext.PatchError, match="already patched with YaRN"):
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


def test_no_class_or_module_of_transformers_is_touched() -> None:
    model = tiny.model()
    owners = {type(module) for module in model.modules()} | {type(model.config)}
    owners |= {sys.modules[owner.__module__] for owner in owners}
    owners |= {sys.modules["transformers.modeling_rope_utils"]}
    before = {owner: dict(vars(owner)) for owner in owners}
    ctxext.patch(model, YARN)
    assert all(dict(vars(owner)) == before[owner] for owner in owners)


def test_the_random_state_is_untouched() -> None:
    model, state = tiny.model(), torch.get_rng_state()
    ctxext.unpatch(ctxext.patch(model, YARN).model)
    assert torch.equal(torch.get_rng_state(), state)


def copied(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model)


def pickled(model: PreTrainedModel) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copied, pickled])
@pytest.mark.parametrize("original_first", [True, False])
def test_a_copy_of_a_patched_model_is_independent(duplicate: Callable[..., Any], original_first: bool) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    plain = tiny.logits(model, ids)
    ctxext.patch(model, YARN)
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


def test_what_the_user_changes_while_the_patch_is_on_survives_its_removal(tmp_path: Path) -> None:
    model = patched()
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


@pytest.mark.parametrize(("replace", "step"), [(False, 1), (True, 3)], ids=["first patch", "replacement"])
def test_a_failure_at_any_line_leaves_the_model_as_it_was(replace: bool, step: int) -> None:
    model, ids = tiny.model(num_hidden_layers=1), tiny.tokens(80)
    handle = ctxext.patch(model, ctxext.PI(factor=2)) if replace else None
    expected = tiny.logits(model, ids)
    for number in range(1, 2000, step):
        before = snapshot(model)
        failure = failing_at_line(number, {"_prepare", "_install"}, lambda: ctxext.patch(model, YARN, replace=replace))
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


def test_a_patch_that_was_tampered_with_refuses_to_come_off() -> None:
    model = patched()
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

    def frequencies(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
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
        def frequencies(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
            inv_freq, attention_factor = super().frequencies(spec)
            return inv_freq.double() * (1 + 1e-9), attention_factor

    model, reference = tiny.model(), tiny.model()
    ctxext.patch(model, Double(factor=4))
    ctxext.patch(reference, Squeeze(factor=4))
    assert tiny.difference(tiny.logits(model, tiny.tokens(101)), tiny.logits(reference, tiny.tokens(101))) < 1e-3


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
def test_patching_does_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    model = tiny.model()
    torch.set_default_dtype(dtype)
    try:
        ctxext.patch(model, YARN)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(tiny.logits(model, tiny.tokens(101)), tiny.logits(patched(), tiny.tokens(101)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_patched_without_gradients_can_be_trained(mode: Any) -> None:
    model, ids = tiny.model(), tiny.tokens(101)
    with mode():
        ctxext.patch(model, YARN)
    expected = gradients(patched(), ids)
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
@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", [True, False], ids=["with position_ids", "without position_ids"])
@pytest.mark.parametrize("method", METHODS)
def test_a_left_padded_row_equals_the_row_alone(method: str, positions: bool, attention: str) -> None:
    model = patched(method)
    model.set_attn_implementation(attention)
    long, short = tiny.tokens(150, seed=2), tiny.tokens(30, seed=3)
    ids = torch.cat((long, torch.cat((torch.zeros(1, 120, dtype=torch.long), short), dim=1)))
    mask = torch.ones_like(ids)
    mask[1, :120] = 0
    inputs = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else {}
    batch = tiny.logits(model, ids, attention_mask=mask, **inputs)
    assert tiny.difference(batch[0], tiny.logits(model, long)[0]) < 1e-4
    # Positions shifted by 120 turn every angle by as much; fp32 rounds those a little differently.
    assert tiny.difference(batch[1, 120:], tiny.logits(model, short)[0]) < (1e-4 if positions else 5e-4)


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
    expected = greedy(native(method), use_cache=False)
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


@pytest.mark.parametrize("method", METHODS)
def test_the_advertised_length_is_the_target_and_the_trained_one_is_kept(method: str) -> None:
    config = patched(method).config
    # As lm-evaluation-harness resolves a model's length.
    names = ("n_positions", "max_position_embeddings", "n_ctx")
    assert next(getattr(config, name) for name in names if hasattr(config, name)) == TARGET
    assert config.ctxext["original_max_position_embeddings"] == 64
    if NATIVE[method]["rope_type"] != "default":
        assert config.rope_parameters["original_max_position_embeddings"] == 64


def test_generation_below_the_target_draws_no_reminder_of_the_trained_length() -> None:
    with tiny.transformers_log() as plain:
        greedy(tiny.model())
    with tiny.transformers_log() as extended:
        greedy(patched())
    assert any("predefined maximum length (64)" in message for message in plain)
    assert not any("predefined maximum length" in message for message in extended)


def test_a_saved_config_records_the_method_in_plain_json(tmp_path: Path) -> None:
    patched().save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["ctxext"]
    assert ctxext.YaRN.model_validate(record["method"]) == YARN
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
    ("family", "changes"), [("llama", {}), ("mistral", {"sliding_window": 4096}), ("qwen2", {"sliding_window": 16})]
)
def test_windows_that_do_not_bite_are_not_warned_of(family: str, changes: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ctxext.patch(tiny.model(family, **changes), YARN)
