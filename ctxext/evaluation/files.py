"""Files that are whole or not there at all, and values in the types that JSON has."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxext.errors import ConfigError


def write_json(record: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``record`` to ``path`` as JSON, whole or not at all; parent folders are created.

    Numbers that JSON doesn't have (NaN, infinities) become null. Raises ConfigError if the file can't be written.
    """
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"can't write {target}: it is a folder, give a file name")
    text = json.dumps(plain(record), indent=2, allow_nan=False) + "\n"
    write_bytes(text.encode(), target)


def write_bytes(content: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file whole or not at all; parent folders are created. Raises ConfigError if it can't be written."""
    target = Path(path).resolve()  # a link stays a link
    if target.exists() and not target.is_file():  # a device or a pipe
        target.write_bytes(content)
        return
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"can't write {target}: {error.strerror or error}") from error


def plain(value: Any) -> Any:
    """``value`` in JSON's types: mappings, lists, text, finite numbers, null."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors, numpy arrays and scalars
        return plain(value.tolist())
    return str(value)
