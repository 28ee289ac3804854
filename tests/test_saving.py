"""What a patched model says of itself, and what is saved and loaded again, by ctxext and without it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ctxext
import tiny
from patches import ATTENTION, METHODS, NATIVE, TARGET, YARN, assert_as_before, greedy, patched, plain_state, snapshot

pytestmark = [
    pytest.mark.usefixtures("strictly"),
    pytest.mark.filterwarnings("error:.*deprecated"),
    # PyTorch's own compiler still uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


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
    twin.load_state_dict(plain_state(model))
    assert tiny.difference(tiny.logits(twin, ids), tiny.logits(model, ids)) < 1e-4


@pytest.mark.parametrize("method", ATTENTION)
def test_the_config_of_a_model_with_changed_attention_is_of_no_use_to_another(method: str) -> None:
    twin = AutoModelForCausalLM.from_config(patched(method).config).eval()
    with pytest.raises(ctxext.PatchError, match="given to another one; patch that model itself"):
        tiny.logits(twin, tiny.tokens(101))


def test_a_base_written_as_a_whole_number_changes_nothing() -> None:
    whole = patched(rope_parameters={"rope_type": "default", "rope_theta": 10_000})
    assert torch.equal(whole.model.rotary_emb.inv_freq, patched().model.rotary_emb.inv_freq)


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
    handle = ctxext.patch(model, type(settings)(**{**dict(settings), "max_position_embeddings": 280}))
    assert handle.max_length == 280
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
