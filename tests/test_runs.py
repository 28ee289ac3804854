"""Runs in folders: killed and resumed, refused, shared by processes; the numbers are those of one undisturbed run."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from filelock import FileLock
from transformers.models.llama.modeling_llama import LlamaModel

import tiny
from ctxext.cli import main
from ctxext.errors import ConfigError
from ctxext.evaluation import answering, runs
from ctxext.evaluation import perplexity as perplexity_module
from ctxext.evaluation.runs import Part, Run, read_run
from ctxext.patching import active_patch
from ctxext.processes import process_index

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")

DOCUMENTS = [f"Document {i}: the quick brown fox jumps over {i + 2} lazy dogs. " * (2 + i) for i in range(4)]
VOLATILE = ("created_utc", "wall_seconds", "peak_memory_bytes", "parts_reused")


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


class Ran(NamedTuple):
    status: int
    out: str
    err: str


Call = Callable[..., Ran]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and texts beside it."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny.save_checkpoint(path)
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def command(*arguments: object) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(int(caught.value.code or 0), captured.out, captured.err)

    return command


def perplexity(folder: Path, *more: object) -> list[str]:
    arguments = ["eval", "perplexity", "-m", folder, "--dataset", folder / "text.jsonl", "--protocol", "sliding"]
    return list(map(str, [*arguments, "--window", 32, "--window", 48, "--stride", 8, *more]))


def prefix(folder: Path, *more: object) -> list[str]:
    return list(map(str, ["eval", "perplexity", "-m", folder, "--dataset", folder / "text.jsonl", *more]))


def passkey(folder: Path, *more: object) -> list[str]:
    arguments = ["eval", "passkey", "-m", folder, "--length", 320, "--depth", 0.1, "--depth", 0.9]
    return list(map(str, [*arguments, "--trials", 4, "--controls", 1, *more]))


def ruler(folder: Path, *more: object) -> list[str]:
    arguments = ["eval", "ruler", "-m", folder, "--length", 700, "--task", "niah_single", "--task", "vt"]
    return list(map(str, [*arguments, "--trials", 3, *more]))


COMMANDS = {"perplexity": perplexity, "passkey": passkey, "ruler": ruler}


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an undisturbed run of a task."""

    @functools.cache
    def run(task: str) -> Path:
        output = tmp_path_factory.mktemp("whole") / task
        with pytest.raises(SystemExit) as caught:
            main([*COMMANDS[task](folder), "--output", str(output)])
        assert not caught.value.code
        return output

    return run


def start(arguments: Sequence[object], log: Path, *, pause: float = 0.0, environment: Mapping[str, str] = {}) -> int:
    """The command as a process of its own, forked: a new interpreter would take seconds to import torch.

    ``pause`` seconds follow each part, so that the process can be killed at a chosen one.
    """
    process = os.fork()
    if process:
        return process
    status = 70
    try:
        sys.stdout, sys.stderr = (open(f"{log}.{name}", "w") for name in ("out", "err"))  # noqa: SIM115
        os.environ.update(environment)
        from accelerate.state import PartialState

        PartialState._reset_state()  # other tests may have set it up
        add = Run.add

        def slowly(*facts: Any) -> None:
            add(*facts)
            time.sleep(pause)

        Run.add = slowly  # type: ignore[method-assign]
        main([str(argument) for argument in arguments])
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(process: int, seconds: float = 120) -> int:
    """The exit status of a process."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise AssertionError(f"still running after {seconds} seconds")


def stored_lines(output: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in output.glob("parts-*.jsonl"))


def wait_for(lines: int, output: Path) -> None:
    deadline = time.monotonic() + 60
    while stored_lines(output) < lines:
        assert time.monotonic() < deadline, "so many parts never came"
        assert not (output / "results.json").exists(), "the run was too fast"
        time.sleep(0.001)


def kill_at(lines: int, output: Path, processes: Sequence[int]) -> None:
    """End processes the hard way as soon as they have stored so many parts."""
    wait_for(lines, output)
    for process in processes:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def start_two(arguments: Sequence[object], log: Path, *, pause: float = 0.0) -> list[int]:
    """The command by two processes, as accelerate launch starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return [
        start(arguments, Path(f"{log}{i}"), pause=pause, environment={**common, "RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(2)
    ]


def result(output: Path) -> dict[str, Any]:
    return comparable((output / "results.json").read_text())


def comparable(text: str) -> dict[str, Any]:
    """A result without what differs from run to run."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record: dict[str, Any] = json.loads(text, parse_constant=refuse)
    for key in VOLATILE:
        del record["provenance"][key]
    return record


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "records.jsonl").read_text().splitlines()]


def assert_same_run(output: Path, other: Path) -> None:
    names = {file.name for file in other.iterdir()}
    assert {file.name for file in output.iterdir()} == names
    if "losses.npy" in names:
        for name in ("losses.npy", "records.jsonl"):
            assert (output / name).read_bytes() == (other / name).read_bytes()
    assert records(output) == records(other)
    assert result(output) == result(other)


def stop_after(parts: int, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> None:
    """Run until so many parts are stored, and no further."""
    add, count = Run.add, iter(range(1, parts + 1))

    def counted(*facts: Any) -> None:
        add(*facts)
        if next(count) == parts:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Run, "add", counted)
        die(arguments)


def die(arguments: Sequence[str]) -> None:
    """The command, which is killed on its way."""
    with pytest.raises(Killed):
        main(list(arguments))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of each forward pass, but for those of the check of the output head."""
    lengths: list[int] = []
    forward = LlamaModel.forward

    @functools.wraps(forward)
    def counted(self: Any, *arguments: Any, **inputs: Any) -> Any:
        positions = inputs["input_ids"].shape[1]
        if inputs["input_ids"].flatten().tolist() != list(range(8)):
            lengths.append(positions)
        return forward(self, *arguments, **inputs)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    return lengths


# Killed and resumed


@pytest.mark.parametrize(("task", "lines"), [("perplexity", 40), ("passkey", 4)])
def test_a_killed_run_that_is_resumed_gives_what_an_undisturbed_one_gives(
    call: Call, folder: Path, whole: Callable[[str], Path], tmp_path: Path, task: str, lines: int
) -> None:
    output = tmp_path / "run"
    arguments = [*COMMANDS[task](folder), "--output", str(output)]
    kill_at(lines, output, [start(arguments, tmp_path / "log", pause=0.01)])
    resumed = call(*arguments, "--resume")
    assert resumed.status == 0, resumed.err
    assert json.loads((output / "results.json").read_text())["provenance"]["parts_reused"] >= lines
    assert_same_run(output, whole(task))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "most"), [("perplexity", 150), ("passkey", 9), ("ruler", 5)])
def test_a_run_may_be_killed_anywhere_and_more_than_once(
    call: Call, folder: Path, whole: Callable[[str], Path], tmp_path: Path, task: str, most: int
) -> None:
    arguments = COMMANDS[task](folder)
    points = sorted(set(np.linspace(1, most, 6).astype(int).tolist()))
    for point in points:
        output = tmp_path / f"once-{point}"
        kill_at(point, output, [start([*arguments, "--output", output], tmp_path / "log", pause=0.005)])
        assert call(*arguments, "--output", output, "--resume").status == 0
        assert_same_run(output, whole(task))
    output = tmp_path / "often"
    for point in points:
        command = [*arguments, "--output", output, "--resume"]
        kill_at(point, output, [start(command, tmp_path / "log", pause=0.005)])
    assert call(*arguments, "--output", output, "--resume").status == 0
    assert_same_run(output, whole(task))


@pytest.mark.parametrize("name", ["losses.npy", "records.jsonl", "results.json"])
def test_a_run_killed_while_its_result_is_written_is_resumed(
    call: Call,
    folder: Path,
    whole: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    passes: list[int],
) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    # Records and losses of a smaller run are in the way of the new ones.
    assert call(*arguments, "--max-documents", 2).status == 0
    write_bytes, write_json = runs.write_bytes, runs.write_json

    def dying(write: Callable[..., None]) -> Callable[..., None]:
        def instead(content: Any, path: Path) -> None:
            if path.name == name:
                raise Killed
            write(content, path)

        return instead

    with monkeypatch.context() as patched:
        patched.setattr(runs, "write_bytes", dying(write_bytes))
        patched.setattr(runs, "write_json", dying(write_json))
        die([*arguments, "--resume"])
    with pytest.raises(ConfigError, match="isn't finished"):
        read_run(tmp_path)
    passes.clear()
    assert call(*arguments, "--resume").status == 0
    assert passes == []
    assert_same_run(tmp_path, whole("perplexity"))


def _torn_at_the_end(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def _torn_in_the_middle(file: Path) -> None:
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([*lines[:3], lines[3][:25], *lines[4:]]))


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _left_over(file: Path) -> None:
    file.with_name(".results.json.0a1b2c3d.tmp").write_text("{")
    file.with_name("parts-1.jsonl").write_text('{"id": ')


@pytest.mark.parametrize("damage", [_torn_at_the_end, _torn_in_the_middle, _empty, _left_over])
def test_lines_that_were_never_finished_are_run_again(
    call: Call,
    folder: Path,
    whole: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    stop_after(10, monkeypatch, arguments)
    damage(tmp_path / "parts-0.jsonl")
    resumed = call(*arguments, "--resume")
    assert resumed.status == 0, resumed.err
    assert_same_run(tmp_path, whole("perplexity"))


# Refused


def refused(ran: Ran, *words: str) -> None:
    """One line on stderr that has the words, and status 2."""
    lines = [line for line in ran.err.splitlines() if line.strip() and "Loading weights" not in line]
    assert (ran.status, ran.out, len(lines)) == (2, "", 1), ran
    for word in ("ctxext: ", *words):
        assert word in lines[0]


def test_a_folder_with_other_files_is_refused_even_to_overwrite(call: Call, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for more in ((), ("--resume",), ("--overwrite",)):
        refused(call(*perplexity(folder), "--output", tmp_path, *more), "holds other files", "thesis.tex")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_is_refused_without_resume_or_overwrite(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    stop_after(1, monkeypatch, arguments)
    refused(call(*arguments), "holds a run", "--resume", "--overwrite")
    assert call(*arguments, "--resume").status == 0
    refused(call(*arguments), "holds a run", "--resume", "--overwrite")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["-s", "method.name=yarn", "-s", "method.factor=4"], ["method", "'yarn'"]),
        (["--dtype", "bfloat16"], ["dtype 'float32'", "'bfloat16'"]),
        (["--attn-implementation", "eager"], ["attn_implementation 'sdpa'", "'eager'"]),
        (["-s", "perplexity.bos=always"], ["bos 'auto'", "'always'"]),
        (["--dataset", "{folder}/other.jsonl"], ["dataset", "text.jsonl", "other.jsonl"]),
    ],
)
def test_a_run_with_other_settings_is_refused_and_the_first_of_them_named(
    call: Call, folder: Path, whole: Callable[[str], Path], more: list[str], words: list[str]
) -> None:
    (folder / "other.jsonl").write_bytes((folder / "text.jsonl").read_bytes())
    more = [argument.replace("{folder}", str(folder)) for argument in more]
    output = whole("perplexity")
    before = {file: file.read_bytes() for file in output.iterdir()}
    refused(call(*perplexity(folder), "--output", output, "--resume", *more), "holds a run with", *words)
    assert {file: file.read_bytes() for file in output.iterdir()} == before


@pytest.mark.parametrize("changed", ["weights", "tokenizer"])
def test_another_model_of_the_same_name_is_refused(
    call: Call, folder: Path, whole: Callable[[str], Path], tmp_path: Path, changed: str
) -> None:
    other = tmp_path / folder.name
    tiny.save_checkpoint(other, seed=1 if changed == "weights" else 0)
    (other / "text.jsonl").write_bytes((folder / "text.jsonl").read_bytes())
    if changed == "tokenizer":
        definition = json.loads((other / "tokenizer.json").read_text())
        vocabulary = definition["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (other / "tokenizer.json").write_text(json.dumps(definition))
    refused(call(*perplexity(other), "--output", whole("perplexity"), "--resume"), f"holds a run with {changed}")


def test_a_run_by_another_version_is_refused(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    stop_after(1, monkeypatch, arguments)
    settings = json.loads((tmp_path / "run.json").read_text())
    settings["versions"]["transformers"] = "4.0.0"
    (tmp_path / "run.json").write_text(json.dumps(settings))
    refused(call(*arguments, "--resume"), "versions.transformers '4.0.0'")


def test_answers_of_another_kind_are_refused(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*passkey(folder), "--output", str(tmp_path)]
    stop_after(1, monkeypatch, [*arguments, "--answers", "forced"])
    refused(call(*arguments, "--resume"), "answers 'forced'", "'both'")


def test_settings_that_can_not_be_read_are_one_line(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    stop_after(1, monkeypatch, arguments)
    (tmp_path / "run.json").write_text("{")
    refused(call(*arguments, "--resume"), "run.json", "can't be read")


def test_losses_that_have_gone_missing_are_noticed(call: Call, folder: Path, tmp_path: Path) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    assert call(*arguments).status == 0
    (tmp_path / "losses.npy").unlink()
    refused(call(*arguments, "--resume"), "losses.npy holds 0 losses", "--overwrite")
    with pytest.raises(ConfigError, match="losses"):
        read_run(tmp_path)


def test_resume_and_overwrite_together_are_refused(call: Call, folder: Path, tmp_path: Path) -> None:
    refused(call(*perplexity(folder), "--output", tmp_path, "--resume", "--overwrite"), "--resume", "--overwrite")


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_resume_and_overwrite_need_an_output(call: Call, folder: Path, option: str) -> None:
    refused(call(*perplexity(folder), option), "--output")


def test_a_file_as_output_is_refused(call: Call, folder: Path) -> None:
    refused(call(*perplexity(folder), "--output", folder / "text.jsonl"), "text.jsonl", "a file", "folder")
    refused(call(*perplexity(folder), "--output", folder / "text.jsonl" / "run"), "can't be written")


def test_a_second_process_on_a_folder_is_refused_while_the_first_is_alive(
    call: Call, folder: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    arguments = [*perplexity(folder), "--output", str(output)]
    first = start(arguments, tmp_path / "log", pause=0.2)
    wait_for(2, output)
    refused(call(*arguments, "--resume"), "another process is at work")
    refused(call(*arguments, "--overwrite"), "another process is at work")
    kill_at(3, output, [first])
    assert call(*arguments, "--resume").status == 0
    assert_same_run(output, whole("perplexity"))


def test_a_user_mistake_found_after_the_start_leaves_nothing_that_is_in_the_way(
    call: Call, folder: Path, tmp_path: Path
) -> None:
    too_long = call(*prefix(folder, "--length", 5000), "--output", tmp_path)
    refused(too_long, "no document has 5000 tokens")
    assert call(*prefix(folder, "--length", 50, "--dtype", "bfloat16"), "--output", tmp_path).status == 0


def test_an_error_lets_go_of_the_folder(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    token_nll, failing = perplexity_module.token_nll, iter([False, True])

    def dying(*inputs: Any, **settings: Any) -> Any:
        if next(failing):
            raise Killed
        return token_nll(*inputs, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(perplexity_module, "token_nll", dying)
        with pytest.raises(Killed) as kept:
            main(arguments)
    assert call(*arguments, "--resume").status == 0
    assert kept.traceback  # which holds on to the run


# Overwritten


def test_overwriting_removes_what_runs_write_and_nothing_else(
    call: Call, folder: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    assert call(*passkey(folder, "--trials", 1), "--output", tmp_path).status == 0
    mine = {"notes.md", "my.png", "mine.yaml", "table.csv", "results.json.bak", ".draft.tmp"}
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / "sub").mkdir()
    written = call(*perplexity(folder), "--output", tmp_path, "--overwrite")
    assert written.status == 0, written.err
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {file.name for file in whole("perplexity").iterdir()} | mine | {"sub"}
    assert all((tmp_path / name).read_text() == "mine" for name in mine)


def test_an_overwriting_run_that_is_killed_at_once_can_be_overwritten_again(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    assert call(*arguments).status == 0
    unlink, removed = Path.unlink, iter([False, True])

    def dying(self: Path, missing_ok: bool = False) -> None:
        if self.parent == tmp_path and next(removed, False):
            raise Killed
        unlink(self, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", dying)
        die([*arguments, "--overwrite"])
    assert call(*arguments, "--overwrite").status == 0


# Asked again, and for more


@pytest.mark.parametrize("task", list(COMMANDS))
def test_resuming_a_finished_run_runs_nothing(
    call: Call, folder: Path, whole: Callable[[str], Path], passes: list[int], task: str
) -> None:
    output = whole(task)
    before, passes[:] = result(output), []
    again = call(*COMMANDS[task](folder), "--output", output, "--resume")
    assert again.status == 0, again.err
    assert passes == []
    assert result(output) == before


def test_more_trials_run_the_new_prompts_only(
    call: Call, folder: Path, whole: Callable[[str], Path], tmp_path: Path, passes: list[int]
) -> None:
    assert call(*passkey(folder, "--trials", 3, "--answers", "forced"), "--output", tmp_path).status == 0
    passes.clear()
    more = [*passkey(folder, "--answers", "forced"), "--output", str(tmp_path), "--resume"]
    assert call(*more).status == 0
    assert len(passes) == 2  # a trial at each of two depths
    assert [record["id"] for record in records(tmp_path)] == [record["id"] for record in records(whole("passkey"))]


def test_more_lengths_run_the_new_windows_only(call: Call, folder: Path, tmp_path: Path, passes: list[int]) -> None:
    arguments = [*prefix(folder, "--protocol", "rolling"), "--output", str(tmp_path)]
    assert call(*arguments, "--length", 64).status == 0
    first, passes[:] = len(passes), []
    assert call(*arguments, "--length", 64, "--length", 128, "--resume").status == 0
    both = json.loads((tmp_path / "results.json").read_text())
    assert len(passes) == both["counts"]["windows"] - first
    assert max(passes) == 128
    assert [row["length"] for row in both["rows"]] == [64, 128]


def test_more_documents_run_the_new_ones_only(
    call: Call, folder: Path, whole: Callable[[str], Path], tmp_path: Path, passes: list[int]
) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    assert call(*arguments, "--max-documents", 3).status == 0
    first, passes[:] = len(passes), []
    assert call(*arguments, "--resume").status == 0
    assert len(passes) == len(records(tmp_path)) - first
    assert_same_run(tmp_path, whole("perplexity"))


def test_a_run_that_is_asked_for_less_keeps_the_rest(call: Call, folder: Path, tmp_path: Path) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    assert call(*arguments).status == 0
    all_of_them = {record["id"] for record in records(tmp_path)}
    assert call(*arguments, "--max-documents", 1, "--resume").status == 0
    assert json.loads((tmp_path / "results.json").read_text())["counts"]["documents"] == 1
    assert {record["id"] for record in records(tmp_path)} == all_of_them


def test_a_stream_of_documents_cut_elsewhere_is_read_again(call: Call, folder: Path, tmp_path: Path) -> None:
    arguments = [*prefix(folder, "--protocol", "stream", "--window", 64, "--stride", 32), "--output"]
    assert call(*arguments, tmp_path / "a", "--max-tokens", 80).status == 0
    assert call(*arguments, tmp_path / "a", "--max-tokens", 100, "--resume").status == 0
    assert call(*arguments, tmp_path / "b", "--max-tokens", 100).status == 0
    assert result(tmp_path / "a") == result(tmp_path / "b")


def test_a_result_is_gone_while_more_is_being_run(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*perplexity(folder), "--output", str(tmp_path)]
    assert call(*arguments, "--max-documents", 2).status == 0
    stop_after(1, monkeypatch, [*arguments, "--resume"])
    with pytest.raises(ConfigError, match="isn't finished: go on with --resume"):
        read_run(tmp_path)


# Parts that failed


@pytest.mark.parametrize("task", ["passkey", "ruler"])
def test_a_part_that_failed_counts_as_wrong_and_is_tried_again(
    call: Call,
    folder: Path,
    whole: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    passes: list[int],
    task: str,
) -> None:
    arguments = [*COMMANDS[task](folder), "--output", str(tmp_path)]
    generated, asked = answering._Reader.generated, iter(range(1000))

    def failing(self: Any, batch: Any) -> Any:
        if next(asked) == 3:
            raise RuntimeError("out of memory\nand a long story")
        return generated(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(answering._Reader, "generated", failing)
        partial = call(*arguments)
    assert partial.status == 3
    assert "prompts that failed, and count as wrong: 1; the first: RuntimeError: out of memory" in partial.err
    record, complete = result(tmp_path), result(whole(task))
    assert (record["status"], record["counts"]["errors"]) == ("partial", 1)
    assert [row["trials"] for row in record["rows"]] == [row["trials"] for row in complete["rows"]]
    assert sum(row["errors"] for row in record["rows"]) == 1
    passes.clear()
    assert call(*arguments, "--resume").status == 0
    assert passes[0] > 8
    assert_same_run(tmp_path, whole(task))


def test_losses_that_are_not_finite_are_errors_and_null(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = answering._Reader.forced

    def broken(self: Any, batch: Any) -> Any:
        return [{**facts, "answer_nll": math.nan} for facts in forced(self, batch)]

    monkeypatch.setattr(answering._Reader, "forced", broken)
    ran = call(*passkey(folder, "--trials", 1, "--controls", 0), "--output", tmp_path)
    assert ran.status == 3, ran.err
    assert "prompts that failed, and count as wrong: 2; the first: the model's logits are not finite" in ran.err
    assert [sample["answer_nll"] for sample in result(tmp_path)["samples"]] == [None, None]
    assert "answer_nll" not in result(tmp_path)["rows"][0]


# Several processes


def test_two_processes_give_the_numbers_of_one(folder: Path, whole: Callable[[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "run"
    processes = start_two([*perplexity(folder), "--output", output], tmp_path / "log", pause=0.001)
    assert [ended(process) for process in processes] == [0, 0], (tmp_path / "log0.err").read_text()
    assert_same_run(output, whole("perplexity"))
    assert "perplexity" in (tmp_path / "log0.out").read_text()
    assert (tmp_path / "log1.out").read_text() == ""


def test_two_killed_processes_are_resumed_by_one(
    call: Call, folder: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    arguments = [*passkey(folder), "--output", str(output)]
    processes = start_two(arguments, tmp_path / "log", pause=0.05)
    kill_at(5, output, processes)
    assert call(*arguments, "--resume").status == 0
    assert json.loads((output / "results.json").read_text())["provenance"]["parts_reused"] >= 5
    assert_same_run(output, whole("passkey"))


def test_a_method_that_fails_in_one_process_is_a_reason_in_all_and_the_rest_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = perplexity_module.token_nll

    def failing(model: Any, *arguments: Any, **options: Any) -> Any:
        if process_index() == 1 and active_patch(model) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return real(model, *arguments, **options)

    monkeypatch.setattr(perplexity_module, "token_nll", failing)  # the processes are forked from this one
    for name, factor in (("first", 2), ("second", 4)):
        (tmp_path / f"{name}.yaml").write_text(f"method: {{name: yarn, factor: {factor}}}\n")
    arguments = ["eval", "compare", "-m", folder, "--dataset", folder / "text.jsonl", "--length", 40, "--json"]
    for name in ("first", "second"):
        arguments += ["--method", tmp_path / f"{name}.yaml"]
    processes = start_two([*arguments, "--task", "perplexity"], tmp_path / "log")
    assert [ended(process) for process in processes] == [3, 0], (tmp_path / "log0.err").read_text()
    plain, *others = json.loads((tmp_path / "log0.out").read_text())["entries"]
    assert plain["perplexity"]["rows"]
    assert len(others) == 2
    assert all("process 1 has failed: CUDA out of memory" in entry["reasons"]["perplexity"] for entry in others)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["passkey", "ruler"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_two_processes_answer_as_one_does(call: Call, folder: Path, tmp_path: Path, task: str, batch_size: int) -> None:
    arguments = [*COMMANDS[task](folder), "--batch-size", str(batch_size)]
    assert call(*arguments, "--output", tmp_path / "one").status == 0
    processes = start_two([*arguments, "--output", tmp_path / "two"], tmp_path / "log")
    assert [ended(process) for process in processes] == [0, 0], (tmp_path / "log0.err").read_text()
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("task", list(COMMANDS))
def test_two_processes_without_a_folder_print_the_numbers_of_one(
    folder: Path, whole: Callable[[str], Path], tmp_path: Path, task: str
) -> None:
    processes = start_two([*COMMANDS[task](folder), "--json"], tmp_path / "log")
    assert [ended(process) for process in processes] == [0, 0], (tmp_path / "log0.err").read_text()
    assert comparable((tmp_path / "log0.out").read_text()) == result(whole(task))
    assert (tmp_path / "log1.out").read_text() == ""


@pytest.mark.slow
def test_torchrun_gives_the_numbers_of_one_process(folder: Path, whole: Callable[[str], Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ctxext"]
    ran = subprocess.run(
        [*command, *perplexity(folder), "--output", str(tmp_path / "run")], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert_same_run(tmp_path / "run", whole("perplexity"))
    assert ran.stdout.count("NLL") == 1


# Folders


@pytest.mark.parametrize(
    "name", ["with a space", "übung-東京", "[a]*", "trailing/", "deep/er/still", "./here/../there"]
)
def test_a_folder_may_have_any_name(call: Call, folder: Path, tmp_path: Path, name: str) -> None:
    output = f"{tmp_path}/{name}"
    (tmp_path / "here").mkdir()
    arguments = [*prefix(folder, "--length", 32, "--max-documents", 1), "--output", output]
    assert call(*arguments).status == 0
    assert call(*arguments, "--resume").status == 0
    assert read_run(output)[0]["rows"][0]["length"] == 32


def test_a_relative_path_and_a_link_lead_to_a_folder(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    arguments = prefix(folder, "--length", 32, "--max-documents", 1)
    assert call(*arguments, "--output", "link").status == 0
    assert call(*arguments, "--output", "real", "--resume").status == 0
    assert (tmp_path / "link").is_symlink()
    assert read_run("link")[0] == read_run(tmp_path / "real")[0]


def test_a_folder_that_can_not_be_written_is_refused(call: Call, folder: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("nothing is forbidden to this user")
    refused(call(*perplexity(folder), "--output", tmp_path), "can't be written", "denied")


def test_a_full_disk_is_one_line(call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    refused(call(*perplexity(folder), "--output", tmp_path), "can't be written: No space left on device")


# From Python


def test_parts_come_back_as_they_were_put_in(tmp_path: Path) -> None:
    for name, order in (("a", ("x", "y", "z")), ("b", ("z", "x", "y"))):
        run = Run(tmp_path / name)
        run.begin({"task": "own"})
        for id_ in order:
            run.add(id_, {"n": ord(id_), "bad": math.inf}, np.full(2, ord(id_) / 7, dtype=np.float32))
        assert run.share([["x", "y"], ["w"]], str, len) == [["w"]]
        assert list(run.collect()) == list(order)
        run.finish({"rows": [math.nan]}, ["x", "y"])
    assert (tmp_path / "a" / "records.jsonl").read_bytes() == (tmp_path / "b" / "records.jsonl").read_bytes()
    assert (tmp_path / "a" / "losses.npy").read_bytes() == (tmp_path / "b" / "losses.npy").read_bytes()
    record, parts = read_run(tmp_path / "a")
    assert record == {"rows": [None]}
    assert parts["y"].facts == {"n": 121, "bad": None}
    assert parts["y"].losses is not None
    np.testing.assert_array_equal(parts["y"].losses, np.full(2, 121 / 7, dtype=np.float32))


def test_a_run_without_a_folder_keeps_parts_in_memory() -> None:
    run = Run()
    run.begin({"task": "own"})
    run.add("x", {"n": 1})
    assert run.done("x")
    assert run.collect() == {"x": Part({"n": 1})}
    run.finish({}, ["x"])


def test_a_batch_is_done_again_as_a_whole() -> None:
    run = Run()
    run.add("a", {})
    run.add("c", {"error": "failed"})
    assert run.share([["a", "b"], ["c"], ["a"]], str, len) == [["a", "b"], ["c"]]


def test_what_is_left_is_shared_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    for done in "aceg":
        run.add(done, {})
    shares = []
    monkeypatch.setattr(runs, "process_count", lambda: 2)
    for index in range(2):
        monkeypatch.setattr(runs, "process_index", lambda index=index: index)
        shares.append(run.share([[letter] for letter in "abcdefgh"], str, len))
    assert shares == [[["b"], ["f"]], [["d"], ["h"]]]


def test_a_run_with_a_folder_must_be_begun(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begin"):
        Run(tmp_path).share([["a"]], str, len)


def test_a_part_named_twice_has_one_record(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.begin({})
    run.add("x", {"n": 1}, [1.0])
    run.finish({}, ["x", "x"])
    assert len(records(tmp_path)) == 1
    assert len(np.load(tmp_path / "losses.npy")) == 1


def test_a_finished_run_leaves_no_lock(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.begin({})
    with FileLock(tmp_path / "other.lock"):
        run.finish({}, [])
    assert not (tmp_path / ".lock").exists()


def test_no_run_and_an_unfinished_one_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is there"):
        read_run(tmp_path / "missing")
    run = Run(tmp_path)
    run.begin({})
    run.add("x", {})
    with pytest.raises(ConfigError, match="isn't finished: go on with --resume"):
        read_run(tmp_path)
