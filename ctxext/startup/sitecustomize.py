"""Lets ctxext into the Pythons that ``ctxext run`` starts, as soon as they import the models of Transformers.

Python runs this file by itself before any program (see the documentation of ``site``). It imports nothing heavy, takes
its folder off ``sys.path`` again, and runs the ``sitecustomize`` that would have been run without it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Finder:
    """Finds ``transformers.modeling_utils`` as Python does, and hands it to ctxext once it has been executed."""

    def __init__(self, settings: str) -> None:
        self._settings = settings

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec and loader, whose ``exec_module`` does one thing more; None for all other modules."""
        spec = PathFinder.find_spec(name, path) if name == "transformers.modeling_utils" else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _start(module.PreTrainedModel, self._settings)

        loader.exec_module = exec_module
        return spec


def _start(model_class: Any, settings: str) -> None:
    try:
        from ctxext.autopatching import start
    except ModuleNotFoundError as error:
        print(
            f"ctxext: {sys.executable} can't import {error.name}, so models can't be extended in it: install ctxext in "
            "its environment, or run the program with a Python that has it",
            file=sys.stderr,
        )
        raise
    start(model_class, settings)


def _run_hidden_sitecustomize() -> None:
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    if "CTXEXT_RUN" in os.environ:
        sys.meta_path.insert(0, _Finder(os.environ["CTXEXT_RUN"]))
    _run_hidden_sitecustomize()
