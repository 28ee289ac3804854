"""``ctxext search``: what may be tried, how it is judged, trials through kills, and what is said of the result."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer

import ctxext
import tiny
from command_line import Run
from ctxext import plotting
from ctxext.config import SearchSection, SearchWeights, load_config
from ctxext.data import Document, tokenize
from ctxext.errors import ConfigError
from ctxext.evaluation.haystack import INSTRUCTION, hide_keys
from ctxext.evaluation.records import TokenLosses
from ctxext.patching import active_patch
from ctxext.search import study, trials, verdict
from ctxext.search.objective import objective, parts, sums
from ctxext.search.space import Monotone, parse_spaces

CONFIGS = sorted((Path(__file__).parent.parent / "configs" / "search").glob("*.yaml"))
DRAW = plotting._PICTURES["search"]
TARGET = 512
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "walks", "home", "in", "may")
METHODS: dict[str, Any] = {
    "yarn": {"beta_fast": {"low": 2, "high": 64, "log": True}, "attention_factor": {"low": 0.8, "high": 1.6}},
    "dca": {"local_size": [4, 8, 60]},
    "ntk": None,
    "per": {"name": "longrope", "long_factor": {"knots": 3, "high": 16}, "attention_factor": [None, 1.0]},
}


def document(number: int, words: int = 150) -> str:
    draw = random.Random(number)
    return " ".join(draw.choice(WORDS) for _ in range(words))


@pytest.fixture
def settings(checkpoint: Path, tmp_path: Path) -> dict[str, Any]:
    """A file of a small search, as values; its texts lie beside it."""
    for name, numbers in (("text", range(2)), ("held-out", range(10, 14)), ("twice", (20, 21, 20))):
        lines = (json.dumps({"text": document(i)}) + "\n" for i in numbers)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return {
        "model": {"name": str(checkpoint), "dtype": "float32"},
        "search": {
            "target": TARGET,
            "methods": METHODS,
            "trials": 9,
            "startup": 5,
            "last": 128,
            "depth": [0.2],
            "text": {"dataset": str(tmp_path / "text.jsonl")},
            "held_out": {"dataset": str(tmp_path / "held-out.jsonl"), "skip_documents": 1, "seed": 1},
        },
    }


@pytest.fixture
def start(run: Run, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command on the file, with changes to its section; without pictures, which take longer than all the rest."""
    monkeypatch.setitem(plotting._PICTURES, "search", lambda record, path: None)

    def call(folder: str, *arguments: object, **changes: Any) -> Any:
        values = {**settings, "search": {**settings["search"], **changes}}
        (tmp_path / "search.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return run("search", "--config", tmp_path / "search.yaml", "--output", tmp_path / folder, *arguments)

    return call


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return content


def found(folder: Path) -> dict[str, Any]:
    """All of a result but what time and machine have to do with."""
    content = record(folder)
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in content["rows"]]
    return {"rows": rows, **{key: content[key] for key in ("summary", "protocol", "counts", "dataset", "method")}}


# What may be tried


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"yran": {}}, ["search.methods.yran.name", "did you mean yarn?"]),
        ({"yarn": 3}, ["search.methods.yarn", "factor: {low: 2, high: 4}"]),
        ({"yarn": {"facter": 2}}, ["search.methods.yarn.facter", "did you mean factor?"]),
        ({"yarn": {"factor": {"low": 4, "high": 2}}}, ["yarn.factor", "low 4 must be below high 2"]),
        ({"yarn": {"factor": {"low": 4}}}, ["yarn.factor", "high is missing"]),
        ({"yarn": {"factor": {"low": 2, "hihg": 4}}}, ["yarn.factor"]),
        ({"yarn": {"factor": {"low": 2, "high": 4, "steps": 1}}}, ["factor.steps", "did you mean step?"]),
        ({"yarn": {"factor": {"low": 0, "high": 4}}}, ["yarn.factor", "0.0", "greater than or equal to 1"]),
        ({"yarn": {"beta_fast": {"low": 0, "high": 4, "log": True}}}, ["log needs low above 0", "leave log out"]),
        ({"yarn": {"factor": {"low": 2, "high": 4, "log": True, "step": 1}}}, ["log and step"]),
        ({"yarn": {"truncate": {"low": 0, "high": 1}}}, ["yarn.truncate", "list of choices"]),
        ({"yarn": {"ramp": ["dimension", "rotation"]}}, ["yarn.ramp", "'rotation'", "'rotations'"]),
        ({"yarn": {"beta_fast": []}}, ["no choices"]),
        ({"yarn": {"beta_fast": -1}}, ["yarn.beta_fast", "-1"]),
        ({"yarn": {"factor": {"knots": 3, "high": 4}}}, ["knots are for"]),
        ({"per": {"name": "longrope", "long_factor": {"knots": 0, "high": 4}}}, ["long_factor.knots"]),
        ({"dca": {"chunk_size": {"low": 16.5, "high": 32}}}, ["chunk_size.low", "integer"]),
        ({"dca": {"frequencies": {"name": "ntk", "facter": {"low": 1, "high": 2}}}}, ["frequencies.facter"]),
        ({"dca": {"frequencies": [None, {"name": "ntk", "facter": 2}]}}, ["frequencies.facter"]),
        ({"dca": {"frequencies": ["ntk", None]}}, ["dca.frequencies", "expected a method", "'ntk'"]),
        ({"yarn": {"beta_fast": {"name": "ntk"}}}, ["yarn.beta_fast", "takes no method"]),
        ({"yarn": {"beta_fast": [{"name": "ntk", "factor": 2}, 32]}}, ["yarn.beta_fast", "out of bounds"]),
        ({"plain": {"factor": 2}}, ["write plain: null"]),
    ],
)
def test_a_space_that_makes_no_sense_is_one_line_that_names_the_key(methods: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(options={"search": {"methods": methods}})
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_kind_of_field_gives_values_within_its_bounds_and_finds_them_again() -> None:
    spaces: Any = parse_spaces(
        {
            "yarn": {"factor": {"low": 2, "high": 4, "step": 0.5}, "beta_fast": {"low": 8, "high": 64, "log": True}},
            "dca": {
                "chunk_size": {"low": 16, "high": 64, "step": 8},
                "local_size": 4,
                "frequencies": {"name": "ntk", "factor": {"low": 1, "high": 4}},
            },
            "dynamic_ntk": {"seq_len": [None, 128]},
        }
    )
    section = SearchSection(sampler="random")
    settings = [trials.propose([], spaces, section.model_copy(update={"seed": seed}), 8).settings for seed in range(40)]
    for one in settings:
        assert one is not None
        label = one["name"]
        if label == "yarn":
            assert one["factor"] in (2, 2.5, 3, 3.5, 4)
            assert 8 <= one["beta_fast"] <= 64
        elif label == "dca":
            assert one["chunk_size"] in range(16, 65, 8)
            assert type(one["chunk_size"]) is int
            assert one["local_size"] == 4
            assert 1 <= one["frequencies"]["factor"] <= 4
        else:
            assert one["seq_len"] in (None, 128)
        known = spaces[label].parameters(label, one, 8)
        assert trials.fixed(label, spaces, {"method": label, **known}, 8).settings == one
    assert {one["name"] for one in settings if one} == {"yarn", "dca", "dynamic_ntk"}


@pytest.mark.parametrize("knots", [1, 2, 5, 31])
def test_divisors_of_the_frequencies_never_fall_and_stay_in_bounds(knots: int) -> None:
    curve, draw = Monotone(knots=knots, high=8), random.Random(knots)
    for _ in range(20):
        trial: Any = SimpleNamespace(suggest_float=lambda name, low, high: draw.uniform(low, high))
        divisors = curve.suggest(trial, "x", 32)
        assert len(divisors) == 32
        assert divisors[0] == 1
        assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(divisors))
        assert divisors[-1] <= 8 * (1 + 1e-12)


@pytest.mark.parametrize("method", [ctxext.NTK(factor=4), ctxext.YaRN(factor=4)])
def test_divisors_start_from_those_of_ntk_exactly_and_of_yarn_at_the_knots(method: ctxext.Method) -> None:
    spec = ctxext.RopeSpec(1e4, 64, 2048)
    base, scaled = (1e4 ** -(torch.arange(32).double() / 32)), method.scaled_rope(spec)[0].double()
    divisors = (base / scaled).tolist()
    curve = Monotone(knots=31, high=4) if method.name == "yarn" else Monotone(knots=4, high=8)
    shares = curve.parameters("x", divisors, 32)
    assert shares is not None
    trial: Any = SimpleNamespace(suggest_float=lambda name, low, high: shares[name])
    assert curve.suggest(trial, "x", 32) == pytest.approx(divisors, rel=1e-5)


def test_the_files_that_come_with_it_are_valid() -> None:
    assert {path.name for path in CONFIGS} == {"default.yaml", "smollm2-16k.yaml"}
    for path in CONFIGS:
        section = load_config(path).search
        assert section.methods
        assert section.text.seed != section.held_out.seed


# How a setting is judged


@pytest.mark.parametrize("depths", [[0.5], [0.9, 0.1, 0.4]])
def test_keys_are_hidden_where_asked_and_asked_for_at_the_end(checkpoint: Path, depths: list[float]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    source = Document("d", document(3, 400))
    keyed = hide_keys(tokenizer, source, length=1500, depths=depths, seed=0)
    assert keyed is not None
    text = keyed.document.text
    ids = tokenize(tokenizer, text)
    assert 1500 - max(map(len, WORDS)) - 2 <= len(ids) <= 1500
    answers = [tokenizer.decode(ids[begin:end]).strip() for begin, end in keyed.answers]
    assert len(set(answers)) == len(depths)
    body = tokenizer.decode(ids[: keyed.text_tokens])
    assert body + text[len(body) :] == text
    assert text[len(body) :].count("?") == len(depths)
    assert text.endswith(answers[-1])
    for answer, depth in zip(answers, depths, strict=True):
        assert len(answer) == 5
        assert body.count(answer) == 2  # the sentence says it twice
        assert body.index(answer) / len(body) == pytest.approx(depth, abs=0.15)
    assert body.startswith(INSTRUCTION)
    assert "".join(body[len(INSTRUCTION) :].split())[:40] == "".join(source.text.split())[:40]


def test_keys_follow_from_the_seed_and_short_documents_have_none(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    source = Document("d", document(3))
    one, again, other = (hide_keys(tokenizer, source, length=512, depths=[0.5], seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other
    assert hide_keys(tokenizer, Document("d", "too short"), length=512, depths=[0.5], seed=0) is None
    with pytest.raises(ConfigError, match="too short for a text with 3 keys"):
        hide_keys(tokenizer, source, length=512, depths=[0.1, 0.2, 0.3], seed=0)
    with pytest.raises(ConfigError, match="14 depths are more than"):
        hide_keys(tokenizer, source, length=512, depths=[i / 14 for i in range(14)], seed=0)


def test_parts_are_the_tokens_that_they_should_be() -> None:
    token = np.arange(1, 100, dtype=np.int32)  # without BOS, token i has i positions before it
    losses = TokenLosses("d", token, token.astype(np.float32), token, token * 0, token * 0)
    keyed: Any = SimpleNamespace(text_tokens=90, answers=((92, 94), (97, 99)))
    got = sums(losses, keyed, (50, 100), 10, 40)
    late = [*range(40, 50), *range(80, 90)]  # of the last length those before the questions
    assert got == {
        "text": (sum(late), 20),
        "passkey": (92 + 93 + 97 + 98, 4),
        "trained": (sum(range(1, 40)), 39),
    }


def test_losses_are_weighted_by_tokens_and_a_gain_within_the_trained_length_is_none() -> None:
    documents: Any = [
        {"text": (10.0, 5), "passkey": (4.0, 4), "trained": (30.0, 10)},
        {"text": (2.0, 1), "passkey": (2.0, 2), "trained": (10.0, 10)},
    ]
    assert parts(documents, [20.0, 10.0]) == {"text": 2.0, "passkey": 1.0, "trained": 0.5}
    assert parts(documents, [40.0, 10.0])["trained"] == 0.0
    assert parts(documents[:1], [20.0, 10.0])["trained"] == 1.0
    weights = SearchWeights(text=1, passkey=0.5, trained=4)
    assert objective({"text": 2.0, "passkey": 1.0, "trained": 0.5}, weights) == 4.5


def test_a_trial_is_stopped_only_if_half_of_enough_others_were_better_on_the_same_documents() -> None:
    others: Any = [SimpleNamespace(value=1.0, intermediate_values={1: v, 2: v + 9}) for v in (1.0, 2.0, 3.0)]
    others.append(SimpleNamespace(value=None, intermediate_values={}))
    section = SearchSection(startup=3)
    assert not trials.is_behind(others, 1, 2.0, section)
    assert trials.is_behind(others, 1, 2.1, section)
    assert not trials.is_behind(others, 2, 10.5, section)
    assert not trials.is_behind(others, 1, 2.1, section.model_copy(update={"pruning": "none"}))
    assert not trials.is_behind(others, 1, 2.1, section.model_copy(update={"startup": 4}))


# The search


def test_a_search_writes_what_it_found_and_defaults_come_first(start: Callable[..., Any], tmp_path: Path) -> None:
    ran = start("out")
    assert ran.status == 0, ran.err
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {
        *("run.json", "trials.journal", "held-out", "results.json"),
        *("table.md", "best.yaml", "config.yaml"),
    }
    result = record(tmp_path / "out")
    rows = result["rows"]
    assert [row["settings"] for row in rows[:3]] == ["defaults"] * 3
    assert [row["method"] for row in rows[:5]] == ["yarn", "dca", "ntk", "per", "per"]
    assert rows[0]["method_settings"] == ctxext.YaRN(max_position_embeddings=TARGET).model_dump(
        mode="json", exclude_none=True
    )
    # Where the space holds them, the sampler learns from defaults too.
    assert rows[0]["parameters"]["yarn.attention_factor"] == pytest.approx(0.1 * math.log(8) + 1)
    assert rows[2]["parameters"] == {}
    # NTK's divisors, in the space of free ones, are judged as NTK is.
    assert rows[4]["objective"] == pytest.approx(rows[2]["objective"], abs=1e-4)
    complete = [row for row in rows if row["state"] == "complete"]
    for row in complete:
        assert row["objective"] == pytest.approx(row["text"] + 0.1 * row["passkey"] + row["trained"])
    best = min(complete, key=lambda row: row["objective"])
    assert result["summary"]["best"]["trial"] == best["trial"]
    assert result["summary"]["held_out"]["document_ids"] == [f"held-out.jsonl:{i}" for i in (2, 3, 4)]
    assert result["dataset"]["document_ids"] == ["text.jsonl:1", "text.jsonl:2"]
    assert result["provenance"]["seed"] == 0
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.startswith(result["summary"]["verdict"])
    assert str(tmp_path) not in "".join(
        (tmp_path / "out" / name).read_text() for name in ("results.json", "run.json", "best.yaml", "config.yaml")
    )


def test_best_yaml_patches_a_model_to_what_was_measured(
    start: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    # Trial 3 is the best of a space whose defaults are not expressed, so that its file holds searched values.
    start("out", trials=4, methods={"per": METHODS["per"]})
    result = record(tmp_path / "out")
    assert not result["summary"]["best"]["is_default"]
    method = ctxext.METHODS[result["method"]["name"]](**result["method"])
    outputs = []
    for source in (method, str(tmp_path / "out" / "best.yaml")):
        model, tokenizer = ctxext.load_model(str(checkpoint), dtype="float32", device="cpu")
        ctxext.patch(model, source)
        outputs.append(tiny.logits(model, tokenizer(document(5), return_tensors="pt").input_ids))
    assert torch.equal(*outputs)
    assert "ctxext eval perplexity" in (tmp_path / "out" / "best.yaml").read_text().splitlines()[0]


def test_settings_that_forbid_each_other_are_pruned_trials_with_the_reason(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    methods = {"dca": {"local_size": [60]}, "yarn": {"beta_fast": {"low": 0.1, "high": 2}, "factor": [2, 8]}}
    ran = start("out", methods=methods, trials=8, sampler="random", startup=20)
    assert ran.status == 0, ran.err
    reasons = [row["reason"] for row in record(tmp_path / "out")["rows"] if row["state"] == "pruned"]
    assert any("beta_fast" in reason and "must be above beta_slow" in reason for reason in reasons)
    assert any("reaches 128 tokens, not the target 512" in reason for reason in reasons)
    assert all(row["objective"] is None for row in record(tmp_path / "out")["rows"] if row["state"] == "pruned")


@pytest.mark.parametrize("sampler", ["tpe", "gp", "random"])
def test_what_is_tried_next_follows_from_seed_and_trials_alone(tmp_path: Path, sampler: Any) -> None:
    spaces: Any = parse_spaces({"yarn": METHODS["yarn"]})
    section = SearchSection(sampler=sampler, startup=2)

    def run_on(folder: Path, seed: int, kept: int) -> list[dict[str, Any]]:
        """The parameters of six trials; the journal is opened anew every ``kept`` of them."""
        folder.mkdir()
        for number in range(6):
            log = trials.TrialLog(folder) if number % kept == 0 else log  # noqa: F821
            proposal = trials.propose(log.finished, spaces, section.model_copy(update={"seed": seed}), 8)
            log.add(proposal, sum(proposal.parameters.values()), {1: 0.1 + number}, {})
        return [trial.params for trial in log.finished]

    whole = run_on(tmp_path / "whole", 0, 9)
    assert run_on(tmp_path / "reopened", 0, 1) == whole
    assert run_on(tmp_path / "other", 1, 9) != whole
    assert len({json.dumps(parameters) for parameters in whole}) == 6


class Killed(BaseException):
    """What nothing catches."""


def test_a_killed_search_goes_on_as_if_nothing_had_happened(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {"yarn": METHODS["yarn"], "ntk": {}}
    changes: dict[str, Any] = {"startup": 2, "methods": methods, "trials": 6}
    assert start("whole", **changes).status == 0
    readings, last = itertools.count(), itertools.count()
    real = study.read

    def killed(*arguments: Any, **options: Any) -> Any:
        held_out = arguments[2].originals[0].id.startswith("held-out")
        if next(readings) in (1, 6) or (held_out and next(last) == 1):
            raise Killed
        return real(*arguments, **options)

    monkeypatch.setattr(study, "read", killed)
    kills = 0
    for _ in range(9):
        try:
            ran = start("killed", "--resume", **changes)
        except Killed:
            kills += 1
            # What a process leaves that is killed while it writes.
            with (tmp_path / "killed" / trials.JOURNAL).open("a") as journal:
                journal.write('{"op_code":4,"worker_id"')
            os.symlink("nobody", tmp_path / "killed" / f"{trials.JOURNAL}.lock")
            continue
        break
    assert kills == 3
    assert ran.status == 0, ran.err
    assert found(tmp_path / "killed") == found(tmp_path / "whole")


@pytest.mark.slow
def test_a_search_that_is_killed_by_the_system_goes_on(start: Callable[..., Any], run: Run, tmp_path: Path) -> None:
    assert start("whole").status == 0
    arguments = ["search", "--config", tmp_path / "search.yaml", "--output", tmp_path / "killed", "--resume"]
    command = [sys.executable, "-m", "ctxext", *map(str, arguments)]
    for more in (1, 3, 6):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        journal, deadline = tmp_path / "killed" / trials.JOURNAL, time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") > 2 + more:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run(*arguments).status == 0
    assert found(tmp_path / "killed") == found(tmp_path / "whole")


def test_more_trials_go_on_fewer_are_refused_and_other_settings_too(start: Callable[..., Any], tmp_path: Path) -> None:
    methods = {"yarn": METHODS["yarn"]}
    assert start("whole", trials=4, methods=methods).status == 0
    assert start("out", trials=2, methods=methods).status == 0
    again = start("out", trials=4, methods=methods)
    assert (again.status, "--resume" in again.err) == (2, True)
    assert start("out", "--resume", trials=4, methods=methods).status == 0
    assert found(tmp_path / "out") == found(tmp_path / "whole")
    fewer = start("out", "--resume", trials=2, methods=methods)
    assert (fewer.status, "has 4 trials already" in fewer.err) == (2, True)
    for changes, word in (({"last": 64}, "search.last"), ({"seed": 3}, "search.seed"), ({"depth": [0.4]}, "depth")):
        refused = start("out", "--resume", **{"trials": 4, "methods": methods, **changes})
        assert (refused.status, word in refused.err) == (2, True), refused.err


def test_time_that_is_up_ends_the_search_after_the_defaults(start: Callable[..., Any], tmp_path: Path) -> None:
    assert start("out", "--minutes", "0.00001", methods={"yarn": METHODS["yarn"], "ntk": {}}).status == 0
    assert len(record(tmp_path / "out")["rows"]) == 2


def planted(monkeypatch: pytest.MonkeyPatch, text: Callable[[float], float], answers: Callable[[float], float]) -> None:
    """Losses that are functions of YaRN's beta_fast alone, but for a little of each document's own."""
    real = study.read

    def read(model: Any, *arguments: Any, **options: Any) -> Any:
        result = real(model, *arguments, **options)
        patch = active_patch(model)
        beta = 32.0 if patch is None else getattr(patch.method, "beta_fast", 32.0)
        for records in result.losses.values():
            for one in records:
                own = len(one.document) + sum(map(ord, one.document))
                one.loss[:] = text(beta) + 0.001 * (own % 7) * beta / 100
                one.loss[-40:] = answers(beta) + 0.001 * (own % 5) * beta / 100
        return result

    monkeypatch.setattr(study, "read", read)


ONE_PARAMETER = {"yarn": {"beta_fast": {"low": 2, "high": 64, "log": True}}}


def test_a_planted_optimum_is_found_and_beats_the_defaults(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, lambda beta: 2 + math.log(beta / 11) ** 2, lambda beta: 1 + abs(math.log(beta / 11)))
    text = {"dataset": str(tmp_path / "text.jsonl"), "max_documents": 1}
    ran = start("out", methods=ONE_PARAMETER, trials=22, startup=6, text=text)
    assert ran.status == 0, ran.err
    result = record(tmp_path / "out")
    assert result["method"]["beta_fast"] == pytest.approx(11, rel=0.15)
    title = result["summary"]["best"]["title"]
    assert result["summary"]["verdict"] == f"{title} beats the defaults on held-out text and prompts"
    [difference] = result["summary"]["differences"]
    assert difference["against"] == "yarn, defaults"
    for part in ("text", "passkey"):
        assert difference[part]["ci95"][1] < 0
        assert difference[part]["documents"] == 3
    assert "95 % intervals over documents, each of which counts as one sample" in " ".join(ran.out.split())


def test_what_is_better_on_text_and_worse_on_prompts_is_not_said_to_beat_the_defaults(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, lambda beta: 2 + 0.01 * beta, lambda beta: 1.0 - 0.01 * beta)
    assert start("out", methods=ONE_PARAMETER, trials=4).status == 0
    said = record(tmp_path / "out")["summary"]["verdict"]
    assert "does not beat the defaults on both text and prompts, within what the intervals allow" in said
    assert "against yarn, defaults text better, prompts worse" in said


@pytest.mark.parametrize(
    ("low", "high", "p", "word"),
    [
        (-0.3, -0.1, 0.01, "better"),
        (0.1, 0.3, 0.01, "worse"),
        (-0.3, 0.1, 0.01, "undecided"),
        (-0.3, -0.1, 0.06, "undecided"),
    ],
)
def test_a_difference_is_judged_by_its_interval_and_by_the_raised_p_value(
    low: float, high: float, p: float, word: str
) -> None:
    assert verdict.judge({"difference": (low + high) / 2, "ci95": (low, high), "p_holm": p}) == word


def test_one_held_out_document_or_nothing_to_compare_with_is_no_verdict() -> None:
    differences = {part: {"difference": -1.0, "ci95": None} for part in ("text", "passkey", "trained")}
    row = {"against": "yarn, defaults", "reason": None, **differences}
    assert "can't be told: there is one held-out document" in verdict.verdict("trial 3", [row], 1)
    assert "nothing to compare it with" in verdict.verdict("trial 3", [], 4)
    failed = verdict.verdict("trial 3", [{"against": "dca, defaults", "reason": "no memory"}], 4)
    assert "nothing to compare it with" in failed


def broken(monkeypatch: pytest.MonkeyPatch, name: str, where: str) -> None:
    """Reading ``text`` or ``held_out`` fails under a method of that name with settings that aren't its defaults."""
    real = study.read

    def read(model: Any, tokenizer: Any, texts: Any, *arguments: Any, **options: Any) -> Any:
        patch = active_patch(model)
        held_out = "held-out.jsonl" in texts.name
        default = patch is not None and getattr(patch.method, "beta_fast", None) == 32.0
        if patch is not None and patch.method.name == name and held_out == (where == "held_out") and not default:
            raise RuntimeError("no memory left")
        return real(model, tokenizer, texts, *arguments, **options)

    monkeypatch.setattr(study, "read", read)


def test_a_best_setting_that_fails_on_held_out_text_is_said_to(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, lambda beta: 2 + 0.01 * beta, lambda beta: 1.0)
    broken(monkeypatch, "yarn", "held_out")
    assert start("out", methods=ONE_PARAMETER, trials=4).status == 3
    summary = record(tmp_path / "out")["summary"]
    assert "could not be measured on held-out text (no memory left)" in summary["verdict"]
    assert "beats the defaults can't be told" in summary["verdict"]


def test_defaults_that_could_not_be_measured_are_named(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, lambda beta: 2 + 0.01 * beta, lambda beta: 1 + 0.01 * beta)
    broken(monkeypatch, "dca", "text")
    assert start("out", methods={**ONE_PARAMETER, "dca": None}, trials=5).status == 3
    summary = record(tmp_path / "out")["summary"]
    assert summary["verdict"].endswith(
        "beats the defaults on held-out text and prompts (dca, defaults could not be measured)"
    )
    assert {"against": "dca, defaults", "reason": "no memory left"} in summary["differences"]


def test_a_window_beyond_the_target_is_tried_as_it_stands(start: Callable[..., Any], tmp_path: Path) -> None:
    assert start("out", methods={"dynamic_ntk": {"seq_len": [TARGET, 2 * TARGET]}}, trials=6).status == 0
    rows = record(tmp_path / "out")["rows"]
    assert {row["method_settings"].get("seq_len") for row in rows} >= {TARGET, 2 * TARGET}
    assert all(row["reason"] is None or row["reason"].startswith("as trial") for row in rows)


def test_after_a_break_a_trial_is_the_best_only_if_none_before_was_better(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, lambda beta: 2 + abs(beta - 32), lambda beta: 1.0)
    first = start("out", methods=ONE_PARAMETER, trials=1)
    assert "the best so far" in first.err
    assert "the best so far" not in start("out", "--resume", methods=ONE_PARAMETER, trials=4).err


def test_a_search_that_finds_nothing_better_says_so(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, lambda beta: 2 + abs(beta - 32), lambda beta: 1.0)
    ran = start("out", methods={**ONE_PARAMETER, "plain": None}, trials=3)
    assert ran.status == 0
    assert "nothing that beats the defaults" in record(tmp_path / "out")["summary"]["verdict"]


def test_text_that_both_sides_would_read_is_refused(start: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "both.jsonl").write_text(json.dumps({"text": document(1)}) + "\n")
    ran = start("out", held_out={"dataset": str(tmp_path / "both.jsonl"), "seed": 1})
    assert ran.status == 2
    for word in ("search.text and search.held_out", "overlap in 1 document", "skip_documents"):
        assert word in ran.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": None}, ["no target", "--target"]),
        ({"methods": {}}, ["nothing to search", "search.methods"]),
        ({"target": 64, "last": 8}, ["search.target", "within the trained length 64"]),
        ({"depth": [0.1, 0.4, 0.7, 0.9]}, ["text with 4 keys", "too short"]),
        ({"text": {"dataset": "{tmp}/text.jsonl", "length": 1024}}, ["search.text.length", "beyond the target 512"]),
        ({"held_out": {"dataset": "{tmp}/held-out.jsonl", "seed": 0}}, ["search.held_out.seed", "give another"]),
        ({"text": {"dataset": "{tmp}/text.jsonl", "skip_documents": 9}}, ["no document after the first 9"]),
        ({"last": 512}, ["search.last", "512"]),
        ({"weights": {"text": 0, "passkey": 0, "trained": 0}}, ["search.weights", "all weights are 0"]),
        ({"sampler": "gp"}, ["search.sampler", "single method", "give tpe"]),
        ({"sampler": "gp", "methods": {"yarn": {"beta_fast": {"low": 40, "high": 64}}}}, ["yarn, defaults is not"]),
        ({"text": {"dataset": "{tmp}/twice.jsonl"}}, ["the same text", "leave one of them out"]),
        ({"trials": 2}, ["search.trials", "5 settings"]),
        ({"depth": []}, ["depth"]),
        ({"weights": {"txt": 1}}, ["weights.txt"]),
    ],
)
def test_a_users_mistake_is_one_line(
    start: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    changes = json.loads(json.dumps(changes).replace("{tmp}", str(tmp_path)))
    ran = start("out", **changes)
    assert ran.status == 2
    lines = [line for line in ran.err.splitlines() if line.startswith("ctxext: ")]
    assert len(lines) == 1, ran.err
    for word in words:
        assert word in lines[0]


def test_without_optuna_it_says_what_to_install(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    ran = start("out")
    assert (ran.status, "pip install optuna" in ran.err) == (2, True)


def test_a_dry_run_says_what_would_be_read_and_writes_nothing(start: Callable[..., Any], tmp_path: Path) -> None:
    ran = start("out", "--dry-run")
    assert ran.status == 0, ran.err
    assert "a trial (5 settings first, 9 at most): 2 documents, 2 windows" in ran.out
    assert "held-out text (the best setting and each of the defaults): 3 documents, 3 windows" in ran.out
    assert not (tmp_path / "out").exists()


def test_a_search_is_reported_like_other_results(start: Callable[..., Any], run: Run, tmp_path: Path) -> None:
    assert start("out", methods=ONE_PARAMETER, trials=3).status == 0
    markdown = run("report", tmp_path / "out").out
    assert record(tmp_path / "out")["summary"]["verdict"] in markdown
    assert "| trial | method | objective |" in markdown
    assert "ctxext search --config config.yaml" in run("report", tmp_path / "out", "-f", "html").out
    objective_lines = [
        line for line in run("report", tmp_path / "out", "-f", "csv").out.splitlines() if ",objective," in line
    ]
    assert len(objective_lines) == 3
    DRAW(record(tmp_path / "out"), tmp_path / "search.png")
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
