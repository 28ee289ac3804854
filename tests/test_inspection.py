"""The report of what is in effect, and that nothing which is not in effect passes for it."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ctxext
import tiny
from ctxext.attention import engine

pytestmark = pytest.mark.usefixtures("strictly")

YARN = tiny.METHODS["yarn"]
METHODS = list(tiny.METHODS)
ATTENTION = [name for name in METHODS if name not in tiny.STATIC]
EITHER = ["yarn", "dca"]
"""One of each kind, where the method is not what is tested."""


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
@pytest.mark.parametrize("method", tiny.STATIC)
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


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", ATTENTION)
def test_a_model_whose_attention_was_changed_reports_what_it_does(method: str, family: str) -> None:
    report = ctxext.inspect(patched(tiny.METHODS[method], family))
    assert report.method == tiny.METHODS[method].model_dump(exclude_none=True, mode="json")
    assert (report.original_max_position_embeddings, report.max_position_embeddings, report.factor) == (64, 256, 4)
    # The rotary embedding, and the attention of two layers.
    assert (report.rope_theta, report.attention_factor, report.patched_modules) == (10_000.0, 1.0, 3)
    assert report.inv_freq == report.base_inv_freq
    assert report.inv_freq == pytest.approx([10 ** (-i / 2) for i in range(8)], rel=1e-6)
    assert report.consistent, report.problems
    assert report.notes == ()


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("dca", ["chunks of 16 tokens", "stay below 24", "exact up to 8"]),
        ("dynamic_ntk", ["true distances", "beyond 64 tokens", "each query's own position", "steps of 16"]),
        ("dynamic_yarn", ["true distances", "beyond 64 tokens", "each query's own position", "steps of 16"]),
    ],
)
def test_what_is_done_to_attention_is_one_sentence_of_the_report(method: str, said: list[str]) -> None:
    report = ctxext.inspect(patched(tiny.METHODS[method]))
    assert report.attention is not None
    assert "\n" not in report.attention
    assert all(part in report.attention for part in said)
    assert report.attention in str(report)
    assert json.loads(json.dumps(report.to_dict()))["attention"] == report.attention


@pytest.mark.parametrize("method", [None, *tiny.STATIC])
def test_stock_attention_needs_no_sentence(method: str | None) -> None:
    report = ctxext.inspect(tiny.model() if method is None else patched(tiny.METHODS[method]))
    assert report.attention is None


@pytest.mark.parametrize("method", [ctxext.DynamicNTK(seq_len=128), ctxext.DynamicYaRN(seq_len=128)], ids=repr)
def test_a_pinned_dynamic_method_is_reported_as_a_static_one(method: ctxext.Method) -> None:
    report = ctxext.inspect(patched(method))
    assert report.attention is None
    assert (report.patched_modules, report.max_position_embeddings) == (1, 128)
    # s = 2 * 128 / 64 - 1
    assert report.base_inv_freq[-1] / report.inv_freq[-1] == pytest.approx(3, rel=2e-6)
    assert report.consistent, report.problems


@pytest.mark.parametrize("method", METHODS)
def test_an_unpatched_model_reports_its_former_self(method: str) -> None:
    model = tiny.model()
    before = ctxext.inspect(model)
    with ctxext.patch(model, tiny.METHODS[method]):
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


_DCA = {"chunk_size": 24, "local_size": 8}


@pytest.mark.parametrize(
    "others",
    [
        [
            ctxext.DCA(**_DCA),
            ctxext.DCA(chunk_size=24, local_size=4),
            ctxext.DCA(chunk_size=25, local_size=9),
            ctxext.DCA(**_DCA, temperature=0.3),
            ctxext.DCA(**_DCA, temperature=0.3, original_max_position_embeddings=48),
            ctxext.DCA(**_DCA, frequencies=ctxext.NTK(factor=2)),
            ctxext.DCA(**_DCA, frequencies=ctxext.YaRN(factor=2)),
            ctxext.DCA(**_DCA, frequencies=ctxext.YaRN(factor=2, attention_factor=1)),
            YARN,
        ],
        [
            ctxext.DynamicYaRN(step=16),
            ctxext.DynamicYaRN(step=15),
            ctxext.DynamicYaRN(step=16, factor=3),
            ctxext.DynamicYaRN(step=16, beta_slow=0.25),
            ctxext.DynamicYaRN(step=16, beta_fast=3),
            ctxext.DynamicYaRN(step=16, truncate=False),
            ctxext.DynamicYaRN(step=16, original_max_position_embeddings=48),
            ctxext.DynamicYaRN(seq_len=128),
            ctxext.DynamicNTK(step=16),
            YARN,
        ],
    ],
    ids=["dca", "dynamic_yarn"],
)
def test_fingerprints_tell_settings_of_changed_attention_apart(others: list[ctxext.Method]) -> None:
    prints = [ctxext.inspect(model).fingerprint for model in [tiny.model(), *(patched(other) for other in others)]]
    assert len(set(prints)) == len(others) + 1


@pytest.mark.parametrize(
    ("method", "same"),
    [
        (tiny.METHODS["dca"], ctxext.DCA(**_DCA, factor=8)),
        (tiny.METHODS["dca"], ctxext.DCA(**_DCA, attention="naive")),
        (tiny.METHODS["dynamic_ntk"], ctxext.DynamicNTK(step=16, max_position_embeddings=640)),
        (tiny.METHODS["dynamic_yarn"], ctxext.DynamicYaRN(step=16, attention="naive")),
    ],
    ids=repr,
)
def test_fingerprints_are_of_scores_and_of_nothing_else(method: ctxext.Method, same: ctxext.Method) -> None:
    expected = ctxext.inspect(patched(method)).fingerprint
    assert ctxext.inspect(patched(same)).fingerprint == expected
    assert ctxext.inspect(patched(method, seed=7)).fingerprint == expected


def test_a_fingerprint_of_changed_attention_is_sha256_of_relative_rotations() -> None:
    # Chunks of 16 with 8 exact, trained on 64: probes around both, and what DCA's three formulas make of each pair.
    positions = [0, 1, 8, 15, 16, 22, 32, 37, 63, 64, 86, 133, 255, 256]
    relative = [
        0 if j > i else
        i % 16 - j % 16 if i // 16 == j // 16 else
        min(i % 16 + 16, 23) - j % 16 if i // 16 == j // 16 + 1 else
        23 - j % 16
        for i in positions for j in positions
    ]  # fmt: skip
    report = ctxext.inspect(patched(tiny.METHODS["dca"]))
    packed = struct.pack("<196q", *relative) + struct.pack("<8f", *report.inv_freq) * 14
    packed += struct.pack("<14f", *[1.0] * 14) + struct.pack("<d", 1.0)
    assert report.fingerprint == hashlib.sha256(packed).hexdigest()


def test_the_report_for_people_names_the_settings_of_a_method_inside_another() -> None:
    text = str(ctxext.inspect(patched(ctxext.DCA(**_DCA, frequencies=ctxext.YaRN(factor=2)))))
    for fact in ("dca", "chunk_size=24", "frequencies=yarn", "factor=2", "64 tokens", "256 tokens (factor 4)", "agree"):
        assert fact in text


def test_the_report_for_people_names_what_counts() -> None:
    text = str(ctxext.inspect(patched()))
    for fact in ("LlamaForCausalLM", "yarn", "factor=4", "64 tokens", "256 tokens", "10,000", "1.138629", "agree"):
        assert fact in text
    assert "not in effect" not in text


def test_the_report_for_files_holds_a_method_inside_another() -> None:
    report = ctxext.inspect(patched(ctxext.DCA(**_DCA, frequencies=ctxext.YaRN(factor=2))))
    values = json.loads(json.dumps(report.to_dict()))
    assert values["method"]["frequencies"]["factor"] == 2
    assert "partition" not in values


def test_the_report_for_files_is_plain_json() -> None:
    report = ctxext.inspect(patched(tiny.METHODS["longrope"]))
    values = json.loads(json.dumps(report.to_dict()))
    assert values["method"]["long_factor"] == [1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4]
    assert values["inv_freq"] == list(report.inv_freq)


@pytest.mark.parametrize("method", ["yarn", *ATTENTION])
def test_inspecting_changes_nothing(method: str) -> None:
    model, ids = patched(tiny.METHODS[method]), tiny.tokens(101)
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
@pytest.mark.parametrize("state", ["plain", *EITHER])
@pytest.mark.parametrize("edit", EDITS)
def test_editing_the_config_after_loading_is_reported_as_not_in_effect(edit: str, state: str, family: str) -> None:
    model, ids = tiny.model(family), tiny.tokens(101)
    if state != "plain":
        ctxext.patch(model, tiny.METHODS[state])
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


TAMPERS = [other_rotary, other_forward, other_frequencies, frequencies_in_place]


@pytest.mark.parametrize(
    ("method", "tamper"),
    [("yarn", tamper) for tamper in [*TAMPERS, other_attention_factor]]
    + [("dca", tamper) for tamper in TAMPERS]
    # At a period of 1 frequencies don't matter; another module does.
    + [(method, tamper) for method in ("dynamic_ntk", "dynamic_yarn") for tamper in TAMPERS[:2]],
)
def test_tampering_with_the_live_module_is_reported(method: str, tamper: Callable[[Any], None]) -> None:
    model = patched(tiny.METHODS[method])
    before = tiny.logits(model, tiny.tokens(101))
    tamper(model)
    assert tiny.difference(tiny.logits(model, tiny.tokens(101)), before) > 1e-2
    report = ctxext.inspect(model)
    assert not report.consistent
    assert "not in effect" in str(report)


def no_hook(model: PreTrainedModel) -> None:
    model.model._forward_pre_hooks.clear()


def another_config_in_a_layer(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.config = tiny.config()


def another_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


BROKEN: list[tuple[Callable[[Any], None], str, str]] = [
    (no_hook, "the hook of {} is gone", "without its decoder"),
    (another_attention, "not every layer runs the attention of {}", "'eager' on a model patched with {}"),
]


@pytest.mark.parametrize(("tamper", "said", "raised"), BROKEN)
@pytest.mark.parametrize("method", ATTENTION)
def test_changed_attention_that_can_not_run_any_more_is_reported_and_raises(
    method: str, tamper: Callable[[Any], None], said: str, raised: str
) -> None:
    model = patched(tiny.METHODS[method])
    tamper(model)
    report = ctxext.inspect(model)
    assert not report.consistent
    assert f"{said.format(method)}: the patch is not in effect" in report.problems
    with pytest.raises(ctxext.PatchError, match=raised.format(method)):
        tiny.logits(model, tiny.tokens(101))


@pytest.mark.parametrize("trained", [8192, 131_072])
def test_the_proof_is_as_sharp_for_long_models(trained: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(max_position_embeddings=trained, head_dim=64)
    method = ctxext.DCA(chunk_size=trained, local_size=trained // 4)
    ctxext.patch(model, method)
    assert not ctxext.inspect(model).problems
    attend = engine.attend
    monkeypatch.setattr(engine, "attend", lambda *given: 1.02 * attend(*given))
    assert "attention does not see the relative positions of dca" in ctxext.inspect(model).problems[0]


@pytest.mark.parametrize("method", ATTENTION)
def test_a_layer_that_no_longer_runs_changed_attention_is_reported(method: str) -> None:
    model = patched(tiny.METHODS[method])
    another_config_in_a_layer(model)
    assert (
        f"not every layer runs the attention of {method}: the patch is not in effect" in ctxext.inspect(model).problems
    )


@pytest.mark.parametrize("method", ATTENTION)
def test_a_rotary_embedding_put_back_under_changed_attention_is_reported(method: str) -> None:
    model = patched(tiny.METHODS[method])
    other_rotary(model)
    report = ctxext.inspect(model)
    assert f"LlamaRotaryEmbedding does not rotate by the frequencies of {method}: the patch is not in effect" in (
        report.problems
    )


@pytest.mark.parametrize("method", ATTENTION)
def test_stock_attention_under_the_registered_name_is_reported(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(tiny.METHODS[method])

    def stock(*args: Any, ctxext: Any = None, **kwargs: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, is_causal=True, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "ctxext", stock)
    report = ctxext.inspect(model)
    assert f"attention does not see the relative positions of {method}: the patch is not in effect" in report.problems


@pytest.mark.parametrize("method", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_changed_attention_is_in_effect_whatever_the_model_is_cast_to(method: str, dtype: torch.dtype) -> None:
    model = patched(tiny.METHODS[method]).to(dtype)
    assert ctxext.inspect(model).consistent


@pytest.mark.parametrize("method", ATTENTION)
def test_dropout_and_training_do_not_get_into_the_way_of_inspecting(method: str) -> None:
    model = patched(tiny.METHODS[method], attention_dropout=0.1).train()
    assert ctxext.inspect(model).consistent


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


@pytest.mark.parametrize("method", [None, *tiny.METHODS.values()], ids=["plain", *METHODS])
def test_a_model_on_the_meta_device_can_be_inspected(method: ctxext.Method | None) -> None:
    with torch.device("meta"):
        model = tiny.model()
    real = tiny.model()
    if method is not None:
        ctxext.patch(model, method)
        ctxext.patch(real, method)
    assert ctxext.inspect(model) == ctxext.inspect(real)


@pytest.mark.parametrize("method", ["yarn", *ATTENTION])
def test_inspecting_does_not_depend_on_the_default_device(method: str) -> None:
    model = patched(tiny.METHODS[method])
    expected = ctxext.inspect(model)
    with torch.device("meta"):
        assert ctxext.inspect(model) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", ["yarn", *ATTENTION])
def test_inspecting_does_not_depend_on_the_default_dtype(method: str, dtype: torch.dtype) -> None:
    model = patched(tiny.METHODS[method])
    expected = ctxext.inspect(model)
    torch.set_default_dtype(dtype)
    try:
        assert ctxext.inspect(model) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("method", tiny.STATIC)
def test_a_reloaded_checkpoint_reports_what_it_was_saved_with(method: str, tmp_path: Path) -> None:
    patched(tiny.METHODS[method]).save_pretrained(tmp_path)
    report = ctxext.inspect(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert report.consistent, report.problems
    assert report.method is None
    assert any("saved with ctxext" in note and method in note for note in report.notes)
    assert report.max_position_embeddings == 256
    assert report.original_max_position_embeddings == 64
    assert report.inv_freq == pytest.approx(ctxext.inspect(patched(tiny.METHODS[method])).inv_freq, rel=1e-6)


@pytest.mark.parametrize("method", ATTENTION)
def test_a_reloaded_checkpoint_whose_attention_was_changed_reports_the_base_and_the_record(
    method: str, tmp_path: Path
) -> None:
    patched(tiny.METHODS[method]).save_pretrained(tmp_path)
    report, base = ctxext.inspect(AutoModelForCausalLM.from_pretrained(tmp_path)), ctxext.inspect(tiny.model())
    assert report.consistent, report.problems
    assert (report.method, report.attention, report.checkpoint_method) == (None, None, method)
    assert any("saved with ctxext" in note and method in note for note in report.notes)
    assert (report.original_max_position_embeddings, report.max_position_embeddings) == (64, 64)
    assert report.fingerprint == base.fingerprint


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


@pytest.mark.filterwarnings("error:.*deprecated")
@pytest.mark.parametrize("method", ATTENTION)
def test_saving_and_generating_leave_changed_attention_consistent(method: str, tmp_path: Path) -> None:
    model = patched(tiny.METHODS[method])
    model.save_pretrained(tmp_path)
    prompt = tiny.tokens(50)
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
    model.resize_token_embeddings(tiny.VOCABULARY + 8, mean_resizing=False)
    assert ctxext.inspect(model).consistent


@pytest.mark.parametrize("method", ["yarn", *ATTENTION])
def test_the_plot_is_a_picture(method: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ctxext.inspect(patched(tiny.METHODS[method])).plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_an_unsupported_model_is_refused() -> None:
    with pytest.raises(ctxext.UnsupportedModelError, match="not supported"):
        ctxext.inspect(torch.nn.Linear(2, 2))
