"""Synthetic long-context tasks in the manner of RULER, without external data: retrieval, tracing, counting.

Task definitions follow "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(https://arxiv.org/abs/2404.06654); kv is the JSON task of HELMET (https://arxiv.org/abs/2410.02694). Scores aren't
comparable with published ones: wording, words and noise are our own, no prompt shows a worked example first (RULER's vt
and cwe do), niah_multikey, niah_multivalue and niah_multiquery hide their needles in noise instead of essays, the list
of cwe is not numbered, and the prompts end in the beginning of the answer, for models without a chat template.

A prompt is a function of its arguments and the tokenizer alone. All that is random is drawn before its size is known;
the size only decides how much of it is used.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ctxext.data import resolve_bos, tokenize
from ctxext.errors import ConfigError, nearest
from ctxext.evaluation.prompts import Prompt, common_prefix, forced_answer, most_units
from ctxext.evaluation.scoring import require_whole
from ctxext.evaluation.words import Stream, numbers, uuids, words

# Changing a word, a count or the order of draws below changes every result: raise the version.
PROMPT_VERSION = "ruler-v1"
# No sentence is longer than 24 characters, so that even one token per character leaves little room unused.
NOISE = (
    "Rain fell on the roof.",
    "The lamp stayed lit.",
    "A dog slept nearby.",
    "Bread lay on the table.",
    "The clock kept ticking.",
    "Nobody was in a hurry.",
    "Wind moved the leaves.",
    "The kettle was warm.",
)
NIAH_HEAD = (
    "The text below gives codes to some words. Remember every code, because one or more of them will be asked for at "
    "the end.\n"
)
NEEDLE = "A code of {key} is {value}."
ASK_ONE = "\nQuestion: What is the code of {keys} in the text above? Answer: The code of {keys} is"
ASK_VALUES = "\nQuestion: What are all the codes of {keys} in the text above? Answer: The {count} codes of {keys} are"
ASK_KEYS = (
    "\nQuestion: What are the codes of {keys} in the text above? Answer: In the same order, the codes of {keys} are"
)
VT_HEAD = (
    "The text below sets variables, one to a number and others to the value of another variable. Keep track of what "
    "each variable holds.\n"
)
VT_TAIL = "\nQuestion: Which variables hold {value} in the end? Answer: The {count} variables that hold {value} are"
CWE_HEAD = (
    "The list below repeats some words far more often than others. Keep count of how often each word occurs in it.\n"
)
CWE_TAIL = (
    "\nQuestion: Which {count} words occur most often in the list above? Answer: The {count} words that occur most "
    "often are"
)
FWE_HEAD = (
    "The text below is written in a code of made-up words, with dots between them. Keep count of how often each word "
    "occurs.\n"
)
FWE_TAIL = (
    "\nQuestion: Leaving the dots aside, which {count} words occur most often in the text above? Answer: The {count} "
    "words that occur most often are"
)
KV_HEAD = (
    "The JSON object below holds pairs of a key and a value. The value of one of the keys will be asked for at the "
    "end.\n{"
)
KV_TAIL = '}}\nThe pair in the object above whose value is asked for is "{key}":'
COUNTS = {3: "three", 4: "four", 5: "five", 10: "ten"}

VALUE_DIGITS = 7
VT_DIGITS = 5
VT_HOPS = 4
DOTS = "..."
LEAST_OTHERS = 3
"""Needles or pairs besides the one asked for in even the shortest haystack that is made of them."""
CWE_WORDS = 10
CWE_SHORT = 4096
"""Below this many tokens, cwe repeats words 6 times and once instead of 30 and 3 times, as RULER's code does."""
FWE_WORDS = 3
FWE_LEAST = 96
"""Entries of the shortest fwe text: the three words then occur 16, 7 and 4 times, and no other more than twice."""

ANSWER_ROOM = 8
"""Tokens that the model may generate beyond those of the whole answer."""


@dataclass(frozen=True)
class Draft:
    """A prompt whose size is still open: all that is drawn, and how the text reads with ``n`` units.

    The text is ``head``, the parts of ``body(n)`` with ``joint`` between them, and ``tail``. ``needles`` are the parts
    whose place is recorded; each occurs once. ``continuation`` is the whole answer as it would follow the text.
    """

    head: str
    body: Callable[[int], list[str]]
    tail: str
    answers: tuple[str, ...]
    continuation: str
    needles: tuple[str, ...] = ()
    joint: str = " "
    facts: dict[str, Any] = field(default_factory=dict)

    def text(self, n: int) -> str:
        """The prompt with ``n`` units."""
        return self.head + self.joint.join(self.body(n)) + self.tail


@dataclass(frozen=True)
class Draws:
    """The source of all that is random in the prompt named ``identity``, for ``length`` tokens."""

    identity: str
    length: int

    def rng(self, name: str) -> random.Random:
        """A generator of its own for each ``name``, so that what one use takes doesn't shift another."""
        return random.Random(int(hashlib.sha256(f"{self.identity}|{name}".encode()).hexdigest(), 16))

    def depths(self, n: int) -> list[float]:
        """``n`` places between 0 (the start of the haystack) and 1 (its end), ascending."""
        rng = self.rng("depths")
        return sorted(rng.random() for _ in range(n))


@dataclass(frozen=True)
class Task:
    """One task: what it asks for, what one unit of its haystack is, and how a prompt is drawn."""

    summary: str
    unit: str
    draft: Callable[[Draws], Draft]


def build_prompt(
    tokenizer: Any,
    *,
    task: str,
    length: int,
    index: int,
    seed: int = 0,
    bos: Literal["auto", "always", "never"] = "auto",
) -> Prompt:
    """Prompt number ``index`` of ``task``: a function of its arguments and the tokenizer alone.

    BOS, prompt and ``max_new_tokens`` (the answer's tokens and ``ANSWER_ROOM``) take at most ``length`` tokens, and
    one more unit of haystack (``TASKS[task].unit``) wouldn't fit. ``details`` hold ``units``, and

    - for tasks with needles (statements in vt, the pair in kv) a list ``needles``, in the order of the text: ``start``,
      the index in ``input_ids`` of the first token with a part of the needle, ``depth``, the share of the haystack's
      tokens that precede it, and ``asked``, whether it holds an answer;
    - for cwe and fwe ``counts``, how often each answer occurs in the haystack.

    Raises ConfigError for an unknown task, arguments out of range, or a length that not even the shortest prompt fits.
    """
    _check(task, length, index, seed)
    identity = f"{task}|{seed}|{length}|{index}"
    draft = TASKS[task].draft(Draws(identity, length))
    bos_id = resolve_bos(tokenizer, bos)
    start = [] if bos_id is None else [bos_id]
    max_new_tokens = len(tokenize(tokenizer, draft.continuation)) + ANSWER_ROOM
    room = length - max_new_tokens - len(start)
    bare = len(tokenize(tokenizer, draft.text(0)))
    if bare > room:
        raise ConfigError(
            f"length {length} is too short for a prompt of task {task}: with this tokenizer it takes at least "
            f"{length - room + bare} tokens, answer included; give a larger length or leave the task out"
        )
    units = most_units(lambda n: len(tokenize(tokenizer, draft.text(n))), room)
    text = draft.text(units)
    ids = tokenize(tokenizer, text)
    forced_ids, forced_start = forced_answer(tokenizer, text, ids, draft.continuation, start)
    return Prompt(
        id=identity,
        task=task,
        length=length,
        index=index,
        input_ids=start + ids,
        answers=draft.answers,
        forced_ids=forced_ids,
        forced_start=forced_start,
        max_new_tokens=max_new_tokens,
        details={"units": units, **draft.facts, **_places(tokenizer, draft, units, ids, len(start))},
    )


def score(continuation: str, answers: Sequence[str]) -> tuple[float, float]:
    """The shares of ``answers`` found in ``continuation``, upper and lower case alike: contained, and strict.

    Contained is RULER's score, which finds 123 in 91234 too. Strict asks for a character that is neither letter nor
    digit, or the text's end, on both sides of the answer. Raises ConfigError if there are no answers.
    """
    if not answers or not all(answers):
        raise ConfigError(f"answers must hold at least one string and no empty ones, got {list(answers)}")
    text, wanted = continuation.lower(), [answer.lower() for answer in answers]
    contained = sum(answer in text for answer in wanted)
    strict = sum(re.search(rf"(?<![^\W_]){re.escape(answer)}(?![^\W_])", text) is not None for answer in wanted)
    return contained / len(wanted), strict / len(wanted)


def _check(task: str, length: int, index: int, seed: int) -> None:
    if task not in TASKS:
        near = nearest(task, TASKS)
        hint = f": did you mean {near!r}?" if near else ""
        raise ConfigError(f"{task!r} is not a RULER task ({', '.join(TASKS)}){hint}")
    for name, value, least in (("length", length, 1), ("index", index, 0), ("seed", seed, 0)):
        require_whole(name, value, least)


def _places(tokenizer: Any, draft: Draft, units: int, ids: list[int], shift: int) -> dict[str, Any]:
    """Where the needles stand among ``ids``, ``shift`` added to their start; without needles the answers' counts."""
    parts = draft.body(units)
    if not draft.needles:
        return {"counts": [parts.count(answer) for answer in draft.answers]}

    def tokens_before(part: int) -> int:
        before = draft.head + draft.joint.join(parts[:part])
        # A blank between two parts is the beginning of the second one's first token.
        before += draft.joint.rstrip() if 0 < part < len(parts) else ""
        return common_prefix(ids, tokenize(tokenizer, before))

    first, last = tokens_before(0), tokens_before(len(parts))
    needles = []
    for needle in draft.needles:
        start = tokens_before(parts.index(needle))
        asked = any(answer in needle for answer in draft.answers)
        needles.append({"start": shift + start, "depth": (start - first) / (last - first), "asked": asked})
    return {"needles": needles}


def _needles_in_noise(draws: Draws, *, keys: int = 1, values: int = 1, ask_all: bool = False) -> Draft:
    """``keys`` words with ``values`` codes each, in noise; one word's codes are asked for, or those of all."""
    names = Stream(words(draws.rng("words"))).first(keys)
    codes = Stream(numbers(draws.rng("values"), VALUE_DIGITS)).first(keys * values)
    pairs = list(zip(names * values, codes, strict=True))
    draws.rng("order").shuffle(pairs)
    asked = names if ask_all else names[:1]
    answers = tuple(code for name in asked for key, code in pairs if key == name)
    needles = [NEEDLE.format(key=key, value=value) for key, value in pairs]
    tail = ASK_VALUES if values > 1 else ASK_KEYS if ask_all else ASK_ONE
    return Draft(
        head=NIAH_HEAD,
        body=_among(_noise(draws), needles, draws.depths(len(needles))),
        tail=tail.format(keys=_listed(asked), count=COUNTS.get(values)),
        answers=answers,
        continuation=" " + ", ".join(answers),
        needles=tuple(needles),
    )


def _needle_in_needles(draws: Draws) -> Draft:
    """One code asked for, in a haystack of nothing but codes of other words."""
    pairs = zip(words(draws.rng("words")), numbers(draws.rng("values"), VALUE_DIGITS), strict=False)
    key, value = next(pairs)
    needle = NEEDLE.format(key=key, value=value)
    others = Stream(NEEDLE.format(key=key, value=value) for key, value in pairs)
    return Draft(
        head=NIAH_HEAD,
        body=_among(others, [needle], draws.depths(1), least=LEAST_OTHERS),
        tail=ASK_ONE.format(keys=key),
        answers=(value,),
        continuation=f" {value}",
        needles=(needle,),
    )


def _variable_tracking(draws: Draws) -> Draft:
    """A number, and a chain of variables that pass it on, their statements in order in noise."""
    names = [word.upper() for word in Stream(words(draws.rng("words"))).first(VT_HOPS + 1)]
    value = next(numbers(draws.rng("values"), VT_DIGITS))
    needles = [f"VAR {names[0]} = {value}."]
    needles += [f"VAR {later} = VAR {earlier}." for earlier, later in itertools.pairwise(names)]
    return Draft(
        head=VT_HEAD,
        body=_among(_noise(draws), needles, draws.depths(len(needles))),
        tail=VT_TAIL.format(value=value, count=COUNTS[len(names)]),
        answers=tuple(names),
        continuation=" " + ", ".join(names),
        needles=tuple(needles),
    )


def _common_words(draws: Draws) -> Draft:
    """Ten words that occur often among others that don't; a unit is one other word with all its occurrences."""
    often, rarely = (6, 1) if draws.length < CWE_SHORT else (30, 3)
    vocabulary = Stream(words(draws.rng("words")))
    common = vocabulary.first(CWE_WORDS)
    order = Stream(_endless(draws.rng("order")))

    def body(n: int) -> list[str]:
        others = vocabulary.first(2 * CWE_WORDS + n)[CWE_WORDS:]
        return _shuffled([*common * often, *(word for word in others for _ in range(rarely))], order)

    return Draft(
        head=CWE_HEAD,
        body=body,
        tail=CWE_TAIL.format(count=COUNTS[CWE_WORDS]),
        answers=tuple(common),
        continuation=" " + ", ".join(common),
        facts={"often": often, "rarely": rarely},
    )


def _frequent_words(draws: Draws) -> Draft:
    """Coded words, the k-th as often as 1 / k^2 (Zeta with alpha 2), the first of them dots; a unit is one entry."""
    vocabulary = Stream(words(draws.rng("words")))
    ranks = Stream(_zeta_ranks())
    order = Stream(_endless(draws.rng("order")))

    def body(n: int) -> list[str]:
        drawn = ranks.first(n + FWE_LEAST)
        spelled = [DOTS, *vocabulary.first(max(drawn) - 1)]
        return _shuffled([spelled[rank - 1] for rank in drawn], order)

    answers = tuple(vocabulary.first(FWE_WORDS))
    return Draft(
        head=FWE_HEAD,
        body=body,
        tail=FWE_TAIL.format(count=COUNTS[FWE_WORDS]),
        answers=answers,
        continuation=" " + ", ".join(answers),
    )


def _key_value(draws: Draws) -> Draft:
    """A JSON object whose keys and values are uuids; the value of one key is asked for."""
    drawn = uuids(draws.rng("uuids"))
    key, value = next(drawn), next(drawn)
    pair = f'"{key}": "{value}"'
    others = Stream(f'"{key}": "{next(drawn)}"' for key in drawn)
    return Draft(
        head=KV_HEAD,
        body=_among(others, [pair], draws.depths(1), least=LEAST_OTHERS),
        tail=KV_TAIL.format(key=key),
        answers=(value,),
        continuation=f' "{value}"',
        needles=(pair,),
        joint=", ",
    )


TASKS: dict[str, Task] = {
    "niah_single": Task("one code in noise", "a sentence of noise", _needles_in_noise),
    "niah_multikey": Task("one of 4 codes in noise", "a sentence of noise", partial(_needles_in_noise, keys=4)),
    "niah_needle": Task("one code among nothing but codes", "a sentence with a code", _needle_in_needles),
    "niah_multivalue": Task("all 4 codes of a word", "a sentence of noise", partial(_needles_in_noise, values=4)),
    "niah_multiquery": Task(
        "the codes of 4 words", "a sentence of noise", partial(_needles_in_noise, keys=4, ask_all=True)
    ),
    "vt": Task("5 variables along a chain of 4 assignments", "a sentence of noise", _variable_tracking),
    "cwe": Task("the 10 words that are repeated most", "a word with its repetitions", _common_words),
    "fwe": Task("the 3 most frequent of coded words", "a word", _frequent_words),
    "kv": Task("the value of a key in JSON", "a pair of uuids", _key_value),
}


def _among(
    haystack: Stream[str], needles: Sequence[str], depths: Sequence[float], *, least: int = 0
) -> Callable[[int], list[str]]:
    """The body with ``least`` + n parts of ``haystack``, and each needle at the boundary of its depth (ascending)."""

    def body(n: int) -> list[str]:
        parts = haystack.first(n + least)
        boundaries = [int(depth * (len(parts) + 1)) for depth in depths]
        for boundary, needle in reversed(list(zip(boundaries, needles, strict=True))):
            parts.insert(boundary, needle)
        return parts

    return body


def _noise(draws: Draws) -> Stream[str]:
    rng = draws.rng("noise")
    return Stream(rng.choice(NOISE) for _ in itertools.count())


def _endless(rng: random.Random) -> Iterator[float]:
    while True:
        yield rng.random()


def _shuffled(entries: list[str], order: Stream[float]) -> list[str]:
    """``entries`` sorted by the numbers drawn for them: one more entry leaves the order of the others as it was."""
    return [entry for _, entry in sorted(zip(order.first(len(entries)), entries, strict=True))]


def _zeta_ranks() -> Iterator[int]:
    """Ranks such that, up to any point, rank k has come up 1 / k^2 times as often as rank 1, rounded down.

    These are the expected counts of a Zeta distribution with alpha 2: rank k comes up for every multiple of k^2.
    """
    due = [(1, 1)]
    while True:
        when, rank = heapq.heappop(due)
        yield rank
        heapq.heappush(due, (when + rank**2, rank))
        if when == rank**2:
            heapq.heappush(due, ((rank + 1) ** 2, rank + 1))


def _listed(names: Sequence[str]) -> str:
    """The names as in a sentence: commas between them, and "and" before the last."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
