"""LongPPL: perplexity of the tokens that only long context predicts, the same ones for every model.

Losses come from perplexity.py; where key tokens are in the text, and their file, is keysets.py's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxext.data import Document
from ctxext.errors import ConfigError, DataError
from ctxext.evaluation.keysets import (
    DocumentKeys,
    KeySet,
    Overlap,
    in_keys,
    merge,
    require_fast,
    require_overlap,
    text_hash,
    token_spans,
    write_keys,
)
from ctxext.evaluation.perplexity import PerplexityResult, evaluate_perplexity
from ctxext.evaluation.records import TokenLosses, summarise
from ctxext.evaluation.runs import KEYS, Run
from ctxext.evaluation.scoring import bare_model, require_whole
from ctxext.evaluation.statistics import Estimate, clustered_mean, exponential
from ctxext.models import model_id
from ctxext.patching import active_patch
from ctxext.processes import is_main_process

VERSION = 1
"""Raised when the numbers change for the same text."""

FEW_TOKENS, FEW_DOCUMENTS = 500, 10
"""With fewer key tokens or documents with one, a result is marked as insufficient."""


def long_short_difference(long: Sequence[TokenLosses], short: Sequence[TokenLosses]) -> list[NDArray[np.float64]]:
    """Log-probability with long context less that with short context, in nats (LSD in the paper).

    One array for each record of ``long``, with an element for each of its scores; NaN where ``short`` has no score of
    that token. Exactly 0 for a token that has no more context in ``long``, where rounding would be all there is.

    Reference: Fang et al., What is Wrong with Perplexity for Long-context Language Modeling?
    (https://arxiv.org/abs/2410.23771), Eq. 2.

    Raises:
        ConfigError: the records are of different documents, or one has a token twice.
    """
    by_document = {record.document: record for record in short}
    if {record.document for record in long} != set(by_document) or not len(long) == len(short) == len(by_document):
        raise ConfigError(
            f"losses with long context ({len(long)} documents) and with short context ({len(short)}) must be of the "
            "same documents, each once; score the same ones"
        )
    return [_difference(record, by_document[record.document]) for record in long]


def _difference(long: TokenLosses, short: TokenLosses) -> NDArray[np.float64]:
    for record in (long, short):
        if len(np.unique(record.token)) < len(record):
            raise ConfigError(
                f"document {record.document!r} has a token scored twice: use a protocol that does it once"
            )
    difference = np.full(len(long), np.nan)
    _, here, there = np.intersect1d(long.token, short.token, assume_unique=True, return_indices=True)
    gain = short.loss[there].astype(np.float64) - long.loss[here]
    difference[here] = np.where(long.context[here] > short.context[there], gain, 0.0)
    return difference


def key_tokens(
    long: Sequence[TokenLosses], short: Sequence[TokenLosses], *, alpha: float = 2.0, beta: float = -2.0
) -> list[TokenLosses]:
    """The scores of ``long`` that are of key tokens, by document.

    A token is key if long context adds more than ``alpha`` nats to its log-probability, and brings that above ``beta``.
    The first token of a document never is one. The paper's values are 2 and -2.

    Raises:
        ConfigError: as ``long_short_difference`` does.
    """
    differences = long_short_difference(long, short)
    return [
        record.where((difference > alpha) & (-record.loss > beta) & (record.token > 0))
        for record, difference in zip(long, differences, strict=True)
    ]


def long_perplexity(keys: Sequence[TokenLosses], scored: Sequence[TokenLosses]) -> dict[str, Any]:
    """LongPPL of ``keys``, the scores of key tokens, out of all ``scored`` ones, as JSON-ready values.

    ``perplexity`` (LongPPL) is the exponential of the mean loss over all key tokens, ``ci95`` its interval over
    documents; these and what else ``summarise`` gives are of key tokens. ``share`` is the share of key tokens.
    ``insufficient`` says that there are too few to conclude anything. ``nll_all`` and ``perplexity_all`` are of all
    tokens. ``compatible`` holds LongPPL as the paper's script has it: the mean of the documents' values, weighted by
    their key tokens.
    """
    row, everything = summarise(keys), summarise(scored)
    tokens, total = row["tokens"], everything["tokens"]
    means = [(len(record), float(record.loss.mean(dtype=np.float64))) for record in keys if len(record)]
    values = [exponential(nll) for _, nll in means]
    weighted = [n * value for (n, _), value in zip(means, values, strict=True) if value is not None]
    script = math.fsum(weighted) / tokens if tokens and len(weighted) == len(values) else None
    return {
        **row,
        "share": tokens / total if total else None,
        "insufficient": tokens < FEW_TOKENS or row["documents"] < FEW_DOCUMENTS,
        "nll_all": everything["nll"],
        "perplexity_all": everything["perplexity"],
        "compatible": {"document_weighted_perplexity": script},
    }


@dataclass(frozen=True, kw_only=True)
class LongPPLResult(PerplexityResult):
    """What an evaluation of perplexity gives, with the key set and the losses of key tokens.

    There is one row. ``losses`` holds the records of whole documents under the length, and those with short context
    under the length of the short windows if the keys were made here. ``key_losses`` has one record for each document.
    """

    keys: KeySet
    key_losses: list[TokenLosses] = field(repr=False)


def evaluate_longppl(
    model: Any,
    tokenizer: Any,
    documents: Iterable[Document],
    *,
    length: int,
    keys: KeySet | None = None,
    short: int | None = None,
    stride: int | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    overlap: Overlap = "contained",
    evaluator: str | None = None,
    max_documents: int | None = None,
    min_tokens: int | None = None,
    batch_size: int = 1,
    bos: Literal["auto", "always", "never"] = "auto",
    run: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LongPPLResult:
    """LongPPL of ``model`` on the first ``length`` positions of each document, in one pass (protocol ``prefix``).

    With ``keys``, the documents are those of the key set: others are skipped, and reading stops at the last of them;
    ``short``, ``stride``, ``alpha`` and ``beta`` are the key set's own. Models are compared on one key set, best found
    by a model that is strong at long context; tokenizers may differ.

    Without ``keys``, they are found with the model itself (the row says ``self``). Such keys are the tokens that this
    very model predicts well, so that the number can't be compared with that of another checkpoint on keys of its own.
    To compare, give the result's ``keys`` to the other evaluations. Documents with fewer than ``min_tokens`` tokens
    (default: ``length``) are skipped then.

    Short context comes from windows of ``short`` positions (K in the paper; default: half the trained length, at most
    4096) every ``stride`` tokens (default: a quarter, 1024 of 4096), protocol ``sliding``: a key token has at least
    ``short - stride`` and less than ``short`` positions before it. ``alpha`` (2) and ``beta`` (-2) are as in
    ``key_tokens``. ``evaluator`` names the model in the key set (default: the checkpoint's name and the method's).

    Differences from the paper's script:
        - Its windows have K to K + stride - 1 tokens before a key; ``short=5120`` with ``stride=1024`` gives as much.
          No token can become key without more context in the long pass, here as there.
        - The start token, if any, goes before every short window, not only the first.
        - All key tokens weigh the same: the exponential of their mean loss, not a mean of documents' perplexities.
        - Losses are taken in float32, and blanks at the ends of a token don't decide whether it is in a key span.

    ``overlap`` says which tokens of a text with known key spans are key tokens, see ``in_keys``. A document whose text
    came before is skipped. ``run`` keeps the losses of both passes, and gets the key set as ``keys.json``.
    ``progress`` is called with the tokens processed so far and in all, for one pass and then for the other.

    Raises ConfigError for contradicting arguments or a slow tokenizer, DataError if documents of the key set are
    missing or have another text, and what ``evaluate_perplexity`` raises.
    """
    given: dict[str, Any] = {"short": short, "stride": stride, "alpha": alpha, "beta": beta}
    check_arguments(length=length, keys=keys, overlap=overlap, **given)
    require_fast(tokenizer)
    settings = _settings(model, length, keys, overlap, **given)
    source = _Source(documents, keys)
    common: dict[str, Any] = {"batch_size": batch_size, "bos": bos, "run": run or Run(), "progress": progress}
    least = 1 if keys is not None and min_tokens is None else min_tokens
    long = evaluate_perplexity(
        model, tokenizer, source, lengths=[length], max_documents=max_documents, min_tokens=least, **common
    )
    texts, passes = source.kept(long.document_ids), [long]
    if keys is None:
        passes.append(_short_pass(model, tokenizer, texts, settings, long, common))
        name = evaluator or _evaluator_name(model)
        keyed = _own_keys(name, tokenizer, texts, settings, long.losses[length], passes[1].losses[settings.short])
    else:
        keyed = keys
    key_losses = select(long.losses[length], texts, tokenizer, keyed, overlap=overlap)
    folder = common["run"].folder
    if folder is not None and is_main_process():
        write_keys(keyed, folder / KEYS)
    row = {"length": length, "keys": "self" if keys is None else keyed.evaluator}
    start = {name: long.protocol[name] for name in ("bos", "bos_id")}
    return LongPPLResult(
        rows=[row | long_perplexity(key_losses, long.losses[length])],
        protocol={"name": "longppl", "version": VERSION, "keys": keyed.hash, **settings._asdict(), **start},
        counts=_counts(passes, source, key_losses),
        document_ids=long.document_ids,
        dataset_fingerprint=long.dataset_fingerprint,
        wall_seconds=sum(result.wall_seconds for result in passes),
        peak_memory_bytes=max(result.peak_memory_bytes or 0 for result in passes) or None,
        losses={size: losses for result in passes for size, losses in result.losses.items()},
        parts=[part for result in passes for part in result.parts],
        keys=keyed,
        key_losses=key_losses,
    )


def check_arguments(
    *,
    length: int,
    keys: KeySet | None = None,
    short: int | None = None,
    stride: int | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    overlap: str = "contained",
) -> None:
    """Raise ConfigError for arguments that ``evaluate_longppl`` would not accept; needs no model."""
    require_whole("length", length, 3)
    require_overlap(overlap)
    given = {"short": short, "stride": stride, "alpha": alpha, "beta": beta}
    if keys is not None:
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name} {value} is about finding keys, and these are given, found with {name} "
                    f"{getattr(keys, name)}: leave it out"
                )
    if short is not None:
        require_whole("short", short, 2)
        _check_windows(length, short, stride)
    if stride is not None:
        require_whole("stride", stride, 1)
    if alpha is not None and not (math.isfinite(alpha) and alpha >= 0):
        raise ConfigError(f"alpha must be a number of nats of at least 0, by which long context helps; got {alpha}")
    if beta is not None and not (math.isfinite(beta) and beta < 0):
        raise ConfigError(f"beta must be below 0, as every log-probability is; got {beta}")


def _check_windows(length: int, short: int, stride: int | None) -> None:
    if short >= length:
        raise ConfigError(
            f"short context of {short} positions must be less than length {length}: give a smaller short or a longer "
            "length"
        )
    if stride is not None and stride >= short:
        raise ConfigError(f"stride {stride} is too long for short windows of {short}: at most {short - 1}")


class Settings(NamedTuple):
    """All that decides the result besides model and text, see ``evaluate_longppl``."""

    length: int
    short: int
    stride: int
    alpha: float
    beta: float
    overlap: Overlap


def _settings(
    model: Any,
    length: int,
    keys: KeySet | None,
    overlap: Overlap,
    *,
    short: int | None,
    stride: int | None,
    alpha: float | None,
    beta: float | None,
) -> Settings:
    if keys is not None:
        return Settings(length, keys.short, keys.stride, keys.alpha, keys.beta, overlap)
    short = max(2, min(4096, _trained_length(model) // 2)) if short is None else short
    stride = max(1, min(1024, short // 4)) if stride is None else stride
    _check_windows(length, short, stride)
    return Settings(length, short, stride, 2.0 if alpha is None else alpha, -2.0 if beta is None else beta, overlap)


def _trained_length(model: Any) -> int:
    patch = active_patch(model)
    if patch is not None:
        return patch.method.lengths(patch.spec).original
    config = getattr(bare_model(model), "config", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    trained = parameters.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
    if trained is None:
        raise ConfigError(
            f"the config of {type(bare_model(model)).__name__} doesn't say how long it was trained for: give short, "
            "at most half of that"
        )
    return int(trained)


def _evaluator_name(model: Any) -> str:
    config = getattr(bare_model(model), "config", None)
    name = model_id(getattr(config, "_name_or_path", "") or type(bare_model(model)).__name__)
    patch = active_patch(model)
    return name if patch is None else f"{name} with {patch.method.name}"


class _Source:
    """The documents to score, each text once: all, or those of a key set, which must all be there."""

    def __init__(self, documents: Iterable[Document], keys: KeySet | None) -> None:
        self._documents, self._keys = documents, keys
        self._read: dict[str, Document] = {}
        self.skipped = {"skipped_repeated": 0, "skipped_without_keys": 0}

    def __iter__(self) -> Iterator[Document]:
        texts: set[str] = set()
        wanted = None if self._keys is None else {document.sha256 for document in self._keys.documents}
        for document in self._documents:
            text = text_hash(document.text)
            if text in texts:
                self.skipped["skipped_repeated"] += 1
            elif wanted is not None and text not in wanted:
                self._check_same_text(document)
                self.skipped["skipped_without_keys"] += 1
            else:
                if document.id in self._read:
                    raise DataError(f"two documents have the id {document.id!r}: give each its own")
                texts.add(text)
                self._read[document.id] = document
                yield document
                if texts == wanted:
                    return
        self._check_complete(texts)

    def _check_same_text(self, document: Document) -> None:
        if self._keys is not None and any(document.id == other.id for other in self._keys.documents):
            self._keys.spans_of(document)  # raises, for the key set has another text of this id

    def _check_complete(self, texts: set[str]) -> None:
        missing = [] if self._keys is None else [other for other in self._keys.documents if other.sha256 not in texts]
        if self._keys is not None and missing:
            raise DataError(
                f"document {missing[0].id!r} of the key set is missing ({len(missing)} of {len(self._keys.documents)} "
                "are): give the data set that the key set was made from, or max_documents to use the first ones"
            )

    def kept(self, ids: Sequence[str]) -> list[Document]:
        """The documents with these ids, of those that were read."""
        return [self._read[id_] for id_ in ids]


def _short_pass(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Document],
    settings: Settings,
    long: PerplexityResult,
    common: dict[str, Any],
) -> PerplexityResult:
    """The tokens of the long pass once more, in short windows."""
    return evaluate_perplexity(
        model,
        tokenizer,
        texts,
        protocol="sliding",
        windows=[settings.short],
        stride=settings.stride,
        max_tokens=settings.length - (long.protocol["bos_id"] is not None),
        min_tokens=1,
        **common,
    )


def _own_keys(
    evaluator: str,
    tokenizer: Any,
    texts: Sequence[Document],
    settings: Settings,
    long: Sequence[TokenLosses],
    short: Sequence[TokenLosses],
) -> KeySet:
    found = key_tokens(long, short, alpha=settings.alpha, beta=settings.beta)
    return KeySet(
        documents=spans_of_tokens(found, texts, tokenizer),
        evaluator=evaluator,
        tokenizer=f"{type(tokenizer).__name__}, {len(tokenizer)} tokens",
        length=settings.length,
        short=settings.short,
        stride=settings.stride,
        alpha=settings.alpha,
        beta=settings.beta,
    )


def spans_of_tokens(
    keys: Sequence[TokenLosses], documents: Sequence[Document], tokenizer: Any
) -> tuple[DocumentKeys, ...]:
    """Where key tokens are in their texts; ``keys`` has one record for each of ``documents``, in order.

    Raises:
        ConfigError: a slow tokenizer.
    """
    return tuple(
        DocumentKeys(document.id, text_hash(document.text), merge(token_spans(tokenizer, document.text)[record.token]))
        for record, document in zip(keys, documents, strict=True)
    )


def select(
    records: Sequence[TokenLosses],
    documents: Sequence[Document],
    tokenizer: Any,
    keys: KeySet,
    *,
    overlap: Overlap = "contained",
) -> list[TokenLosses]:
    """The scores of key tokens; ``records`` has one record for each of ``documents``, in order.

    Never among them is the first token of a document, which no context precedes.

    Raises:
        ConfigError: a slow tokenizer.
        DataError: the key set lacks a document, or has another text of it.
    """
    selected = []
    for record, document in zip(records, documents, strict=True):
        spans, text = token_spans(tokenizer, document.text), document.text
        chosen = in_keys(spans, keys.spans_of(document), text, overlap=overlap)
        selected.append(record.where(chosen[record.token] & (record.token > 0)))
    return selected


def _counts(passes: Sequence[PerplexityResult], source: _Source, keys: Sequence[TokenLosses]) -> dict[str, int]:
    """What was read and run; ``tokens_scored`` counts each token once."""
    both = {name: sum(result.counts[name] for result in passes) for name in ("tokens_processed", "windows")}
    return {**passes[0].counts, **both, **source.skipped, "key_tokens": sum(map(len, keys))}


def paired(first: LongPPLResult, second: LongPPLResult) -> Estimate:
    """Mean loss of ``first`` less that of ``second`` over the same key tokens, in nats, with documents as the unit.

    The exponential of its value is the ratio of the two LongPPLs.

    Raises:
        ConfigError: the two have other key sets, texts or settings, no key tokens, or not the same ones, as with
            another tokenizer.
    """
    if first.keys.hash != second.keys.hash:
        raise ConfigError(
            f"key sets differ ({first.keys.hash[:12]}, {second.keys.hash[:12]}): their LongPPLs are of different "
            "tokens; evaluate both models with one key set (--keys)"
        )
    for name in ("length", "overlap", "bos"):
        one, other = first.protocol[name], second.protocol[name]
        if one != other:
            raise ConfigError(f"{name} differs ({one!r}, {other!r}): evaluate both models with the same {name}")
    if first.dataset_fingerprint != second.dataset_fingerprint:
        raise ConfigError(
            f"documents differ ({len(first.document_ids)} and {len(second.document_ids)}): evaluate both models on the "
            "same ones"
        )
    sums, tokens = [], []
    for one_record, other_record in zip(first.key_losses, second.key_losses, strict=True):
        _check_same_tokens(one_record, other_record)
        if len(one_record):
            sums.append(float((one_record.loss.astype(np.float64) - other_record.loss).sum()))
            tokens.append(len(one_record))
    if not tokens:
        raise ConfigError("there is no key token to compare: use more or longer documents, or overlap 'any'")
    return clustered_mean(sums, tokens)


def _check_same_tokens(first: TokenLosses, second: TokenLosses) -> None:
    if not (np.array_equal(first.token, second.token) and np.array_equal(first.size, second.size)):
        raise ConfigError(
            f"document {first.document!r}: key tokens differ ({len(first)} and {len(second)}), as they do between "
            "tokenizers: compare the rows' bits_per_byte instead"
        )
