"""A dry run counts what the run itself would process, and runs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ctxext
from command_line import Run
from ctxext.config import load_config
from ctxext.evaluation import estimate as estimating
from ctxext.evaluation.estimate import estimate
from ctxext.evaluation.runs import Run as Parts
from ctxext.evaluation.tasks import prepare

SECTIONS: dict[str, dict[str, Any]] = {
    "perplexity": {"protocol": "sliding", "window": [48, 64], "stride": 16, "max_documents": 2, "batch_size": 3},
    "positions": {"length": 100},
    "passkey": {"length": [300, 330], "depth": [0.5], "trials": 2, "controls": 0},
    "ruler": {"length": [900], "task": ["vt", "niah_single"], "trials": 1},
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": "walk on and on " * n}) + "\n" for n in (8, 9, 12)))
    return path


@pytest.mark.parametrize("task", SECTIONS)
def test_what_is_foreseen_is_what_is_run(task: str, checkpoint: Path, texts: Path) -> None:
    section = SECTIONS[task] | ({"dataset": str(texts)} if task in ("perplexity", "positions") else {})
    prepared = prepare(task, load_config(options={"model": {"name": str(checkpoint)}, task: section}))
    model, tokenizer = ctxext.load_model(str(checkpoint), {"name": "yarn", "factor": 16})
    passes = []
    hook = model.model.register_forward_hook(lambda *_: passes.append(1))
    foreseen = estimate(prepared, model, tokenizer)
    assert len(passes) <= 2 * len(estimating.PROBES) + 2  # the probes, and the check of the head
    hook.remove()
    counts = prepared.evaluate(model, tokenizer, Parts(), None).counts
    assert foreseen.tokens == counts["tokens_processed"]
    assert foreseen.inputs == counts.get("windows", counts.get("samples"))
    assert foreseen.seconds > 0
    assert foreseen.memory_bytes > sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize(("linear", "quadratic"), [(1e-3, 0.0), (1e-3, 1e-6), (0.0, 1e-6)])
def test_time_grows_as_the_probes_say(linear: float, quadratic: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "_timed", lambda model, n: linear * n + quadratic * n**2)
    expected = sum(linear * n + quadratic * n**2 for n in (100, 16_384))
    assert estimating._seconds(None, [100, 16_384]) == pytest.approx(expected)


def test_a_dry_run_writes_nothing_and_names_what_is_too_short(
    run: Run, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments = ("eval", "positions", "-m", checkpoint, "--dataset", texts, "--dry-run", "--output", output)
    result = run(*arguments, "--length", 100)
    assert result.status == 0, result.err
    assert result.out.startswith("3 documents, 3 windows, 300 tokens, the longest 100\nabout ")
    assert not output.exists()
    assert "no document has 1000 tokens" in run(*arguments, "--length", 1000).err


def test_a_comparison_is_foreseen_task_by_task(run: Run, checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    yarn = tmp_path / "yarn.yaml"
    yarn.write_text("method: {name: yarn, factor: 4}\n")
    arguments = ("eval", "compare", "-m", checkpoint, "--dataset", texts, "--method", yarn, "--dry-run")
    result = run(*arguments, "--task", "perplexity", "--length", 64)
    assert result.out.startswith("for each of 2 models:\nperplexity: 3 documents, 3 windows, 192 tokens")
