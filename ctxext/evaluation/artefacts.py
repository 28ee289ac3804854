"""What lies in a run's folder for people: pictures of the result, and the configuration to run it again with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ctxext.errors import CtxextError
from ctxext.files import write_bytes


def command(task: str) -> str:
    """The command that makes results of ``task``."""
    return "ctxext search" if task == "search" else f"ctxext eval {task}"


def write_artefacts(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Write ``config.yaml`` and the pictures of ``record`` into ``folder``; a line for people about each.

    Without matplotlib there are no pictures, and a line says so.
    """
    from ctxext.plotting import plot_record

    resolved = {key: value for key, value in record["configuration"].items() if value is not None}
    text = f"# {command(record['task'])} --config config.yaml\n" + yaml.safe_dump(resolved, sort_keys=False)
    write_bytes(text.encode(), folder / "config.yaml")
    lines = [f"wrote {folder}"]
    try:
        plot_record(record, folder)
    except CtxextError as error:
        lines.append(f"no pictures: {error}")
    return lines
