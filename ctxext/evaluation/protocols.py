"""Perplexity protocols: which tokens of a text are scored, each with which tokens before it.

"Perplexity at 8k" is a different number in every one of them. Here they are pure arithmetic on token counts; what is
fed to the model and how losses are averaged is decided in perplexity.py and records.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ctxext.errors import ConfigError

PROTOCOLS = {
    "prefix": 1,  # one window per document, from its start
    "sliding": 1,  # every token once, in overlapping windows
    "stream": 1,  # all documents as one text, a window every so many tokens, all of it scored
    "rolling": 1,  # every token once, in windows side by side
    "same-target": 1,  # the last tokens of each document, with ever more text before them
}
"""The version of each: raised when its numbers change for the same text."""

BY_WINDOW = ("sliding", "stream")
"""Protocols that are given windows and a stride; the others are given lengths."""


class Window(NamedTuple):
    """One forward pass: text tokens ``begin:end`` are its input, of which ``target_begin:end`` are scored.

    ``started``: a start token (BOS) goes before them.
    """

    begin: int
    end: int
    target_begin: int
    started: bool

    @property
    def positions(self) -> int:
        """Length of the input, start token included."""
        return self.end - self.begin + self.started

    @property
    def n_targets(self) -> int:
        """Number of scored tokens."""
        return self.end - self.target_begin

    @property
    def context(self) -> int:
        """Positions before the first scored token."""
        return self.target_begin - self.begin + self.started


def prefix_window(n_tokens: int, length: int, *, bos: bool) -> Window:
    """The first ``length`` positions of a text, BOS included; without BOS the first token is not scored."""
    return Window(0, min(n_tokens, length - bos), 0 if bos else 1, bos)


def sliding_windows(n_tokens: int, window: int, stride: int, *, bos: bool) -> Iterator[Window]:
    """The windows that score a text of ``n_tokens`` tokens, each token once.

    ``window`` counts input positions, BOS included. Window k begins at token k * stride and scores what the windows
    before it left over: everything in the first, ``stride`` tokens with at least ``window - stride`` positions before
    them in the later ones. The last window is moved left until it is full, if the text is long enough, so that its
    targets have no less context than the others. Without BOS the text's first token has no context, and is never
    scored; for the same reason the stride is at most ``window - 1``.
    """
    if not 1 <= stride < window:
        raise ConfigError(f"stride {stride} must be between 1 and {window - 1} for a window of {window} positions")
    capacity = window - bos
    scored = 0 if bos else 1
    begin = 0
    while scored < n_tokens:
        end = min(begin + capacity, n_tokens)
        yield Window(max(0, end - capacity), end, scored, bos)
        scored, begin = end, begin + stride


def stream_windows(n_tokens: int, length: int, stride: int) -> Iterator[Window]:
    """A window of ``length`` tokens every ``stride`` tokens, all of it scored but its first token, without BOS.

    A token is scored in up to length / stride windows, with another context in each. As in LongLoRA's and DCA's
    scripts, windows that don't fit are left out, and so is the last one that does.

    Reference: Chen et al., LongLoRA (https://arxiv.org/abs/2309.12307), the evaluation script.
    """
    for begin in list(range(0, n_tokens - length, stride))[:-1]:
        yield Window(begin, begin + length, begin + 1, False)


def rolling_windows(n_tokens: int, length: int) -> Iterator[Window]:
    """Windows side by side, which score ``length`` tokens each from as many inputs; a start token before the first.

    The first token of each later window is predicted from the last one of the window before, alone. The last window
    reaches back until its input is full. The last token of each is a target only, so ``positions`` is ``length + 1``.

    Reference: ``loglikelihood_rolling`` of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).
    """
    scored = 0
    while scored < n_tokens:
        end = min(scored + length, n_tokens)
        yield Window(0, end, 0, True) if scored == 0 else Window(end - length - 1, end, scored, False)
        scored = end


def target_window(n_tokens: int, length: int, targets: int, *, bos: bool) -> Window:
    """The last ``targets`` tokens of a text, predicted in an input of its last tokens, ``length`` positions in all."""
    return Window(n_tokens - (length - bos), n_tokens, n_tokens - targets, bos)


def default_stride(window: int) -> int:
    """256 for windows up to 8192 positions (less where 256 doesn't fit), an eighth of the window above."""
    return min(256, window - 1) if window <= 8192 else window // 8
