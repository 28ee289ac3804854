"""Plans: what is needed, what is known of each method, what fits; from a config alone, errors on one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import AutoConfig

import ctxext
import tiny
from command_line import Run
from ctxext import memory, planning
from ctxext.errors import PatchError, UnsupportedModelError
from ctxext.families import FAMILIES
from ctxext.methods import METHODS
from ctxext.models import BUILTIN_MODELS, read_config
from ctxext.planning import make_plan, sufficient

LLAMA3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "dtype": "bfloat16",
}

NEEDED = {
    name: required
    for name, cls in METHODS.items()
    if (required := [key for key, field in cls.model_fields.items() if field.is_required()])
}
"""Settings that only the user knows."""


def llama3(**changes: Any) -> Any:
    return AutoConfig.for_model("llama", **{**LLAMA3_8B, **changes})


def folder(path: Path, config: Any) -> Path:
    """A folder with nothing but a config."""
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("trained", "target", "factor"),
    [(8192, 24_000, 2.93), (8192, 24_576, 3.0), (8192, 24_577, 3.01), (4096, 4097, 1.01), (32_768, 131_072, 4.0)],
)
def test_the_factor_is_the_smallest_in_hundredths_that_suffices(trained: int, target: int, factor: float) -> None:
    assert sufficient(trained, target) == factor
    reached = ctxext.YaRN(factor=factor).lengths(ctxext.RopeSpec(1e4, 16, trained)).target
    assert reached >= target


@pytest.mark.parametrize("trained", [100, 4096, 7777, 8192])
def test_no_target_slips_through_the_rounding_of_factors(trained: int) -> None:
    spec = ctxext.RopeSpec(1e4, 16, trained)
    for target in range(trained + 1, trained + 3000, 7):
        factor = sufficient(trained, target)
        assert ctxext.PI(factor=factor).lengths(spec).target >= target
        assert (factor - 0.01) * trained < target


def test_a_plan_names_factor_round_factor_and_lengths() -> None:
    plan = make_plan("m", llama3(), 24_000)
    assert (plan.trained, plan.reach, plan.factor, plan.round_factor) == (8192, 8192, 2.93, 3.0)
    assert plan.method == {"name": "yarn", "factor": 2.93}


@pytest.mark.parametrize("name", METHODS)
def test_the_yaml_extends_the_model_to_the_target(name: str, tmp_path: Path) -> None:
    required = {key: getattr(tiny.METHODS[name], key) for key in NEEDED.get(name, ())}
    plan = make_plan("m", tiny.config(), 150, METHODS[name](**required))
    assert plan.yaml is not None
    assert next(v for v in plan.verdicts if v.method == name).fits is None
    path = tmp_path / "method.yaml"
    path.write_text(plan.yaml)
    with ctxext.patch(tiny.model(), path) as patch:
        assert patch.method.name == name
        assert patch.max_length >= 150
        assert patch.max_length <= 150 + 0.01 * tiny.TRAINED or patch.method.changes_attention


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_is_planned_for(family: str) -> None:
    config = tiny.config(family)
    plan = make_plan("m", config, 200)
    assert plan.parameters == sum(p.numel() for p in tiny.model(family).parameters())
    assert [verdict.method for verdict in plan.verdicts] == list(METHODS)
    assert {v.method for v in plan.verdicts if v.fits} == set(NEEDED)
    assert config.max_position_embeddings == tiny.TRAINED  # and the config given is left as it was


# Counts from the models' cards.
@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (llama3(), 8.03, 8.03),
        (
            AutoConfig.for_model(
                "mixtral", hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_local_experts=8,
                num_experts_per_tok=2, num_attention_heads=32, num_key_value_heads=8, vocab_size=32_000,
            ),
            46.7,
            12.9,
        ),
        (
            AutoConfig.for_model(
                "qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
                num_experts_per_tok=8, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
                head_dim=128, vocab_size=151_936, max_position_embeddings=40_960,
            ),
            30.5,
            3.3,
        ),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_models_cards(config: Any, billions: float, active: float) -> None:
    sizes = memory.sizes(planning.meta_model(config))
    assert sizes.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert sizes.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_the_cache_of_a_known_model_is_counted_exactly() -> None:
    plan = make_plan("m", llama3(), 131_072, batch_size=2)
    decode = next(one for one in plan.passes if one.name == "decode")
    assert decode.memory.cache == 2 * 131_072 * 32 * 2 * 8 * 128 * 2  # 128 KiB a token
    assert decode.memory.weights == 2 * plan.parameters
    assert plan.dtype == "bfloat16"


def test_tied_embeddings_count_once() -> None:
    untied, tied = (make_plan("m", tiny.config(tie_word_embeddings=tie), 128) for tie in (False, True))
    assert untied.parameters - tied.parameters == tiny.VOCABULARY * 64


def test_the_longest_input_that_fits_fits_and_the_next_does_not() -> None:
    capacity = 40 * 10**9
    plan = make_plan("m", llama3(), 16_384, capacity=capacity)
    sizes = memory.sizes(planning.meta_model(llama3()))
    ways = planning.ways(sizes, bf16=True, lora_rank=16)
    for one in plan.passes:
        assert one.longest is not None
        held = [ways[one.name](memory.Input(one.longest + more, 1, 2)).total for more in (0, 1)]
        assert held[1] > capacity
        assert held[0] <= capacity or one.longest == 0
    assert next(one for one in plan.passes if one.name == "train").longest == 0  # its states alone are 128 GB


@pytest.mark.parametrize("target", [64, 40])
def test_within_the_trained_length_nothing_is_needed(target: int, run: Run, tmp_path: Path) -> None:
    result = run("plan", "-m", folder(tmp_path, tiny.config()), "--target", target)
    assert result.status == 0
    assert "nothing is needed: it reads 64 tokens as it is" in result.out
    assert "method:" not in result.out


def test_a_scaled_checkpoint_counts_from_its_trained_length(tmp_path: Path) -> None:
    model = tiny.model()
    ctxext.patch(model, ctxext.YaRN(factor=4))
    model.save_pretrained(tmp_path)
    config = read_config(str(tmp_path))
    assert make_plan("m", config, 256).method is None  # its own scaling reaches that
    plan = make_plan("m", config, 500)
    assert (plan.trained, plan.reach, plan.factor) == (64, 256, 7.82)
    assert any("is replaced" in note for note in plan.notes)


def test_a_checkpoint_with_a_recorded_dca_reads_as_far_as_that(tmp_path: Path) -> None:
    model = tiny.model()
    ctxext.patch(model, ctxext.DCA(max_position_embeddings=500))
    model.save_pretrained(tmp_path)
    assert make_plan("m", read_config(str(tmp_path)), 500).method is None
    assert make_plan("m", read_config(str(tmp_path)), 501).trained == 64


def test_a_llama3_scaling_is_enough_within_its_reach_and_has_to_be_replaced_beyond() -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = llama3(max_position_embeddings=131_072, rope_parameters=scaling)
    assert make_plan("m", config, 100_000).method is None
    with pytest.raises(UnsupportedModelError, match="--replace-scaling"):
        make_plan("m", config, 200_000)
    assert make_plan("m", config, 200_000, replace_scaling=True).trained == 8192


def test_methods_that_the_model_cannot_have_are_named_with_the_reason() -> None:
    plan = make_plan("m", tiny.config("mistral", sliding_window=32), 200)
    reasons = {verdict.method: verdict.fits for verdict in plan.verdicts}
    assert "sliding window" in (reasons["dca"] or "")
    assert reasons["yarn"] is None
    assert any("sliding window of 32 tokens" in note for note in plan.notes)
    with pytest.raises(PatchError, match="sliding window"):
        make_plan("m", tiny.config("mistral", sliding_window=32), 200, "dca")


def test_what_is_known_without_training_follows_the_factor() -> None:
    twice, far = ({v.method: v.untrained for v in make_plan("m", tiny.config(), n).verdicts} for n in (128, 6400))
    assert (twice["pi"], twice["yarn"], twice["ntk"], twice["dca"], twice["llama3"]) == (False, True, True, True, None)
    assert (far["yarn"], far["ntk"], far["dca"]) == (False, False, True)


def test_evidence_and_limit_go_together() -> None:
    for cls in METHODS.values():
        assert cls.untrained_factor is None or cls.untrained_factor >= 1
        assert ("no figures" in cls.evidence) == (cls.untrained_factor is None)


def test_methods_that_turn_all_keys_add_to_the_cache() -> None:
    plan = make_plan("m", tiny.config(), 200, "dynamic_yarn")
    assert {v.method for v in plan.verdicts if v.memory != "nothing"} == {
        "dynamic_ntk",
        "dynamic_yarn",
        "self_extend",
        "rerope",
    }
    cache = {one.name: one.memory.cache for one in plan.passes}
    assert cache["decode"] == cache["prefill"] * 3 // 2


def test_settings_of_a_file_are_kept_and_its_lengths_checked(run: Run, tmp_path: Path) -> None:
    model = folder(tmp_path / "model", tiny.config())
    file = tmp_path / "method.yaml"
    file.write_text("method: {name: yarn, beta_fast: 16}\n")
    plan = json.loads(run("plan", "-m", model, "--target", 200, "--config", file, "--json").out)
    assert plan["method"] == {"name": "yarn", "factor": 3.13, "beta_fast": 16.0}
    result = run("plan", "-m", model, "--target", 200, "--config", file, "-s", "method.factor=3")
    assert result.status == 2
    assert "reaches 192 tokens, not 200" in result.err
    assert "at least 3.13" in result.err
    result = run("plan", "-m", model, "--target", 200, "--config", file, "--method", "ntk")
    assert result.status == 2
    assert result.err.count("\n") == 1


def test_a_method_inside_another_is_written_whole() -> None:
    plan = make_plan("m", tiny.config(), 300, ctxext.DCA(frequencies=ctxext.NTK(factor=2)))
    inner = {"name": "ntk", "factor": 2.0, "log_n": False}
    assert plan.method == {"name": "dca", "max_position_embeddings": 300, "frequencies": inner}


class Half(ctxext.PI):
    """A user's own method."""

    name: Literal["half"] = "half"


def test_a_method_of_the_users_own_is_planned_for() -> None:
    plan = make_plan("m", tiny.config(), 150, Half())
    assert plan.method == {"name": "half", "factor": 2.35}


def test_the_trained_length_may_come_from_the_method() -> None:
    plan = make_plan("m", tiny.config(), 100, ctxext.YaRN(original_max_position_embeddings=32))
    assert (plan.trained, plan.factor) == (32, 3.13)
    assert plan.method == {"name": "yarn", "factor": 3.13, "original_max_position_embeddings": 32}


def test_a_folder_with_a_config_alone_is_planned_for_and_printed(run: Run, tmp_path: Path) -> None:
    result = run("plan", "--model", folder(tmp_path, tiny.config()), "--target", 200, "--memory", 1)
    assert result.status == 0, result.err
    for text in ("local:", "factor of 3.13", "prefill", "LoRA, checkpointing", "1.0 GB are there", "method:\n", "dca"):
        assert text in result.out
    assert result.out.rstrip().endswith("name: yarn\n  factor: 3.13")


def test_json_has_totals_and_nothing_that_json_does_not_know(run: Run, tmp_path: Path) -> None:
    text = run("plan", "-m", folder(tmp_path, tiny.config()), "-t", 200, "--json", "--memory", 0.001).out
    plan = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    for one in plan["passes"]:
        parts = one["memory"]
        assert parts["total"] == sum(parts[key] for key in ("weights", "states", "cache", "activations", "logits"))
        assert one["fits"] == (parts["total"] <= 10**6)
    assert next(v for v in plan["verdicts"] if v["method"] == "dca")["limit"] == "any"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target", 200, "--method", "yran"), "did you mean yarn"),
        (("--target", 0), "expected 2 to 16,777,216"),
        (("--target", 2**24 + 1), "float32"),
        (("--target", 200, "--method", "longrope"), "long_factor"),
        (("--target", 200, "--device", "cuda:7"), "cuda:7"),
        (("--target", 200, "--device", "gpu"), "gpu"),
        (("--target", 200, "-s", "method.name=dca", "-s", "method.attention=naive"), "naive"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[object, ...], said: str, run: Run, tmp_path: Path) -> None:
    result = run("plan", "--model", folder(tmp_path, tiny.config()), *arguments)
    assert result.status == 2
    assert said in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "t5"])
def test_other_architectures_are_refused(model_type: str, run: Run, tmp_path: Path) -> None:
    result = run("plan", "--model", folder(tmp_path, AutoConfig.for_model(model_type)), "--target", 2048)
    assert result.status == 2
    assert f"{model_type!r} is not supported (llama, mistral" in result.err


def test_a_folder_without_a_config_is_refused(run: Run, tmp_path: Path) -> None:
    result = run("plan", "--model", tmp_path, "--target", 2048)
    assert result.status == 2
    assert "no config.json" in result.err


def test_a_quantized_checkpoint_is_noted() -> None:
    config = tiny.config()
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert any("quantized" in note for note in make_plan("m", config, 200).notes)


def test_the_builtin_model_is_planned_for_from_its_gguf_file() -> None:
    config = read_config(next(iter(BUILTIN_MODELS)))
    plan = make_plan("m", config, 16_384)
    assert plan.parameters == 134_515_008
    assert (plan.trained, plan.factor, plan.dtype) == (8192, 2.0, "float32")


def test_the_memory_of_this_machine_is_known_or_said_to_be_unknown() -> None:
    capacity = planning.memory_capacity("cpu")
    assert capacity is None or 2**28 < capacity < 2**50
    assert math.inf in [cls.untrained_factor for cls in METHODS.values()]


@pytest.mark.parametrize(("method", "said"), [("yarn", True), ("dca", False)])
def test_the_mask_of_blocks_of_several_documents_is_spoken_of_where_there_is_one(method: str, said: bool) -> None:
    notes = make_plan("m", tiny.config(), 200, method).notes
    assert any("stock attention is given a mask, of 0.00 GB and more" in note for note in notes) == said
