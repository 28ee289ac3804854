"""The result record: complete, strictly JSON, and written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from ctxext.errors import ConfigError
from ctxext.evaluation.passkey import PasskeyResult
from ctxext.evaluation.perplexity import PerplexityResult
from ctxext.evaluation.results import result_record
from ctxext.files import write_json


class Tokenizer:
    def __len__(self) -> int:
        return 128

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1}


PERPLEXITY = PerplexityResult(
    rows=[{"length": 64, "documents": 2, "tokens": 126, "nll": 800.0, "perplexity": None}],
    protocol={"name": "prefix", "version": 1, "lengths": [64]},
    counts={"documents": 2},
    document_ids=["a", "b"],
    dataset_fingerprint="f" * 64,
    wall_seconds=1.5,
    peak_memory_bytes=10,
)
PASSKEY = PasskeyResult(
    rows=[{"length": 512, "depth": 0.5, "trials": 1, "correct": 1, "accuracy": 1.0}],
    samples=[{"id": "0|512|0.5|0", "key": "12345", "answer": " 12345\ud800"}],
    protocol={"name": "passkey", "version": "passkey-v1"},
    counts={"samples": 1},
    wall_seconds=1.5,
    peak_memory_bytes=None,
)


def record_of(task: str, result: PerplexityResult | PasskeyResult, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": tiny.model(),
        "model_id": "tiny",
        "tokenizer": Tokenizer(),
        "configuration": {"perplexity": {"length": (64,)}},
        "seed": 3,
    }
    return result_record(task, result, **settings | changes)


def strict(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_a_perplexity_record_holds_rows_protocol_dataset_and_patch() -> None:
    patch = {"method": "yarn", "fingerprint": "ab"}
    record = record_of("perplexity", PERPLEXITY, dataset_id="docs", method={"name": "yarn", "factor": 4}, patch=patch)
    assert (record["schema_version"], record["task"]) == (1, "perplexity")
    assert (record["rows"], record["protocol"], record["counts"]) == (
        PERPLEXITY.rows,
        PERPLEXITY.protocol,
        PERPLEXITY.counts,
    )
    assert record["dataset"] == {"id": "docs", "fingerprint": "f" * 64, "document_ids": ["a", "b"]}
    assert (record["method"], record["patch"]) == ({"name": "yarn", "factor": 4}, patch)
    assert record["configuration"] == {"perplexity": {"length": [64]}}


def test_a_passkey_record_holds_its_samples() -> None:
    record = record_of("passkey", PASSKEY)
    assert record["samples"] == PASSKEY.samples
    assert "dataset" not in record
    assert (record["method"], record["patch"]) == (None, None)


def test_provenance_names_versions_device_and_settings_but_not_the_host() -> None:
    provenance = record_of("perplexity", PERPLEXITY)["provenance"]
    for name in ("torch", "transformers", "datasets"):
        assert provenance[name] == metadata.version(name)
    assert provenance["python"] == platform.python_version()
    assert (provenance["model"], provenance["seed"], provenance["dtype"]) == ("tiny", 3, "float32")
    assert provenance["attn_implementation"] == "sdpa"
    assert provenance["device"].startswith("cpu")
    assert provenance["created_utc"].endswith("+00:00")
    assert (provenance["wall_seconds"], provenance["peak_memory_bytes"]) == (1.5, 10)
    assert "ctxext" in provenance
    assert socket.gethostname() not in json.dumps(provenance)


def test_the_file_is_strict_json_even_for_numbers_that_json_lacks(tmp_path: Path) -> None:
    odd = {
        "nan": math.nan,
        "infinite": [math.inf, -math.inf],
        "tensor": torch.tensor([1.0, math.nan]),
        "numpy": np.float32(0.5),
        "path": Path("a/b"),
        "dtype": torch.bfloat16,
        "surrogate": "\ud800",
    }
    write_json(odd, tmp_path / "r.json")
    assert strict(tmp_path / "r.json") == {
        "nan": None,
        "infinite": [None, None],
        "tensor": [1.0, None],
        "numpy": 0.5,
        "path": "a/b",
        "dtype": "torch.bfloat16",
        "surrogate": "\ud800",
    }


@pytest.mark.parametrize(("task", "result"), [("perplexity", PERPLEXITY), ("passkey", PASSKEY)])
def test_a_record_comes_back_as_it_was_written(
    tmp_path: Path, task: str, result: PerplexityResult | PasskeyResult
) -> None:
    record, path = record_of(task, result), tmp_path / "new" / "folder" / "result.json"
    write_json(record, path)
    assert strict(path) == record
    assert list(strict(path)) == list(record)
    assert path.read_text().endswith("}\n")
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    record = record_of("perplexity", PERPLEXITY)
    write_json(record, tmp_path / "a.json")
    write_json(record, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_an_existing_file_is_replaced_whole_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_json({"run": 1}, path)
    write_json({"run": 2}, path)
    assert strict(path) == {"run": 2}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_json({"run": 3}, path)
    assert strict(path) == {"run": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is a folder") as error:
        write_json({}, tmp_path)
    assert "\n" not in str(error.value)


def test_a_parent_that_is_a_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't write") as error:
        write_json({}, tmp_path / "file" / "deeper" / "result.json")
    assert "\n" not in str(error.value)


def test_others_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_json({}, tmp_path / "result.json")
    assert (tmp_path / "result.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_stays_a_link_and_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("{}")
    link.symlink_to(real)
    write_json({"rows": []}, link)
    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"rows": []}
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json({"rows": []}, pipe)
    assert json.loads(os.read(reader, 100)) == {"rows": []}
    os.close(reader)
    assert pipe.is_fifo()
