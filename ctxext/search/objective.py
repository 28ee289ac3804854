"""How a setting is judged: the loss of text far into documents, of keys hidden in them, and within the trained length.

A document is read once: it is a passkey prompt with text as its filler, so that one pass gives all three.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxext.data import Document, dataset_id
from ctxext.errors import DataError
from ctxext.evaluation.haystack import KeyedText, hide_keys
from ctxext.evaluation.perplexity import PerplexityResult, evaluate_perplexity
from ctxext.evaluation.records import TokenLosses
from ctxext.evaluation.runs import Run
from ctxext.evaluation.tasks import section_documents

if TYPE_CHECKING:
    from ctxext.config import SearchText, SearchWeights

PARTS = ("text", "passkey", "trained")
"""What is judged: the tokens before each length, the answers, and the tokens within the trained length."""

Sums = dict[str, tuple[float, int]]
"""For each of ``PARTS``, the loss of a document's tokens in nats, and their number."""


@dataclass(frozen=True)
class Texts:
    """Documents with keys, and what they were made of."""

    name: str
    originals: tuple[Document, ...]
    keyed: tuple[KeyedText, ...]
    lengths: tuple[int, ...]
    bos: Any

    @property
    def longest(self) -> int:
        """Positions of each document."""
        return max(self.lengths)


def read_texts(section: SearchText, tokenizer: Any, lengths: Sequence[int], depths: Sequence[float]) -> Texts:
    """The documents of a section that are long enough, each with a key at each of ``depths``.

    Raises:
        DataError: none is long enough, or one is there twice.
        ConfigError: the lengths are too short for so many keys.
    """
    originals: list[Document] = []
    seen: dict[str, str] = {}
    keyed: list[KeyedText] = []
    documents = itertools.islice(section_documents(section, section.dataset), section.skip_documents, None)
    for document in documents:
        found = hide_keys(tokenizer, document, length=max(lengths), depths=depths, seed=section.seed, bos=section.bos)
        if found is None:
            continue
        if (twin := seen.setdefault(document.text, document.id)) != document.id:
            raise DataError(
                f"{dataset_id(section.dataset)}: documents {twin} and {document.id} are the same text, which would "
                "count twice; leave one of them out"
            )
        originals.append(document)
        keyed.append(found)
        if len(keyed) == section.max_documents:
            break
    name = dataset_id(section.dataset, revision=section.dataset_revision)
    if not keyed:
        raise DataError(
            f"{name}: no document after the first {section.skip_documents} has {max(lengths)} tokens; ask for shorter "
            "lengths, or give longer documents"
        )
    return Texts(f"{name} with keys (seed {section.seed})", tuple(originals), tuple(keyed), tuple(lengths), section.bos)


def read(
    model: Any,
    tokenizer: Any,
    texts: Texts,
    keyed: Sequence[KeyedText] | None = None,
    *,
    length: int | None = None,
    run: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PerplexityResult:
    """The losses of documents (default: all), each from one pass over its first ``length`` positions (default: all)."""
    documents = [text.document for text in (texts.keyed if keyed is None else keyed)]
    # They differ by a word's tokens in length, and all of them count.
    return evaluate_perplexity(
        model,
        tokenizer,
        documents,
        lengths=[length or texts.longest],
        min_tokens=2,
        bos=texts.bos,
        run=run,
        progress=progress,
    )


def sums(record: TokenLosses, keyed: KeyedText, lengths: Sequence[int], last: int, trained: int) -> Sums:
    """What a document's losses come to, by part.

    ``text``: the ``last`` tokens before each of ``lengths``, or before the questions. ``passkey``: the answers.
    ``trained``: the tokens with fewer than ``trained`` positions before them. Questions and answers are no text.
    """
    text = record.token < keyed.text_tokens
    answer = np.zeros(len(record), dtype=bool)
    for begin, end in keyed.answers:
        answer |= (record.token >= begin) & (record.token < end)
    late = np.zeros(len(record), dtype=bool)
    end = int(record.context[text].max(initial=0)) + 1
    for length in (min(length, end) for length in lengths):
        late |= (record.context >= length - last) & (record.context < length)
    chosen = {
        "text": text & late,
        "passkey": answer,
        "trained": text & (record.context < trained),
    }
    return {part: (float(record.loss[mask].sum(dtype=np.float64)), int(mask.sum())) for part, mask in chosen.items()}


def parts(documents: Sequence[Sums], plain: Sequence[float]) -> dict[str, float]:
    """Mean losses over documents in nats a token; ``trained`` is the excess over the plain model's, never below 0.

    ``plain`` holds the plain model's loss within the trained length, of these documents first.
    """
    totals = {part: [sum(values) for values in zip(*(one[part] for one in documents), strict=True)] for part in PARTS}
    (text, text_tokens), (answers, answer_tokens), (inside, inside_tokens) = (totals[part] for part in PARTS)
    lost = (inside - sum(plain[: len(documents)])) / inside_tokens
    return {"text": text / text_tokens, "passkey": answers / answer_tokens, "trained": max(0.0, lost)}


def objective(found: Mapping[str, float], weights: SearchWeights) -> float:
    """The weighted sum that a search makes small."""
    return weights.text * found["text"] + weights.passkey * found["passkey"] + weights.trained * found["trained"]
