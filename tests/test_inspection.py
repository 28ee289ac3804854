"""The report of what is in effect, and that nothing which is not in effect passes for it."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import ctxext
import tiny

YARN = tiny.METHODS["yarn"]
METHODS = list(tiny.METHODS)


@pytest.fixture(autouse=True)
def _strictly() -> Iterator[None]:
    with tiny.strictly():
        yield


def patched(method: ctxext.Method = YARN, family: str = "llama", **changes: Any) -> PreTrainedModel:
    model = tiny.model(family, **changes)
    ctxext.patch(model, method)
    return model


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_plain_model_has_nothing_to_report(family: str) -> None:
    report = ctxext.inspect(tiny.model(family))
    assert (report.model_type, report.method, report.scaling) == (family, None, "default")
    assert (report.original_max_position_embeddings, report.max_position_embeddings, report.factor) == (64, 64, 1)
    assert (report.rope_theta, report.attention_factor, report.patched_modules) == (10_000.0, 1.0, 0)
    assert report.inv_freq == report.base_inv_freq
    assert report.consistent
    assert report.problems == report.notes == ()


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_patched_model_reports_its_method_as_measured(method: str, family: str) -> None:
    model = patched(tiny.METHODS[method], family)
    report = ctxext.inspect(model)
    assert report.method == tiny.METHODS[method].model_dump(exclude_none=True, mode="json")
    assert (report.original_max_position_embeddings, report.max_position_embeddings, report.factor) == (64, 256, 4)
    assert (report.rope_theta, report.patched_modules) == (10_000.0, 1)
    cos, sin = model.base_model.rotary_emb(torch.zeros(1, 1, 64), torch.tensor([[1]]))
    assert report.inv_freq == pytest.approx(torch.atan2(sin, cos)[0, 0, :8].tolist(), rel=1e-6)
    assert report.attention_factor == pytest.approx(math.hypot(cos[0, 0, 0].item(), sin[0, 0, 0].item()), rel=1e-6)
    assert report.base_inv_freq == pytest.approx([10 ** (-i / 2) for i in range(8)], rel=1e-6)
    assert report.consistent, report.problems


def test_an_unpatched_model_reports_its_former_self() -> None:
    model = tiny.model()
    before = ctxext.inspect(model)
    with ctxext.patch(model, YARN):
        assert ctxext.inspect(model) != before
    assert ctxext.inspect(model) == before


def test_fingerprints_are_sha256_of_the_live_values() -> None:
    report = ctxext.inspect(patched())
    packed = struct.pack("<8f", *report.inv_freq)
    assert report.inv_freq_sha256 == hashlib.sha256(packed).hexdigest()
    assert report.fingerprint == hashlib.sha256(packed + struct.pack("<d", report.attention_factor)).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        ctxext.YaRN(factor=4, beta_slow=2),
        ctxext.YaRN(factor=4, attention_factor=1),
        ctxext.YaRN(factor=8),
        ctxext.PI(factor=4),
    ],
    ids=repr,
)
def test_fingerprints_tell_settings_apart(other: ctxext.Method) -> None:
    assert ctxext.inspect(patched(other)).fingerprint != ctxext.inspect(patched()).fingerprint
    assert ctxext.inspect(patched(other)).fingerprint == ctxext.inspect(patched(other, seed=7)).fingerprint


def test_the_report_for_people_names_what_counts() -> None:
    text = str(ctxext.inspect(patched()))
    for fact in ("LlamaForCausalLM", "yarn", "factor=4", "64 tokens", "256 tokens", "10,000", "1.138629", "agree"):
        assert fact in text
    assert "not in effect" not in text


def test_the_report_for_files_is_plain_json() -> None:
    report = ctxext.inspect(patched(tiny.METHODS["longrope"]))
    values = json.loads(json.dumps(report.to_dict()))
    assert values["method"]["long_factor"] == [1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4]
    assert values["inv_freq"] == list(report.inv_freq)


def test_inspecting_changes_nothing() -> None:
    model, ids = patched(), tiny.tokens(101)
    settings, expected, state = model.config.to_dict(), tiny.logits(model, ids), torch.get_rng_state()
    assert ctxext.inspect(model) == ctxext.inspect(model)
    assert model.config.to_dict() == settings
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(tiny.logits(model, ids), expected)


def updated(**values: Any) -> Callable[[Any], None]:
    return lambda config: config.rope_parameters.update(values)


def assigned(name: str, value: Any) -> Callable[[Any], None]:
    return lambda config: setattr(config, name, value)


_LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
EDITS: dict[str, Callable[[Any], None]] = {
    "a key in place": updated(rope_theta=1e6),
    "a type in place": updated(rope_type="linear", factor=8.0),
    "a factor without a type": updated(factor=8.0),
    "yarn in place": updated(rope_type="yarn", factor=8.0, original_max_position_embeddings=64),
    "dynamic": updated(rope_type="dynamic", factor=8.0),
    "longrope": updated(rope_type="longrope", factor=8.0, **_LONGROPE),
    "longrope of another size": updated(rope_type="longrope", factor=8.0, **{**_LONGROPE, "short_factor": [1.0] * 4}),
    "a type that Transformers has not": updated(rope_type="ntk", factor=8.0),
    "a number as text": updated(rope_theta="1e6"),
    "a whole dict": assigned("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}),
    "a dict without a base": assigned("rope_parameters", {"rope_type": "linear", "factor": 8.0}),
    "a dict by layer type": assigned(
        "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    ),
    "an empty dict": assigned("rope_parameters", {}),
    "nothing": assigned("rope_parameters", None),
    "the old name, as on model cards": assigned("rope_scaling", {"rope_type": "yarn", "factor": 8.0}),
    "the old name and key": assigned("rope_scaling", {"type": "linear", "factor": 8.0}),
    "the length": assigned("max_position_embeddings", 4096),
    "the base by its old name": assigned("rope_theta", 1e6),
}


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3"])
@pytest.mark.parametrize("state", ["plain", "patched"])
@pytest.mark.parametrize("edit", EDITS)
def test_editing_the_config_after_loading_is_reported_as_not_in_effect(edit: str, state: str, family: str) -> None:
    model, ids = tiny.model(family) if state == "plain" else patched(family=family), tiny.tokens(101)
    before = tiny.logits(model, ids)
    EDITS[edit](model.config)
    assert torch.equal(tiny.logits(model, ids), before), "the edit does act"
    report = ctxext.inspect(model)
    assert not report.consistent
    assert any("not in effect" in problem for problem in report.problems)
    assert "not in effect" in str(report)
    json.dumps(report.to_dict())


def test_an_edit_of_a_scaled_checkpoint_is_reported_too() -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = tiny.model(max_position_embeddings=256, rope_parameters=parameters)
    assert ctxext.inspect(model).consistent
    model.config.rope_parameters["factor"] = 8.0
    assert "not in effect" in str(ctxext.inspect(model))


def test_an_edit_of_longrope_is_reported_too() -> None:
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **_LONGROPE}
    model = tiny.model(max_position_embeddings=256, rope_parameters=parameters)
    assert ctxext.inspect(model).consistent
    model.config.rope_parameters["short_factor"] = [2.0] * 8
    assert "not in effect" in str(ctxext.inspect(model))


def other_rotary(model: PreTrainedModel) -> None:
    model.model.rotary_emb = tiny.model().model.rotary_emb


def other_forward(model: PreTrainedModel) -> None:
    model.model.rotary_emb.forward = tiny.model().model.rotary_emb.forward


def other_frequencies(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq = 2 * model.model.rotary_emb.inv_freq


def frequencies_in_place(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


def other_attention_factor(model: PreTrainedModel) -> None:
    model.model.rotary_emb.attention_scaling = 1.0


@pytest.mark.parametrize(
    "tamper", [other_rotary, other_forward, other_frequencies, frequencies_in_place, other_attention_factor]
)
def test_tampering_with_the_live_module_is_reported(tamper: Callable[[Any], None]) -> None:
    model = patched()
    before = tiny.logits(model, tiny.tokens(101))
    tamper(model)
    assert tiny.difference(tiny.logits(model, tiny.tokens(101)), before) > 1e-2
    report = ctxext.inspect(model)
    assert not report.consistent
    assert "not in effect" in str(report)


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
def test_frequencies_rounded_by_a_cast_are_reported_and_a_patch_mends_them(cast: str) -> None:
    model = getattr(tiny.model(), cast)()
    report = ctxext.inspect(model)
    assert not report.consistent
    assert "rounded to 16 bits" in str(report)
    ctxext.patch(model, YARN)
    assert ctxext.inspect(model).consistent


def test_a_model_loaded_in_bf16_is_not_taken_for_a_rounded_one(tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path)
    assert ctxext.inspect(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)).consistent


@pytest.mark.parametrize("method", [None, YARN], ids=["plain", "patched"])
def test_a_model_on_the_meta_device_can_be_inspected(method: ctxext.Method | None) -> None:
    with torch.device("meta"):
        model = tiny.model()
    real = tiny.model()
    if method is not None:
        ctxext.patch(model, method)
        ctxext.patch(real, method)
    assert ctxext.inspect(model) == ctxext.inspect(real)


def test_inspecting_does_not_depend_on_the_default_device() -> None:
    model = patched()
    expected = ctxext.inspect(model)
    with torch.device("meta"):
        assert ctxext.inspect(model) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_inspecting_does_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    model = patched()
    expected = ctxext.inspect(model)
    torch.set_default_dtype(dtype)
    try:
        assert ctxext.inspect(model) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("method", METHODS)
def test_a_reloaded_checkpoint_reports_what_it_was_saved_with(method: str, tmp_path: Path) -> None:
    patched(tiny.METHODS[method]).save_pretrained(tmp_path)
    report = ctxext.inspect(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert report.consistent, report.problems
    assert report.method is None
    assert any("saved with ctxext" in note and method in note for note in report.notes)
    assert report.max_position_embeddings == 256
    assert report.original_max_position_embeddings == 64
    assert report.inv_freq == pytest.approx(ctxext.inspect(patched(tiny.METHODS[method])).inv_freq, rel=1e-6)


def test_a_scaled_checkpoint_is_called_scaled() -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    report = ctxext.inspect(tiny.model(max_position_embeddings=256, rope_parameters=parameters))
    assert (report.scaling, report.factor, report.original_max_position_embeddings) == ("yarn", 4, 64)
    assert report.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert "scaled with yarn" in str(report)


def test_dynamic_frequencies_after_a_long_input_are_called_what_they_are() -> None:
    model = tiny.model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    assert ctxext.inspect(model).consistent
    tiny.logits(model, tiny.tokens(128))
    report = ctxext.inspect(model)
    assert report.problems == ("dynamic: the live frequencies are those of the last input, not of the config",)


def test_windows_are_noted_on_plain_and_patched_models() -> None:
    model = tiny.model("mistral", sliding_window=16)
    note = "2 of 2 layers attend to a sliding window of 16 tokens"
    assert note in str(ctxext.inspect(model))
    with pytest.warns(UserWarning, match="16 tokens"):
        ctxext.patch(model, YARN)
    assert note in str(ctxext.inspect(model))


def test_a_target_that_is_the_trained_length_is_noted() -> None:
    report = ctxext.inspect(patched(ctxext.RopeTheta(rope_theta=1e6)))
    assert report.consistent
    assert "the target length is the trained length" in str(report)


@pytest.mark.filterwarnings("error:.*deprecated")
def test_saving_and_generating_leave_a_patched_model_consistent(tmp_path: Path) -> None:
    model = patched()
    model.save_pretrained(tmp_path)
    prompt = tiny.tokens(50)
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
    model.resize_token_embeddings(tiny.VOCABULARY + 8, mean_resizing=False)
    model.set_attn_implementation("eager")
    assert ctxext.inspect(model).consistent


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ctxext.inspect(patched()).plot(tmp_path / "wavelengths.png")
    assert (tmp_path / "wavelengths.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_an_unsupported_model_is_refused() -> None:
    with pytest.raises(ctxext.UnsupportedModelError, match="not supported"):
        ctxext.inspect(torch.nn.Linear(2, 2))
