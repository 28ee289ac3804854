"""Which models can be patched, what their configs say about the trained rotary embedding, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, PhiConfig

import ctxext
import tiny
from ctxext.families import FAMILIES, find_family, rotary_dim, stock_frequencies, trained_rope, window_layers
from ctxext.rope import RopeSpec

PI = ctxext.PI(factor=4)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def scaled(parameters: dict[str, Any], length: int = 256) -> Any:
    """A model whose checkpoint came with a scaling."""
    return tiny.model(max_position_embeddings=length, rope_parameters=dict(parameters))


def test_every_supported_architecture_has_a_tiny_model() -> None:
    assert set(tiny.FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_familys_row_leads_to_its_rotary_embedding_layers_and_attention(family: str) -> None:
    model = tiny.model(family)
    row = find_family(model)
    decoder = model.base_model
    rotary = getattr(decoder, row.rotary)
    assert [m for m in model.modules() if "RotaryEmbedding" in type(m).__name__] == [rotary]
    layers = getattr(decoder, row.layers)
    assert len(layers) == model.config.num_hidden_layers
    assert all(getattr(layer, row.attention).q_proj.in_features == 64 for layer in layers)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification], ids=["decoder", "classifier"])
def test_models_without_a_language_head_can_be_patched(auto: Any, family: str) -> None:
    torch.manual_seed(0)
    model = auto.from_config(tiny.config(family)).eval()
    ids = tiny.tokens(100)
    with torch.no_grad():
        before = model(ids)[0]
        with ctxext.patch(model, PI):
            assert tiny.difference(model(ids)[0], before) > 1e-2
        assert torch.equal(model(ids)[0], before)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4),
        PhiConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
        ),
    ],
    ids=["no rotary embedding", "another rotary embedding"],
)
def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ctxext.UnsupportedModelError, match=f"{config.model_type}.*llama, mistral, mixtral, qwen2"):
        ctxext.patch(model, PI)
    assert model.config is config or model.config.max_position_embeddings == config.max_position_embeddings


@pytest.mark.parametrize("function", [lambda model: ctxext.patch(model, PI), ctxext.inspect], ids=["patch", "inspect"])
@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), None, "llama"], ids=["module", "None", "path"])
def test_what_is_no_model_of_transformers_is_refused(thing: Any, function: Any) -> None:
    with pytest.raises(ctxext.UnsupportedModelError, match="is not supported"):
        function(thing)


def test_a_model_without_its_rotary_embedding_is_refused() -> None:
    model = tiny.model()
    del model.model.rotary_emb
    with pytest.raises(ctxext.UnsupportedModelError, match="found none; nothing was patched"):
        ctxext.patch(model, PI)


def test_a_model_with_two_rotary_embeddings_is_refused() -> None:
    model = tiny.model()
    model.model.layers[1].self_attn.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    with pytest.raises(ctxext.UnsupportedModelError, match=r"layers\.1\.self_attn\.rotary_emb.*nothing was patched"):
        ctxext.patch(model, PI)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, 16),
        ("llama", {"head_dim": 32}, 32),
        ("qwen3", {"head_dim": 32}, 32),
        ("mixtral", {"head_dim": None}, 16),
        ("qwen2", {}, 16),
    ],
)
def test_the_rotary_dimension_is_the_heads(family: str, changes: dict[str, Any], expected: int) -> None:
    assert rotary_dim(tiny.config(family, **changes)) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_head_wider_than_its_share_gets_its_own_frequencies(family: str) -> None:
    # As Qwen3-0.6B: hidden_size / heads is 64, head_dim is 128.
    model = tiny.model(family, head_dim=32)
    ctxext.patch(model, ctxext.NTK(factor=4))
    expected = torch.tensor([(1e4 * 4 ** (32 / 30)) ** (-i / 16) for i in range(16)])
    torch.testing.assert_close(model.base_model.rotary_emb.inv_freq, expected, rtol=1e-6, atol=0)


def test_a_partly_rotated_head_is_refused() -> None:
    model = tiny.model(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    with pytest.raises(ctxext.UnsupportedModelError, match=r"partial_rotary_factor 0\.5"):
        ctxext.patch(model, PI)


def test_rope_parameters_that_differ_by_layer_are_refused() -> None:
    config = tiny.config()
    config.rope_parameters = {"rope_theta": 1e4, "full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ctxext.UnsupportedModelError, match="differ by layer type"):
        trained_rope(config, PI)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_trained_embedding_of_a_plain_checkpoint_is_its_configs(family: str) -> None:
    assert trained_rope(tiny.config(family), PI) == RopeSpec(10_000.0, 16, 64)


@pytest.mark.parametrize(
    "parameters", [YARN, {**LINEAR, "original_max_position_embeddings": 64}], ids=["yarn", "linear"]
)
def test_a_scaled_checkpoint_is_extended_from_its_trained_length(parameters: dict[str, Any]) -> None:
    model, plain = scaled(parameters), tiny.model()
    ctxext.patch(model, ctxext.YaRN(factor=8))
    ctxext.patch(plain, ctxext.YaRN(factor=8))
    assert model.config.max_position_embeddings == 512
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert model.config.rope_parameters == plain.config.rope_parameters


def test_a_scaling_without_a_recorded_length_needs_it_in_the_method() -> None:
    with pytest.raises(ctxext.UnsupportedModelError, match="give original_max_position_embeddings in the method"):
        ctxext.patch(scaled(LINEAR), PI)
    model = scaled(LINEAR)
    ctxext.patch(model, ctxext.PI(factor=8, original_max_position_embeddings=64))
    assert model.config.max_position_embeddings == 512
    assert model.model.rotary_emb.inv_freq[0].item() == 1 / 8


@pytest.mark.parametrize("parameters", [LLAMA3, LONGROPE, DYNAMIC], ids=lambda parameters: parameters["rope_type"])
def test_a_scaling_that_no_factor_can_be_relative_to_is_refused_with_the_way_out(parameters: dict[str, Any]) -> None:
    model = scaled(parameters)
    with pytest.raises(ctxext.UnsupportedModelError, match=f"{parameters['rope_type']}.*replace_scaling=True"):
        ctxext.patch(model, ctxext.PI(factor=8, original_max_position_embeddings=64))
    ctxext.patch(model, ctxext.PI(factor=8, original_max_position_embeddings=64), replace_scaling=True)
    expected = parameters["rope_theta"] ** -(torch.arange(8) / 8) / 8
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected, rtol=1e-6, atol=0)
    assert model.config.max_position_embeddings == 512


def test_a_length_that_transformers_guessed_is_not_taken_for_the_trained_one() -> None:
    """Transformers fills in max_position_embeddings, here the target, where a yarn config has no trained length."""
    model = scaled({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, length=256)
    with pytest.raises(ctxext.UnsupportedModelError, match="original_max_position_embeddings"):
        ctxext.patch(model, ctxext.YaRN(factor=4))


def test_a_length_raised_after_loading_is_not_taken_for_the_trained_one() -> None:
    model = tiny.model()
    model.config.max_position_embeddings = 256
    with pytest.raises(ctxext.ConfigError, match=r"256.*loaded with 64.*original_max_position_embeddings"):
        ctxext.patch(model, ctxext.YaRN(factor=4))
    ctxext.patch(model, ctxext.YaRN(factor=4, original_max_position_embeddings=64))
    assert model.config.max_position_embeddings == 256


def test_a_checkpoint_that_names_its_scaling_twice_is_refused() -> None:
    model = scaled({"type": "linear", **YARN})
    with pytest.raises(ctxext.UnsupportedModelError, match=r"linear.*yarn|yarn.*linear"):
        ctxext.patch(model, PI)


def test_a_checkpoint_may_name_its_scaling_by_the_old_key() -> None:
    old = {("type" if key == "rope_type" else key): value for key, value in YARN.items()}
    model = scaled(old)
    ctxext.patch(model, PI)
    assert model.config.rope_parameters["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"method": {"name": "yarn"}},
        {"method": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64},
        {
            "method": {"name": "yarn", "factor": 4, "setting_of_tomorrow": 1},
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
        {"method": {"name": "yarn", "factor": 0.5}, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    ],
    ids=["empty", "incomplete", "no mapping", "of a later version", "out of range"],
)
def test_a_record_that_cannot_be_read_is_refused(record: dict[str, Any]) -> None:
    model = tiny.model(ctxext=record)
    with pytest.raises(ctxext.CtxextError, match="ctxext"):
        ctxext.patch(model, PI)
    assert ctxext.inspect(model).method is None


def test_a_record_that_contradicts_the_rope_parameters_is_refused(tmp_path: Path) -> None:
    model = tiny.model()
    ctxext.patch(model, ctxext.YaRN(factor=4))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["factor"] = 8.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    edited = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ctxext.CtxextError, match=r"config\.ctxext says .* but its rope_parameters"):
        ctxext.patch(edited, PI)


@pytest.mark.parametrize("parameters", [None, YARN, LLAMA3, DYNAMIC, LONGROPE], ids=str)
def test_asking_for_stock_frequencies_changes_nothing(parameters: dict[str, Any] | None) -> None:
    model = tiny.model() if parameters is None else scaled(parameters)
    config, rotary = model.config, model.model.rotary_emb
    before = config.to_dict()
    inv_freq, attention_factor, rope_type = stock_frequencies(type(rotary), config)
    assert config.to_dict() == before
    assert torch.equal(inv_freq, rotary.inv_freq)
    assert (attention_factor, rope_type) == (rotary.attention_scaling, rotary.rope_type)


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 16}, (2, 16)),
        ("mixtral", {"sliding_window": 16}, (2, 16)),
        ("qwen2", {}, None),
        ("qwen2", {"sliding_window": 16}, None),
        ("qwen2", QWEN_WINDOW, (2, 16)),
        # Transformers gives a window to every other layer below max_window_layers here.
        ("qwen2_moe", QWEN_WINDOW, (1, 16)),
        ("qwen3", QWEN_WINDOW, (2, 16)),
        ("qwen3_moe", QWEN_WINDOW, (4, 16)),
    ],
)
def test_layers_that_attend_to_a_window_are_counted(
    family: str, changes: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    assert window_layers(tiny.config(family, **changes)) == expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 16, "num_hidden_layers": 1}),
        ("mixtral", {"sliding_window": 16, "num_hidden_layers": 1}),
        ("qwen2", {**QWEN_WINDOW, "num_hidden_layers": 1, "max_window_layers": 0}),
        ("qwen2_moe", {**QWEN_WINDOW, "num_hidden_layers": 1, "max_window_layers": 1}),
        ("qwen3", {**QWEN_WINDOW, "num_hidden_layers": 1, "max_window_layers": 0}),
        ("qwen3_moe", {**QWEN_WINDOW, "num_hidden_layers": 1, "max_window_layers": 0}),
        ("llama", {"num_hidden_layers": 1}),
        ("qwen2", {"sliding_window": 16, "num_hidden_layers": 1}),
    ],
)
def test_the_count_of_window_layers_is_what_the_model_really_does(family: str, changes: dict[str, Any]) -> None:
    """One layer with a window of 16 can't see token 0 from token 40; one without can."""
    model = tiny.model(family, **changes)
    ids = tiny.tokens(41)
    changed = ids.clone()
    changed[0, 0] = 3 + (ids[0, 0] - 2) % (tiny.VOCABULARY - 3)
    # Not exactly 0, because mixtures of experts group other tokens with the last one.
    blind = tiny.difference(tiny.logits(model, ids)[:, -1], tiny.logits(model, changed)[:, -1]) < 1e-4
    assert blind == (window_layers(model.config) is not None)
