"""A command's answer, as its user sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ran(NamedTuple):
    """Exit status, and what was printed."""

    status: int
    out: str
    err: str


Run = Callable[..., Ran]
