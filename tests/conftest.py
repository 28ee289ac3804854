"""Settings for all tests: no network, repeatable, deprecations of Transformers are errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # so that the processes that tests start don't wait for each other's threads
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import tiny
from command_line import Ran, Run
from ctxext.cli import main

# These models are so small that a second thread only waits, and on a busy machine waits long.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """The same random numbers for each test, and nothing of what accelerate remembers of the one before."""
    torch.manual_seed(0)
    yield
    AcceleratorState._reset_state()
    GradientState._reset_state()


@pytest.fixture
def strictly() -> Iterator[None]:
    """What would be a warning of Transformers about ctxext is an error."""
    with tiny.strictly():
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line, called in this process."""

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(int(caught.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one token per byte, trained to 64 tokens."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny.save_checkpoint(path)
    return path
