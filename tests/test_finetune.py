"""``ctxext finetune``: from a file to a model that loads, through kills, in one process or two, and its refusals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import DistributedType
from finetunes import SETTINGS, TEXTS, contents, losses
from transformers import AutoModelForCausalLM

import ctxext
import tiny
from command_line import Run
from ctxext.checkpoints import read_log
from ctxext.patching import active_patch

CONFIGS = Path(__file__).parent.parent / "configs"
HELD_OUT = "What is measured is never what was trained on. " * 20


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> Path:
    """A file of a small fine-tune, with its texts beside it."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"text": HELD_OUT}) + "\n")
    values = {
        "model": {"name": str(checkpoint), "dtype": "float32"},
        "method": {"name": "yarn", "factor": 4},
        "finetune": {**SETTINGS, "dataset": str(tmp_path / "train.jsonl")},
        "perplexity": {"dataset": str(tmp_path / "held-out.jsonl"), "length": [64, 256]},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def perplexities(log: list[dict[str, Any]]) -> list[list[float]]:
    return [[row["nll"] for row in entry["evaluation"]] for entry in log if "evaluation" in entry]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["-s", "finetune.lora={rank: 4, merge: true}"], "finetune.lora.merge: the weights are spread"),
        (["-s", "method.name=clex", "-s", "finetune.precision=bf16"], "bf16 would round what clex learns"),
    ],
)
def test_what_spread_weights_would_get_wrong_is_refused(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], words: str
) -> None:
    monkeypatch.setattr("ctxext.finetuning.SHARDED", (DistributedType.NO,))
    ran = run("finetune", "-c", config, "-o", tmp_path / "run", *changes)
    assert (ran.status, words in ran.err) == (2, True), ran.err
    assert not (tmp_path / "run" / "model").exists()


def test_the_result_loads_without_ctxext_and_reads_as_it_was_measured(run: Run, config: Path, tmp_path: Path) -> None:
    ran = run("finetune", "-c", config, "-o", tmp_path / "run")
    assert ran.status == 0
    log = read_log(tmp_path / "run")
    assert perplexities(log)[-1][1] < perplexities(log)[0][1] - 0.2
    code = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors='pt').input_ids[:, :256]\n"
        "print(float(model(ids, labels=ids).loss), 'ctxext' in sys.modules)\n"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "run" / "model"), HELD_OUT]
    loss, loaded = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
    assert loaded == "False"
    assert float(loss) == pytest.approx(perplexities(log)[-1][1], abs=1e-4)


def test_the_screen_says_what_is_done(run: Run, config: Path, tmp_path: Path) -> None:
    ran = run("finetune", "-c", config, "-o", tmp_path / "run")
    assert "6 steps of 2 blocks (2 in each of 1 process), 1,152 tokens" in ran.out
    assert "trained to 64 tokens, target 256" in ran.out
    assert "% of the scored tokens stand beyond the trained length" in ran.out
    assert f"wrote {tmp_path / 'run' / 'model'}" in ran.out.replace("\n", "")
    assert "warning: blocks show relative positions up to 96; the target is 256" in ran.err
    assert (tmp_path / "run" / "training.png").stat().st_size > 10_000


def test_the_model_card_tells_method_data_settings_and_command(run: Run, config: Path, tmp_path: Path) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "run")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    for part in ("yarn", "local:train.jsonl", "6 steps of 2 blocks of 96 tokens", "learning_rate: 0.001", "ctxext"):
        assert part in card


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("method", ["yarn", "dca"])
def test_adapters_and_merged_models_read_as_they_were_measured(
    run: Run, config: Path, tmp_path: Path, method: str, merge: bool
) -> None:
    lora = f"finetune.lora={{rank: 4, trainable: [norm, embed], merge: {str(merge).lower()}}}"
    ran = run("finetune", "-c", config, "-o", tmp_path / "run", "-s", lora, "-s", f"method.name={method}")
    assert ran.status == 0
    folder = tmp_path / "run" / ("model" if merge else "adapter")
    model, tokenizer = ctxext.load_model(str(folder), device="cpu")
    patch = active_patch(model)
    assert (patch is not None) is (not merge or method == "dca")  # a static method is part of a merged checkpoint
    ids = tokenizer(HELD_OUT, return_tensors="pt").input_ids[:, :256]
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert loss == pytest.approx(perplexities(read_log(tmp_path / "run"))[-1][1], abs=1e-4)


def test_a_finished_run_that_is_resumed_with_more_steps_goes_on(run: Run, config: Path, tmp_path: Path) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "whole", "--steps", "8")
    run("finetune", "-c", config, "-o", tmp_path / "run", "--steps", "5")
    ran = run("finetune", "-c", config, "-o", tmp_path / "run", "--steps", "8", "--resume")
    assert ran.status == 0
    assert losses(read_log(tmp_path / "run")) == losses(read_log(tmp_path / "whole"))


def test_a_run_that_has_gone_further_is_not_taken_for_a_shorter_one(run: Run, config: Path, tmp_path: Path) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "run")
    before = (tmp_path / "run" / "model" / "README.md").read_bytes()
    ran = run("finetune", "-c", config, "-o", tmp_path / "run", "--steps", "4", "--resume")
    assert (ran.status, "steps 4: the run in" in ran.err) == (2, True)
    assert (tmp_path / "run" / "model" / "README.md").read_bytes() == before
    assert len(losses(read_log(tmp_path / "run"))) == 6


def test_evaluations_by_window_are_run_too(run: Run, config: Path, tmp_path: Path) -> None:
    changes = ["protocol=sliding", "length=[]", "window=64"]
    settings = [part for change in changes for part in ("-s", f"perplexity.{change}")]
    assert run("finetune", "-c", config, "-o", tmp_path / "run", *settings).status == 0
    assert [len(rows) for rows in perplexities(read_log(tmp_path / "run"))] == [1, 1]


def test_evaluations_in_bf16_say_so_and_are_near_those_of_the_saved_weights(
    run: Run, config: Path, tmp_path: Path
) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "run", "-s", "finetune.precision=bf16")
    log = read_log(tmp_path / "run")
    assert {entry["precision"] for entry in log if "evaluation" in entry} == {"bf16"}
    arguments = ["--dataset", tmp_path / "held-out.jsonl", "--length", 256, "--json"]
    saved = json.loads(run("eval", "perplexity", "-m", tmp_path / "run" / "model", *arguments).out)["rows"][0]["nll"]
    assert perplexities(log)[-1][1] == pytest.approx(saved, abs=0.05)


def test_a_dry_run_writes_nothing(run: Run, config: Path, tmp_path: Path) -> None:
    ran = run("finetune", "-c", config, "-o", tmp_path / "run", "--dry-run")
    assert ran.status == 0
    assert "6 steps of 2 blocks" in ran.out
    assert not list((tmp_path / "run").iterdir())


def test_a_dry_run_removes_nothing(run: Run, config: Path, tmp_path: Path) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "run")
    before = contents(tmp_path / "run")
    assert run("finetune", "-c", config, "-o", tmp_path / "run", "--dry-run", "--overwrite").status == 0
    assert before == contents(tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence-length", 300], "sequence_length 300 is beyond the 256 tokens that the model is extended to"),
        (["-s", "method.max_position_embeddings=300"], "factor 4 times the trained length 64 is 256, not"),
        (["--dataset", "nowhere.jsonl"], "'nowhere.jsonl' not found"),
        (["-s", "finetune.learning_rat=1"], "finetune.learning_rat: unknown key"),
        (["-s", "finetune.lora={rank: 0}"], "finetune.lora.rank: expected"),
        (["-s", "finetune.steps=0"], "finetune.steps: expected"),
        (["-s", "perplexity=null", "-s", "finetune.evaluate_every=2"], "evaluate_every: nothing to evaluate"),
        (["-s", "finetune.dataset=null"], "no data; give --dataset"),
        (["-s", "finetune.trackers=nothing"], "Unsupported logging capability: nothing"),
        (["-s", "finetune.trackers=aim"], "finetune.trackers: aim: not all of them are installed"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_writes_nothing(
    run: Run, config: Path, tmp_path: Path, arguments: list[object], message: str
) -> None:
    ran = run("finetune", "-c", config, "-o", tmp_path / "run", *arguments)
    assert ran.status == 2
    assert message in ran.err
    lines = [line for line in ran.err.splitlines() if line.startswith("ctxext:")]
    assert len(lines) == 1
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["-s", "finetune.positions=pose", "--sequence-length", 60],
            "no document has 60 tokens, as a block with positions",
        ),
        (["--sequence-length", 90], "no document among the first 12 blocks reaches beyond the trained length of 64"),
        (["--sequence-length", 250], "the whole data set has 220 tokens, less than one block of 250"),
    ],
    ids=str,
)
def test_documents_that_are_too_short_are_an_error(
    run: Run, config: Path, tmp_path: Path, changes: list[object], message: str
) -> None:
    (tmp_path / "short.jsonl").write_text((json.dumps({"text": "twenty characters..."}) + "\n") * 10)
    ran = run("finetune", "-c", config, "-o", tmp_path / "run", "--dataset", tmp_path / "short.jsonl", *changes)
    assert (ran.status, message in ran.err) == (2, True), ran.err


def test_without_a_folder_nothing_is_trained(run: Run, config: Path) -> None:
    ran = run("finetune", "-c", config)
    assert ran.status == 2
    assert "give --output" in ran.err


def test_training_on_what_is_evaluated_is_an_error(run: Run, config: Path, tmp_path: Path) -> None:
    (tmp_path / "both.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, HELD_OUT]))
    ran = run("finetune", "-c", config, "-o", tmp_path / "run", "--dataset", tmp_path / "both.jsonl")
    assert ran.status == 2
    assert "'both.jsonl:13' is a document of the training data and of the evaluation data" in ran.err


def test_overwriting_waits_until_all_is_checked(run: Run, config: Path, tmp_path: Path) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "run")
    before = contents(tmp_path / "run")
    for change in ("finetune.sequence_length=99999", "finetune.lora={target_modules: [nothing]}"):
        ran = run("finetune", "-c", config, "-o", tmp_path / "run", "--overwrite", "-s", change)
        assert ran.status == 2
        assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--resume"]], ids=["", "overwrite", "resume"])
def test_folders_of_other_kinds_of_run_are_left_as_they_were(
    run: Run, config: Path, tmp_path: Path, more: list[str]
) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "trained")
    evaluate = ("eval", "perplexity", "-c", config)
    assert run(*evaluate, "-o", tmp_path / "measured").status == 0
    before = contents(tmp_path / "trained"), contents(tmp_path / "measured")
    ran = run(*evaluate, "-o", tmp_path / "trained", *more)
    assert (ran.status, "holds a run of another kind (fine-tune)" in ran.err) == (2, True), ran.err
    ran = run("finetune", "-c", config, "-o", tmp_path / "measured", *more)
    assert (ran.status, "holds a run of another kind (evaluation)" in ran.err) == (2, True), ran.err
    assert (contents(tmp_path / "trained"), contents(tmp_path / "measured")) == before


def test_a_run_goes_on_with_the_evaluation_that_it_began_with(run: Run, config: Path, tmp_path: Path) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "run")
    more = ["--resume", "-s", "finetune.steps=8", "-s", "perplexity.length=[64]"]
    ran = run("finetune", "-c", config, "-o", tmp_path / "run", *more)
    assert (ran.status, "holds a run with perplexity.length [64, 256], this one has [64]" in ran.err) == (2, True)


def test_the_environment_does_not_change_how_many_batches_make_a_step(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "one")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    run("finetune", "-c", config, "-o", tmp_path / "other")
    assert losses(read_log(tmp_path / "one")) == losses(read_log(tmp_path / "other"))


def test_an_adapter_whose_weights_are_frozen_is_refused(run: Run, config: Path, tmp_path: Path) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "first", "-s", "finetune.lora={rank: 2}")
    ran = run("finetune", "-c", config, "-m", tmp_path / "first" / "adapter", "-o", tmp_path / "second")
    assert (ran.status, "nothing to train: all weights are frozen" in ran.err) == (2, True), ran.err


def test_the_folder_of_another_run_is_left_as_it_was(run: Run, config: Path, tmp_path: Path) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "run")
    before = contents(tmp_path / "run")
    for arguments, message in (
        ([], "holds a run: go on with --resume, or start again with --overwrite"),
        (["--resume", "-s", "finetune.learning_rate=1"], "holds a run with finetune.learning_rate 0.001, this one has"),
        (["--resume", "-s", "method.factor=8"], "holds a run with method.factor 4.0, this one has 8.0"),
    ):
        ran = run("finetune", "-c", config, "-o", tmp_path / "run", *arguments)
        assert (ran.status, message in ran.err) == (2, True)
    assert before == contents(tmp_path / "run")


def launch(arguments: list[object], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )


def test_two_processes_train_as_one(run: Run, config: Path, tmp_path: Path) -> None:
    run("finetune", "-c", config, "-o", tmp_path / "one")
    arguments = ["accelerate.commands.launch", "--config_file", CONFIGS / "accelerate" / "cpu-2proc.yaml"]
    arguments += ["-m", "ctxext", "finetune", "-c", config, "-o", tmp_path / "two"]
    process = launch([*arguments, "-s", "finetune.gradient_accumulation_steps=1"])
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "6 steps of 2 blocks (1 in each of 2 processes)" in output
    one, two = (read_log(tmp_path / name) for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    assert perplexities(two)[0] == perplexities(one)[0]  # of the same weights: equal to the bit
    assert perplexities(two)[-1] == pytest.approx(perplexities(one)[-1], abs=1e-4)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("one", "two")]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert tiny.difference(a, b) < 1e-4


# accelerate shards on accelerators only; told that its two CPU processes are GPUs, it shards here too.
SHARDED = """
import sys
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from ctxext import processes
from ctxext.cli import main
processes._state()
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
from torch.distributed import fsdp
shard, sharded = fsdp.fully_shard, []
def noted(module, *arguments, **options):
    sharded.append(type(module).__name__)
    return shard(module, *arguments, **options)
fsdp.fully_shard = noted
try:
    main(sys.argv[1:])
finally:
    assert sharded == ["LlamaDecoderLayer"] * 2 + ["Root"], sharded
"""


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", ["yarn", "clex"])
def test_spread_weights_train_and_resume_as_whole_ones(
    run: Run, config: Path, tmp_path: Path, method: str, lora: bool
) -> None:
    changes = ["-s", f"method.name={method}"]
    changes += ["-s", "finetune.lora={rank: 4, trainable: [norm]}"] if lora else []
    run("finetune", "-c", config, "-o", tmp_path / "one", *changes)
    (tmp_path / "sharded.py").write_text(SHARDED)
    launcher = ["accelerate.commands.launch", "--config_file", CONFIGS / "accelerate" / "fsdp2.yaml"]
    launcher += ["--num_processes", 2, tmp_path / "sharded.py"]
    command = ["finetune", "-c", config, "-o", tmp_path / "two", "-s", "finetune.gradient_accumulation_steps=1"]
    for more in (["--steps", 4], ["--steps", 6, "--resume"]):
        process = launch([*launcher, *command, *changes, *more])
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    one, two = (read_log(tmp_path / name) for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    assert perplexities(two)[0] == pytest.approx(perplexities(one)[0], abs=1e-5)
    result = "adapter" if lora else "model"
    models = [ctxext.load_model(str(tmp_path / name / result), device="cpu")[0] for name in ("one", "two")]
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert tiny.difference(a, b) < 1e-3, name


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_with_the_same_weights(run: Run, config: Path, tmp_path: Path) -> None:
    changes = ["-s", "finetune.save_every=1", "--steps", "12", "-s", "perplexity=null"]
    run("finetune", "-c", config, "-o", tmp_path / "whole", *changes)
    draw, kills = random.Random(0), 0
    arguments = ["ctxext", "finetune", "-c", config, "-o", tmp_path / "run", "--resume", *changes]
    while True:
        process = launch(arguments)
        started = time.monotonic()
        moment = draw.uniform(4, 14)
        while process.poll() is None and not (kills < 10 and time.monotonic() - started > moment):
            time.sleep(0.01)
        if process.poll() is not None:
            assert process.returncode == 0, process.communicate()[0]
            if kills >= 10:
                break
            (tmp_path / "run").rename(
                tmp_path / f"early-{kills}"
            )  # it was done before ten kills: once more from the start
            continue
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
    assert losses(read_log(tmp_path / "run")) == losses(read_log(tmp_path / "whole"))
    whole, resumed = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("whole", "run"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
