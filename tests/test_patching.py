"""Every method on every architecture: equal to a native model, exact undo, one instance only, whatever fails."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ctxext
import tiny
from ctxext import patching
from patches import (
    ATTENTION,
    EITHER,
    METHODS,
    TARGET,
    YARN,
    assert_as_before,
    gradients,
    native,
    patched,
    plain_state,
    snapshot,
)

pytestmark = [
    pytest.mark.usefixtures("strictly"),
    pytest.mark.filterwarnings("error:.*deprecated"),
    # PyTorch's own compiler still uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


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
    assert list(plain_state(model)) == list(plain.state_dict())
    assert len(model.state_dict()) == len(plain.state_dict()) + (2 if method == "clex" else 0)
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(plain_state(patched(method)), strict=True)


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

    gradients = torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        action()
    except InjectedError as failure:
        return str(failure)
    finally:
        sys.settrace(None)
        # A trace sees the line of a `with` once more before the block is left, and an error from there leaves it open.
        torch.set_grad_enabled(gradients)
    return None


@pytest.mark.parametrize(
    ("method", "replace", "step"), [("yarn", False, 1), ("yarn", True, 3), ("dca", False, 11), ("dca", True, 17)]
)
def test_a_failure_at_any_line_leaves_the_model_as_it_was(method: str, replace: bool, step: int) -> None:
    model, ids = tiny.model(num_hidden_layers=1), tiny.tokens(80)
    handle = ctxext.patch(model, ctxext.PI(factor=2)) if replace else None
    expected = tiny.logits(model, ids)
    for number in range(1, 4000, step):
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


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("mistral", {"sliding_window": 4096}), ("qwen2", {"sliding_window": 16})]
)
def test_windows_that_do_not_bite_are_not_warned_of(family: str, changes: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ctxext.patch(tiny.model(family, **changes), YARN)
