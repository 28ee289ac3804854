"""Perplexity by named protocols: which tokens are scored with which context, and how the losses are averaged.

The losses themselves come from scoring.py; reading documents and settling the BOS token is data.py's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ctxext.data import Document, fingerprint, resolve_bos, tokenize
from ctxext.errors import ConfigError, CtxextError, DataError
from ctxext.evaluation.scoring import (
    check_head,
    check_length,
    check_positions,
    equal_batches,
    evaluating,
    require_distinct,
    require_whole,
    token_nll,
)

PROTOCOL_VERSION = 1


class Window(NamedTuple):
    """Document tokens ``begin:end`` are the input (after BOS, if any); of them ``target_begin:end`` are scored."""

    begin: int
    end: int
    target_begin: int


@dataclass(frozen=True)
class PerplexityResult:
    """Rows (one per length or window) and what is needed to repeat them."""

    rows: list[dict[str, Any]]
    protocol: dict[str, Any]
    counts: dict[str, int]
    document_ids: list[str]
    dataset_fingerprint: str
    wall_seconds: float
    peak_memory_bytes: int | None


def windows(n_tokens: int, window: int, stride: int, bos: bool) -> Iterator[Window]:
    """The windows that score a document of ``n_tokens`` tokens, each token once.

    ``window`` counts input positions, BOS included. Window k begins at token k * stride and scores what the windows
    before it left over: everything in the first, ``stride`` tokens with at least ``window - stride`` positions before
    them in the later ones. The last window is moved left until it is full, if the document is long enough, so that its
    targets have no less context than the others. Without BOS the document's first token has no context, and is never
    scored; for the same reason the stride is at most ``window - 1``.
    """
    if not 1 <= stride < window:
        raise ConfigError(f"stride {stride} must be between 1 and {window - 1} for a window of {window} positions")
    capacity = window - 1 if bos else window
    scored = 0 if bos else 1
    begin = 0
    while scored < n_tokens:
        end = min(begin + capacity, n_tokens)
        yield Window(max(0, end - capacity), end, scored)
        scored, begin = end, begin + stride


def default_stride(window: int) -> int:
    """256 for windows up to 8192 positions (less where 256 doesn't fit), an eighth of the window above."""
    return min(256, window - 1) if window <= 8192 else window // 8


def evaluate_perplexity(
    model: Any,
    tokenizer: Any,
    documents: Iterable[Document],
    *,
    protocol: Literal["prefix", "sliding"] = "prefix",
    lengths: Sequence[int] = (),
    windows: Sequence[int] = (),
    stride: int | None = None,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    batch_size: int = 1,
    bos: Literal["auto", "always", "never"] = "auto",
    one_pass: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> PerplexityResult:
    """Token-weighted perplexity of ``model`` on ``documents``, one row per length (prefix) or window (sliding).

    prefix: one window per document. The row at length L scores the input of exactly L positions (BOS and the first
    L - 1 tokens, or the first L tokens): L - 1 tokens. ``nll_last`` is the mean over the tokens past the previous
    length alone, where a failing extension shows. With ``one_pass`` all rows are read off one pass at the longest
    length, which is exact when no logit depends on later tokens; pass False for a method that depends on the window's
    whole length.
    sliding: every token of a document once, see ``windows``; ``stride`` defaults to ``default_stride``.

    Documents are cut to ``max_tokens`` and skipped, and counted, below ``min_tokens`` (default: the longest length or
    window, so that every row scores the same documents; lower, a row scores what there is). Reading stops after
    ``max_documents``. Only windows of equal length share a batch, so nothing is padded. ``progress`` is called with
    the tokens processed so far and in all.

    Raises ConfigError for contradicting arguments, DataError if no document is long enough, UnsupportedModelError if
    the model's logits can't be computed in slices, CtxextError if a loss isn't finite.
    """
    sizes, strides, min_tokens = check_arguments(
        protocol=protocol,
        lengths=lengths,
        windows=windows,
        stride=stride,
        max_documents=max_documents,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        batch_size=batch_size,
    )

    check_positions(model)
    check_length(model, max(sizes))
    with evaluating(model) as cost:
        bos_id = resolve_bos(tokenizer, bos)
        kept, tokens, skipped = _select(documents, tokenizer, max_documents, max_tokens, min_tokens, bos_id)
        passes = dict(zip(sizes, strides, strict=True))
        if protocol == "prefix" and one_pass:
            passes = {max(sizes): passes[max(sizes)]}
        jobs = _jobs(passes, tokens, bos_id is not None, truncate=protocol == "prefix")
        check_head(model)
        losses = _score(model, jobs, kept, tokens, bos_id, batch_size, progress)

    if protocol == "prefix":
        rows = _prefix_rows(sizes, losses)
        settings: dict[str, Any] = {"lengths": sizes, "one_pass": one_pass}
    else:
        rows = [
            {"window": size, "stride": step, "length": size} | _aggregate(losses[size])
            for size, step in zip(sizes, strides, strict=True)
        ]
        settings = {"windows": sizes, "strides": strides}
    limits = {"max_documents": max_documents, "max_tokens": max_tokens, "min_tokens": min_tokens}
    return PerplexityResult(
        rows=rows,
        protocol={"name": protocol, "version": PROTOCOL_VERSION, **settings, **limits, "bos": bos, "bos_id": bos_id},
        counts={
            "documents": len(kept),
            **skipped,
            "tokens_scored": sum(job.n_targets for job in jobs),
            "tokens_processed": sum(job.length(bos_id) for job in jobs),
            "windows": len(jobs),
        },
        document_ids=[document.id for document in kept],
        dataset_fingerprint=fingerprint(kept),
        wall_seconds=cost.wall_seconds,
        peak_memory_bytes=cost.peak_memory_bytes,
    )


def check_arguments(
    *,
    protocol: str = "prefix",
    lengths: Sequence[int] = (),
    windows: Sequence[int] = (),
    stride: int | None = None,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    batch_size: int = 1,
) -> tuple[list[int], list[int], int]:
    """Window sizes in ascending order, the stride of each, and the least tokens of a document; needs no model.

    Raises ConfigError for arguments that ``evaluate_perplexity`` would not accept.
    """
    sizes, strides = _plan(protocol, lengths, windows, stride)
    require_whole("batch_size", batch_size, 1)
    for name, value, least in (("max_documents", max_documents, 1), ("max_tokens", max_tokens, 1)):
        if value is not None:
            require_whole(name, value, least)
    min_tokens = max(sizes) if min_tokens is None else min_tokens
    require_whole("min_tokens", min_tokens, 0)
    if max_tokens is not None and max_tokens < min_tokens:
        raise ConfigError(f"max_tokens {max_tokens} cuts every document below {min_tokens} tokens (min_tokens)")
    return sizes, strides, min_tokens


class _Job(NamedTuple):
    """One forward pass: a window of document number ``document`` for the row of ``size``."""

    size: int
    document: int
    window: Window

    @property
    def n_targets(self) -> int:
        return self.window.end - self.window.target_begin

    def length(self, bos_id: int | None) -> int:
        return self.window.end - self.window.begin + (bos_id is not None)


def _jobs(passes: Mapping[int, int], tokens: Sequence[Tensor], bos: bool, *, truncate: bool) -> list[_Job]:
    """Every window of every document, for each size and its stride; ``truncate`` stops at the first window's end."""
    jobs = []
    for size, stride in passes.items():
        for document, ids in enumerate(tokens):
            n_tokens = min(len(ids), size - bos) if truncate else len(ids)
            jobs += [_Job(size, document, window) for window in windows(n_tokens, size, stride, bos)]
    return jobs


def _plan(
    protocol: str, lengths: Sequence[int], windows: Sequence[int], stride: int | None
) -> tuple[list[int], list[int]]:
    """Window sizes in ascending order, and the stride of each."""
    if protocol not in ("prefix", "sliding"):
        raise ConfigError(f"protocol {protocol!r} is unknown: use 'prefix' or 'sliding'")
    name, sizes, other, unused = (
        ("lengths", lengths, "windows", windows) if protocol == "prefix" else ("windows", windows, "lengths", lengths)
    )
    if unused or (protocol == "prefix" and stride is not None):
        raise ConfigError(
            f"protocol {protocol!r} takes {name} (--{name[:-1]}), not {other if unused else 'stride'}; "
            f"leave that out, or drop it with -s perplexity.{(other if unused else 'stride').removesuffix('s')}=null"
        )
    for size in sizes:
        require_whole(name, size, 2)
    require_distinct(name, sizes)
    if protocol == "prefix":
        return sorted(sizes), [size - 1 for size in sorted(sizes)]
    if stride is not None:
        require_whole("stride", stride, 1)
        if stride >= min(sizes):
            raise ConfigError(f"stride {stride} is too long for a window of {min(sizes)}: at most {min(sizes) - 1}")
    return sorted(sizes), [stride or default_stride(size) for size in sorted(sizes)]


def _select(
    documents: Iterable[Document],
    tokenizer: Any,
    max_documents: int | None,
    max_tokens: int | None,
    min_tokens: int,
    bos_id: int | None,
) -> tuple[list[Document], list[Tensor], dict[str, int]]:
    """The documents to score, their tokens, and how many were skipped; reads no further than it must."""
    kept: list[Document] = []
    tokens: list[Tensor] = []
    short = empty = longest = 0
    for document in documents:
        ids = tokenize(tokenizer, document.text)[:max_tokens]
        longest = max(longest, len(ids))
        if len(ids) < (2 if bos_id is None else 1):
            empty += 1
        elif len(ids) < min_tokens:
            short += 1
        else:
            kept.append(document)
            tokens.append(torch.tensor(ids, dtype=torch.long))
            if len(kept) == max_documents:
                break
    if not kept:
        raise DataError(
            f"no document has {max(min_tokens, 2)} tokens: the longest of {short + empty} has {longest}; "
            "ask for shorter lengths, lower min_tokens, or give longer documents"
        )
    return kept, tokens, {"skipped_short": short, "skipped_empty": empty}


def _score(
    model: Any,
    jobs: Sequence[_Job],
    documents: Sequence[Document],
    tokens: Sequence[Tensor],
    bos_id: int | None,
    batch_size: int,
    progress: Callable[[int, int], None] | None,
) -> dict[int, list[Tensor]]:
    """For each size, and each document, the losses of its scored tokens in order."""
    first = 0 if bos_id is not None else 1
    losses = {job.size: [torch.empty(0)] * len(tokens) for job in jobs}
    for job in jobs:  # the last window of a document tells how many of its tokens are scored
        losses[job.size][job.document] = torch.empty(job.window.end - first)
    bos = torch.tensor([] if bos_id is None else [bos_id], dtype=torch.long)
    total = sum(job.length(bos_id) for job in jobs)
    done = 0
    for batch in equal_batches(jobs, batch_size, key=lambda job: (job.length(bos_id), job.n_targets)):
        ids = [torch.cat([bos, tokens[job.document][job.window.begin : job.window.end]]) for job in batch]
        for job, nll in zip(batch, token_nll(model, torch.stack(ids), batch[0].n_targets), strict=True):
            start = job.window.target_begin
            if not nll.isfinite().all():
                position = start + int((~nll.isfinite()).nonzero()[0])
                raise CtxextError(
                    f"document {documents[job.document].id!r}: the loss of token {position} is "
                    f"{float(nll[position - start])}: the model's logits are not finite; check the patch, try float32"
                )
            losses[job.size][job.document][start - first : job.window.end - first] = nll
        done += sum(job.length(bos_id) for job in batch)
        if progress is not None:
            progress(done, total)
    return losses


def _prefix_rows(lengths: Sequence[int], losses: Mapping[int, Sequence[Tensor]]) -> list[dict[str, Any]]:
    rows = []
    for previous, length in zip([1, *lengths], lengths, strict=False):  # length L scores L - 1 tokens
        own = losses.get(length, losses[max(losses)])
        row = {"length": length} | _aggregate([nll[: length - 1] for nll in own])
        last = _aggregate([nll[previous - 1 : length - 1] for nll in own])
        rows.append(row | {f"{name}_last": last[name] for name in ("nll", "tokens", "perplexity")})
    return rows


def _aggregate(losses: Sequence[Tensor]) -> dict[str, Any]:
    """Documents, tokens, mean loss in nats and its exponential; sums in float64, so that no order of adding matters."""
    from ctxext.evaluation.metrics import TokenPerplexity  # loads `evaluate`, which takes a second

    scored = [nll for nll in losses if len(nll)]
    metric = TokenPerplexity().compute(
        nll_sum=[float(x.double().sum()) for x in scored], tokens=[len(x) for x in scored]
    )
    return {"documents": len(scored), **{name: metric[name] for name in ("tokens", "nll", "perplexity")}}
