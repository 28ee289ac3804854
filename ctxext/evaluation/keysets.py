"""Key sets: the parts of documents that only long context predicts, as character spans that any tokenizer can use.

Which tokens become keys, and the perplexity of them, is longppl.py's part.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from ctxext.data import Document
from ctxext.errors import ConfigError, DataError, nearest
from ctxext.evaluation.runs import KEYS
from ctxext.files import write_json

FORMAT, VERSION = "ctxext key set", 1

Overlap = Literal["contained", "any"]


@dataclass(frozen=True)
class DocumentKeys:
    """The key spans of one document: characters ``begin`` to ``end - 1`` of its text, in order, none touching another.

    ``sha256`` is that of the text in UTF-8; ``id`` only serves messages.
    """

    id: str
    sha256: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class KeySet:
    """Key spans of documents, and how they were found.

    Attributes:
        documents: the documents that were read; those without a key too.
        evaluator: the model that found the keys.
        tokenizer: its tokenizer.
        length: positions of its long pass, from the start of each document (start token included).
        short: positions of its short windows (K in the paper).
        stride: tokens from one short window to the next.
        alpha: nats that long context adds to the log-probability of a key token, at least.
        beta: log-probability in nats that a key token has with long context, at least.
    """

    documents: tuple[DocumentKeys, ...]
    evaluator: str
    tokenizer: str
    length: int
    short: int
    stride: int
    alpha: float
    beta: float

    @cached_property
    def hash(self) -> str:
        """The sha256 of texts and spans: the same for two key sets that pick the same characters."""
        content = sorted((document.sha256, document.spans) for document in self.documents)
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def spans_of(self, document: Document) -> NDArray[np.int64]:
        """The key spans of ``document``, ``[n, 2]``.

        Raises:
            DataError: the key set has no document with this text; says whether it has one with this id.
        """
        spans = self._by_text.get(text_hash(document.text))
        if spans is not None:
            return np.array(spans, dtype=np.int64).reshape(-1, 2)
        if any(document.id == other.id for other in self.documents):
            raise DataError(
                f"document {document.id!r}: its text differs from the one that the keys were found in (by sha256); "
                "give the same revision of the data set, or make a new key set"
            )
        raise DataError(
            f"document {document.id!r} is not in the key set ({len(self.documents)} documents); give the data set that "
            "it was made from, or make a new key set"
        )

    @cached_property
    def _by_text(self) -> dict[str, tuple[tuple[int, int], ...]]:
        return {document.sha256: document.spans for document in self.documents}


def text_hash(text: str) -> str:
    """The sha256 of ``text`` in UTF-8, hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def write_keys(keys: KeySet, path: str | os.PathLike[str]) -> None:
    """Write ``keys`` as JSON, whole or not at all. Raises ConfigError if the file can't be written."""
    write_json({"format": FORMAT, "version": VERSION, "hash": keys.hash, **asdict(keys)}, path)


def read_keys(path: str | os.PathLike[str]) -> KeySet:
    """The key set in a file, or in the folder of a run that used it.

    Raises:
        ConfigError: no key set is there, it is of an unknown version, or it was changed since it was written.
    """
    path = Path(path)
    file = path / KEYS if path.is_dir() else path
    record = _read(file)
    if record.get("format") != FORMAT:
        raise ConfigError(f"{file}: this is no key set; give a file that --write-keys wrote")
    if record.get("version") != VERSION:
        raise ConfigError(
            f"{file}: version {record.get('version')!r} of the key set format is unknown (this is {VERSION}); "
            "update ctxext, or make a new key set"
        )
    try:
        keys = TypeAdapter(KeySet).validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file}: {where}: {first['msg'].lower()}; make a new key set") from None
    for document in keys.documents:
        _check_spans(file, document)
    if record.get("hash") != keys.hash:
        raise ConfigError(
            f"{file}: its documents and spans have the hash {keys.hash[:12]}, not {str(record.get('hash'))[:12]} as it "
            "says: it was changed by hand or cut; get the original, or make a new key set"
        )
    return keys


def _read(file: Path) -> Mapping[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: can't be read ({error.strerror}); give the file or run folder of a key set"
        ) from None
    except ValueError:  # not UTF-8, or not JSON
        raise ConfigError(f"{file}: this is not JSON; give a file that --write-keys wrote") from None
    return record if isinstance(record, dict) else {}


def _check_spans(file: Path, document: DocumentKeys) -> None:
    reached = -1
    for begin, end in document.spans:
        if not reached < begin < end:
            raise ConfigError(
                f"{file}: document {document.id!r} has the span {begin}-{end} after one that ends at {reached}: spans "
                "must be ordered, apart and not empty; make a new key set"
            )
        reached = end


def require_fast(tokenizer: Any) -> None:
    """Raise ConfigError for a tokenizer that doesn't tell where in the text its tokens are."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which doesn't tell where in the text a token is: LongPPL "
            "needs a fast one (AutoTokenizer with use_fast=True, or a checkpoint with a tokenizer.json)"
        )


def require_overlap(overlap: str) -> None:
    """Raise ConfigError unless ``overlap`` is contained or any."""
    if overlap not in get_args(Overlap):
        near = nearest(overlap, get_args(Overlap))
        hint = f": did you mean {near!r}?" if near else ""
        raise ConfigError(f"overlap {overlap!r} is not contained or any{hint}")


def token_spans(tokenizer: Any, text: str) -> NDArray[np.int64]:
    """Where each token of ``text`` is in it, as its tokenizer tells: begin and end in characters, ``[n, 2]``.

    A character in several tokens belongs to the span of each. Tokens of no character (a blank that the tokenizer puts
    in front) have an empty span.

    Raises:
        ConfigError: the tokenizer is a slow one, or gives no token a place.
    """
    require_fast(tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
    spans = np.array(encoded.offset_mapping, dtype=np.int64).reshape(-1, 2)
    if len(spans) and not (spans[:, 1] > spans[:, 0]).any():
        raise ConfigError(
            f"{type(tokenizer).__name__} gives every token an empty place in the text: LongPPL needs its offsets; "
            "update tokenizers, or load another tokenizer.json"
        )
    return spans


def merge(spans: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """The same characters in as few spans as possible: in order, none empty, none touching another."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted((int(begin), int(end)) for begin, end in spans if begin < end):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def in_keys(
    spans: NDArray[np.int64], keys: NDArray[np.int64], text: str, *, overlap: Overlap = "contained"
) -> NDArray[np.bool_]:
    """Which tokens of ``text`` are key tokens, ``[n]``.

    Blanks at either end of a token don't count, for tokenizers differ in which word a blank goes with; a token of
    blanks alone is taken as it is. Tokens of no character are never keys. Of a character in several tokens, all are
    keys or none: a key set can't tell them apart.

    Args:
        spans: of the tokens, ``[n, 2]``.
        keys: key spans, ``[m, 2]``, in order and apart.
        text: what both refer to.
        overlap: ``contained`` wants all of a token's characters in one key span, ``any`` at least one.
    """
    if not len(keys):
        return np.zeros(len(spans), dtype=np.bool_)
    begins, ends = _trimmed(spans, text)
    if overlap == "contained":
        nearest_key = np.searchsorted(keys[:, 0], begins, side="right") - 1
        inside = keys[nearest_key, 1] >= ends
    else:
        nearest_key = np.searchsorted(keys[:, 0], ends, side="left") - 1
        inside = keys[nearest_key, 1] > begins
    chosen: NDArray[np.bool_] = inside & (nearest_key >= 0) & (begins < ends)
    return chosen


def _trimmed(spans: NDArray[np.int64], text: str) -> Sequence[NDArray[np.int64]]:
    """Begin and end of each token, without the blanks at its ends."""
    solid = np.fromiter((not character.isspace() for character in text), dtype=np.bool_, count=len(text))
    at = np.arange(len(text))
    following = np.minimum.accumulate(np.where(solid, at, len(text))[::-1])[::-1]  # first non-blank from here
    preceding = np.maximum.accumulate(np.where(solid, at + 1, 0))  # end of the last non-blank up to here
    begins = np.append(following, len(text))[spans[:, 0]]
    ends = np.insert(preceding, 0, 0)[spans[:, 1]]
    blank = begins >= ends
    return np.where(blank, spans[:, 0], begins), np.where(blank, spans[:, 1], ends)
