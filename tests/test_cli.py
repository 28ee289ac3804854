"""The command line on a tiny model in a folder: tables, JSON, exit statuses, one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ctxext
import tiny
from command_line import Run
from ctxext.aliases import ALIASES
from ctxext.cli import info
from ctxext.config import load_config
from ctxext.evaluation import answering
from ctxext.methods import METHODS

ATTENTION = [name for name in tiny.METHODS if name not in tiny.STATIC]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(checkpoint: Path) -> Path:
    """A checkpoint with a text file and a configuration beside it."""
    path = checkpoint
    (path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    (path / "yarn.yaml").write_text("method: {name: yarn, factor: 4}\nperplexity: {length: [32, 64]}\n")
    return path


def test_help_and_version_answer(run: Run) -> None:
    assert run("--help").status == 0
    assert ctxext.__version__ in run("--version").out
    for command in (
        ["eval", "perplexity"],
        ["eval", "positions"],
        ["eval", "ruler"],
        ["inspect"],
        ["methods"],
        ["env"],
    ):
        result = run(*command, "--help")
        assert result.status == 0
        assert "Usage" in result.out


def test_help_does_not_import_torch_or_transformers() -> None:
    code = (
        "import sys; from ctxext.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "ctxext", "--version"], capture_output=True, text=True, check=True)
    assert ctxext.__version__ in done.stdout


def test_methods_lists_every_method_and_explains_each(run: Run) -> None:
    listed = run("methods").out
    for name, cls in METHODS.items():
        assert name in listed
        explained = run("methods", name).out
        assert cls.title in explained
        assert all(field in explained for field in cls.model_fields if field != "name")


def test_the_table_in_the_readme_is_the_one_that_the_code_prints(run: Run) -> None:
    assert run("methods", "--markdown").out.strip() in (ROOT / "README.md").read_text()


def test_env_names_versions_and_what_is_bundled(run: Run) -> None:
    out = run("env").out
    for word in ("ctxext", "torch", "transformers", "python", "accelerators", "builtin model"):
        assert word in out


def test_perplexity_prints_a_table_and_writes_the_result(run: Run, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "run"
    result = run(
        "eval", "perplexity", "--model", folder, "--dataset", folder / "text.txt", "--config", folder / "yarn.yaml",
        "--length", 48, "--length", 128, "--output", output,
    )  # fmt: skip
    assert result.status == 0, result.err
    assert "perplexity" in result.out
    assert "yarn" in result.out
    record = json.loads((output / "results.json").read_text())
    assert [row["length"] for row in record["rows"]] == [48, 128]
    assert record["method"] == {"name": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0} | {
        "truncate": True,
        "ramp": "dimension",
        "log_n": False,
    }
    assert record["patch"]["patched_modules"] == 1
    assert len(record["patch"]["fingerprint"]) == 64
    assert record["configuration"]["perplexity"]["length"] == [48, 128]
    written = {file.name for file in output.iterdir()}
    assert written == {"run.json", "records.jsonl", "losses.npy", "results.json", "config.yaml", "perplexity.png"}
    for name in ("run.json", "records.jsonl", "results.json", "config.yaml"):
        assert str(folder.parent) not in (output / name).read_text()


def test_json_on_stdout_is_the_result_and_nothing_else(run: Run, folder: Path) -> None:
    result = run(
        "eval", "perplexity", "-m", folder, "--dataset", folder / "text.txt", "--length", 64, "--json",
    )  # fmt: skip
    record = json.loads(result.out)
    assert record["method"] is None
    assert record["patch"]["patched_modules"] == 0


def test_a_hub_data_set_is_read_at_its_revision_and_the_result_names_it(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def stand_in(*arguments: object, **options: object) -> dict[str, list[dict[str, str]]]:
        asked.append((arguments, options["name"], options["revision"]))
        return {"test": [{"text": "The quick brown fox jumps over the lazy dog. " * 3}]}

    monkeypatch.setattr("ctxext.data.load_dataset", stand_in)
    arguments = ("eval", "perplexity", "-m", folder, "--length", 64, "--json")
    named = json.loads(run(*arguments, "--dataset", "pg19", "--dataset-revision", "v1").out)
    assert named["dataset"]["id"] == "pg19 (emozilla/pg19@v1)"
    # What the configuration says can be given again.
    given = named["configuration"]["perplexity"]
    assert (given["dataset"], given["dataset_revision"]) == ("pg19", "v1")
    pinned = json.loads(run(*arguments, "--dataset", "pg19").out)["configuration"]["perplexity"]
    assert pinned["dataset_revision"] == ALIASES["pg19"].revision
    other = json.loads(run(*arguments, "--dataset", "owner/name", "-s", "perplexity.dataset_revision=v2").out)
    assert other["dataset"]["id"] == "owner/name@v2"
    assert other["configuration"]["perplexity"]["dataset"] == "owner/name"
    revisions = ["v1", ALIASES["pg19"].revision, "v2"]
    assert [revision for _, _, revision in asked] == revisions


def test_a_limit_lowers_and_never_raises() -> None:
    config = load_config(settings=["passkey.trials=2", "passkey.controls=0", "perplexity.max_documents=9"])
    limited = config.limited(5)
    assert (limited.passkey.trials, limited.passkey.controls, limited.perplexity.max_documents) == (2, 0, 5)
    assert (limited.ruler.trials, limited.positions.max_documents) == (5, 5)
    assert config.limited(1).passkey.trials == 1


def test_too_little_memory_is_one_line(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nDetails")

    monkeypatch.setattr("ctxext.evaluation.perplexity.token_nll", exhausted)
    result = run("eval", "perplexity", "-m", folder, "--dataset", folder / "text.txt", "--length", 64)
    assert result.status == 2
    [line] = [line for line in result.err.splitlines() if line.startswith("ctxext: ")]
    assert "out of memory: CUDA out of memory. Tried to allocate 9 GiB. Details; try a shorter length" in line


def test_lengths_come_from_the_file_where_no_option_gives_them(run: Run, folder: Path) -> None:
    arguments = ("-m", folder, "-c", folder / "yarn.yaml", "--dataset", folder / "text.txt", "--json")
    record = json.loads(run("eval", "perplexity", *arguments).out)
    assert [row["length"] for row in record["rows"]] == [32, 64]


def test_sliding_windows_have_a_row_each(run: Run, folder: Path) -> None:
    result = run(
        "eval", "perplexity", "-m", folder, "--dataset", folder / "text.txt", "--protocol", "sliding",
        "--window", 32, "--window", 64, "--stride", 16, "--json",
    )  # fmt: skip
    rows = json.loads(result.out)["rows"]
    assert [(row["window"], row["stride"]) for row in rows] == [(32, 16), (64, 16)]
    assert rows[0]["tokens"] == rows[1]["tokens"]


def test_runs_that_differ_in_one_setting_have_different_fingerprints(run: Run, folder: Path) -> None:
    arguments = ("eval", "perplexity", "-m", folder, "-c", folder / "yarn.yaml", "--dataset", folder / "text.txt")
    fingerprints = {
        json.loads(run(*arguments, "--json", *setting).out)["patch"]["fingerprint"]
        for setting in ((), ("-s", "method.beta_slow=4"), ("-s", "method.attention_factor=1.0"))
    }
    assert len(fingerprints) == 3


@pytest.mark.parametrize("name", ATTENTION)
def test_perplexity_runs_with_changed_attention_and_records_it(run: Run, folder: Path, name: str) -> None:
    arguments = ("eval", "perplexity", "-m", folder, "--dataset", folder / "text.txt", "--length", 64, "--length", 200)
    plain, record = (json.loads(run(*arguments, "--json", *extra).out) for extra in ((), ("-s", f"method.name={name}")))
    assert record["rows"][1]["perplexity"] != plain["rows"][1]["perplexity"]
    assert record["method"]["name"] == record["patch"]["method"]["name"] == name
    assert record["patch"]["attention"]
    assert record["patch"]["consistent"]
    assert record["patch"]["fingerprint"] != plain["patch"]["fingerprint"]


def test_a_method_inside_another_is_given_on_the_command_line(run: Run, folder: Path) -> None:
    settings = (
        "-s",
        "method.name=dca",
        "-s",
        "method.chunk_size=24",
        "-s",
        "method.frequencies={name: ntk, factor: 2}",
    )
    report = json.loads(run("inspect", "-m", folder, "--json", *settings).out)
    assert report["method"]["frequencies"] == {"name": "ntk", "factor": 2.0, "log_n": False}
    assert report["inv_freq"][1] == pytest.approx((1e4 * 2 ** (16 / 14)) ** (-1 / 8), rel=1e-6)


@pytest.mark.parametrize("name", ATTENTION)
def test_inspect_says_what_a_method_does_to_attention_and_draws_it(
    run: Run, folder: Path, tmp_path: Path, name: str
) -> None:
    picture = tmp_path / "attention.png"
    result = run("inspect", "-m", folder, "-s", f"method.name={name}", "--plot", picture)
    assert result.status == 0, result.err
    assert any(line.split()[0] == "attention" for line in result.out.splitlines() if line.strip())
    assert "config and live module agree" in result.out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_passkey_prints_a_grid_and_writes_every_sample(run: Run, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "passkey"
    result = run(
        "eval", "passkey", "-m", folder, "-c", folder / "yarn.yaml", "--length", 320, "--depth", 0.1, "--depth", 0.9,
        "--trials", 2, "--controls", 0, "--output", output,
    )  # fmt: skip
    assert result.status == 0, result.err
    assert "accuracy" in result.out
    record = json.loads((output / "results.json").read_text())
    assert [(row["length"], row["depth"], row["trials"]) for row in record["rows"]] == [(320, 0.1, 2), (320, 0.9, 2)]
    assert len(record["samples"]) == 4


def test_positions_prints_the_curve_and_how_far_the_model_reads(run: Run, folder: Path, tmp_path: Path) -> None:
    texts = ("The quick brown fox jumps over the lazy dog. ", "Pack my box with five dozen liquor jugs. ") * 2
    lines = (json.dumps({"text": f"Document {i}. {text * 8}"}) for i, text in enumerate(texts))
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    output = tmp_path / "run"
    result = run(
        "eval", "positions", "-m", folder, "--dataset", tmp_path / "texts.jsonl", "--length", 256, "--output", output,
    )  # fmt: skip
    assert result.status == 0, result.err
    assert "context beyond the trained length gains" in result.out
    assert "64 - 127" in result.out
    record = json.loads((output / "results.json").read_text())
    assert [(row["low"], row["high"]) for row in record["rows"]] == [(0, 64), (64, 128), (128, 256)]
    assert [row["documents"] for row in record["rows"]] == [4, 4, 4]
    assert (record["summary"]["trained"], record["summary"]["longest"]) == (64, 256)
    written = {file.name for file in output.iterdir()}
    assert written == {"run.json", "records.jsonl", "losses.npy", "results.json", "config.yaml", "positions.png"}


def test_positions_of_one_document_are_a_curve_without_conclusions(run: Run, folder: Path) -> None:
    result = run("eval", "positions", "-m", folder, "--dataset", folder / "text.txt", "--length", 200)
    assert result.status == 0, result.err
    assert "one document" in result.out
    assert "trained length" not in result.out


def test_ruler_prints_a_row_per_task_and_length_and_draws_them(run: Run, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    result = run(
        "eval", "ruler", "-m", folder, "--task", "niah_single", "--task", "cwe", "--length", 1500, "--trials", 2,
        "--output", output,
    )  # fmt: skip
    assert result.status == 0, result.err
    assert "mean score of at least 85.6%: no length" in result.out
    record = json.loads((output / "results.json").read_text())
    assert [(row["task"], row["length"], row["trials"]) for row in record["rows"]] == [
        ("niah_single", 1500, 2),
        ("cwe", 1500, 2),
    ]
    assert all(row["task"] in result.out for row in record["rows"])
    assert record["summary"]["effective_length"] is None
    written = {file.name for file in output.iterdir()}
    assert written == {"run.json", "records.jsonl", "results.json", "config.yaml", "ruler.png"}


def test_prompts_that_fail_make_a_partial_result_and_status_3(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = answering._Reader.forced

    def forced(reader: Any, batch: Any) -> Any:
        if batch[0].index == 1:
            raise torch.OutOfMemoryError("no memory left")
        return read(reader, batch)

    monkeypatch.setattr(answering._Reader, "forced", forced)
    arguments = ("-m", folder, "--length", 320, "--depth", 0.5, "--trials", 3, "--controls", 0, "--json")
    result = run("eval", "passkey", *arguments)
    assert result.status == 3
    assert "the first: OutOfMemoryError: no memory left" in result.err
    record = json.loads(result.out)
    assert (record["status"], record["counts"]["errors"]) == ("partial", 1)
    assert [(row["trials"], row["errors"]) for row in record["rows"]] == [(3, 1)]


def test_a_model_that_finds_no_key_in_short_prompts_is_said_to_be_at_the_floor(run: Run, folder: Path) -> None:
    result = run("eval", "passkey", "-m", folder, "--length", 320, "--depth", 0.5, "--trials", 1, "--controls", 1)
    assert "controls: 0 of 1 in 512 tokens" in result.out
    assert "task floor" in result.out


def test_inspect_reports_and_draws(run: Run, folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "wavelengths.png"
    result = run("inspect", "-m", folder, "-c", folder / "yarn.yaml", "--plot", picture)
    assert result.status == 0, result.err
    assert "yarn (factor=4" in result.out
    assert "config and live module agree" in result.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(run("inspect", "-m", folder, "--json").out)
    assert report["method"] is None
    assert report["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["eval", "perplexity", "--length", "64"], ["no model", "--model"]),
        (["eval", "perplexity", "-m", "builtin:smollm2", "--length", "64"], ["builtin:smollm2", "did you mean"]),
        (["eval", "perplexity", "-m", "./missing", "--length", "64"], ["./missing", "not found"]),
        (["eval", "perplexity", "-m", "{folder}", "--length", "64", "-s", "method.facter=4"], ["method"]),
        (["eval", "perplexity", "-m", "{folder}", "-c", "missing.yaml"], ["missing.yaml", "no such file"]),
        (["eval", "perplexity", "-m", "{folder}"], ["lengths", "--length"]),
        (["eval", "perplexity", "-m", "{folder}", "--length", "1"], ["length", "1"]),
        (["eval", "perplexity", "-m", "{folder}", "--length", "64", "--dtype", "float8"], ["float8"]),
        (["eval", "perplexity", "-m", "{folder}", "--length", "64", "--device", "warp"], ["warp"]),
        (["eval", "perplexity", "-m", "{folder}", "--length", "64", "--window", "32"], ["window"]),
        (["eval", "perplexity", "-m", "{folder}", "--protocol", "sliding", "--length", "64"], ["length"]),
        (["eval", "perplexity", "-m", "{folder}", "--length", "64", "--output", "{folder}"], ["holds other files"]),
        (
            ["eval", "perplexity", "-m", "{folder}", "--length", "64", "--dataset", "{folder}/text.csv"],
            ["text.csv", "not found"],
        ),
        (
            [
                "eval",
                "perplexity",
                "-m",
                "{folder}",
                "--length",
                "64",
                "--dataset",
                "{folder}/text.txt",
                "--dataset-revision=v1",
            ],
            ["text.txt", "revisions", "leave them out"],
        ),
        (
            ["eval", "perplexity", "-m", "{folder}", "--length", "9999", "--dataset", "{folder}/text.txt"],
            ["9999", "longest"],
        ),
        (["eval", "passkey", "-m", "{folder}", "--length", "64"], ["length 64"]),
        (["eval", "passkey", "-m", "{folder}", "--length", "512", "--depth", "2"], ["depth", "2"]),
        (
            ["inspect", "-m", "{folder}", "-s", "method.name=yarn", "-s", "method.factor=0"],
            ["method.factor", "0"],
        ),
        (
            ["inspect", "-m", "{folder}", "-s", "method.name=yarn", "-s", "method.max_position_embeddings=32"],
            ["32", "64"],
        ),
        (
            ["inspect", "-m", "{folder}", "-s", "method.name=dca", "-s", "method.chunk_size=65"],
            ["method dca", "chunk_size 65", "64"],
        ),
        (
            ["inspect", "-m", "{folder}", "-s", "method.name=dca", "-s", "method.frequencies={name: ntk, facter: 2}"],
            ["-s method.frequencies", "facter", "2", "did you mean factor?"],
        ),
        (
            ["inspect", "-m", "{folder}", "-s", "method.name=dynamic_ntk", "-s", "method.max_position_embeddings=32"],
            ["method dynamic_ntk", "max_position_embeddings 32", "64"],
        ),
        (["eval", "positions", "-m", "{folder}"], ["length", "--length"]),
        (["eval", "positions", "-m", "{folder}", "--length", "1"], ["length", "1"]),
        (
            ["eval", "positions", "-m", "{folder}", "--length", "9999", "--dataset", "{folder}/text.txt"],
            ["9999", "longest"],
        ),
        (["eval", "ruler", "-m", "{folder}"], ["lengths", "--length"]),
        (["eval", "ruler", "-m", "{folder}", "--length", "64"], ["length 64 is too short", "niah_single"]),
        (
            ["eval", "ruler", "-m", "{folder}", "--length", "64", "--task", "niah_singel"],
            ["did you mean 'niah_single'"],
        ),
        (["methods", "yran"], ["did you mean yarn?"]),
    ],
)
def test_a_users_mistake_is_one_line_on_stderr_and_status_2(
    run: Run, folder: Path, arguments: list[str], parts: list[str]
) -> None:
    result = run(*(argument.replace("{folder}", str(folder)) for argument in arguments))
    assert result.status == 2
    assert result.out == ""
    lines = [line for line in result.err.splitlines() if line.startswith("ctxext: ")]
    assert len(lines) == 1, result.err
    assert "Traceback" not in result.err
    for part in parts:
        assert part in lines[0]


def test_a_file_with_a_method_can_be_run_plain_and_with_the_other_protocol(run: Run, folder: Path) -> None:
    arguments = ("eval", "perplexity", "-m", folder, "-c", folder / "yarn.yaml", "--dataset", folder / "text.txt")
    record = json.loads(run(*arguments, "-s", "method=null", "--json").out)
    assert record["method"] is None
    record = json.loads(run(*arguments, "--protocol", "sliding", "--window", 64, "--json").out)
    assert [row["window"] for row in record["rows"]] == [64]


def test_a_checkpoint_saved_with_a_method_is_not_called_plain(run: Run, folder: Path, tmp_path: Path) -> None:
    model, tokenizer = ctxext.load_model(str(folder), ctxext.NTK(factor=4))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    arguments = ("eval", "perplexity", "--dataset", folder / "text.txt", "--length", 64)
    assert "as saved, scaled with ntk" in " ".join(run(*arguments, "-m", tmp_path).out.split())
    assert "plain" in run(*arguments, "-m", folder).out


@pytest.mark.parametrize("name", ATTENTION)
def test_a_checkpoint_saved_with_changed_attention_runs_with_it(
    run: Run, folder: Path, tmp_path: Path, name: str
) -> None:
    settings = {"name": name, "original_max_position_embeddings": 32}
    model, tokenizer = ctxext.load_model(str(folder), settings)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    arguments = ("eval", "perplexity", "--dataset", folder / "text.txt", "--length", 100, "--json")
    saved = json.loads(run(*arguments, "-m", tmp_path).out)
    given = json.loads(
        run(
            *arguments, "-m", folder, "-s", f"method.name={name}", "-s", "method.original_max_position_embeddings=32"
        ).out
    )
    assert saved["rows"][0]["perplexity"] == given["rows"][0]["perplexity"]
    assert saved["patch"]["fingerprint"] == given["patch"]["fingerprint"]


def test_an_output_that_can_not_be_written_is_found_before_the_run(run: Run, folder: Path) -> None:
    result = run("eval", "perplexity", "-m", "whatever/model", "--length", 64, "--output", "/proc/results")
    assert result.status == 2
    assert "can't be written" in result.err


def test_a_wrong_setting_is_found_before_the_model_is_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctxext.models

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(ctxext.models, "load_model", fail)
    for extra in (
        ["-s", "method.name=yarn", "-s", "method.factor=nan"],
        ["--length", "64", "--length", "64"],
        ["--length", "64", "--stride", "8"],
        ["--length", "64", "--dataset", "./missing.txt"],
    ):
        assert run("eval", "perplexity", "-m", "whatever/model", *extra).status == 2
    assert run("eval", "passkey", "-m", "whatever/model").status == 2


def test_a_checkpoint_with_a_scaling_of_its_own_asks_for_the_option(run: Run, tmp_path: Path, folder: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("inspect", "-m", tmp_path, "-s", "method.name=yarn", "-s", "method.factor=4")
    refused = run(*arguments)
    assert refused.status == 2
    assert "--replace-scaling" in refused.err
    accepted = run(*arguments, "--replace-scaling")
    assert accepted.status == 0, accepted.err
    assert "32 tokens" in accepted.out


def test_the_methods_table_has_a_row_for_each_method() -> None:
    rows = info.methods_table().splitlines()[2:]
    assert len(rows) == len(METHODS)


def test_commands_work_with_the_hub_offline(folder: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "ctxext", "inspect", "--model", "some-owner/some-model"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "offline" in done.stderr
    assert "Traceback" not in done.stderr
