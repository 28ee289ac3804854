"""CLEX: its equation against other solvers, its weights through training, saving, loading and everything in between."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetunes import TEXTS, load, losses, train
from safetensors.torch import load_file, save_file
from scipy.integrate import solve_ivp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicCache

import ctxext
import tiny
from command_line import Run
from ctxext.blocks import Block, Blocks, Packing
from ctxext.config import FinetuneSection
from ctxext.data import Document
from ctxext.errors import ModelLoadError
from ctxext.export import export, save_adapter, write_checkpoint
from ctxext.lora import add_lora
from ctxext.methods.clex import learned_logarithm, ntk_rates, runge_kutta
from ctxext.rope import RopeSpec
from ctxext.training import sampled_factor
from patches import assert_as_before, gradients, patched, snapshot

CLEX = tiny.METHODS["clex"]
TINY = RopeSpec(10_000.0, 16, 64)
QWEN = RopeSpec(1_000_000.0, 128, 32_768)
IDS = tiny.tokens(101)
FILE = "clex.safetensors"

pytestmark = [
    # PEFT still asks recent releases of Transformers by an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


def disturb(model: nn.Module, *, seed: int = 0, by: float = 0.03) -> None:
    """As training would leave the weights: no longer where they start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in flow(model).parameters():
            weight.add_(by * torch.randn(weight.shape, generator=generator))


def flow(model: nn.Module) -> Any:
    found = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    return found.learned


def learned(method: ctxext.Method = CLEX, **changes: Any) -> PreTrainedModel:
    model = tiny.model(**changes)
    ctxext.patch(model, method)
    disturb(model)
    return model


def loaded(folder: Path, method: Any = None) -> Any:
    return ctxext.load_model(str(folder), method, device="cpu")[0]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in flow(model).named_parameters()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def trained(checkpoint: Path, tmp_path: Path) -> Path:
    """A folder with a model whose frequencies have moved."""
    model, tokenizer = ctxext.load_model(str(checkpoint), CLEX, device="cpu")
    disturb(model)
    write_checkpoint(model, tokenizer, tmp_path / "trained")
    return tmp_path / "trained"


# The equation


@pytest.mark.parametrize("spec", [TINY, QWEN], ids=["tiny", "qwen"])
@pytest.mark.parametrize("factor", [1.0, 1.5, 4.0, 31.7])
def test_it_starts_as_ntk_aware_to_the_bit(spec: RopeSpec, factor: float) -> None:
    expected, _ = ctxext.NTK(factor=factor).scaled_rope(spec)
    method = ctxext.CLEX(factor=factor)
    assert torch.equal(method.scaled_rope(spec)[0], expected)
    assert torch.equal(method.learned_rope(spec)(factor).detach(), expected)
    assert method.rope_parameters(spec) == ctxext.NTK(factor=factor).rope_parameters(spec)


def test_a_model_without_training_is_the_one_of_ntk_to_the_bit() -> None:
    assert torch.equal(tiny.logits(patched("clex"), IDS), tiny.logits(patched("ntk"), IDS))


def test_the_solver_is_of_fourth_order() -> None:
    start = torch.tensor([1.0, 0.5], dtype=torch.float64)
    exact = start * math.exp(math.sin(2.0))  # of dx/du = x cos u

    def error(steps: int) -> float:
        return tiny.difference(runge_kutta(lambda u, x: x * math.cos(u), start, 2.0, steps), exact)

    for steps in (16, 32):
        assert math.log2(error(steps) / error(2 * steps)) == pytest.approx(4, abs=0.15)


@pytest.mark.parametrize("factor", [1.3, 4.0, 32.0])
def test_the_frequencies_solve_the_equation_of_the_paper(factor: float) -> None:
    flow = ctxext.CLEX(factor=factor).learned_rope(TINY)
    generator = torch.Generator().manual_seed(1)
    flow.down.data = 0.05 / factor * torch.randn(flow.down.shape, generator=generator)
    up, down = (weight.detach().double().numpy() for weight in (flow.up, flow.down))
    half = 8

    def slope(t: float, z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """As in the paper, over t itself and with the bias in it."""
        hidden = z @ up
        return np.array([-2 * i / (16 - 2) / t for i in range(half)]) + (hidden / (1 + np.exp(-hidden))) @ down

    start = np.log([1e4 ** (-2 * i / 16) for i in range(half)])
    solution = solve_ivp(slope, (1.0, factor), start, method="DOP853", rtol=1e-10, atol=1e-12).y[:, -1]
    moved = np.abs(solution - np.log(ctxext.NTK(factor=factor).scaled_rope(TINY)[0].double().numpy())).max()
    assert moved > 0.01
    # Logarithms of up to 12 in fp32, and what the default number of steps leaves.
    torch.testing.assert_close(flow(factor).detach().double().log(), torch.from_numpy(solution), rtol=0, atol=2e-5)


def test_gradients_of_the_equation_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(2)
    up, down = (
        torch.randn(shape, generator=generator, dtype=torch.float64).mul_(0.2).requires_grad_()
        for shape in ((4, 8), (8, 4))
    )
    start = torch.tensor([1e4 ** (-i / 4) for i in range(4)], dtype=torch.float64).log()

    def frequencies(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return learned_logarithm(up, down, start, ntk_rates(4), math.log(4), 6).exp()

    assert torch.autograd.gradcheck(frequencies, (up, down))


def test_gradients_reach_the_weights_through_the_model() -> None:
    model = learned().double()
    found = gradients(model, IDS)
    generator = torch.Generator().manual_seed(3)
    for name, weight in flow(model).named_parameters():
        direction = torch.randn(weight.shape, generator=generator)
        predicted = (found[f"model.rotary_emb.learned.{name}"] * direction).sum().item()
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(direction, alpha=sign * 1e-5)
                ends.append(model(IDS, labels=IDS, use_cache=False).loss.item())
                weight.sub_(direction, alpha=sign * 1e-5)
        # Frequencies are fp32, so the distance can't be much smaller, and over it the loss is not straight.
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(predicted, rel=0.02), name


def test_the_first_step_moves_what_starts_at_zero_and_the_second_the_rest() -> None:
    model = patched("clex")
    optimizer = torch.optim.SGD(flow(model).parameters(), lr=1e-4)
    gradients(model, IDS)
    assert flow(model).down.grad.abs().max() > 0
    assert flow(model).up.grad.abs().max() == 0
    optimizer.step()
    optimizer.zero_grad()
    gradients(model, IDS)
    assert flow(model).up.grad.abs().max() > 0


# On the model


def test_it_comes_off_without_a_trace_once_trained() -> None:
    model = tiny.model()
    before, plain = snapshot(model), tiny.logits(model, IDS)
    with ctxext.patch(model, CLEX):
        names = {name for name, _ in model.named_parameters() if "rotary_emb" in name}
        assert names == {"model.rotary_emb.learned.up", "model.rotary_emb.learned.down"}
        disturb(model)
        assert tiny.difference(tiny.logits(model, IDS), tiny.logits(patched("ntk"), IDS)) > 1e-2
    assert torch.equal(tiny.logits(model, IDS), plain)
    assert_as_before(model, before)
    assert not any("rotary_emb" in name for name, _ in model.named_parameters())


def test_two_models_learn_apart() -> None:
    first, second = patched("clex"), patched("clex")
    disturb(first)
    assert torch.equal(tiny.logits(second, IDS), tiny.logits(patched("ntk"), IDS))


def test_it_runs_in_every_way_with_the_same_logits() -> None:
    model, ids = learned(), tiny.tokens(150)
    whole = tiny.logits(model, ids)
    for ends in ((150,), (100, 150), (64, 65, 66, 150)):
        pieces = tiny.in_pieces(model, ids, ends, DynamicCache(config=model.config))
        assert tiny.difference(pieces, whole) < 1e-4
    padded = torch.cat([torch.zeros(1, 50, dtype=torch.long), ids[:, :100]], dim=1)
    mask = torch.cat([padded[:, :50] * 0, torch.ones_like(padded[:, 50:])], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = tiny.logits(
        model,
        torch.cat([ids, padded]),
        attention_mask=torch.cat([torch.ones_like(ids), mask]),
        position_ids=torch.cat([torch.arange(150)[None], positions]),
    )
    assert tiny.difference(batch[1, 50:], whole[0, :100]) < 1e-4


def test_a_compiler_traces_it_whole() -> None:
    rotary = learned(ctxext.CLEX(factor=4, solver_steps=2)).model.rotary_emb
    inputs = torch.zeros(1, 1, 64), torch.tensor([[3, 70]])
    with torch.no_grad():
        compiled = torch.compile(rotary, backend="eager", fullgraph=True)(*inputs)
        torch.testing.assert_close(compiled, rotary(*inputs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_learned_weights_stay_exact_through_casts(cast: str) -> None:
    model = learned()
    before, frequencies = weights(model), model.model.rotary_emb.inv_freq
    getattr(model, cast)()
    assert equal(weights(model), before)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert ctxext.inspect(model).consistent


def test_learned_weights_do_not_go_to_the_meta_device_with_the_model() -> None:
    model = learned()
    before = weights(model)
    model.to("meta")
    assert model.model.rotary_emb.inv_freq.device.type == "meta"
    model.to_empty(device="cpu")
    assert equal(weights(model), before)


def test_a_copy_learns_by_itself() -> None:
    model = learned()
    twin, before = copy.deepcopy(model), tiny.logits(model, IDS)
    assert torch.equal(tiny.logits(twin, IDS), before)
    disturb(twin, seed=1)
    assert tiny.difference(tiny.logits(twin, IDS), before) > 1e-3
    assert torch.equal(tiny.logits(model, IDS), before)


def test_a_copy_is_saved_as_itself(tmp_path: Path) -> None:
    model = learned()
    twin = copy.deepcopy(model)
    disturb(twin, seed=1)
    twin.save_pretrained(tmp_path)
    assert equal(load_file(tmp_path / FILE), weights(twin))
    assert not equal(weights(twin), weights(model))


def test_the_equation_is_solved_once_while_nothing_changes() -> None:
    model = learned()
    calls: list[float] = []
    flow(model).register_forward_hook(lambda module, inputs, output: calls.append(inputs[0]))
    first = tiny.logits(model, IDS)
    for _ in range(5):
        tiny.logits(model, IDS)
    assert calls == [4.0]
    flow(model).down.data.mul_(2)  # which leaves no trace on the parameter
    assert tiny.difference(tiny.logits(model, IDS), first) > 1e-3
    assert len(calls) == 2


def test_inspect_says_whether_anything_has_been_learned() -> None:
    model = patched("clex")
    # d/2 x d, twice, with d = 16.
    assert "the 256 weights of clex are untrained: the frequencies are those that it starts with" in str(
        ctxext.inspect(model)
    )
    disturb(model)
    report = ctxext.inspect(model)
    assert report.consistent
    assert "the 256 weights of clex have been trained" in report.notes
    assert report.fingerprint != ctxext.inspect(patched("clex")).fingerprint


def test_another_factor_keeps_what_was_learned_and_another_method_does_not() -> None:
    model = learned()
    before = weights(model)
    ctxext.patch(model, ctxext.CLEX(factor=8), replace=True)
    assert equal(weights(model), before)
    with pytest.raises(ctxext.ConfigError, match=r"learned weights have shapes .* these settings need"):
        ctxext.patch(model, ctxext.CLEX(factor=8, amplification=2), replace=True)
    assert equal(weights(model), before)
    ctxext.patch(model, tiny.METHODS["yarn"], replace=True)
    ctxext.patch(model, CLEX, replace=True)
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(patched("ntk"), IDS))


def test_weights_are_given_to_a_method_that_learns_alone() -> None:
    source = learned()
    model = tiny.model()
    ctxext.patch(model, CLEX, weights=weights(source))
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(source, IDS))
    with pytest.raises(ctxext.PatchError, match="method yarn learns nothing"):
        ctxext.patch(tiny.model(), tiny.METHODS["yarn"], weights=weights(source))
    with pytest.raises(ctxext.PatchError, match="of which 0 are positive numbers"):
        ctxext.patch(tiny.model(), CLEX, weights={name: w * math.nan for name, w in weights(source).items()})


def test_it_is_refused_where_frequencies_are_fixed() -> None:
    with pytest.raises(ValueError, match="frequencies: clex learns its frequencies, which are fixed in here"):
        ctxext.DCA(frequencies=CLEX)


# Saved and loaded


def test_a_saved_model_comes_back_with_what_it_learned(trained: Path, checkpoint: Path) -> None:
    model = loaded(trained)
    expected = loaded(checkpoint, CLEX)
    disturb(expected)
    assert ctxext.inspect(model).method["name"] == "clex"
    assert equal(weights(model), weights(expected))
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(expected, IDS))
    assert tiny.difference(tiny.logits(model, IDS), tiny.logits(loaded(checkpoint, CLEX), IDS)) > 1e-2
    assert ctxext.inspect(model).consistent


def test_to_transformers_alone_it_is_a_model_with_the_learned_frequencies(trained: Path) -> None:
    plain, model = AutoModelForCausalLM.from_pretrained(trained).eval(), loaded(trained)
    assert plain.state_dict().keys() == load_file(trained / "model.safetensors").keys()
    config = json.loads((trained / "config.json").read_text())
    assert (config["rope_parameters"]["rope_type"], config["max_position_embeddings"]) == ("longrope", 256)
    torch.testing.assert_close(
        plain.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=3e-7, atol=0
    )  # two roundings of fp32
    assert tiny.difference(tiny.logits(plain, IDS), tiny.logits(model, IDS)) < 1e-3
    assert ctxext.inspect(plain).consistent


def test_a_model_is_saved_as_it_is_when_it_is_saved(tmp_path: Path) -> None:
    model = patched("clex")
    for seed in (0, 1):
        disturb(model, seed=seed)
        model.save_pretrained(tmp_path)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert tiny.difference(tiny.logits(plain, IDS), tiny.logits(model, IDS)) < 1e-3
        assert ctxext.inspect(model).consistent
    model.model.rotary_emb.learned.down.data.zero_()
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(tiny.logits(plain, IDS), tiny.logits(patched("ntk"), IDS))


def test_a_model_is_saved_from_the_state_that_it_is_told(tmp_path: Path) -> None:
    model, state = patched("clex"), learned().state_dict()
    model.save_pretrained(tmp_path, state_dict=state)
    assert equal(load_file(tmp_path / FILE), weights(learned()))
    assert not any("rotary" in name for name in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(patched("ntk"), IDS))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert tiny.difference(tiny.logits(plain, IDS), tiny.logits(learned(), IDS)) < 1e-3


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    learned().save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / FILE).exists()


def test_a_push_that_would_leave_the_weights_behind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ctxext.ConfigError, match=r"use model\.push_to_hub"):
        learned().save_pretrained(tmp_path / "out", push_to_hub=True)


def test_a_model_without_training_is_saved_as_ntk_and_learns_on(checkpoint: Path, tmp_path: Path) -> None:
    model, tokenizer = ctxext.load_model(str(checkpoint), CLEX, device="cpu")
    write_checkpoint(model, tokenizer, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(tiny.logits(plain, IDS), tiny.logits(model, IDS))
    again = loaded(tmp_path / "out")
    assert equal(weights(again), weights(model))


def test_what_was_learned_is_put_on_under_another_factor_too(trained: Path, tmp_path: Path) -> None:
    model = loaded(trained, ctxext.CLEX(factor=8))
    assert equal(weights(model), weights(loaded(trained)))
    assert model.config.max_position_embeddings == 512
    model.save_pretrained(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert tiny.difference(tiny.logits(plain, IDS), tiny.logits(model, IDS)) < 1e-3


def overwritten(folder: Path, **changes: Any) -> None:
    save_file({**load_file(folder / FILE), **changes}, folder / FILE)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / FILE).unlink(), "was saved with method clex, and lacks clex.safetensors"),
        (lambda folder: (folder / FILE).write_bytes(b"\x08\0\0"), "clex.safetensors can't be read"),
        (lambda folder: overwritten(folder, down=torch.full((16, 8), math.nan)), "not finite (down)"),
        (lambda folder: overwritten(folder, down=torch.zeros(32, 8)), "the learned weights have shapes"),
        (lambda folder: overwritten(folder, more=torch.zeros(1)), "the learned weights have shapes"),
        (lambda folder: overwritten(folder, down=torch.zeros(16, 8)), "leads to other frequencies than its config"),
    ],
    ids=["missing", "broken", "not finite", "other shape", "more", "of another model"],
)
def test_weights_that_are_not_those_of_the_model_are_an_error(trained: Path, spoil: Any, message: str) -> None:
    spoil(trained)
    with pytest.raises(ctxext.CtxextError) as caught:
        loaded(trained)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trained_checkpoint_is_not_begun_anew_by_mistake(trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained)
    before = snapshot(model)
    with pytest.raises(ctxext.PatchError, match=r"clex\.safetensors: load it with ctxext\.load_model"):
        ctxext.patch(model, CLEX)
    assert_as_before(model, before)
    ctxext.patch(model, tiny.METHODS["yarn"])
    assert ctxext.inspect(model).rope_theta == 1e4


def test_a_config_that_was_edited_since_is_noticed(trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 2e4
    (trained / "config.json").write_text(json.dumps(config))
    with pytest.raises(ctxext.UnsupportedModelError, match=r"its rope_parameters .* are others"):
        loaded(trained)


@pytest.mark.parametrize("rope_format", ["v5", "v4"])
def test_an_export_has_the_learned_frequencies_and_what_was_learned(
    trained: Path, tmp_path: Path, rope_format: Any
) -> None:
    exported = export(str(trained), None, tmp_path / "out", engine="vllm", rope_format=rope_format)
    assert exported.commands
    model = loaded(trained)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert tiny.difference(tiny.logits(plain, IDS), tiny.logits(model, IDS)) < 1e-3
    assert torch.equal(tiny.logits(loaded(tmp_path / "out"), IDS), tiny.logits(model, IDS))
    with pytest.raises(ctxext.UnsupportedModelError, match=r"llama\.cpp takes no divisor"):
        export(str(trained), None, tmp_path / "cpp", engine="llama.cpp")


# Training


@pytest.mark.parametrize("changes", [{}, {"sample_factor": True}], ids=str)
def test_a_fine_tune_trains_it_and_goes_on_to_the_bit(checkpoint: Path, tmp_path: Path, changes: Any) -> None:
    whole, log = train(checkpoint, tmp_path / "whole", method=CLEX, **changes)
    assert not equal(weights(whole.model), weights(patched("clex")))
    train(checkpoint, tmp_path / "run", method=CLEX, steps=3, save_every=3, **changes)
    again, again_log = train(checkpoint, tmp_path / "run", method=CLEX, resume=True, **changes)
    assert losses(again_log) == losses(log)
    assert [entry.get("factor") for entry in again_log] == [entry.get("factor") for entry in log]
    assert equal(weights(again.model), weights(whole.model))
    assert again.model.model.rotary_emb.factor == 4
    if changes:
        factors = [entry["factor"] for entry in log]
        assert len(set(factors)) == 6
        assert all(1.0 <= factor <= 4.0 for factor in factors)


def test_the_command_trains_it_and_writes_what_it_learned(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    settings = ["sequence_length=96", "steps=2", "gradient_accumulation_steps=1", "learning_rate=0.01"]
    settings += ["precision=fp32", "sample_factor=true", "positions=pose", f"dataset={tmp_path / 'train.jsonl'}"]
    arguments = [part for setting in settings for part in ("-s", f"finetune.{setting}")]
    arguments += ["-s", "method.name=clex", "-s", "method.factor=4"]
    ran = run("finetune", "--model", checkpoint, "-o", tmp_path / "run", *arguments)
    assert ran.status == 0, ran.err
    model = loaded(tmp_path / "run" / "model")
    assert not equal(weights(model), weights(patched("clex")))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    assert tiny.difference(tiny.logits(plain, IDS), tiny.logits(model, IDS)) < 1e-3


def test_a_sampled_factor_covers_what_the_blocks_ask_for() -> None:
    ids = np.zeros(96, dtype=np.int64)
    block = Block(ids, np.arange(96), ids)
    near, pose = FinetuneSection(seed=3), FinetuneSection(seed=3, positions="pose")
    far = Block(ids, np.concatenate([np.arange(48), 152 + np.arange(48)]), ids)
    drawn = [sampled_factor(near, step, [block], 64, 4.0) for step in range(200)]
    assert drawn == [sampled_factor(near, step, [block, block], 64, 4.0) for step in range(200)]
    assert 1.5 <= min(drawn) < 1.6
    assert 3.9 < max(drawn) <= 4.0
    assert np.mean(drawn) == pytest.approx(2.75, abs=0.2)
    assert drawn != [sampled_factor(FinetuneSection(seed=4), step, [block], 64, 4.0) for step in range(200)]
    assert min(sampled_factor(near, step, [far], 64, 4.0) for step in range(50)) >= 200 / 64
    assert min(sampled_factor(pose, step, [far], 64, 4.0) for step in range(50)) < 200 / 64
    assert sampled_factor(near, 0, [block], 64, 1.25) == 1.25


def test_positions_of_pose_follow_the_sampled_factor(checkpoint: Path) -> None:
    documents = [Document(str(i), "some text of many letters" * 40) for i in range(60)]
    packing = Packing(20, positions="pose", target=100)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    blocks = list(itertools.islice(Blocks(lambda: iter(documents), tokenizer, packing), 1000))
    squeezed = [block.squeezed(100, 50) for block in blocks]
    for block, near in zip(blocks, squeezed, strict=True):
        gaps = [int(max(np.diff(found.positions))) for found in (block, near)]
        assert gaps[1] <= gaps[0]
        assert near.positions[0] == 0
        assert (np.diff(near.positions) >= 1).all()
        assert (np.diff(near.positions) > 1).sum() <= 1
    reach = [int(block.positions[-1]) for block in squeezed]
    assert (min(reach), max(reach)) == (19, 49)
    assert np.mean(reach) == pytest.approx(34, abs=1)
    assert [block.squeezed(100, 100).positions.tolist() for block in blocks[:20]] == [
        block.positions.tolist() for block in blocks[:20]
    ]


def test_a_factor_is_sampled_for_methods_that_take_another_one_alone(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ctxext.ConfigError, match=r"sample_factor: only a method that learns .* \(clex\)"):
        train(checkpoint, tmp_path / "run", sample_factor=True)


@pytest.fixture
def adapted(checkpoint: Path, tmp_path: Path) -> tuple[Any, Path]:
    """A model with an adapter and learned frequencies, trained together, and its folder."""
    model, tokenizer = load(checkpoint, CLEX)
    job, _ = train((model, tokenizer), tmp_path / "run", lora={"rank": 4}, steps=2, learning_rate=0.02)
    save_adapter(job.model.eval(), tmp_path / "adapter", base=str(checkpoint))
    return job.model, tmp_path / "adapter"


def test_lora_trains_it_too_and_the_adapter_brings_it(adapted: tuple[Any, Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, folder = adapted
    assert not equal(weights(model), weights(patched("clex")))
    again = loaded(folder)
    assert equal(weights(again), weights(model))
    expected = tiny.logits(model, IDS)
    assert torch.equal(tiny.logits(again, IDS), expected)
    assert not any("rotary" in name for name in load_file(folder / "adapter_model.safetensors"))
    export(str(folder), None, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert tiny.difference(tiny.logits(plain, IDS), expected) < 1e-3
    assert equal(weights(loaded(tmp_path / "merged")), weights(model))


def test_an_adapter_without_what_was_learned_is_refused(adapted: tuple[Any, Path]) -> None:
    (adapted[1] / FILE).unlink()
    with pytest.raises(ModelLoadError, match=r"lacks clex\.safetensors"):
        loaded(adapted[1])


def test_an_adapter_is_refused_on_a_base_that_others_have_loaded(adapted: tuple[Any, Path], checkpoint: Path) -> None:
    peft = pytest.importorskip("peft")
    refused = pytest.raises(ModelLoadError, match=r"load both with ctxext\.load_model")
    with ctxext.autopatch(CLEX):
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        with refused:
            peft.PeftModel.from_pretrained(model, str(adapted[1]))


def test_an_adapter_is_saved_from_the_state_that_it_is_told(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    settings = FinetuneSection(lora={"rank": 2}).lora
    assert settings is not None
    first, second = (add_lora(load(checkpoint, CLEX)[0], settings) for _ in range(2))
    disturb(second)
    save_adapter(first, tmp_path / "adapter", base=str(checkpoint), state=second.state_dict())
    assert equal(load_file(tmp_path / "adapter" / FILE), weights(second))
    assert equal(weights(first), weights(patched("clex")))
    assert equal(weights(loaded(tmp_path / "adapter")), weights(second))


def test_ddp_finds_its_weights(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'init'}", rank=0, world_size=1)
    try:
        model = learned()
        expected = gradients(learned(), IDS)
        wrapped = DistributedDataParallel(model)
        wrapped(IDS, labels=IDS, use_cache=False).loss.backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name
    finally:
        torch.distributed.destroy_process_group()
