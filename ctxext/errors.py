"""Errors that a user can cause and can repair; the command line prints each as one line and exits with status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CtxextError(Exception):
    """Base of every error that ctxext raises on purpose."""


class ConfigError(CtxextError, ValueError):
    """A setting is wrong: an unknown key, a value out of range, lengths that contradict each other."""


class PatchError(CtxextError, RuntimeError):
    """A model can't be patched or unpatched as asked, or a patch would not act."""


class UnsupportedModelError(PatchError):
    """The model's architecture, or its present scaling, is not one that ctxext can extend."""


class ModelLoadError(CtxextError, RuntimeError):
    """A checkpoint can't be found or read."""


class DataError(CtxextError, RuntimeError):
    """A data set can't be found or read, or holds nothing that the evaluation can use."""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word``, or None if none is close."""
    matches = difflib.get_close_matches(str(word), list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None
