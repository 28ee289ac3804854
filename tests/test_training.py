"""The loop: the recipe is what it says, an interrupted run goes on as if it hadn't been, errors leave a good state."""

from __future__ import annotations

import itertools
import math
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from finetunes import SETTINGS, documents, load, losses, train
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import tiny
from ctxext.blocks import Blocks, Packing
from ctxext.checkpoints import Checkpoints, read_log
from ctxext.config import FinetuneSection
from ctxext.data import Document
from ctxext.errors import ConfigError, CtxextError, DataError
from ctxext.folder import FolderError
from ctxext.patching import unwrap
from ctxext.training import learning_rate

Usage = namedtuple("Usage", "total used free")


class Stopped(BaseException):
    """Stands for the end of the process."""


def stop_at(step: int) -> Any:
    def report(entry: Any) -> None:
        if entry["step"] == step and "loss" in entry:
            raise Stopped

    return report


def weights(job: Any) -> dict[str, torch.Tensor]:
    return dict(unwrap(job.model).state_dict())


def assert_same_weights(job: Any, other: Any) -> None:
    ours, theirs = weights(job), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", tiny.METHODS)
def test_a_few_steps_lower_the_loss_under_every_method(checkpoint: Path, tmp_path: Path, name: str) -> None:
    _, log = train(checkpoint, tmp_path / "run", method=tiny.METHODS[name])
    assert losses(log)[-1] < losses(log)[0] - 1


def test_the_loss_is_that_of_the_blocks_as_the_model_reads_them(checkpoint: Path, tmp_path: Path) -> None:
    model, tokenizer = load(checkpoint)
    _, log = train(checkpoint, tmp_path / "run", steps=1, gradient_accumulation_steps=3)
    stream, total, targets = Blocks(documents, tokenizer, Packing(96)), 0.0, 0
    for _ in range(3):
        block = next(stream)
        starts = [*(block.positions == 0).nonzero()[0].tolist(), 96]
        for start, end in itertools.pairwise(starts):  # each piece on its own
            ids = torch.from_numpy(block.ids[start:end])[None]
            if end - start > 1:
                total += model(ids, labels=ids, use_cache=False).loss.item() * (end - start - 1)
                targets += end - start - 1
    assert losses(log) == pytest.approx([total / targets], abs=1e-4)


def test_with_pose_each_token_sees_all_before_it_at_the_positions_of_the_block(
    checkpoint: Path, tmp_path: Path
) -> None:
    model, tokenizer = load(checkpoint)
    packing = Packing(40, positions="pose", target=256)
    _, log = train(checkpoint, tmp_path / "run", steps=1, positions="pose", sequence_length=40)
    total = 0.0
    for block in itertools.islice(Blocks(documents, tokenizer, packing), 2):
        ids, positions = torch.from_numpy(block.ids)[None], torch.from_numpy(block.positions)[None]
        logits = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False).logits
        total += torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item() / 2
    assert losses(log) == pytest.approx([total], abs=1e-4)


@pytest.mark.parametrize("changes", [{"batch_size": 2, "gradient_accumulation_steps": 1}, {"batch_size": 4}], ids=str)
def test_accumulation_and_batches_are_one_arithmetic(checkpoint: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    count = changes["batch_size"] * changes.get("gradient_accumulation_steps", 2)
    one, log = train(checkpoint, tmp_path / "one", batch_size=1, gradient_accumulation_steps=count)
    other, other_log = train(checkpoint, tmp_path / "other", **changes)
    assert losses(log) == pytest.approx(losses(other_log), abs=1e-4)
    norms, other_norms = ([entry["gradient_norm"] for entry in entries] for entries in (log, other_log))
    assert norms == pytest.approx(other_norms, rel=1e-4)  # AdamW and clipping would hide a wrong scale
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert tiny.difference(a, b) < 1e-4


@pytest.mark.parametrize("stopped", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "changes",
    [{}, {"lora": {"rank": 4, "dropout": 0.2, "trainable": ["norm"]}}, {"positions": "pose", "sequence_length": 40}],
    ids=str,
)
def test_a_resumed_run_is_equal_to_the_bit(
    checkpoint: Path, tmp_path: Path, stopped: int, changes: dict[str, Any]
) -> None:
    whole, log = train(checkpoint, tmp_path / "whole", **changes)
    with pytest.raises(Stopped):
        train(checkpoint, tmp_path / "run", report=stop_at(stopped), **changes)
    resumed, resumed_log = train(checkpoint, tmp_path / "run", resume=True, **changes)
    assert losses(resumed_log) == losses(log)
    assert [entry["step"] for entry in resumed_log] == [entry["step"] for entry in log]
    assert_same_weights(resumed, whole)


def test_tied_embeddings_stay_tied_over_a_checkpoint(tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    whole, log = train(tmp_path / "tied", tmp_path / "whole")
    with pytest.raises(Stopped):
        train(tmp_path / "tied", tmp_path / "run", report=stop_at(3))
    resumed, resumed_log = train(tmp_path / "tied", tmp_path / "run", resume=True)
    assert losses(resumed_log) == losses(log)
    assert_same_weights(resumed, whole)
    model = unwrap(resumed.model)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_last_checkpoints_are_kept(checkpoint: Path, tmp_path: Path) -> None:
    train(checkpoint, tmp_path / "run", save_every=1, keep=3)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        f"checkpoint-{step:06d}" for step in (4, 5, 6)
    ]


def test_a_checkpoint_that_was_being_written_does_not_count(checkpoint: Path, tmp_path: Path) -> None:
    whole, _ = train(checkpoint, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(checkpoint, tmp_path / "run", report=stop_at(5))
    half = tmp_path / "run" / ".checkpoint-000006.tmp"
    shutil.copytree(tmp_path / "run" / "checkpoint-000004", half)
    (tmp_path / "run" / "checkpoint-000009").mkdir()  # by hand, without anything in it
    resumed, _ = train(checkpoint, tmp_path / "run", resume=True)
    assert_same_weights(resumed, whole)
    assert not half.exists()


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 0, 0.1),
        ("constant", 9, 1.0),
        ("constant", 10, 1.0),
        ("constant", 109, 1.0),
        ("linear", 10, 1.0),
        ("linear", 60, 0.5),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.5),
        ("cosine", 109, (1 + math.cos(math.pi * 0.99)) / 2),
    ],
)
def test_the_learning_rate_is_a_function_of_the_step(schedule: Any, step: int, expected: float) -> None:
    settings = FinetuneSection(schedule=schedule, steps=110, warmup_steps=10, learning_rate=1e-3)
    assert learning_rate(settings, step) == pytest.approx(1e-3 * expected)


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(FinetuneSection(warmup_steps=0, learning_rate=1e-3), 0) == 1e-3


def test_the_optimiser_takes_each_steps_own_rate(checkpoint: Path, tmp_path: Path) -> None:
    _, log = train(checkpoint, tmp_path / "run", gradient_accumulation_steps=4, schedule="linear")
    settings = FinetuneSection(**{**SETTINGS, "schedule": "linear"})
    assert [entry["learning_rate"] for entry in log] == [learning_rate(settings, step) for step in range(6)]


def test_gradients_are_clipped(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    step = torch.optim.AdamW.step

    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        squares = [p.grad.double().square().sum() for group in self.param_groups for p in group["params"]]
        norms.append(float(sum(squares)) ** 0.5)  # type: ignore[arg-type]
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", watching)
    _, log = train(checkpoint, tmp_path / "run", max_grad_norm=0.5)
    assert all(entry["gradient_norm"] > 0.5 for entry in log)
    assert norms == pytest.approx([0.5] * 6, rel=1e-4)


def test_the_recipe_is_adamw_as_configured(checkpoint: Path, tmp_path: Path) -> None:
    job, _ = train(checkpoint, tmp_path / "run", weight_decay=0.1, steps=1)
    groups = job.optimizer.param_groups
    assert [group["betas"] for group in groups] == [(0.9, 0.95)] * 2
    assert [(group["weight_decay"], min(p.ndim for p in group["params"])) for group in groups] == [(0.1, 2), (0.0, 1)]


def test_what_is_trained_is_kept_in_fp32(tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path / "m", dtype=torch.bfloat16)
    job, _ = train(tmp_path / "m", tmp_path / "run", precision="bf16", learning_rate=1e-6, warmup_steps=0)
    assert {p.dtype for p in job.model.parameters()} == {torch.float32}
    before, _ = load(tmp_path / "m")
    after = unwrap(job.model)
    moved = (after.lm_head.weight - before.lm_head.weight.float()).abs()
    assert moved.max() > 0  # bfloat16 would have rounded it away
    assert moved.max() < 1e-4


def test_lora_trains_adapters_and_leaves_the_base_as_it_was(checkpoint: Path, tmp_path: Path) -> None:
    before, _ = load(checkpoint)
    job, _ = train(checkpoint, tmp_path / "run", lora={"rank": 4}, learning_rate=1e-2)
    names = [name for name, p in job.model.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    stored = {name.replace("base_layer.", "") for name in weights(job) if "lora_" not in name}
    assert stored == set(before.state_dict())
    for name, value in weights(job).items():
        if "lora_" not in name:
            assert torch.equal(value, before.state_dict()[name.replace("base_layer.", "")])


@pytest.mark.parametrize("tied", [False, True])
def test_norms_and_embeddings_can_be_trained_beside_the_adapters(tmp_path: Path, tied: bool) -> None:
    tiny.save_checkpoint(tmp_path / "m", tie_word_embeddings=tied)
    before, _ = load(tmp_path / "m")
    job, _ = train(tmp_path / "m", tmp_path / "run", lora={"rank": 4, "trainable": ["norm", "embed"]})
    model = job.model.merge_and_unload()
    assert not torch.equal(model.model.norm.weight, before.model.norm.weight)
    assert not torch.equal(model.model.layers[0].input_layernorm.weight, before.model.layers[0].input_layernorm.weight)
    assert not torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) is tied


def test_adapters_on_what_is_not_there_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora.target_modules: c_attn: no such linear layer \(down_proj"):
        train(checkpoint, tmp_path / "run", lora={"target_modules": ["c_attn"]})


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    model, tokenizer = load(checkpoint)

    def spoil(entry: Any) -> None:
        if entry["step"] == 3:
            model.model.norm.weight.data[0] = math.nan

    with pytest.raises(CtxextError, match=r"the loss is nan at step 4, .*the last checkpoint is .*checkpoint-000002"):
        train((model, tokenizer), tmp_path / "run", report=spoil)
    whole, _ = train(checkpoint, tmp_path / "whole")
    resumed, _ = train(checkpoint, tmp_path / "run", resume=True)
    assert_same_weights(resumed, whole)


def test_a_gradient_that_is_not_a_number_changes_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load(checkpoint)
    model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    before = model.model.norm.weight.clone()
    with pytest.raises(CtxextError, match=r"the norm of the gradient is (nan|inf) at step 1"):
        train((model, tokenizer), tmp_path / "run")
    assert torch.equal(model.model.norm.weight, before)


def test_a_full_disk_is_noticed_before_writing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(entry: Any) -> None:
        if entry["step"] == 3:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 1000))

    with pytest.raises(CtxextError, match=r"checkpoint-000004 can't be written: .* are free; the last .*-000002"):
        train(checkpoint, tmp_path / "run", report=fill)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run").glob("*checkpoint*")] == ["checkpoint-000002"]


def test_a_checkpoint_that_breaks_off_leaves_the_last_one(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def fill(entry: Any) -> None:
        if entry["step"] == 3:
            monkeypatch.setattr("ctxext.checkpoints.save_file", full)

    with pytest.raises(CtxextError, match=r"No space left on device; the last checkpoint .*-000002; make room"):
        train(checkpoint, tmp_path / "run", report=fill)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run").glob("*checkpoint*")] == ["checkpoint-000002"]
    train(checkpoint, tmp_path / "run", resume=True)


def test_data_that_breaks_off_keeps_the_last_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    reads = iter(range(100))

    def read() -> Iterator[Document]:
        yield from list(documents())[:4]
        if next(reads) > 0:  # the plan has read once
            raise DataError("row 5 can't be read")
        yield from list(documents())[4:]

    with pytest.raises(DataError, match="row 5"):
        train(checkpoint, tmp_path / "run", read=read, save_every=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": None}, "sequence_length: none given"),
        ({"sequence_length": 257}, "sequence_length 257 is beyond the 256 tokens that the model is extended to"),
        ({"positions": "pose", "sequence_length": 256}, "positions pose trains on blocks shorter than the target"),
    ],
    ids=str,
)
def test_blocks_that_do_not_fit_the_model_are_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(checkpoint, tmp_path / "run", **changes)


def test_long_blocks_of_short_documents_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    def short() -> Iterator[Document]:
        return iter([Document(str(i), "a text of few tokens") for i in range(50)])

    with pytest.raises(ConfigError, match="reaches beyond the trained length of 64 tokens, so that blocks of 96 teach"):
        train(checkpoint, tmp_path / "run", read=short)
    train(checkpoint, tmp_path / "concat", read=short, pack="concat", steps=1)


def test_attention_that_mixes_packed_documents_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    def causal_only(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, None, is_causal=True)

    AttentionInterface.register("mixing", causal_only)
    AttentionMaskInterface.register("mixing", lambda *args, **kwargs: None)
    model, tokenizer = load(checkpoint)
    model.set_attn_implementation("mixing")
    with pytest.raises(ConfigError, match="documents in a block see each other on this model's attention"):
        train((model, tokenizer), tmp_path / "run")
    train((model, tokenizer), tmp_path / "concat", pack="concat", steps=1)


def test_a_gap_that_hides_what_is_before_it_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    model, tokenizer = load(checkpoint)
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )  # without a mask Transformers takes what follows for another text
    with pytest.raises(ConfigError, match="before the gap of positions pose is hidden"):
        train((model, tokenizer), tmp_path / "run", positions="pose", sequence_length=40)


def test_evaluations_stand_in_the_log_between_the_steps(checkpoint: Path, tmp_path: Path) -> None:
    seen = []

    def evaluate(model: Any) -> list[dict[str, Any]]:
        seen.append((type(model).__name__, model.training, torch.is_grad_enabled()))
        return [{"length": 64, "nll": 1.0, "perplexity": math.e}]

    _, log = train(checkpoint, tmp_path / "run", evaluate=evaluate, evaluate_every=4)
    assert [entry["step"] for entry in log if "evaluation" in entry] == [0, 4, 6]
    assert set(seen) == {("LlamaForCausalLM", False, False)}
    assert len(losses(log)) == 6


def test_a_plan_counts_what_will_be_done(checkpoint: Path, tmp_path: Path) -> None:
    model, tokenizer = load(checkpoint)
    job, _ = train((model, tokenizer), tmp_path / "run", batch_size=2, gradient_accumulation_steps=3, steps=2)
    plan = job.plan()
    assert (plan.global_batch, plan.tokens, plan.processes) == (6, 2 * 6 * 96, 1)
    assert plan.trainable == plan.parameters == sum(p.numel() for p in model.parameters())
    assert (plan.trained, plan.target) == (64, 256)
    assert 0 < plan.beyond < 0.4
    assert "blocks show relative positions up to 96; the target is 256" in plan.notes


def test_pose_shows_the_whole_target(checkpoint: Path, tmp_path: Path) -> None:
    model, tokenizer = load(checkpoint)
    job, _ = train((model, tokenizer), tmp_path / "run", positions="pose", sequence_length=40, steps=1)
    assert job.plan().notes == ()
    assert job.plan().beyond > 0.2


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FolderError, match="holds other files"):
        Checkpoints(tmp_path, resume=resume, overwrite=not resume)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_a_run_is_not_thrown_away_without_being_asked(checkpoint: Path, tmp_path: Path) -> None:
    train(checkpoint, tmp_path / "run")
    with pytest.raises(FolderError, match="holds a run: go on with --resume, or start again with --overwrite"):
        Checkpoints(tmp_path / "run", resume=False, overwrite=False)
    checkpoints = Checkpoints(tmp_path / "run", resume=False, overwrite=True)
    checkpoints.begin({})
    checkpoints.close()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.json"}
    assert read_log(tmp_path / "run") == []


def test_checkpoints_of_another_model_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(checkpoint, tmp_path / "run", report=stop_at(3))
    with pytest.raises(CtxextError, match="holds other weights than those that are trained now"):
        train(checkpoint, tmp_path / "run", resume=True, lora={"rank": 2})


def test_another_program_in_this_process_keeps_its_own_settings(checkpoint: Path, tmp_path: Path) -> None:
    theirs = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=3)
    train(checkpoint, tmp_path / "run", precision="bf16", steps=1)
    assert (theirs.mixed_precision, theirs.gradient_accumulation_steps) == ("no", 3)
    assert Accelerator(cpu=True, mixed_precision="no").state is not None


def test_training_leaves_accelerate_ready_for_another_recipe(checkpoint: Path, tmp_path: Path) -> None:
    for precision in ("fp32", "bf16", "fp32"):
        train(checkpoint, tmp_path / f"{precision}{len(list(tmp_path.iterdir()))}", precision=precision, steps=1)
