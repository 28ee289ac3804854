"""Passkey prompts: five-digit keys hidden at set depths in filler text of an exact number of tokens.

How they are asked and scored is passkey.py's part; documents with a key in them are what ``ctxext search`` reads.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import random
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from ctxext.data import Document, resolve_bos, tokenize
from ctxext.errors import ConfigError
from ctxext.evaluation.prompts import Prompt, common_prefix, forced_answer, most_units

# The prompt, version passkey-v1, in the manner of Landmark Attention (https://arxiv.org/abs/2305.16300). Changing a
# word here changes every result: raise the version. No filler sentence is longer than 20 characters, so that even a
# tokenizer with one token per character fills a prompt to within 24 tokens of its length.
PROMPT_VERSION = "passkey-v1"
INSTRUCTION = "A pass key is hidden inside a lot of irrelevant text. Find it and memorize it. I will ask you for it."
FILLER = ("The grass is green.", "The sky is blue.", "The sun is warm.", "The road is long.", "We walk on and on.")
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
# With more than one key each belongs to somebody.
NAMED_NEEDLE = "The pass key of {name} is {key}. Remember it. {key} is the pass key of {name}."
NAMED_QUESTION = "What is the pass key of {name}? The pass key of {name} is"
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack", "Kate", "Leo", "Maria")

ANSWER_ROOM = 8
"""Tokens that the model may generate beyond those of the key."""
SLACK = 24
"""A prompt with its room for the answer is less than this many tokens shorter than the length asked for."""


class Needle(NamedTuple):
    """A key, the sentence that says it, its place among the filler (0 start, 1 end), and the question for it."""

    key: str
    sentence: str
    depth: float
    question: str = QUESTION


class Filler(NamedTuple):
    """Sentences to hide keys in, from a text of that name."""

    name: str
    sentences: tuple[str, ...]


def text_filler(name: str, text: str) -> Filler:
    """The sentences of a text, or its lines where it has none; white space within them becomes single spaces."""
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n+", text))
    return Filler(name, tuple(part for part in parts if part))


def build_prompt(
    tokenizer: Any,
    *,
    length: int,
    depth: float,
    trial: int,
    seed: int,
    bos: Literal["auto", "always", "never"] = "auto",
    distractors: int = 0,
    filler: Filler | None = None,
    needle: bool = True,
) -> Prompt:
    """The prompt of one trial: a function of its arguments and the tokenizer alone.

    The prompt and its room for the answer (the key's tokens and ``ANSWER_ROOM``) take at most ``length`` tokens, and
    more than ``length - SLACK``. The needle stands at the sentence boundary nearest to ``depth`` of the filler's
    tokens: 0 is right after the instruction, 1 right before the question. With ``distractors``, as many keys of other
    names stand at depths of their own. Without ``needle`` the key isn't there, and can't be known.

    Raises:
        ConfigError: not even the prompt without filler fits, or there is too little filler.
    """
    depth = float(depth)
    identity = f"{seed}|{length}|{depth}|{trial}"
    asked, others, question = _needles(identity, depth, distractors, filler)
    key = asked.key
    bos_id = resolve_bos(tokenizer, bos)
    prefix = [] if bos_id is None else [bos_id]
    max_new_tokens = len(tokenize(tokenizer, key)) + ANSWER_ROOM
    room = length - max_new_tokens - len(prefix)
    haystack = _Haystack(tokenizer, [asked, *others] if needle else others, question)

    bare = tokenize(tokenizer, haystack.text([]))
    if len(bare) > room:
        raise ConfigError(
            f"length {length} is too short for a passkey prompt: this tokenizer needs at least "
            f"{length - room + len(bare)} tokens, answer included"
        )
    sentences, ids = haystack.fill(room, bare) if filler is None else haystack.fill_with(filler, room)
    if room - len(ids) >= SLACK:
        raise ConfigError(f"this tokenizer can't fill a passkey prompt to within {SLACK} tokens of length {length}")
    details: dict[str, Any] = {"depth": depth, "trial": trial, "key": key}
    if needle:
        start = common_prefix(ids, tokenize(tokenizer, haystack.before(asked, sentences)))
        filler_before, total = haystack.filler_before(asked, sentences, start), len(ids) - len(bare)
        details |= {
            "needle_start": len(prefix) + start,
            "depth_realised": filler_before / total if total else 0.0,
            "distance": len(ids) - start,
        }
    forced_ids, forced_start = forced_answer(tokenizer, haystack.text(sentences), ids, f" {key}", prefix)
    variant = "" if not distractors else f"|{distractors} distractors"
    variant += "" if filler is None else f"|filler {filler.name}"
    variant += "" if needle else "|no needle"
    return Prompt(
        id=identity + variant,
        task="passkey" if needle else "no needle",
        length=length,
        index=trial,
        input_ids=prefix + ids,
        answers=(key,),
        forced_ids=forced_ids,
        forced_start=forced_start,
        max_new_tokens=max_new_tokens,
        details=details,
    )


class KeyedText(NamedTuple):
    """A document with keys hidden in it, and the questions for them with their answers at the end.

    ``text_tokens`` counts the tokens before the first question, ``answers`` says which tokens each answer is made of,
    as begin and end.
    """

    document: Document
    text_tokens: int
    answers: tuple[tuple[int, int], ...]


def hide_keys(
    tokenizer: Any,
    document: Document,
    *,
    length: int,
    depths: Sequence[float],
    seed: int,
    bos: Literal["auto", "always", "never"] = "auto",
) -> KeyedText | None:
    """The beginning of a document as a passkey prompt with its answers, in ``length`` positions, BOS included.

    One key stands at each of ``depths`` (0 start, 1 end); with more than one, each belongs to somebody, and all are
    asked for in turn. As many words of the document are taken as fit, so that it may be a word shorter than ``length``;
    between them nothing is changed. The keys are a function of seed, document, length and depths, and no numbers of the
    document.

    Returns None for a document of fewer than ``length`` tokens.

    Raises:
        ConfigError: not even the prompt without text fits, or there are more depths than names.
    """
    if len(depths) > len(NAMES):
        raise ConfigError(f"{len(depths)} depths are more than there are names for keys: at most {len(NAMES)}")
    if len(tokenize(tokenizer, document.text)) < length:
        return None
    identity = f"{seed}|{document.id}|{length}|{[float(depth) for depth in depths]}"
    first, others, _ = _needles(identity, depths[0], len(depths) - 1, Filler(document.id, (document.text,)))
    needles = [needle._replace(depth=depth) for needle, depth in zip((first, *others), depths, strict=True)]
    placed = sorted(needles, key=lambda needle: needle.depth)
    words = re.findall(r"\S+\s*|\s+", document.text)

    def body(n: int) -> str:
        cuts = [0, *(round(needle.depth * n) for needle in placed), n]
        parts = ["".join(words[begin:end]) for begin, end in itertools.pairwise(cuts)]
        sentences = [*(needle.sentence for needle in placed), ""]
        return "\n\n".join(filter(None, [INSTRUCTION, *itertools.chain(*zip(parts, sentences, strict=True))]))

    def ending() -> list[str]:
        """Text and answers by turns."""
        asked = [("\n\n" if i == 0 else ".\n\n") + needle.question for i, needle in enumerate(needles)]
        return list(itertools.chain(*((question, f" {n.key}") for question, n in zip(asked, needles, strict=True))))

    def tokens(text: str) -> list[int]:
        return tokenize(tokenizer, text)

    room = length - (resolve_bos(tokenizer, bos) is not None)
    n = most_units(lambda n: len(tokens(body(n) + "".join(ending()))), room)
    if n < 1:
        raise ConfigError(f"length {length} is too short for a text with {len(depths)} keys in it; give a longer one")
    texts = list(itertools.accumulate([body(n), *ending()]))
    whole = tokens(texts[-1])
    ends = [common_prefix(tokens(text), whole) for text in texts]
    return KeyedText(Document(document.id, texts[-1]), ends[0], tuple(zip(ends[1::2], ends[2::2], strict=True)))


def _needles(identity: str, depth: float, distractors: int, filler: Filler | None) -> tuple[Needle, list[Needle], str]:
    """The needle that is asked for, the others, and the question."""
    digest = hashlib.sha256(identity.encode()).hexdigest()
    first = 10_000 + int(digest, 16) % 90_000
    draw = random.Random(digest)
    # A key that the filler happens to hold could be found without its needle.
    taken = set() if filler is None else set(re.findall("[0-9]{5}", " ".join(filler.sentences)))
    keys = itertools.chain([first], iter(lambda: draw.randrange(10_000, 100_000), -1))
    free: list[str] = []
    while len(free) <= distractors:
        key = str(next(keys))
        if key not in taken:
            free.append(key)
            taken.add(key)
    if not distractors:
        return Needle(free[0], NEEDLE.format(key=free[0]), depth), [], QUESTION
    names = draw.sample(NAMES, 1 + distractors)
    sentences = [NAMED_NEEDLE.format(name=name, key=key) for name, key in zip(names, free, strict=True)]
    questions = [NAMED_QUESTION.format(name=name) for name in names]
    others = [
        Needle(key, text, draw.random(), question)
        for key, text, question in zip(free[1:], sentences[1:], questions[1:], strict=True)
    ]
    return Needle(free[0], sentences[0], depth, questions[0]), others, questions[0]


class _Haystack:
    """The text of a prompt around its filler."""

    def __init__(self, tokenizer: Any, needles: Sequence[Needle], question: str) -> None:
        self._tokenizer, self._needles, self._question = tokenizer, needles, question
        heads = [" ".join([INSTRUCTION, *_sentences(n)]) for n in range(len(FILLER), 2 * len(FILLER) + 1)]
        totals = [len(tokenize(tokenizer, head)) for head in heads]
        # What a sentence costs where others stand before it.
        self._costs = dict(zip(FILLER, (max(1, b - a) for a, b in itertools.pairwise(totals)), strict=True))

    def text(self, sentences: Sequence[str]) -> str:
        """The prompt with ``sentences`` as its filler."""
        return " ".join([INSTRUCTION, *self._parts(sentences), self._question])

    def before(self, needle: Needle, sentences: Sequence[str]) -> str:
        """The prompt up to ``needle``."""
        parts = self._parts(sentences)
        return " ".join([INSTRUCTION, *parts[: parts.index(needle.sentence)]])

    def filler_before(self, needle: Needle, sentences: Sequence[str], start: int) -> int:
        """Tokens of filler before ``needle``, which starts at ``start``: neither instruction nor other needles."""
        parts, head = self._parts(sentences), len(tokenize(self._tokenizer, INSTRUCTION))
        others = {other.sentence for other in self._needles} & set(parts[: parts.index(needle.sentence)])
        needles = sum(len(tokenize(self._tokenizer, f"{INSTRUCTION} {other}")) - head for other in others)
        return start - head - needles

    def fill(self, room: int, bare: list[int]) -> tuple[list[str], list[int]]:
        """The most sentences of ``FILLER`` with which the prompt takes at most ``room`` tokens, and its tokens.

        The first guess is right for tokenizers that treat a sentence the same wherever it stands; whole prompts are
        tokenised to be sure, and the guess is corrected if it was off. ``bare`` are the tokens without filler.
        """
        costs = [self._costs[sentence] for sentence in FILLER]
        best, ids, too_many = 0, bare, math.inf
        guess = _affordable(costs, 0, room - len(bare))
        while best < guess < too_many:
            attempt = self._tokens(_sentences(guess))
            spare = room - len(attempt)
            if spare >= 0:
                best, ids = guess, attempt
                guess += _affordable(costs, guess, spare)
            else:
                too_many = guess
                guess -= max(1, -spare // max(costs))
        return _sentences(best), ids

    def fill_with(self, filler: Filler, room: int) -> tuple[list[str], list[int]]:
        """The most sentences of ``filler`` that fit, and of ``FILLER`` behind them; and the prompt's tokens."""
        counts = self._tokenizer([f" {sentence}" for sentence in filler.sentences], add_special_tokens=False).input_ids
        self._costs |= {sentence: len(ids) for sentence, ids in zip(filler.sentences, counts, strict=True)}
        if len(self._tokens(filler.sentences)) <= room:
            raise ConfigError(f"filler {filler.name!r} is used up before {room} tokens: give a longer text")
        n = most_units(lambda n: len(self._tokens(filler.sentences[:n])), room)
        first = list(filler.sentences[:n])
        sentences = first + _sentences(most_units(lambda m: len(self._tokens(first + _sentences(m))), room))
        return sentences, self._tokens(sentences)

    def _tokens(self, sentences: Sequence[str]) -> list[int]:
        return tokenize(self._tokenizer, self.text(sentences))

    def _parts(self, sentences: Sequence[str]) -> list[str]:
        """Filler and needles in order; each needle stands at the boundary nearest to its depth."""
        offsets = [0, *itertools.accumulate(self._costs[sentence] for sentence in sentences)]
        placed = sorted(
            ((_nearest(offsets, needle.depth * offsets[-1]), needle) for needle in self._needles), key=_first
        )
        parts: list[str] = []
        done = 0
        for boundary, needle in placed:
            parts += [*sentences[done:boundary], needle.sentence]
            done = boundary
        return parts + list(sentences[done:])


def _nearest(offsets: Sequence[int], wanted: float) -> int:
    """The index of the offset nearest to ``wanted``, the first of two."""
    i = bisect.bisect_left(offsets, wanted)
    around = range(max(0, i - 1), min(i + 1, len(offsets)))
    return min(around, key=lambda j: abs(offsets[j] - wanted))


def _first(pair: tuple[int, Needle]) -> int:
    return pair[0]


def _sentences(n: int) -> list[str]:
    return list(itertools.islice(itertools.cycle(FILLER), n))


def _affordable(costs: Sequence[int], first: int, tokens: int) -> int:
    """How many sentences, from number ``first`` on, cost no more than ``tokens`` together."""
    totals = itertools.accumulate(itertools.islice(itertools.cycle(costs), first % len(costs), None))
    return sum(1 for _ in itertools.takewhile(lambda total: total <= tokens, totals))
