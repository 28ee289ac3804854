"""A run: the parts that are done, kept in a folder as they come, and shared by several processes.

A part is what a model is asked once, a window of text or a prompt. What the parts mean, and the rows that are made of
them, is the tasks' part.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from ctxext.errors import ConfigError, CtxextError
from ctxext.evaluation.files import plain, write_bytes, write_json

SETTINGS, RECORDS, LOSSES, RESULTS, LOCK = "run.json", "records.jsonl", "losses.npy", "results.json", ".lock"
KEYS = "keys.json"
"""The key set of a LongPPL evaluation, see keysets.py."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """What came of one window or prompt: JSON-ready facts, and the losses of its tokens in nats, float32 ``[n]``.

    A part with ``error`` among its facts failed; it counts, and is tried again when the run is resumed.
    """

    facts: dict[str, Any]
    losses: NDArray[np.float32] | None = None

    @property
    def failed(self) -> bool:
        """Whether there is an error in place of a result."""
        return self.facts.get("error") is not None


class Run:
    """The parts of one evaluation by id: in memory, and in ``folder`` if one is given.

    Started by ``accelerate launch``, each process works on its share of the parts, and ``collect`` gives all of them to
    every process. A folder that several machines share is written by all of them.

    The folder holds ``run.json`` (the settings that decide what a part's result is), ``parts-<process>.jsonl`` while
    the run goes on, and at the end ``records.jsonl`` (a line for each part), ``losses.npy`` (float32, all losses one
    after the other; a record's ``losses`` says from where to where) and ``results.json``.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, resume: bool = False, overwrite: bool = False
    ) -> None:
        """Raise ConfigError for a folder that can't be written, holds other files, or a run (without ``resume``)."""
        self.folder = None if folder is None else Path(folder)
        self._resume, self._overwrite = resume, overwrite
        self._parts: dict[str, Part] = {}
        self._own: set[str] = set()
        self._reused = 0
        self._file: Any = None
        self._lock: FileLock | None = None
        if self.folder is None:
            if resume or overwrite:
                raise ConfigError("--resume and --overwrite are about a run's folder: give one with --output")
        elif is_main_process():
            _check_folder(self.folder, resume=resume, overwrite=overwrite)

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Start, or go on with what a run with the same ``settings`` has done.

        Raises:
            ConfigError: the folder holds a run with other settings; the first that differs is named.
        """
        if self.folder is None:
            return
        if is_main_process():
            self._lock = FileLock(self.folder / LOCK, timeout=0)
            try:
                self._lock.acquire()
            except Timeout:
                raise ConfigError(f"--output {self.folder}: another process is at work on this run") from None
            if self._overwrite:
                _clear(self.folder)
            self._prepare(plain(settings))
        wait_for_everyone()
        self._parts = _stored_parts(self.folder)
        self._reused = sum(1 for part in self._parts.values() if not part.failed)
        wait_for_everyone()
        self._file = (self.folder / f"parts-{process_index()}.jsonl").open("a", encoding="utf-8")

    @property
    def reused(self) -> int:
        """How many parts were there when the run began."""
        return self._reused

    def done(self, id_: str) -> bool:
        """Whether the part has its result already."""
        return id_ in self._parts and not self._parts[id_].failed

    def share(
        self, batches: Iterable[list[Item]], id_of: Callable[[Item], str], positions: Callable[[Item], int]
    ) -> list[list[Item]]:
        """The batches that are this process's to do, of those that aren't done.

        ``batches`` are all of them, in the same order in every process; ``id_of`` names an item's part, ``positions``
        is the length of its input. A batch is done again as a whole, because the last bits of a result may depend on
        what it is run with.
        """
        own = itertools.islice(batches, process_index(), None, process_count())
        return [batch for batch in own if not all(self.done(id_of(item)) for item in batch)]

    def add(self, id_: str, facts: Mapping[str, Any], losses: Any = None) -> None:
        """Keep a part, on disk before anything else happens."""
        part = Part(dict(plain(facts)), None if losses is None else np.asarray(losses, dtype=np.float32))
        self._parts[id_] = part
        self._own.add(id_)
        if self._file is not None:
            self._file.write(_line(id_, part))
            self._file.flush()

    def collect(self) -> dict[str, Part]:
        """The parts of all processes by id."""
        if process_count() > 1:
            from accelerate.utils import gather_object

            own = [(id_, self._parts[id_]) for id_ in sorted(self._own)]
            self._parts |= dict(gather_object(own))
        return self._parts

    def close(self) -> None:
        """Leave the folder as it is, to be gone on with later."""
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            self._lock.release()

    def finish(self, record: Mapping[str, Any], order: Sequence[str]) -> None:
        """Write records, losses and last the result; ``order`` is that of the parts, others follow by id."""
        if self.folder is None:
            return
        self._file.close()
        wait_for_everyone()
        if not is_main_process():
            return
        ordered = [*order, *sorted(set(self._parts) - set(order))]
        offset, lines, losses = 0, [], []
        for id_ in ordered:
            part = self._parts[id_]
            line = {"id": id_, **part.facts}
            if part.losses is not None:
                line["losses"] = [offset, offset + len(part.losses)]
                offset += len(part.losses)
                losses.append(part.losses)
            lines.append(json.dumps(line, allow_nan=False) + "\n")
        if losses:
            buffer = io.BytesIO()
            np.save(buffer, np.concatenate(losses))
            write_bytes(buffer.getvalue(), self.folder / LOSSES)
        write_bytes("".join(lines).encode(), self.folder / RECORDS)
        write_json(record, self.folder / RESULTS)
        for file in self.folder.glob("parts-*.jsonl"):
            file.unlink()
        assert self._lock is not None  # the main process holds it since begin()
        self._lock.release()
        (self.folder / LOCK).unlink(missing_ok=True)

    def _prepare(self, settings: dict[str, Any]) -> None:
        assert self.folder is not None  # begin() has checked
        path = self.folder / SETTINGS
        if path.exists():
            there = _read_json(path)
            if (difference := _difference(there, settings)) is not None:
                key, old, new = difference
                raise ConfigError(
                    f"--output {self.folder}: holds a run with {key} {old!r}, this one has {new!r}; "
                    "give another folder, or --overwrite"
                )
        else:
            write_json(settings, path)
        # One file, without the line that a killed process may have left unfinished.
        parts = _stored_parts(self.folder)
        write_bytes("".join(_line(id_, part) for id_, part in parts.items()).encode(), self.folder / "parts-0.jsonl")
        for file in self.folder.glob("parts-*.jsonl"):
            if file.name != "parts-0.jsonl":
                file.unlink()


class Planned(CtxextError):  # noqa: N818  # it ends a dry run, and is caught there
    """Not an error: a dry run has seen what it came for."""


class DryRun(Run):
    """Takes note of what would be run, and ends there.

    ``batches`` holds, for each batch, the input length of its windows or prompts in tokens.
    """

    def __init__(self) -> None:
        """Without a folder."""
        super().__init__()
        self.batches: list[list[int]] = []

    def share(
        self, batches: Iterable[list[Item]], id_of: Callable[[Item], str], positions: Callable[[Item], int]
    ) -> list[list[Item]]:
        """Note the batches. Raises Planned."""
        self.batches = [[positions(item) for item in batch] for batch in batches]
        raise Planned


def read_run(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Part]]:
    """The result of a finished run, and its parts by id.

    Raises:
        ConfigError: the folder holds no finished run.
    """
    folder = Path(folder)
    if not (folder / RESULTS).is_file():
        unfinished = (folder / SETTINGS).is_file()
        hint = "the run there isn't finished: go on with --resume" if unfinished else "no run is there"
        raise ConfigError(f"{folder}: {hint}")
    return _read_json(folder / RESULTS), _stored_parts(folder)


def process_count() -> int:
    """How many processes share the work: one, unless ``accelerate launch`` started more."""
    return int(_state().num_processes) if _launched() else 1


def process_index() -> int:
    """The number of this process among them."""
    return int(_state().process_index) if _launched() else 0


def is_main_process() -> bool:
    """Whether this process prints and writes results."""
    return process_index() == 0


def wait_for_everyone() -> None:
    """Wait until every process is here."""
    if _launched():
        _state().wait_for_everyone()


def local_device() -> torch.device | None:
    """The accelerator that ``accelerate launch`` gave to this process; None for a process on its own."""
    return _state().device if _launched() else None


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _state() -> Any:
    from accelerate import PartialState

    return PartialState()  # a singleton, which starts torch's process group when first made


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise ConfigError("--resume goes on with a run, --overwrite throws it away: give one of them")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder}: this is a file; give the name of a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--output {folder}: can't be written: {error.strerror}") from None
    if names and SETTINGS not in names:
        raise ConfigError(f"--output {folder}: holds other files ({names[0]}, ...): give an empty folder or a new name")
    if names and not resume and not overwrite:
        raise ConfigError(f"--output {folder}: holds a run: go on with --resume, or start again with --overwrite")


def _clear(folder: Path) -> None:
    for pattern in (SETTINGS, RECORDS, LOSSES, RESULTS, KEYS, "parts-*.jsonl", "*.png", "*.yaml", "*.md", "*.csv"):
        for file in folder.glob(pattern):
            file.unlink()


def _stored_parts(folder: Path) -> dict[str, Part]:
    """Parts of a finished run and of a running one; an unfinished last line is left out."""
    parts: dict[str, Part] = {}
    if (folder / RECORDS).is_file():
        losses = np.load(folder / LOSSES) if (folder / LOSSES).is_file() else np.empty(0, dtype=np.float32)
        for line in (folder / RECORDS).read_text(encoding="utf-8").splitlines():
            facts = json.loads(line)
            span = facts.pop("losses", None)
            parts[facts.pop("id")] = Part(facts, None if span is None else losses[span[0] : span[1]])
    for file in sorted(folder.glob("parts-*.jsonl")):
        for text in file.read_bytes().split(b"\n")[:-1]:  # what follows the last line end was never finished
            facts = json.loads(text)
            encoded = facts.pop("losses", None)
            values = None if encoded is None else np.frombuffer(base64.b64decode(encoded), dtype="<f4")
            parts[facts.pop("id")] = Part(facts, values)
    return parts


def _line(id_: str, part: Part) -> str:
    line = {"id": id_, **part.facts}
    if part.losses is not None:
        line["losses"] = base64.b64encode(part.losses.astype("<f4").tobytes()).decode()
    return json.dumps(line, allow_nan=False) + "\n"


def _read_json(path: Path) -> dict[str, Any]:
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
