"""The state of a fine-tune on disk: whole or not there at all, whenever the process ends.

A run's folder holds ``run.json`` (its settings), ``log.jsonl`` (a line for each step and evaluation), the last
``checkpoint-<step>`` folders, and at the end the result.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ctxext.blocks import Place
from ctxext.errors import CtxextError
from ctxext.files import plain, write_bytes, write_json
from ctxext.folder import SETTINGS, RunFolder, read_json
from ctxext.processes import is_main_process, wait_for_everyone

LOG, PROGRESS, WEIGHTS = "log.jsonl", "progress.json", "trained.safetensors"
RESULTS = ("model", "adapter")
PICTURE, TRACKED = "training.png", "ctxext"
"""The log as a picture, and the folder that trackers write to."""
_UNFINISHED = (".*.tmp", ".*.old")
"""What a killed process may leave of a folder that it was about to write (here, and in files.py)."""
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""Where each process holds a part of the weights only."""


class Checkpoints:
    """The folder of one fine-tune, seen from every process; the main one writes what isn't each one's own.

    Raises:
        FolderError: as :class:`ctxext.folder.RunFolder` does.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resume: bool, overwrite: bool, keep: int = 2) -> None:
        self.folder, self._keep = Path(folder), keep
        self._claim: RunFolder | None = None
        if is_main_process():
            self._claim = RunFolder(
                folder,
                "fine-tune",
                resume=resume,
                overwrite=overwrite,
                begun=_begun,
                clear=_clear,
                unfinished=_UNFINISHED,
            )

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Take the folder. Raises FolderError for a run with other settings, or one that is being written."""
        if self._claim is not None:
            self._claim.begin(settings)
            _remove_unfinished(self.folder)
        wait_for_everyone()

    def close(self) -> None:
        """Let go of the folder."""
        if self._claim is not None:
            self._claim.close()

    def last(self) -> Path | None:
        """The last checkpoint."""
        found = _steps(self.folder)
        return found[max(found)] if found else None

    def last_good(self) -> str:
        """What an error says of the last checkpoint."""
        last = self.last()
        return "no checkpoint has been written yet" if last is None else f"the last checkpoint is {last}"

    def load(self, accelerator: Accelerator, root: torch.nn.Module) -> dict[str, Any]:
        """Bring back weights, optimiser and random numbers of the last checkpoint; its progress, or nothing.

        From here on the accelerator saves only what is trained.
        """
        if accelerator.distributed_type not in SHARDED:
            accelerator.register_save_state_pre_hook(_save_trained)
            accelerator.register_load_state_pre_hook(_load_trained)
        last = self.last()
        progress: dict[str, Any] = {}
        if last is not None:
            accelerator.load_state(str(last))
            progress = read_json(last / PROGRESS)
            progress["place"] = Place(**progress["place"])
        if is_main_process():
            _cut_log(self.folder / LOG, progress.get("step", 0))
        wait_for_everyone()
        return progress

    def save(self, accelerator: Accelerator, root: torch.nn.Module, progress: Mapping[str, Any]) -> None:
        """Write a checkpoint and remove the oldest. Raises CtxextError if it can't be written."""
        final = self.folder / f"checkpoint-{progress['step']:06d}"
        trained = sum(parameter.numel() for parameter in root.parameters() if parameter.requires_grad)
        with self.writing(final, 12 * trained) as temporary:  # weights and the optimiser's two moments in fp32
            accelerator.save_state(str(temporary))
            if is_main_process():
                write_json(progress, temporary / PROGRESS)
        if is_main_process():
            found = _steps(self.folder)
            for step in sorted(found)[: -self._keep]:
                _remove(found[step])
        wait_for_everyone()

    @contextmanager
    def writing(self, final: Path, size: int = 0) -> Iterator[Path]:
        """A folder to write to, which becomes ``final`` when all is written, and is removed if that fails.

        Args:
            final: within the run's folder; what is there is replaced.
            size: bytes that will be written, about.

        Raises:
            CtxextError: they don't fit, or can't be written.
        """
        temporary = self.folder / f".{final.name}.tmp"
        try:
            if is_main_process():
                free = shutil.disk_usage(self.folder).free
                if free < size:
                    raise OSError(f"it takes {size / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free")
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            wait_for_everyone()
            yield temporary
            wait_for_everyone()
            if is_main_process():
                _sync(temporary)
                if final.exists():
                    _remove(final)
                os.replace(temporary, final)
                _sync_folder(self.folder)
            wait_for_everyone()
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap what the system says
            if isinstance(error, CtxextError):
                raise
            shutil.rmtree(temporary, ignore_errors=True)
            reason = getattr(error, "strerror", None) or str(error)
            raise CtxextError(
                f"{final} can't be written: {reason}; {self.last_good()}; make room and go on with --resume"
            ) from error

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append a line to the log. Raises CtxextError if it can't be written."""
        try:
            with (self.folder / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(entry), allow_nan=False) + "\n")
        except OSError as error:
            raise CtxextError(
                f"{self.folder / LOG} can't be written: {error.strerror}; {self.last_good()}; make room and go on with "
                "--resume"
            ) from None


def read_log(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's log, in order; one that was never finished is left out."""
    file = Path(folder) / LOG
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def _cut_log(file: Path, step: int) -> None:
    """Remove what was logged after ``step``, and will be logged again."""
    kept = [entry for entry in read_log(file.parent) if step and entry["step"] <= step]
    write_bytes("".join(json.dumps(entry) + "\n" for entry in kept).encode(), file)


def _trained(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in root.named_parameters() if parameter.requires_grad}


def _save_trained(models: list[torch.nn.Module], weights: list[Any], folder: str) -> None:
    """Instead of all weights of the model, one copy of those that are trained."""
    weights.clear()
    if is_main_process():
        found = {name: value.detach().cpu().contiguous() for name, value in _trained(models[0]).items()}
        save_file(found, Path(folder) / WEIGHTS)


def _load_trained(models: list[torch.nn.Module], folder: str) -> None:
    """Counterpart of ``_save_trained``."""
    parameters = _trained(models.pop())
    stored = load_file(Path(folder) / WEIGHTS)
    if stored.keys() != parameters.keys():
        raise CtxextError(f"{folder} holds other weights than those that are trained now: it is of another run")
    with torch.no_grad():
        for name, value in stored.items():
            parameters[name].copy_(value)


def _steps(folder: Path) -> dict[int, Path]:
    """Checkpoints by step."""
    found = [path for path in folder.glob("checkpoint-*") if (path / PROGRESS).is_file()]
    return {int(path.name.removeprefix("checkpoint-")): path for path in found}


def _begun(folder: Path) -> bool:
    return bool(_steps(folder)) or any((folder / name).is_dir() for name in RESULTS)


def _clear(folder: Path) -> None:
    """Remove what fine-tunes write, and nothing else; the settings last, without which the folder isn't a run's."""
    _remove_unfinished(folder)
    written = (*RESULTS, PICTURE, TRACKED, LOG, SETTINGS)
    for path in (*_steps(folder).values(), *(folder / name for name in written)):
        _remove(path)


def _remove_unfinished(folder: Path) -> None:
    for pattern in _UNFINISHED:
        for path in folder.glob(pattern):
            _remove(path)


def _remove(path: Path) -> None:
    """A folder disappears under its name at once, so that nobody takes half of it for the whole."""
    if path.is_dir():
        hidden = path.with_name(f".{path.name}.old.tmp")
        shutil.rmtree(hidden, ignore_errors=True)
        os.replace(path, hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Have the system write everything in the folder to the disk, so that its new name can't get there first."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
