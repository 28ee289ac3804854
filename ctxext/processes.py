"""The processes that share the work, where a launcher has started more than one.

Started by ``accelerate launch`` or ``torchrun``. On CPUs ``accelerate launch`` starts several only as the file
``configs/accelerate/cpu-2proc.yaml`` says.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch


def process_count() -> int:
    """How many processes share the work: one, unless a launcher started more."""
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
    """The accelerator that the launcher gave to this process; None for a process on its own."""
    return _state().device if _launched() else None


def only_cpus() -> bool:
    """Whether the processes run on CPUs, because there is nothing else or the launcher says so."""
    from accelerate.utils import parse_flag_from_env

    return bool(parse_flag_from_env("ACCELERATE_USE_CPU")) or not torch.accelerator.is_available()


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _state() -> Any:
    from accelerate import PartialState

    # A singleton, which starts torch's process group when first made. Where there are only CPUs it must be told, or it
    # takes each process for a single one; and who is done would by default wait ten minutes for the others.
    return PartialState(cpu=only_cpus(), timeout=timedelta(days=30))
