"""Models that other programs load: in a block, and in programs that ``ctxext run`` starts."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    pipeline,
)
from transformers.integrations.peft import PeftAdapterMixin

import ctxext
import patches
import tiny
from ctxext.adapters import save_adapter
from ctxext.cli import main
from ctxext.errors import ConfigError, ModelLoadError, PatchError, UnsupportedModelError

ROOT = Path(__file__).parent.parent
YARN = {"name": "yarn", "factor": 4}
IDS = tiny.tokens(150, seed=3)
ORIGINAL = vars(PreTrainedModel)["from_pretrained"]


@pytest.fixture(autouse=True)
def _original() -> Iterator[None]:
    """What one test leaves behind is not the next one's matter."""
    yield
    PreTrainedModel.from_pretrained = ORIGINAL  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=32, n_positions=32)).save_pretrained(path)
    return path


def by_hand(path: Path, method: Any = YARN, **options: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    ctxext.patch(model, method)
    return model


def loaded_in_block(path: Path, method: Any = YARN, **options: Any) -> PreTrainedModel:
    with ctxext.autopatch(method):
        return AutoModelForCausalLM.from_pretrained(path, **options)


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with another config; None removes a key."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return target


# In a block


@pytest.mark.parametrize("method", list(tiny.METHODS))
def test_a_model_loaded_in_a_block_is_the_one_that_is_patched_by_hand(method: str, checkpoint: Path) -> None:
    model = loaded_in_block(checkpoint, tiny.METHODS[method])
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(by_hand(checkpoint, tiny.METHODS[method]), IDS))
    assert tiny.difference(tiny.logits(model, IDS), tiny.logits(tiny.model(vocab_size=259), IDS)) > 1e-2
    assert ctxext.inspect(model).consistent


@pytest.mark.parametrize(
    "load",
    [
        lambda path: LlamaForCausalLM.from_pretrained(path),
        lambda path: AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)[0],
        lambda path: AutoModelForCausalLM.from_pretrained(path, device_map={"": "cpu"}),
        lambda path: AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"),
        lambda path: AutoModelForCausalLM.from_pretrained(path, config=tiny.config(vocab_size=259)),
        lambda path: pipeline("text-generation", model=str(path), device="cpu").model,
        lambda path: copy.deepcopy(AutoModelForCausalLM.from_pretrained(path)),
    ],
    ids=["concrete class", "loading info", "device map", "attention", "config", "pipeline", "deep copy"],
)
def test_every_way_of_loading_gives_an_extended_model(load: Callable[[Path], Any], checkpoint: Path) -> None:
    with ctxext.autopatch(YARN):
        model = load(checkpoint)
    assert ctxext.inspect(model).method == {"name": "yarn", "factor": 4.0, **_yarn_defaults()}
    assert tiny.difference(tiny.logits(model, IDS), tiny.logits(by_hand(checkpoint), IDS)) < 1e-4


def _yarn_defaults() -> dict[str, Any]:
    return ctxext.YaRN(factor=4).model_dump(exclude={"name", "factor"}, exclude_none=True, mode="json")


def test_a_bfloat16_model_is_the_one_that_is_patched_by_hand(checkpoint: Path) -> None:
    model = loaded_in_block(checkpoint, dtype=torch.bfloat16)
    assert model.dtype is torch.bfloat16
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(by_hand(checkpoint, dtype=torch.bfloat16), IDS))


def test_the_base_of_an_adapter_is_extended(checkpoint: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), settings)
    adapted.save_pretrained(tmp_path)
    ctxext.patch(adapted, YARN)
    expected = tiny.logits(adapted.eval(), IDS)
    with ctxext.autopatch(YARN):
        for load in (peft.AutoPeftModelForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
            assert torch.equal(tiny.logits(load(tmp_path).eval(), IDS), expected)


def test_each_model_gets_one_line_on_stderr(checkpoint: Path, gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ctxext.autopatch(YARN):
        capsys.readouterr()
        AutoModelForCausalLM.from_pretrained(checkpoint)
        GPT2LMHeadModel.from_pretrained(gpt2)
        AutoModel.from_pretrained(checkpoint)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ctxext")]
    assert lines == [
        f"ctxext: extended: LlamaForCausalLM from {checkpoint} with yarn, from 64 to 256 tokens",
        f"ctxext: left alone: GPT2LMHeadModel from {gpt2}: model_type 'gpt2' is not supported",
        f"ctxext: left alone: LlamaModel from {checkpoint}: not a causal language model",
    ]


def test_the_line_names_a_subfolder_and_a_state_dict(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(checkpoint, tmp_path / "inner")
    with ctxext.autopatch(YARN):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="inner")
        LlamaForCausalLM.from_pretrained(None, config=tiny.config(vocab_size=259), state_dict=model.state_dict())
        with pytest.raises(PatchError, match="the program sets"):
            AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="inner", max_position_embeddings=128)
    err = capsys.readouterr().err
    assert f"LlamaForCausalLM from {tmp_path}/inner with yarn" in err
    assert "LlamaForCausalLM from a state dict with yarn, from 64 to 256" in err


def test_the_line_says_where_the_config_keeps_the_trained_length(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loaded_in_block(checkpoint, tiny.METHODS["dca"]).config.max_position_embeddings == 64
    assert "from 64 to 256 tokens; its config keeps 64" in capsys.readouterr().err


def test_models_without_a_language_modelling_head_stay_plain(checkpoint: Path) -> None:
    plain = AutoModel.from_pretrained(checkpoint)
    with ctxext.autopatch(YARN):
        AutoModelForCausalLM.from_pretrained(checkpoint)
        model = AutoModel.from_pretrained(checkpoint)
        reward = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    with torch.no_grad():
        assert torch.equal(model(IDS).last_hidden_state, plain(IDS).last_hidden_state)
        assert torch.equal(reward.model(IDS).last_hidden_state, plain(IDS).last_hidden_state)


def test_models_from_before_a_config_or_a_pickle_stay_as_they_are(checkpoint: Path, tmp_path: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = tiny.logits(before, IDS)
    torch.save(before, tmp_path / "model.pt")
    with ctxext.autopatch(YARN):
        AutoModelForCausalLM.from_pretrained(checkpoint)
        built = AutoModelForCausalLM.from_config(before.config).eval()
        built.load_state_dict(before.state_dict())
        pickled = torch.load(tmp_path / "model.pt", weights_only=False)
        for model in (before, built, pickled):
            assert torch.equal(tiny.logits(model, IDS), expected)


def test_nothing_extended_is_an_error_that_names_what_was_loaded(checkpoint: Path, gpt2: Path) -> None:
    def load_others() -> None:
        with ctxext.autopatch(YARN):
            AutoModelForCausalLM.from_config(tiny.config())
            GPT2LMHeadModel.from_pretrained(gpt2)
            AutoModel.from_pretrained(checkpoint)

    with pytest.raises(
        PatchError, match=r"extended \(left alone: GPT2LMHeadModel from .*; left alone: LlamaModel from"
    ):
        load_others()


def test_from_pretrained_is_the_same_object_after_the_block(checkpoint: Path) -> None:
    with ctxext.autopatch(YARN):
        AutoModelForCausalLM.from_pretrained(checkpoint)
        assert vars(PreTrainedModel)["from_pretrained"] is not ORIGINAL
    assert vars(PreTrainedModel)["from_pretrained"] is ORIGINAL
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.max_position_embeddings == 64


def test_an_exception_in_the_block_is_passed_on_and_the_original_is_back() -> None:
    def fail() -> None:
        with ctxext.autopatch(YARN):
            assert vars(PreTrainedModel)["from_pretrained"] is not ORIGINAL
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert vars(PreTrainedModel)["from_pretrained"] is ORIGINAL


def test_a_wrong_method_is_an_error_before_the_block() -> None:
    with pytest.raises(ConfigError, match="facter"), ctxext.autopatch({"name": "yarn", "facter": 4}):
        raise AssertionError


def test_a_second_block_is_refused_in_the_same_and_in_another_thread(checkpoint: Path) -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with ctxext.autopatch(YARN):
                pass
        except PatchError as error:
            errors.append(error)

    with ctxext.autopatch(YARN):
        enter()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert ctxext.inspect(AutoModelForCausalLM.from_pretrained(checkpoint)).method is not None
    assert ["can't be nested" in str(error) for error in errors] == [True, True]


def test_a_model_that_another_thread_loads_is_extended(checkpoint: Path) -> None:
    models: list[PreTrainedModel] = []
    with ctxext.autopatch(YARN):
        thread = threading.Thread(target=lambda: models.append(AutoModelForCausalLM.from_pretrained(checkpoint)))
        thread.start()
        thread.join()
    assert models[0].config.max_position_embeddings == 256


def test_a_wrapper_of_another_program_survives_the_block_and_extends_nothing_afterwards(checkpoint: Path) -> None:
    with ctxext.autopatch(YARN):
        ours = vars(PreTrainedModel)["from_pretrained"]
        theirs = classmethod(lambda cls, *args, **options: ours.__get__(None, cls)(*args, **options))
        PreTrainedModel.from_pretrained = theirs  # type: ignore[method-assign, assignment]
        during = AutoModelForCausalLM.from_pretrained(checkpoint)
    after = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert vars(PreTrainedModel)["from_pretrained"] is theirs
    assert [model.config.max_position_embeddings for model in (during, after)] == [256, 64]


def test_an_extended_model_comes_off_as_any_other(checkpoint: Path) -> None:
    model = loaded_in_block(checkpoint)
    ctxext.unpatch(model)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(plain, IDS))


# Checkpoints that are scaled already


@pytest.mark.parametrize("method", ["pi", "ntk", "yarn", "dca", "dynamic_yarn"])
def test_a_checkpoint_saved_with_the_method_is_not_extended_twice(
    method: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = by_hand(checkpoint, tiny.METHODS[method])
    model.save_pretrained(tmp_path)
    again = loaded_in_block(tmp_path, tiny.METHODS[method])
    assert torch.equal(tiny.logits(again, IDS), tiny.logits(model, IDS))
    assert "in place of" not in capsys.readouterr().err


@pytest.mark.parametrize("saved", ["ntk", "yarn", "dca"])
def test_another_method_counts_from_the_trained_length_and_says_what_it_replaces(
    saved: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(checkpoint, tiny.METHODS[saved]).save_pretrained(tmp_path)
    again = loaded_in_block(tmp_path, {"name": "pi", "factor": 8})
    expected = by_hand(checkpoint, {"name": "pi", "factor": 8})
    assert torch.equal(tiny.logits(again, IDS), tiny.logits(expected, IDS))
    assert f"from 64 to 512 tokens, in place of {saved}\n" in capsys.readouterr().err


def test_transformers_own_yarn_is_extended_from_its_trained_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patches.native("yarn").save_pretrained(tmp_path)
    model = loaded_in_block(tmp_path, {"name": "yarn", "factor": 8})
    assert torch.equal(
        tiny.logits(model, IDS % 128), tiny.logits(by_hand(tmp_path, {"name": "yarn", "factor": 8}), IDS % 128)
    )
    assert "from 64 to 512 tokens, in place of yarn" in capsys.readouterr().err


def test_a_supported_model_that_cannot_be_extended_is_an_error_where_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patches.native("llama3").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="already scaled with llama3"):
        loaded_in_block(tmp_path)
    assert f"ctxext: refused: LlamaForCausalLM from {tmp_path}: " in capsys.readouterr().err
    with ctxext.autopatch(YARN, replace_scaling=True):
        assert AutoModelForCausalLM.from_pretrained(tmp_path).config.max_position_embeddings == 256


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_position_embeddings", 128),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e5}),
    ],
)
def test_a_program_that_extends_the_model_itself_is_refused(key: str, value: Any, checkpoint: Path) -> None:
    with pytest.raises(PatchError, match=f"the program sets {key} to "):
        loaded_in_block(checkpoint, **{key: value})


@pytest.mark.parametrize(
    ("scaling", "method"),
    [
        (None, YARN),
        ({"type": "linear", "factor": 2.0}, {**YARN, "original_max_position_embeddings": 64}),
        ({"type": "yarn", "factor": 2.0}, {**YARN, "original_max_position_embeddings": 64}),
    ],
)
def test_a_checkpoint_in_the_older_form_is_extended_as_by_hand(
    scaling: dict[str, Any] | None, method: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    path = edited(checkpoint, tmp_path / "older", rope_parameters=None, rope_theta=5e4, rope_scaling=scaling)
    model = loaded_in_block(path, method)
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(by_hand(path, method), IDS))


def test_a_length_set_by_the_program_is_no_matter_where_the_method_gives_the_trained_one(checkpoint: Path) -> None:
    method = {**YARN, "original_max_position_embeddings": 64}
    model = loaded_in_block(checkpoint, method, max_position_embeddings=128)
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(by_hand(checkpoint), IDS))


def test_load_model_with_a_method_of_its_own_is_refused(checkpoint: Path) -> None:
    with ctxext.autopatch(YARN):
        model, _ = ctxext.load_model(str(checkpoint))
        assert ctxext.inspect(model).consistent
        with pytest.raises(PatchError, match="already patched"):
            ctxext.load_model(str(checkpoint), ctxext.PI(factor=2))


# Programs that know nothing of ctxext

TRAINING = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

def train(source, target, prepare=lambda model: None):
    model = AutoModelForCausalLM.from_pretrained(source)
    prepare(model)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 128, (100,), generator=generator) for _ in range(8)]
    arguments = TrainingArguments(
        target, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": text, "labels": text} for text in texts])
    trainer.train()
    trainer.save_model(target)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model

if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2])
"""


@pytest.fixture(scope="module")
def training_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train_model.py"
    path.write_text(TRAINING)
    return path


@pytest.fixture
def train(training_script: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.syspath_prepend(str(training_script.parent))
    import train_model

    return train_model.train


@pytest.mark.parametrize("method", patches.EITHER)
def test_a_trainer_script_gives_the_losses_and_weights_of_a_model_patched_by_hand(
    method: str, train: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    expected, model = train(checkpoint, tmp_path / "hand", lambda m: ctxext.patch(m, tiny.METHODS[method]))
    plain, _ = train(checkpoint, tmp_path / "plain")
    with ctxext.autopatch(tiny.METHODS[method]):
        losses, trained = train(checkpoint, tmp_path / "auto")
    assert losses == expected != plain
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), model.parameters(), strict=True))


def test_what_a_trainer_saves_keeps_the_scaling_without_ctxext(
    train: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    with ctxext.autopatch(YARN):
        _, trained = train(checkpoint, tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reloaded.config.max_position_embeddings == 256
    assert torch.equal(tiny.logits(reloaded, IDS), tiny.logits(trained.eval(), IDS))


def test_what_a_trainer_saves_records_a_method_that_changes_attention(
    train: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    with ctxext.autopatch(tiny.METHODS["dca"]):
        _, trained = train(checkpoint, tmp_path)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path)
    reloaded, _ = ctxext.load_model(str(tmp_path))
    assert torch.equal(tiny.logits(reloaded, IDS), tiny.logits(trained.eval(), IDS))


def test_a_draft_model_is_extended_too_and_the_text_is_that_of_greedy_decoding(checkpoint: Path) -> None:
    with ctxext.autopatch(YARN):
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        draft = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert ctxext.inspect(draft).consistent
    assert draft.config.max_position_embeddings == 256
    assert torch.equal(patches.greedy(model, assistant_model=draft), patches.greedy(by_hand(checkpoint)))


TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 2


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with a task whose documents are longer than the trained length."""
    documents = [{"question": TEXT[:n], "answer": n % 3} for n in (40, 67, 101, 115)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    files = {"data_files": {"test": str(tmp_path / "documents.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    settings = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": files,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["dog", "lazy fox", "the"],
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "local.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def answers(results: dict[str, Any]) -> list[Any]:
    return [sample["filtered_resps"] for sample in results["samples"]["local"]]


def evaluate(folder: Path, model: Any, **settings: Any) -> dict[str, Any]:
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'ctxext[lm-eval]'")
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model, tasks=["local"], task_manager=tasks, bootstrap_iters=0, **settings
    )
    return results


def test_the_harness_loads_an_extended_model_and_reads_as_far(checkpoint: Path, task: Path) -> None:
    harness = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm-evaluation-harness")
    with ctxext.autopatch(YARN):
        lm = harness.HFLM(pretrained=str(checkpoint), device="cpu")
        assert lm.max_length == 256
        loaded = evaluate(task, "hf", model_args={"pretrained": str(checkpoint)}, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    expected = evaluate(task, harness.HFLM(by_hand(checkpoint), tokenizer=tokenizer))
    plain = evaluate(task, harness.HFLM(AutoModelForCausalLM.from_pretrained(checkpoint), tokenizer=tokenizer))
    assert answers(loaded) == answers(expected) != answers(plain)


def test_the_harness_has_to_be_told_the_length_of_a_method_that_changes_attention(checkpoint: Path, task: Path) -> None:
    harness = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm-evaluation-harness")
    with ctxext.autopatch(tiny.METHODS["dca"]):
        assert harness.HFLM(pretrained=str(checkpoint), device="cpu").max_length == 64
        arguments = {"pretrained": str(checkpoint), "max_length": 256}
        loaded = evaluate(task, "hf", model_args=arguments, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = by_hand(checkpoint, tiny.METHODS["dca"])
    assert answers(loaded) == answers(evaluate(task, harness.HFLM(model, tokenizer=tokenizer, max_length=256)))


# ctxext run

METHOD = ("-s", "method.name=yarn", "-s", "method.factor=4")
LOADING = "import sys; from transformers import LlamaForCausalLM as M; M.from_pretrained(sys.argv[1]); "


class Programs:
    """Runs ``ctxext run`` in this process; the program is one of its own."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: object, method: tuple[str, ...] = METHOD) -> tuple[int, str, str]:
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["run", *method, *(str(argument) for argument in arguments)])
        out, err = self._capfd.readouterr()
        return int(caught.value.code or 0), out, err


@pytest.fixture
def run_program(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Programs(capfd)


def test_a_program_and_the_pythons_below_it_load_extended_models(
    run_program: Programs, checkpoint: Path, tmp_path: Path
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {LOADING!r}, *sys.argv[1:]])")
    status, _, err = run_program("--", script, checkpoint)
    assert status == 0
    assert err.count(f"ctxext: extended: LlamaForCausalLM from {checkpoint} with yarn, from 64 to 256 tokens\n") == 1


@pytest.mark.parametrize(("code", "status"), [("import sys; sys.exit(3)", 3), ("1 / 0", 1)])
def test_a_failing_programs_status_is_passed_on(code: str, status: int, run_program: Programs) -> None:
    assert run_program("--", "-c", code)[0] == status


def test_a_program_that_a_signal_ended_has_the_status_that_a_shell_gives(run_program: Programs) -> None:
    assert run_program("--", "-c", "import os; os.kill(os.getpid(), 15)")[0] == 128 + 15


def test_a_program_that_loads_nothing_is_an_error(run_program: Programs) -> None:
    status, out, err = run_program("--", "-c", "print('done')")
    assert (status, out) == (2, "done\n")
    assert err.startswith("ctxext: no model was extended (none came out of from_pretrained)")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_program_that_loads_nothing_supported_is_an_error_that_names_it(run_program: Programs, gpt2: Path) -> None:
    code = "import sys; from transformers import GPT2LMHeadModel as M; M.from_pretrained(sys.argv[1])"
    status, _, err = run_program("--", "-c", code, gpt2)
    assert status == 2
    assert f"no model was extended (left alone: GPT2LMHeadModel from {gpt2}: model_type 'gpt2'" in err


SHOW = "import json, sys\nprint(json.dumps([sys.argv, [e for e in sys.path if e], 'sitecustomize' in sys.modules]))\n"


@pytest.mark.parametrize("kind", ["script", "module", "folder", "code", "command"])
def test_a_program_sees_the_arguments_and_the_path_that_it_sees_without_ctxext(
    kind: str, run_program: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__main__.py").write_text(SHOW)
    (tmp_path / "show.py").write_text(SHOW)
    monkeypatch.chdir(tmp_path)
    python = [sys.executable]
    program, command = {
        "script": (["show.py"], [*python, "show.py"]),
        "module": (["-m", "show"], [*python, "-m", "show"]),
        "folder": ([str(tmp_path)], [*python, str(tmp_path)]),
        "code": (["-c", SHOW], [*python, "-c", SHOW]),
        "command": (["python", "show.py"], [*python, "show.py"]),
    }[kind]
    arguments = ["--config", "x", "--", "-m", "", "a b", "--"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    assert json.loads(run_program("--", *program, *arguments)[1])[:2] == json.loads(done.stdout)[:2]


def test_the_users_own_sitecustomize_is_run(
    run_program: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("MINE = 7\nprint('mine')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    code = "import sitecustomize; print(sitecustomize.MINE, sitecustomize.__file__)"
    assert run_program("--", "-c", code)[1] == f"mine\n7 {tmp_path / 'sitecustomize.py'}\n"


def test_a_python_that_has_no_ctxext_says_so_and_fails(
    run_program: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    (tmp_path / "transformers" / "modeling_utils.py").write_text("class PreTrainedModel: pass")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import sys; sys.modules['ctxext'] = None; import transformers.modeling_utils"
    status, _, err = run_program("--", "-c", code)
    assert status == 1
    assert f"ctxext: {sys.executable} can't import ctxext" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "nonsense"], "nonsense: no such program"),
        (["--", "./configs/dca.yaml"], "no such program, or not executable"),
    ],
)
def test_a_program_that_cannot_be_started_is_one_line(
    arguments: list[str], words: str, run_program: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    status, _, err = run_program(*arguments)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1


def test_a_run_needs_a_method_and_is_not_nested(run_program: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = run_program("--", "-c", "pass", method=())
    assert (status, err.partition(";")[0]) == (2, "ctxext: no method")
    monkeypatch.setenv("CTXEXT_RUN", "{}")
    status, _, err = run_program("--", "-c", "pass")
    assert status == 2
    assert "can't be nested" in err


def test_a_request_to_end_reaches_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-m", "ctxext", "run", *METHOD, "--", "-c", code])
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "workers"),
    [(["accelerate", "launch", "--cpu", "--num_processes", "1"], 1), (["torchrun", "--nproc-per-node", "2"], 2)],
    ids=["accelerate", "torchrun"],
)
def test_workers_of_a_launcher_load_extended_models(
    launch: list[str], workers: int, run_program: Programs, training_script: Path, checkpoint: Path, tmp_path: Path
) -> None:
    status, _, err = run_program("--", *launch, training_script, checkpoint, tmp_path)
    assert status == 0, err
    assert err.count("ctxext: extended: LlamaForCausalLM") == workers
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.max_position_embeddings == 256


@pytest.mark.slow
@pytest.mark.parametrize("program", [["lm_eval"], ["-m", "lm_eval"]])
def test_the_harness_on_the_command_line_gives_the_answers_of_a_model_patched_by_hand(
    program: list[str], run_program: Programs, checkpoint: Path, task: Path
) -> None:
    harness = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm-evaluation-harness")
    output = task / "output"
    arguments = ["--model", "hf", "--model_args", f"pretrained={checkpoint}", "--tasks", "local", "--device", "cpu"]
    arguments += ["--include_path", str(task), "--output_path", str(output), "--log_samples"]
    status, _, err = run_program("--", *program, *arguments)
    assert status == 0, err
    lines = next(output.rglob("samples_*.jsonl")).read_text().splitlines()
    found = sorted((json.loads(line) for line in lines), key=lambda sample: sample["doc_id"])
    expected = evaluate(task, harness.HFLM(by_hand(checkpoint), tokenizer=AutoTokenizer.from_pretrained(checkpoint)))
    for sample, wanted in zip(found, answers(expected), strict=True):
        assert [float(score) for score, _ in sample["filtered_resps"]] == [score for score, _ in wanted]


ADAPTER_READERS = {
    "transformers": lambda folder, base: AutoModelForCausalLM.from_pretrained(folder),
    "auto peft": lambda folder, base: peft.AutoPeftModelForCausalLM.from_pretrained(folder),
    "peft": lambda folder, base: peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder),
    "later": lambda folder, base: AutoModelForCausalLM.from_pretrained(base).load_adapter(folder),
}


@pytest.fixture
def adapter(checkpoint: Path, tmp_path: Path) -> Path:
    """One that was trained under YaRN."""
    model, _ = ctxext.load_model(str(checkpoint), tiny.METHODS["yarn"], device="cpu")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    save_adapter(wrapped, tmp_path / "adapter", base=str(checkpoint))
    return tmp_path / "adapter"


@pytest.mark.parametrize("reader", ADAPTER_READERS)
def test_an_adapter_of_another_method_is_refused(checkpoint: Path, adapter: Path, reader: str) -> None:
    with pytest.raises(ModelLoadError, match="was trained under YaRN"), ctxext.autopatch(tiny.METHODS["pi"]):
        ADAPTER_READERS[reader](str(adapter), str(checkpoint))


@pytest.mark.parametrize("reader", ["transformers", "auto peft", "peft"])
def test_an_adapter_of_the_same_method_reads_as_ctxext_loads_it(checkpoint: Path, adapter: Path, reader: str) -> None:
    ids = tiny.tokens(100)
    expected = tiny.logits(ctxext.load_model(str(adapter), device="cpu")[0], ids)
    with ctxext.autopatch(tiny.METHODS["yarn"]):
        model = ADAPTER_READERS[reader](str(adapter), str(checkpoint)).eval()
    assert torch.equal(tiny.logits(model, ids), expected)


def test_adapters_are_read_as_ever_after_the_block(checkpoint: Path, adapter: Path) -> None:
    owners = (peft.PeftModel, PeftAdapterMixin)
    before = [vars(owner)["load_adapter"] for owner in owners]
    with ctxext.autopatch(tiny.METHODS["yarn"]):
        AutoModelForCausalLM.from_pretrained(checkpoint)
        assert [vars(owner)["load_adapter"] for owner in owners] != before
    assert [vars(owner)["load_adapter"] for owner in owners] == before


@pytest.mark.slow
def test_a_program_that_reads_an_adapter_of_another_method_fails(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "pi.yaml").write_text("method: {name: pi, factor: 4}\n")
    (tmp_path / "program.py").write_text(
        "import sys, peft\npeft.AutoPeftModelForCausalLM.from_pretrained(sys.argv[1])\n"
    )
    command = ["-m", "ctxext", "run", "--config", tmp_path / "pi.yaml", "--", tmp_path / "program.py", adapter]
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "was trained under YaRN" in done.stderr
