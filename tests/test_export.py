"""Exported folders, as other programs read them, and the commands for other engines, as those compute rotations."""

from __future__ import annotations

import errno
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_models import needs_gguf, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ctxext
import tiny
from command_line import Run
from ctxext.errors import ConfigError, CtxextError, UnsupportedModelError
from ctxext.export import Exported, export, write_checkpoint
from ctxext.models import load_skeleton
from patches import ATTENTION, METHODS

YARN = tiny.METHODS["yarn"]
PINNED = [ctxext.DynamicNTK(seq_len=256), ctxext.DynamicYaRN(factor=1, seq_len=256)]
FORMATS: Any = ["v5", "v4"]
ENGINES: Any = ["vllm", "sglang", "llama.cpp"]


@pytest.fixture
def base(checkpoint: Path) -> str:
    return str(checkpoint)


def extended(name: str, method: ctxext.Method | None) -> PreTrainedModel:
    return ctxext.load_model(name, method, device="cpu")[0]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("rope_format", FORMATS)
@pytest.mark.parametrize("method", [*(tiny.METHODS[name] for name in tiny.STATIC), *PINNED], ids=repr)
def test_transformers_alone_loads_a_static_method_with_equal_logits(
    method: ctxext.Method, rope_format: Any, base: str, tmp_path: Path
) -> None:
    export(base, method, tmp_path / "out", rope_format=rope_format)
    plain, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), tiny.tokens(101)
    assert type(plain.model.rotary_emb).__module__.startswith("transformers.")
    assert plain.config.max_position_embeddings == 256
    # A method's own rounding of its factors may differ from Transformers' in the last bit.
    assert tiny.difference(tiny.logits(plain, ids), tiny.logits(extended(base, method), ids)) < 1e-4


def test_a_fresh_interpreter_needs_no_ctxext(base: str, tmp_path: Path) -> None:
    export(base, YARN, tmp_path / "out")
    ids = tiny.tokens(101)
    torch.save(ids, tmp_path / "ids.pt")
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); sys.modules['ctxext'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "torch.set_num_threads(1); AutoTokenizer.from_pretrained('out')\n"
        "model = AutoModelForCausalLM.from_pretrained('out').eval()\n"
        "with torch.no_grad(): torch.save(model(torch.load('ids.pt')).logits, 'logits.pt')"
    )
    subprocess.run([sys.executable, "-c", code, ""], cwd=tmp_path, check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), tiny.logits(extended(base, YARN), ids))


def test_the_older_form_has_the_keys_that_older_engines_read(base: str, tmp_path: Path) -> None:
    export(base, YARN, tmp_path / "yarn", rope_format="v4")
    export(base, tiny.METHODS["ntk"], tmp_path / "ntk", rope_format="v4")
    yarn, ntk = config_of(tmp_path / "yarn"), config_of(tmp_path / "ntk")
    assert (yarn["rope_theta"], yarn["rope_scaling"]["rope_type"], yarn["rope_scaling"]["factor"]) == (1e4, "yarn", 4)
    assert (ntk["rope_theta"], ntk["rope_scaling"]) == (pytest.approx(48760.546), None)
    assert not {"rope_parameters", "dtype"} & (yarn.keys() | ntk.keys())
    assert yarn["torch_dtype"] == "float32"


@pytest.mark.parametrize("rope_format", FORMATS)
# A rope_theta checkpoint can't be extended by name again: how far it was trained with its new base is nowhere recorded.
@pytest.mark.parametrize(
    ("method", "named"), [(m, n) for m in METHODS for n in (False, True) if (m, n) != ("rope_theta", True)]
)
def test_exporting_again_changes_nothing(method: str, named: bool, rope_format: Any, base: str, tmp_path: Path) -> None:
    export(base, tiny.METHODS[method], tmp_path / "once", rope_format=rope_format)
    again = tiny.METHODS[method] if named else None
    export(str(tmp_path / "once"), again, tmp_path / "twice", rope_format=rope_format)
    for file in ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes(), file


@pytest.mark.parametrize("rope_format", FORMATS)
@pytest.mark.parametrize("first", ["pi", "ntk", "yarn", "dca"])
def test_extending_further_counts_from_the_trained_length(
    first: str, rope_format: Any, base: str, tmp_path: Path
) -> None:
    export(base, tiny.METHODS[first], tmp_path / "x4", rope_format=rope_format)
    export(str(tmp_path / "x4"), ctxext.YaRN(factor=8), tmp_path / "x8")
    export(base, ctxext.YaRN(factor=8), tmp_path / "direct")
    assert (tmp_path / "x8" / "config.json").read_bytes() == (tmp_path / "direct" / "config.json").read_bytes()
    assert config_of(tmp_path / "x8")["max_position_embeddings"] == 512


@pytest.mark.parametrize("method", ATTENTION)
def test_a_method_that_changes_attention_is_recorded_and_said_to_be_ctxext_s_alone(
    method: str, base: str, tmp_path: Path
) -> None:
    exported = export(base, tiny.METHODS[method], tmp_path / "out")
    ids, out = tiny.tokens(101), str(tmp_path / "out")
    assert f"Only ctxext runs {method}" in str(exported)
    assert f"Only ctxext runs {method}" in (tmp_path / "out" / "README.md").read_text()
    plain = AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.equal(tiny.logits(plain, ids), tiny.logits(extended(base, None), ids))
    assert torch.equal(tiny.logits(extended(out, None), ids), tiny.logits(extended(base, tiny.METHODS[method]), ids))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ATTENTION)
def test_engines_that_can_not_run_a_method_are_refused_before_weights_are_read(
    method: str, engine: Any, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxext.export.load_model", None)
    with pytest.raises(UnsupportedModelError, match=f"{engine} can't run {method}: .* pin a dynamic one with seq_len"):
        export(base, tiny.METHODS[method], tmp_path / "out", engine=engine)
    assert list(tmp_path.iterdir()) == []


def option(exported: Exported, name: str) -> str:
    command = exported.commands[-1]
    return command[command.index(name) + 1]


def llama_cpp_rotation(command: list[str], dim: int) -> tuple[torch.Tensor, float]:
    """Frequencies fp64 and attention factor that llama.cpp gets out of its flags.

    Linear scaling divides all angles. YaRN mixes divided and whole ones along a ramp between two whole dimensions, and
    multiplies by 1 + 0.1 ln(scale), whatever --yarn-attn-factor says, and by the file's rope.scaling.attn_factor.
    """
    options = dict(itertools.pairwise(command))
    base = float(options["--rope-freq-base"])
    inv_freq = torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    if options["--rope-scaling"] == "none":
        return inv_freq, 1.0
    scale = float(options["--rope-scale"])
    if options["--rope-scaling"] == "linear":
        return inv_freq / scale, 1.0
    trained = int(options["--yarn-orig-ctx"])

    def dimension(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(0, math.floor(dimension(float(options["--yarn-beta-fast"]))))
    high = min(dim - 1, math.ceil(dimension(float(options["--yarn-beta-slow"]))))
    mixed = [min(1.0, max(0.0, (i - low) / max(0.001, high - low))) for i in range(dim // 2)]
    ramp = torch.tensor(mixed, dtype=torch.float64)
    overrides = dict(item.split("=") for item in options.get("--override-kv", "x=y").split(","))
    factor = float(overrides.get("llama.rope.scaling.attn_factor", "float:1").removeprefix("float:"))
    return inv_freq / scale * ramp + inv_freq * (1 - ramp), factor * (1 + 0.1 * math.log(scale))


LLAMA_CPP = [
    tiny.METHODS["pi"],
    tiny.METHODS["ntk"],
    tiny.METHODS["rope_theta"],
    YARN,
    ctxext.YaRN(factor=2.5, beta_fast=8, beta_slow=2),
    ctxext.YaRN(factor=4, attention_factor=1.0),
    ctxext.YaRN(factor=4, mscale=0.707, mscale_all_dim=0.5),
    ctxext.YaRN(factor=1),
    *PINNED,
]


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("method", LLAMA_CPP, ids=repr)
def test_the_flags_of_llama_cpp_give_the_same_rotation(
    method: ctxext.Method, written: bool, base: str, tmp_path: Path
) -> None:
    exported = export(base, method, tmp_path / "out" if written else None, engine="llama.cpp")
    inv_freq, attention_factor = llama_cpp_rotation(exported.commands[-1], 16)
    report = ctxext.inspect(extended(base, method))
    assert inv_freq.tolist() == pytest.approx(report.inv_freq, rel=1e-5)
    assert attention_factor == pytest.approx(report.attention_factor, rel=1e-6)
    assert option(exported, "-c") == str(report.max_position_embeddings)
    assert (f"context_length=int:{report.max_position_embeddings}" in str(exported)) == (not written)
    if written:
        assert exported.commands[0][:3] == ["python", "convert_hf_to_gguf.py", str(tmp_path / "out")]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (tiny.METHODS["ntk_by_parts"], "no divisor for each frequency"),
        (tiny.METHODS["longrope"], "no divisor for each frequency"),
        (ctxext.YaRN(factor=4, ramp="rotations"), "no divisor for each frequency"),
        (ctxext.YaRN(factor=4, truncate=False), "rounds the ends of YaRN's ramp"),
        (tiny.METHODS["llama3"], "takes 8192 for the trained length of llama3 scaling, not 64"),
    ],
    ids=repr,
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    method: ctxext.Method, message: str, base: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        export(base, method, tmp_path / "out", engine="llama.cpp")
    assert list(tmp_path.iterdir()) == []


def test_llama_cpp_reads_llama3_scaling_from_a_converted_folder_only(tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path / "base", max_position_embeddings=8192)
    exported = export(str(tmp_path / "base"), tiny.METHODS["llama3"], tmp_path / "out", engine="llama.cpp")
    assert option(exported, "--rope-scaling") == "none"
    with pytest.raises(UnsupportedModelError, match="no flag for llama3 scaling; export a folder"):
        export(str(tmp_path / "base"), tiny.METHODS["llama3"], engine="llama.cpp")
    with pytest.raises(UnsupportedModelError, match="GGUF files of this model hold its llama3 scaling"):
        export(str(tmp_path / "out"), ctxext.YaRN(factor=4), engine="llama.cpp", replace_scaling=True)


@needs_gguf
def test_a_gguf_file_runs_with_flags_as_it_is(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny.model(vocab_size=6))
    exported = export(str(file), YARN, engine="llama.cpp")
    assert exported.commands[0][:3] == ["llama-server", "-m", str(file)]
    assert option(exported, "--override-kv") == "llama.context_length=int:256"
    with pytest.raises(UnsupportedModelError, match="vllm: a GGUF file can't be given other settings"):
        export(str(file), YARN, engine="vllm")


@needs_gguf
def test_a_gguf_file_becomes_a_folder_for_transformers(tmp_path: Path) -> None:
    source, ids = tiny.model(vocab_size=6), tiny.tokens(101) % 6
    file = write_gguf(tmp_path / "model.gguf", source)
    export(str(file), YARN, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ctxext.patch(source, YARN)
    assert tiny.difference(tiny.logits(plain, ids), tiny.logits(source, ids)) < 1e-4
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()["ab"] == 3


OVERRIDES = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}
ATTENTION_FACTORS = [
    ctxext.YaRN(factor=4, attention_factor=1.25),
    ctxext.YaRN(factor=4, mscale=0.707, mscale_all_dim=0.5),
]


@pytest.mark.parametrize("engine", OVERRIDES)
@pytest.mark.parametrize("rope_format", FORMATS)
@pytest.mark.parametrize("method", [*(tiny.METHODS[name] for name in tiny.STATIC), *ATTENTION_FACTORS], ids=repr)
def test_overrides_turn_the_base_s_config_into_the_exported_one(
    method: ctxext.Method, rope_format: Any, engine: Any, base: str, tmp_path: Path
) -> None:
    exported = export(base, method, engine=engine, rope_format=rope_format)
    settings = {**config_of(Path(base)), **json.loads(option(exported, OVERRIDES[engine]))}
    if rope_format == "v4":
        del settings["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = AutoConfig.from_pretrained(tmp_path)
    stock = LlamaRotaryEmbedding(config)
    report = ctxext.inspect(extended(base, method))
    assert stock.inv_freq.tolist() == pytest.approx(report.inv_freq, rel=1e-6)
    assert stock.attention_scaling == pytest.approx(report.attention_factor)
    assert config.max_position_embeddings == 256
    assert str(256) in (option(exported, "--max-model-len" if engine == "vllm" else "--context-length"))


@pytest.mark.parametrize("engine", OVERRIDES)
@pytest.mark.parametrize("method", ATTENTION_FACTORS, ids=repr)
def test_engines_that_only_multiply_the_default_attention_factor_arrive_at_the_same(
    method: ctxext.YaRN, engine: Any, base: str, tmp_path: Path
) -> None:
    exported = export(base, method, tmp_path / "out", engine=engine)
    parameters = json.loads(option(exported, OVERRIDES[engine]))["rope_parameters"]
    assert parameters["attn_factor"] * (0.1 * math.log(4) + 1) == pytest.approx(parameters["attention_factor"])


@pytest.mark.parametrize("engine", OVERRIDES)
@pytest.mark.parametrize("method", ["ntk_by_parts", "longrope"])
def test_engines_that_have_their_own_idea_of_longrope_s_attention_factor_are_told(
    method: str, engine: Any, base: str, tmp_path: Path
) -> None:
    exported = export(base, tiny.METHODS[method], tmp_path / "out", engine=engine)
    parameters = json.loads(option(exported, OVERRIDES[engine]))["rope_parameters"]
    assert parameters["short_mscale"] == parameters["long_mscale"] == parameters["attention_factor"]


@pytest.mark.parametrize("engine", OVERRIDES)
@pytest.mark.parametrize("method", ["pi", "ntk", "yarn", "rope_theta", "llama3"])
def test_an_exported_folder_needs_no_overrides(method: str, engine: Any, base: str, tmp_path: Path) -> None:
    (command,) = export(base, tiny.METHODS[method], tmp_path / "out", engine=engine).commands
    assert command[-2:] == ["--max-model-len" if engine == "vllm" else "--context-length", "256"]
    assert str(tmp_path / "out") in command


@pytest.mark.parametrize(("engine", "rest"), [("vllm", "--max-model-len"), ("sglang", "--context-length")])
def test_the_commit_of_a_hub_model_is_handed_on(
    engine: Any, rest: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = load_skeleton(base, YARN)
    monkeypatch.setattr("ctxext.export.load_skeleton", lambda *_, **__: skeleton)
    exported = export("someone/model", YARN, engine=engine, revision="abc")
    assert f"someone/model --revision abc {rest} 256" in str(exported)


def test_the_length_given_to_vllm_is_no_fraction_above_what_it_derives(base: str, tmp_path: Path) -> None:
    exported = export(base, ctxext.YaRN(factor=2.3), tmp_path / "out", engine="vllm")  # 2.3 * 64 = 147.2
    assert option(exported, "--max-model-len") == "147"
    tiny.save_checkpoint(tmp_path / "base", max_position_embeddings=100)
    exported = export(str(tmp_path / "base"), ctxext.YaRN(factor=2.3), tmp_path / "other", engine="vllm")
    assert option(exported, "--max-model-len") == "229"  # 2.3 * 100 is 229.99999999999997
    assert config_of(tmp_path / "other")["max_position_embeddings"] == 230


@pytest.mark.parametrize("engine", OVERRIDES)
def test_a_base_with_settings_that_would_stay_is_not_overridden(engine: Any, base: str, tmp_path: Path) -> None:
    export(base, YARN, tmp_path / "yarn")
    with pytest.raises(UnsupportedModelError, match=f"{engine}: the base model's own attention_factor, beta_fast"):
        export(str(tmp_path / "yarn"), tiny.METHODS["ntk"], engine=engine)


@pytest.mark.parametrize("engine", OVERRIDES)
def test_chunks_that_a_checkpoint_asks_for_are_turned_off_with_a_static_method(engine: Any, tmp_path: Path) -> None:
    chunks = {"chunk_size": 24, "local_size": 8, "original_max_position_embeddings": 64}
    tiny.save_checkpoint(tmp_path / "base", dual_chunk_attention_config=chunks)
    exported = export(str(tmp_path / "base"), YARN, tmp_path / "out", engine=engine)
    assert json.loads(option(exported, OVERRIDES[engine])) == {"dual_chunk_attention_config": None}


def test_the_tokenizer_no_longer_cuts_to_the_trained_length(tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base", model_max_length=64)
    tokenizer.save_pretrained(tmp_path / "base")
    for name, method, length in (("yarn", YARN, 256), ("dca", tiny.METHODS["dca"], 64)):
        export(str(tmp_path / "base"), method, tmp_path / name)
        ids = AutoTokenizer.from_pretrained(tmp_path / name)("a" * 400, truncation=True).input_ids
        assert len(ids) == length


@pytest.mark.parametrize("tied", [True, False])
def test_shards_and_tied_weights_are_exported_whole(tied: bool, tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path / "base", tie_word_embeddings=tied)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval(), tiny.tokens(101)
    (tmp_path / "base" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "base", max_shard_size="50KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    export(str(tmp_path / "base"), YARN, tmp_path / "out")
    ctxext.patch(model, YARN)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(tiny.logits(plain, ids), tiny.logits(model, ids))


def test_the_dtype_may_be_chosen(base: str, tmp_path: Path) -> None:
    export(base, YARN, tmp_path / "out", dtype="bfloat16")
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_the_model_card_says_what_and_how(base: str, tmp_path: Path) -> None:
    export(base, YARN, tmp_path / "out", engine="vllm", command="ctxext export --model x")
    card = (tmp_path / "out" / "README.md").read_text()
    _, metadata, text = card.split("---\n", 2)
    assert "ctxext" in yaml.safe_load(metadata)["tags"]
    assert "base_model" not in yaml.safe_load(metadata)  # a path is no name on the hub
    assert "Trained to 64 tokens, extended to 256" in text
    assert yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["method"]["factor"] == 4
    assert "vllm serve" in text
    assert f"ctxext {ctxext.__version__}:\n\n```\nctxext export --model x\n```" in text


def test_a_model_in_memory_is_written_with_what_is_on_it(base: str, tmp_path: Path) -> None:
    model, tokenizer = ctxext.load_model(base, YARN, device="cpu")
    write_checkpoint(model, tokenizer, tmp_path / "written")
    export(base, YARN, tmp_path / "exported")
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("written", "exported")]
    assert files[0] == files[1]
    assert (tmp_path / "written" / "config.json").read_bytes() == (tmp_path / "exported" / "config.json").read_bytes()


def fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags: [cats]\n---\nmy notes")


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_of_something_else_is_never_written_to(overwrite: bool, base: str, tmp_path: Path) -> None:
    fill(tmp_path / "out")
    with pytest.raises(ConfigError, match="holds other files"):
        export(base, YARN, tmp_path / "out", overwrite=overwrite)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["README.md"]


def test_an_earlier_export_is_replaced_only_when_told_to(base: str, tmp_path: Path) -> None:
    export(base, YARN, tmp_path / "out")
    with pytest.raises(ConfigError, match="--overwrite"):
        export(base, tiny.METHODS["ntk"], tmp_path / "out")
    assert config_of(tmp_path / "out")["ctxext"]["method"]["name"] == "yarn"
    export(base, tiny.METHODS["ntk"], tmp_path / "out", overwrite=True)
    assert config_of(tmp_path / "out")["ctxext"]["method"]["name"] == "ntk"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_may_be_there_and_a_file_may_not(base: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(base, YARN, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        export(base, YARN, tmp_path / "file")


@pytest.mark.parametrize(("model", "output"), [("out", "out"), ("out", "out/sub"), ("out/base", "out")])
def test_the_model_s_own_folder_is_not_written_to(model: str, output: str, base: str, tmp_path: Path) -> None:
    export(base, YARN, tmp_path / "out")
    export(base, YARN, tmp_path / "out" / "base")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="the model's own folder"):
        export(str(tmp_path / model), None, tmp_path / output, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("earlier", [True, False])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(
    earlier: bool, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if earlier:
        export(base, tiny.METHODS["ntk"], tmp_path / "out")

    def fail(self: object, folder: Path, **settings: Any) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)
    with pytest.raises(ConfigError, match=r"can't write .*out: No space left on device$") as caught:
        export(base, YARN, tmp_path / "out", overwrite=earlier)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if earlier else [])
    if earlier:
        assert config_of(tmp_path / "out")["ctxext"]["method"]["name"] == "ntk"


def test_a_plain_model_without_a_method_is_nothing_to_export(base: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not extended, and no method was given"):
        export(base, None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_scaling_that_follows_the_input_is_no_engine_s_to_repeat(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    tiny.save_checkpoint(tmp_path / "base", rope_parameters=scaling)
    with pytest.raises(CtxextError, match="already scaled with dynamic"):
        export(str(tmp_path / "base"), YARN, tmp_path / "out", engine="vllm")


def test_the_harness_takes_the_folder_unchanged(base: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'ctxext[lm-eval]'")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    export(base, YARN, tmp_path / "out")
    text = "The quick brown fox jumps over the lazy dog, and on. " * 3  # 159 tokens: beyond the trained 64
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": text}) + "\n")
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{text[:100]}}",
        "doc_to_target": "{{text[100:]}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
    }
    (tmp_path / "local.yaml").write_text(yaml.safe_dump(task))
    results = simple_evaluate(
        "hf",
        model_args=f"pretrained={tmp_path / 'out'}",
        tasks=["local"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    model, tokenizer = ctxext.load_model(base, YARN, device="cpu")
    ids = torch.tensor([tokenizer(text).input_ids])
    scores = tiny.logits(model, ids)[0, 99:-1].double().log_softmax(-1).gather(1, ids[0, 100:, None])
    ((score, _),) = results["samples"]["local"][0]["filtered_resps"]
    assert float(score) == pytest.approx(scores.sum().item(), rel=1e-4)


def test_the_command_line_writes_and_says_what_to_run(run: Run, base: str, tmp_path: Path) -> None:
    ran = run(
        "export",
        "--model",
        base,
        "-s",
        "method.name=yarn",
        "-s",
        "method.factor=4",
        "--for",
        "vllm",
        "-o",
        tmp_path / "out",
    )
    assert (ran.status, ran.out.splitlines()[0]) == (0, f"wrote {tmp_path / 'out'}")
    assert shlex.split(ran.out.splitlines()[-1])[:3] == ["vllm", "serve", str(tmp_path / "out")]


def test_the_command_line_prints_flags_and_writes_nothing(run: Run, base: str, tmp_path: Path) -> None:
    settings = ["-s", "method.name=ntk", "-s", "method.factor=4"]
    ran = run("export", "--model", base, *settings, "--for", "llama.cpp", "--print-only")
    assert ran.status == 0
    assert "--rope-freq-base 48760.546" in ran.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--for", "vllm"], "give either --output FOLDER, or --print-only"),
        (["--for", "vllm", "--print-only", "-o", "x"], "give either --output FOLDER, or --print-only"),
        (["--print-only"], "Transformers takes no settings on its command line"),
        (["--for", "vlm", "--print-only"], "--for vlm is not one of .* did you mean vllm"),
        (["--for", "vllm", "--rope-format", "v6", "--print-only"], "--rope-format v6 is not one of v5, v4"),
        (["--for", "vllm", "--print-only", "-s", "model.base=x"], "base 'x' is about adapters"),
    ],
)
def test_a_user_s_mistake_is_one_line_and_status_2(arguments: list[str], message: str, run: Run, base: str) -> None:
    ran = run("export", "--model", base, "-s", "method.name=yarn", "-s", "method.factor=4", *arguments)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert re.search(message, ran.err)
