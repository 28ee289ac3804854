"""The folder of a run: who writes there, and with which settings it was begun."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ctxext.errors import ConfigError
from ctxext.files import plain, write_json

SETTINGS, LOCK = "run.json", ".lock"


class FolderError(ConfigError):
    """A run's folder can't be used as asked."""


class RunFolder:
    """A folder that holds one run of one kind, written by one process at a time.

    ``run.json`` holds the kind, and the settings that decide what the run gives: a run with others can't be continued.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        *,
        resume: bool,
        overwrite: bool,
        begun: Callable[[Path], bool],
        clear: Callable[[Path], None],
        unfinished: Sequence[str] = (),
    ) -> None:
        """Check that the folder can be used; nothing in it is touched yet.

        Args:
            path: made if it isn't there.
            kind: of run: an evaluation, a fine-tune or a search.
            resume: go on with the run that is there.
            overwrite: throw it away.
            begun: whether anything would be lost with the run in the folder.
            clear: removes what such runs write.
            unfinished: patterns of files that a killed process may have left, which don't count.

        Raises:
            FolderError: the folder can't be written, holds other files, a run of another kind, or a run (without
                ``resume``).
        """
        self.path, self._kind = Path(path), kind
        self._overwrite, self._begun, self._clear = overwrite, begun, clear
        self._lock: FileLock | None = None
        if resume and overwrite:
            raise ConfigError("--resume goes on with a run, --overwrite throws it away: give one of them")
        if self.path.exists() and not self.path.is_dir():
            raise FolderError(f"--output {path}: this is a file; give the name of a folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = sorted(entry.name for entry in self.path.iterdir() if entry.name != LOCK)
            names = [name for name in names if not any(map(Path(name).match, unfinished))]
            tempfile.TemporaryFile(dir=self.path).close()
        except OSError as error:
            raise FolderError(f"--output {path}: can't be written: {error.strerror}") from None
        if names and SETTINGS not in names:
            raise FolderError(
                f"--output {path}: holds other files ({names[0]}, ...): give an empty folder or a new name"
            )
        there = kind
        if SETTINGS in names:
            with suppress(ConfigError):  # a file that can't be read is told of where it is needed
                there = read_json(self.path / SETTINGS).get("kind", kind)
        if there != kind:
            raise FolderError(f"--output {path}: holds a run of another kind ({there}): give another folder")
        if not resume and not overwrite and begun(self.path):
            raise FolderError(f"--output {path}: holds a run: go on with --resume, or start again with --overwrite")

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Take the folder for this process, and settle the settings.

        Raises:
            FolderError: another process is at work there, or the folder holds a run with other settings; the first
                that differs is named.
        """
        self._lock = FileLock(self.path / LOCK, timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise FolderError(f"--output {self.path}: another process is at work on this run") from None
        if self._overwrite or not self._begun(self.path):
            self._clear(self.path)
        settings = {"kind": self._kind, **plain(settings)}
        file = self.path / SETTINGS
        if not file.exists():
            write_json(settings, file)
        elif (difference := _difference(read_json(file), settings)) is not None:
            key, old, new = difference
            raise FolderError(
                f"--output {self.path}: holds a run with {key} {old!r}, this one has {new!r}; "
                "give another folder, or --overwrite"
            )

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None and self._lock.is_locked:
            self._lock.release()
            (self.path / LOCK).unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """A file of JSON. Raises ConfigError if it can't be read."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    return value


def _difference(there: Any, here: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first setting that differs, as (dotted name, there, here)."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*here, *(key for key in there if key not in here)]:
            found = _difference(there.get(key), here.get(key), f"{path}.{key}" if path else key)
            if found is not None:
                return found
        return None
    return None if there == here else (path, there, here)
