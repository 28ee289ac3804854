"""A question about a long text, built by tokens: the prompt, what a right answer holds, and the search for its size.

What the text is about is decided by the tasks (passkey.py, ruler.py); how a model answers is answering.py's part.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxext.data import tokenize


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids; a function of the task's settings and the tokenizer alone.

    ``id`` names it among all prompts of a task, whatever else is run. ``length`` is the number of tokens that prompt
    and answer may take. ``answers`` are the strings that the continuation is searched for. ``forced_ids`` spell the
    whole answer after ``input_ids[:forced_start]``: most tokenizers leave the prompt as it is when an answer is put
    behind it, then ``forced_start`` is the prompt's length. ``details`` are JSON-ready facts for the records.
    """

    id: str
    task: str
    length: int
    index: int
    input_ids: list[int]
    answers: tuple[str, ...]
    forced_ids: list[int]
    forced_start: int
    max_new_tokens: int
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Of the token ids: equal for two methods that were asked the same."""
        return hashlib.sha256(" ".join(map(str, self.input_ids)).encode()).hexdigest()


def forced_answer(
    tokenizer: Any, text: str, ids: Sequence[int], answer: str, start: Sequence[int] = ()
) -> tuple[list[int], int]:
    """The token ids that spell ``answer`` behind the prompt ``text``, and where they start among the prompt's.

    The two are tokenised together, as a model would have read them in training. ``ids`` are those of ``text`` alone,
    ``start`` the ids before it (BOS), which count in the position.
    """
    together = tokenize(tokenizer, text + answer)
    common = common_prefix(ids, together)
    return together[common:], len(start) + common


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def most_units(tokens: Callable[[int], int], room: int) -> int:
    """The most units of text with which a prompt takes at most ``room`` tokens; -1 if it doesn't fit without any.

    ``tokens(n)`` is the token count with ``n`` units; it must not fall as ``n`` rises. It is called a dozen times
    where all units cost about the same, and some dozens at most.
    """
    bare = tokens(0)
    if bare > room:
        return -1
    unit = max(1.0, (tokens(16) - bare) / 16)
    guess = int(0.9 * (room - bare) / unit)
    low, step = (guess, 1 + guess // 16) if tokens(guess) <= room else (0, guess)
    while tokens(low + step) <= room:
        low, step = low + step, 2 * step
    return low + bisect.bisect_right(range(1, step), room, key=lambda n: tokens(low + n))
