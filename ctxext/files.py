"""Files that are whole or not there at all, and values in the types that JSON has."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


def check_new_folder(folder: Path, *, overwrite: bool, replaceable: Callable[[Path], bool]) -> None:
    """Refuse a folder that holds something, unless ``overwrite`` is set and it is ``replaceable``.

    Raises:
        ConfigError: one line that says which of the two is missing.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not replaceable(folder):
            raise ConfigError(f"{folder} holds other files: give a new or empty folder")
        if not overwrite:
            raise ConfigError(f"{folder} holds an earlier one: give another folder, or overwrite it (--overwrite)")


@contextmanager
def new_folder(folder: Path, *, overwrite: bool, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """A temporary folder beside ``folder``, which takes its place when the block ends; after an error nothing is left.

    Raises:
        ConfigError: the folder is refused by ``check_new_folder``, or something can't be written, whatever the library
            that tried raised.
    """
    check_new_folder(folder, overwrite=overwrite, replaceable=replaceable)
    target = folder.resolve()  # a link stays a link
    temporary, former = (target.with_name(f".{target.name}.{secrets.token_hex(4)}.{end}") for end in ("tmp", "old"))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        check_new_folder(folder, overwrite=overwrite, replaceable=replaceable)  # time has passed
        if target.exists():
            target.rename(former)
        temporary.rename(target)
    except ConfigError:
        raise
    except Exception as error:  # libraries that write tensors have errors of their own for a full disk
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"can't write {folder}: {reason}") from error
    finally:
        if former.exists() and not target.exists():
            former.rename(target)
        for leftover in (temporary, former):
            shutil.rmtree(leftover, ignore_errors=True)


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
