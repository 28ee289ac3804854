"""LoRA adapters that carry their method: saved, loaded, refused under another one, merged, told apart."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import ctxext
import tiny
from command_line import Run
from ctxext.errors import ConfigError, CtxextError, ModelLoadError
from ctxext.evaluation.compare import Bench
from ctxext.evaluation.results import weights_fingerprint
from ctxext.export import export, save_adapter, write_checkpoint

peft = pytest.importorskip("peft", reason="needs peft: pip install 'ctxext[peft]'")

pytestmark = [
    # PEFT still asks recent releases of Transformers by an old name, and warns of what is tested here.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

YARN = tiny.METHODS["yarn"]
TRAINABLE = ["norm", "input_layernorm", "post_attention_layernorm", "embed_tokens"]
IDS = tiny.tokens(101)


def train(name: str, method: ctxext.Method | None, *, seed: int = 3, **settings: Any) -> Any:
    """The base model with an adapter whose weights are all moved."""
    model, _ = ctxext.load_model(name, method, device="cpu")
    torch.manual_seed(seed)
    defaults = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{**defaults, **settings})).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return wrapped


def loaded(folder: Path, method: Any = None, **options: Any) -> Any:
    return ctxext.load_model(str(folder), method, device="cpu", **options)[0]


def refusal(folder: Path, method: Any = None, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        loaded(folder, method, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def base(checkpoint: Path) -> str:
    return str(checkpoint)


@pytest.fixture
def adapter(base: str, tmp_path: Path) -> Path:
    """An adapter trained with YaRN."""
    save_adapter(train(base, YARN), tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("modules", [None, TRAINABLE], ids=["lora", "lora, norms and embeddings"])
@pytest.mark.parametrize("method", ["yarn", "dca", "dynamic_yarn", None])
def test_an_adapter_comes_back_with_its_method_and_merges_into_a_plain_model(
    method: str | None, modules: list[str] | None, tied: bool, tmp_path: Path
) -> None:
    tiny.save_checkpoint(tmp_path / "base", tie_word_embeddings=tied)
    trained = train(str(tmp_path / "base"), method and tiny.METHODS[method], modules_to_save=modules)
    expected = tiny.logits(trained, IDS)
    save_adapter(trained, tmp_path / "adapter")
    again = loaded(tmp_path / "adapter")
    assert torch.equal(tiny.logits(again, IDS), expected)
    assert ctxext.inspect(again).consistent
    export(str(tmp_path / "adapter"), None, tmp_path / "merged")
    merged = ctxext.load_model(str(tmp_path / "merged"), device="cpu")[0]
    assert not hasattr(merged, "peft_config")
    # The sum of the weights is rounded once more than the sum of the results.
    assert tiny.difference(tiny.logits(merged, IDS), expected) < 1e-3
    if method in ("yarn", None):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert torch.equal(tiny.logits(plain, IDS), tiny.logits(merged, IDS))


def test_weights_that_stay_tied_while_they_are_trained_stay_tied_when_merged(tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path / "base", tie_word_embeddings=True)
    trained = train(str(tmp_path / "base"), YARN, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    expected = tiny.logits(trained, IDS)
    save_adapter(trained, tmp_path / "adapter")
    export(str(tmp_path / "adapter"), None, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert tiny.difference(tiny.logits(plain, IDS), expected) < 1e-3


def test_the_record_says_what_was_trained_on_what(adapter: Path, base: str) -> None:
    record = yaml.safe_load((adapter / "ctxext.yaml").read_text())
    assert record["base_model"] == base
    assert ctxext.YaRN(**record["method"]) == YARN
    model = ctxext.load_model(base, YARN, device="cpu")[0]
    assert record["rotation"]["fingerprint"] == ctxext.inspect(model).fingerprint
    assert record["rotation"]["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    "method", [YARN, {"name": "yarn", "factor": 4}, ctxext.YaRN(max_position_embeddings=256)], ids=repr
)
def test_the_same_method_may_be_named(method: Any, adapter: Path) -> None:
    assert torch.equal(tiny.logits(loaded(adapter, method), IDS), tiny.logits(loaded(adapter), IDS))


@pytest.mark.parametrize("method", [ctxext.YaRN(factor=8), ctxext.NTK(factor=4), tiny.METHODS["dca"]], ids=repr)
def test_another_method_is_refused(method: ctxext.Method, adapter: Path) -> None:
    assert "was trained under YaRN(factor=4.0), not under" in refusal(adapter, method)


def test_other_chunks_are_another_method(base: str, tmp_path: Path) -> None:
    save_adapter(train(base, tiny.METHODS["dca"]), tmp_path / "adapter")
    assert "not under DCA" in refusal(tmp_path / "adapter", ctxext.DCA(chunk_size=24, local_size=6))


class Mine(ctxext.NTK):
    name: str = "mine"  # type: ignore[assignment]


def test_a_user_s_own_method_is_asked_for_and_compared(base: str, tmp_path: Path) -> None:
    trained = train(base, Mine(factor=4))
    save_adapter(trained, tmp_path / "adapter")
    assert torch.equal(tiny.logits(loaded(tmp_path / "adapter", Mine(factor=4)), IDS), tiny.logits(trained, IDS))
    assert "hand the method to load_model" in refusal(tmp_path / "adapter")
    assert "not under Mine" in refusal(tmp_path / "adapter", Mine(factor=8))


def test_an_adapter_of_the_plain_model_is_refused_under_any_method(base: str, tmp_path: Path) -> None:
    save_adapter(train(base, None), tmp_path / "adapter")
    assert ctxext.inspect(loaded(tmp_path / "adapter")).method is None
    assert "was trained under 'no method', not under YaRN" in refusal(tmp_path / "adapter", YARN)


def test_an_adapter_without_a_record_is_loaded_onto_the_plain_model_only(base: str, tmp_path: Path) -> None:
    trained = train(base, None)
    trained.save_pretrained(str(tmp_path / "adapter"))
    assert torch.equal(tiny.logits(loaded(tmp_path / "adapter"), IDS), tiny.logits(trained, IDS))
    assert "has no ctxext.yaml" in refusal(tmp_path / "adapter", YARN)


def test_an_adapter_without_a_record_is_refused_on_a_base_that_brings_a_method(base: str, tmp_path: Path) -> None:
    export(base, tiny.METHODS["dca"], tmp_path / "base")
    train(str(tmp_path / "base"), None).save_pretrained(str(tmp_path / "adapter"))
    assert "has no ctxext.yaml" in refusal(tmp_path / "adapter")


def test_the_adapter_of_a_base_that_brings_a_method_has_that_method(base: str, tmp_path: Path) -> None:
    export(base, tiny.METHODS["dca"], tmp_path / "base")
    trained = train(str(tmp_path / "base"), None)
    save_adapter(trained, tmp_path / "adapter")
    assert torch.equal(tiny.logits(loaded(tmp_path / "adapter"), IDS), tiny.logits(trained, IDS))


def test_the_adapter_of_a_checkpoint_that_was_extended_before_needs_no_method(base: str, tmp_path: Path) -> None:
    export(base, YARN, tmp_path / "base")
    trained = train(str(tmp_path / "base"), None)
    save_adapter(trained, tmp_path / "adapter")
    assert torch.equal(tiny.logits(loaded(tmp_path / "adapter"), IDS), tiny.logits(trained, IDS))
    exported = export(str(tmp_path / "adapter"), None, tmp_path / "merged", engine="llama.cpp")
    assert "--rope-scaling yarn --rope-scale 4.0" in str(exported)


def test_a_base_that_moved_is_named_and_may_be_given(base: str, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "here")
    trained = train(str(tmp_path / "here"), YARN)
    save_adapter(trained, tmp_path / "adapter")
    (tmp_path / "here").rename(tmp_path / "there")
    assert "here', which is not there: say where it is with base" in refusal(tmp_path / "adapter")
    again = loaded(tmp_path / "adapter", base=str(tmp_path / "there"))
    assert torch.equal(tiny.logits(again, IDS), tiny.logits(trained, IDS))


def test_a_relative_base_is_found_from_the_adapter_s_folder(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "runs").mkdir(parents=True)
    shutil.copytree(base, tmp_path / "work" / "base")
    monkeypatch.chdir(tmp_path / "work")
    trained = train("base", YARN)
    save_adapter(trained, "runs/adapter")
    monkeypatch.chdir(tmp_path)
    os.rename("work", "moved")
    assert torch.equal(tiny.logits(loaded(Path("moved/runs/adapter")), IDS), tiny.logits(trained, IDS))


def test_the_name_of_a_base_from_the_hub_is_kept(base: str, tmp_path: Path) -> None:
    save_adapter(train(base, YARN), tmp_path / "adapter", base="someone/model")
    assert yaml.safe_load((tmp_path / "adapter" / "ctxext.yaml").read_text())["base_model"] == "someone/model"


@pytest.mark.parametrize(
    "change", [{"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, {"max_position_embeddings": 1024}]
)
def test_a_base_on_which_the_method_does_something_else_is_refused(
    change: dict[str, Any], adapter: Path, tmp_path: Path
) -> None:
    tiny.save_checkpoint(tmp_path / "other", **change)
    assert "is it the right base model?" in refusal(adapter, base=str(tmp_path / "other"))


def test_a_base_of_another_size_is_refused(adapter: Path, tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path / "other", hidden_size=128, head_dim=16)
    assert "doesn't fit" in refusal(adapter, base=str(tmp_path / "other"))
    tiny.save_checkpoint(tmp_path / "deeper", num_hidden_layers=3)
    assert "its file lacks base_model.model.model.layers.2." in refusal(adapter, base=str(tmp_path / "deeper"))


def test_an_adapter_is_no_base(adapter: Path) -> None:
    assert "is an adapter itself" in refusal(adapter, base=str(adapter))


def rewrite(adapter: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = yaml.safe_load((adapter / "ctxext.yaml").read_text())
    change(record)
    (adapter / "ctxext.yaml").write_text(yaml.safe_dump(record))


def test_last_bits_of_another_processor_are_no_other_method(adapter: Path) -> None:
    rewrite(adapter, lambda record: record["rotation"].update(fingerprint="0" * 64))
    assert ctxext.inspect(loaded(adapter)).method["name"] == "yarn"
    rewrite(adapter, lambda record: record["rotation"]["inv_freq"].__setitem__(3, 0.03))
    assert "is it the right base model?" in refusal(adapter)


@pytest.mark.parametrize(
    "text", ["", "nonsense", "method: {name: yarn}", "{", "base_model: x\nmethod: null\nrotation: {inv_freq: all}"]
)
def test_a_record_that_can_not_be_read_is_not_passed_over(text: str, adapter: Path) -> None:
    (adapter / "ctxext.yaml").write_text(text)
    assert "can't be read" in refusal(adapter)


def test_a_record_with_wrong_settings_names_its_file(adapter: Path) -> None:
    rewrite(adapter, lambda record: record["method"].update(facter=3))
    with pytest.raises(ConfigError, match=r"ctxext\.yaml: method\.facter: unknown key"):
        loaded(adapter)


@pytest.mark.parametrize("change", ["lacks", "has more", "pickled"])
def test_weights_that_are_not_the_adapter_s_are_refused(change: str, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    if change == "lacks":
        weights.pop(min(weights))
    elif change == "has more":
        weights["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 64)
    save_file(weights, file)
    if change == "pickled":
        torch.save(weights, adapter / "adapter_model.bin")
        file.unlink()
    messages = {"lacks": "its file lacks", "has more": "the model has no", "pickled": "pickled weights are not read"}
    assert messages[change] in refusal(adapter)


def test_trained_parameters_that_would_be_lost_are_named(base: str, tmp_path: Path) -> None:
    trained = train(base, YARN)
    trained.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(CtxextError, match=r"1 trainable parameters .*\.norm\.weight first: .*modules_to_save"):
        save_adapter(trained, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_trained_biases_are_part_of_an_adapter_that_says_so(tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path / "base", attention_bias=True)
    trained = train(str(tmp_path / "base"), YARN, bias="all")
    save_adapter(trained, tmp_path / "adapter")
    assert torch.equal(tiny.logits(loaded(tmp_path / "adapter"), IDS), tiny.logits(trained, IDS))


def with_prompt(model: nn.Module) -> Any:
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def test_other_kinds_of_adapters_are_refused(base: str, tmp_path: Path) -> None:
    model, tokenizer = ctxext.load_model(base, YARN, device="cpu")
    with pytest.raises(CtxextError, match="LlamaForCausalLM is no PeftModel"):
        save_adapter(model, tmp_path / "adapter")
    prompted = with_prompt(model)
    for refused in (
        lambda: save_adapter(prompted, tmp_path / "adapter"),
        lambda: write_checkpoint(prompted, tokenizer, tmp_path / "adapter"),
    ):
        with pytest.raises(CtxextError, match="type PROMPT_TUNING are not supported"):
            refused()
    prompted.save_pretrained(str(tmp_path / "adapter"))
    assert "type PROMPT_TUNING are not supported" in refusal(tmp_path / "adapter")


def test_a_folder_of_something_else_is_never_written_to(base: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        save_adapter(train(base, YARN), tmp_path, overwrite=True)


def test_an_earlier_adapter_is_replaced_only_when_told_to(adapter: Path, base: str) -> None:
    trained = train(base, tiny.METHODS["ntk"])
    with pytest.raises(ConfigError, match="holds an earlier one"):
        save_adapter(trained, adapter)
    save_adapter(trained, adapter, overwrite=True)
    assert torch.equal(tiny.logits(loaded(adapter), IDS), tiny.logits(trained, IDS))


def test_a_model_in_memory_is_merged_and_written_and_stays_usable(base: str, tmp_path: Path) -> None:
    trained = train(base, YARN, modules_to_save=["norm"])
    expected, tokenizer = tiny.logits(trained, IDS), ctxext.load_model(base, device="cpu")[1]
    for name in ("once", "twice"):
        write_checkpoint(trained, tokenizer, tmp_path / name)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert tiny.difference(tiny.logits(plain, IDS), expected) < 1e-3


def test_weights_given_beside_adapters_are_not_written(base: str, tmp_path: Path) -> None:
    trained, tokenizer = train(base, YARN), ctxext.load_model(base, device="cpu")[1]
    with pytest.raises(ConfigError, match="adapters can't be merged into weights that are given as state"):
        write_checkpoint(trained, tokenizer, tmp_path / "out", state=trained.state_dict())
    assert not (tmp_path / "out").exists()


def test_results_of_two_adapters_on_one_base_are_not_taken_for_one_another(base: str) -> None:
    fingerprints = {
        weights_fingerprint(ctxext.patching.unwrap(model))
        for model in (
            train(base, YARN),
            train(base, YARN, seed=4),
            train(base, YARN, lora_alpha=32),  # the same weights, added with another factor
            ctxext.load_model(base, YARN, device="cpu")[0],
        )
    }
    assert len(fingerprints) == 4


def test_an_evaluation_takes_an_adapter_and_names_its_method(run: Run, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 8)
    arguments = ["--dataset", tmp_path / "text.txt", "--length", 128, "--output", tmp_path / "run"]
    ran = run("eval", "perplexity", "--model", adapter, *arguments)
    assert ran.status == 0
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["method"]["name"] == record["patch"]["method"]["name"] == "yarn"
    other = run("eval", "perplexity", "--model", adapter, "-s", "method.name=ntk", "-s", "method.factor=4", *arguments)
    assert other.status == 2


def test_a_run_is_not_resumed_with_another_adapter(run: Run, adapter: Path, base: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 8)
    arguments = ["--dataset", tmp_path / "text.txt", "--length", 128, "--output", tmp_path / "run"]
    assert run("eval", "perplexity", "--model", adapter, *arguments).status == 0
    save_adapter(train(base, YARN, seed=4), adapter, overwrite=True)
    ran = run("eval", "perplexity", "--model", adapter, *arguments, "--resume")
    assert ran.status == 2
    assert "weights" in ran.err


def test_methods_are_not_compared_on_an_adapter(adapter: Path) -> None:
    model, _ = ctxext.load_model(str(adapter), device="cpu")
    with pytest.raises(ConfigError, match="an adapter is made for the method that it was trained under"):
        Bench(model)


def test_an_adapter_is_run_elsewhere_only_merged(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an adapter has to be merged to be run elsewhere"):
        export(str(adapter), engine="vllm")
    exported = export(str(adapter), None, tmp_path / "merged", engine="vllm")
    assert exported.commands == [["vllm", "serve", str(tmp_path / "merged"), "--max-model-len", "256"]]


def test_the_wrong_method_is_noticed_before_weights_are_read(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxext.export.load_model", None)
    with pytest.raises(ModelLoadError, match="was trained under YaRN"):
        export(str(adapter), tiny.METHODS["ntk"], tmp_path / "merged")
