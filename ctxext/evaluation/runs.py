"""A run: the parts that are done, kept in a folder as they come, and shared by several processes.

A part is what a model is asked once, a window of text or a prompt. What the parts mean, and the rows that are made of
them, is the tasks' part.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctxext.errors import ConfigError, CtxextError
from ctxext.files import plain, write_bytes, write_json
from ctxext.folder import SETTINGS, RunFolder, read_json
from ctxext.processes import is_main_process, process_count, process_index, wait_for_everyone

RECORDS, LOSSES, RESULTS = "records.jsonl", "losses.npy", "results.json"
KEYS = "keys.json"
"""The key set of a LongPPL evaluation, see keysets.py."""
_WRITTEN = (RESULTS, RECORDS, LOSSES, "config.yaml", KEYS, "parts-0.jsonl", SETTINGS)
_UNFINISHED = tuple(f".{name}.????????.tmp" for name in _WRITTEN)
"""What a killed process may leave of a file that it was about to write (files.py)."""

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

    Started by ``accelerate launch`` or ``torchrun`` (on CPUs only the latter starts several), each process works on its
    share of the parts, and ``collect`` gives all of them to every process. A folder that several machines share is
    written by all of them.

    The folder holds ``run.json`` (the settings that decide what a part's result is), ``parts-<process>.jsonl`` while
    the run goes on, and at the end ``records.jsonl`` (a line for each part), ``losses.npy`` (float32, all losses one
    after the other; a record's ``losses`` says from where to where) and ``results.json``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        shared: bool = True,
    ) -> None:
        """Raise ConfigError for a folder that can't be written, holds other files, or a run (without ``resume``).

        Without ``shared`` every process does all parts, as a model needs whose weights are spread over the processes.
        """
        self._shared = shared
        self.folder = None if folder is None else Path(folder)
        self._parts: dict[str, Part] = {}
        self._own: set[str] = set()
        self._awaited = False
        self._reused = 0
        self.documents = 0
        """How many texts the parts are of, where they are of texts."""
        self._file: Any = None
        self._claim: RunFolder | None = None
        if self.folder is None:
            if resume or overwrite:
                raise ConfigError("--resume and --overwrite are about a run's folder: give one with --output")
        elif is_main_process():
            self._claim = RunFolder(
                self.folder,
                "evaluation",
                resume=resume,
                overwrite=overwrite,
                begun=_has_parts,
                clear=_clear,
                unfinished=_UNFINISHED,
            )

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Start, or go on with what a run with the same ``settings`` has done.

        Raises:
            ConfigError: the folder holds a run with other settings; the first that differs is named.
        """
        if self.folder is None:
            return
        if self._claim is not None:
            self._claim.begin(settings)
            self._join_parts()
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
        self,
        batches: Iterable[list[Item]],
        id_of: Callable[[Item], str],
        positions: Callable[[Item], int],
        *,
        at_once: int | None = None,
    ) -> list[list[Item]]:
        """The batches that are this process's to do, of those that aren't done.

        ``batches`` are all of them, in the same order in every process; ``id_of`` names an item's part, ``positions``
        is the length of its input, ``at_once`` how many of a batch are run together (None: all). A batch is done again
        as a whole, because the last bits of a result may depend on what it is run with, or after.
        """
        if self.folder is not None and self._file is None:
            raise ConfigError(f"the run in {self.folder} keeps nothing before its begin(): call that first")
        left = [batch for batch in batches if not all(self.done(id_of(item)) for item in batch)]
        if left and self.folder is not None and is_main_process():
            (self.folder / RESULTS).unlink(missing_ok=True)  # this run, now asked for more, is not finished
        self._awaited = self._shared and process_count() > 1
        return left[process_index() :: process_count()] if self._shared else left

    def add(self, id_: str, facts: Mapping[str, Any], losses: Any = None) -> None:
        """Keep a part, on disk before anything else happens."""
        part = Part(dict(plain(facts)), None if losses is None else np.asarray(losses, dtype=np.float32))
        self._parts[id_] = part
        self._own.add(id_)
        if self._file is not None:
            self._file.write(_line(id_, part))
            self._file.flush()

    def collect(self) -> dict[str, Part]:
        """The parts of all processes by id.

        Raises:
            CtxextError: another process has abandoned its share.
        """
        if self._awaited:
            self._parts |= self._gather([(id_, self._parts[id_]) for id_ in sorted(self._own)])
        return self._parts

    def abandon(self, error: BaseException) -> None:
        """Tell the processes that wait for this one's parts that an error ended them; they have the same to tell."""
        if self._awaited:
            with suppress(CtxextError):
                self._gather([(f"process {process_index()}", str(error) or type(error).__name__)])

    def _gather(self, own: list[tuple[str, Any]]) -> dict[str, Part]:
        from accelerate.utils import gather_object

        self._awaited = False
        everyones: list[tuple[str, Any]] = gather_object(own)
        for name, said in everyones:
            if isinstance(said, str):
                raise CtxextError(f"{name} has failed: {said}")
        return dict(everyones)

    def finish(self, record: Mapping[str, Any], order: Sequence[str]) -> None:
        """Write records, losses and last the result; ``order`` is that of the parts, others follow by id."""
        if self.folder is None:
            return
        self._file.close()
        wait_for_everyone()
        if is_main_process():
            self._write(record, [*dict.fromkeys(order), *sorted(set(self._parts) - set(order))])
        self.close()

    def close(self) -> None:
        """Let go of the folder, where what is done stays; ``finish`` has done so."""
        if self._file is not None:
            self._file.close()
        if self._claim is not None:
            self._claim.close()

    def _write(self, record: Mapping[str, Any], ordered: Sequence[str]) -> None:
        assert self.folder is not None  # finish() has checked
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
        for pattern in ("parts-*.jsonl", *_UNFINISHED):
            for file in self.folder.glob(pattern):
                file.unlink()

    def _join_parts(self) -> None:
        assert self.folder is not None  # begin() has checked
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
        self.at_once = 1

    def share(
        self,
        batches: Iterable[list[Item]],
        id_of: Callable[[Item], str],
        positions: Callable[[Item], int],
        *,
        at_once: int | None = None,
    ) -> list[list[Item]]:
        """Note the batches. Raises Planned."""
        self.batches = [[positions(item) for item in batch] for batch in batches]
        self.at_once = max(map(len, self.batches)) if at_once is None else at_once
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
    return read_json(folder / RESULTS), _stored_parts(folder)


def _has_parts(folder: Path) -> bool:
    """Whether anything would be lost with the run; a run that stopped before its first part is as good as none."""
    finished = any((folder / name).is_file() for name in (RECORDS, RESULTS))
    return finished or any(file.stat().st_size for file in folder.glob("parts-*.jsonl"))


def _clear(folder: Path) -> None:
    """Remove what runs write, and nothing else; the settings last, without which the folder isn't a run's."""
    pictures = [f"{task}.png" for task in ("perplexity", "positions", "passkey", "ruler")]
    for pattern in (*pictures, "parts-*.jsonl", *_UNFINISHED, *_WRITTEN):
        for file in folder.glob(pattern):
            file.unlink()


def _stored_parts(folder: Path) -> dict[str, Part]:
    """Parts of a finished run and of a running one; lines that were never finished are left out."""
    parts = _finished_parts(folder) if (folder / RECORDS).is_file() else {}
    for file in sorted(folder.glob("parts-*.jsonl")):
        for text in file.read_bytes().split(b"\n")[:-1]:  # what follows the last line end was never finished
            try:
                facts = json.loads(text)
            except ValueError:  # the disk was full, or the machine lost power: this part is run again
                continue
            encoded = facts.pop("losses", None)
            values = None if encoded is None else np.frombuffer(base64.b64decode(encoded), dtype="<f4")
            parts[facts.pop("id")] = Part(facts, values)
    return parts


def _finished_parts(folder: Path) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    try:
        losses = np.load(folder / LOSSES) if (folder / LOSSES).is_file() else np.empty(0, dtype=np.float32)
        records = [json.loads(line) for line in (folder / RECORDS).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{folder}: the run's records can't be read: {error}; start again with --overwrite") from None
    for facts in records:
        span = facts.pop("losses", None)
        if span is not None and span[1] > len(losses):
            raise ConfigError(
                f"{folder}: {LOSSES} holds {len(losses)} losses, {RECORDS} speaks of {span[1]}: one of them was "
                "changed or removed; put it back, or start again with --overwrite"
            )
        parts[facts.pop("id")] = Part(facts, None if span is None else losses[slice(*span)])
    return parts


def _line(id_: str, part: Part) -> str:
    line = {"id": id_, **part.facts}
    if part.losses is not None:
        line["losses"] = base64.b64encode(part.losses.astype("<f4").tobytes()).decode()
    return json.dumps(line, allow_nan=False) + "\n"
