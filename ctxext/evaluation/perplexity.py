"""Perplexity of documents by a named protocol: what is fed to the model, and the rows that its losses make.

Which tokens a protocol scores is protocols.py's part, the losses themselves are scoring.py's, averages and intervals
records.py's; reading documents and settling the BOS token is data.py's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctxext.data import Document, fingerprint, resolve_bos, token_sizes, tokenize
from ctxext.errors import ConfigError, CtxextError, DataError, nearest
from ctxext.evaluation.protocols import (
    BY_WINDOW,
    PROTOCOLS,
    Window,
    default_stride,
    prefix_window,
    rolling_windows,
    sliding_windows,
    stream_windows,
    target_window,
)
from ctxext.evaluation.records import TokenLosses, summarise, within
from ctxext.evaluation.runs import Run
from ctxext.evaluation.scoring import (
    check_head,
    check_length,
    check_positions,
    decoded_nll,
    equal_batches,
    evaluating,
    require_distinct,
    require_whole,
    token_nll,
)


@dataclass(frozen=True)
class PerplexityResult:
    """Rows (one per length or window), the losses that they are made of, and what is needed to repeat them.

    ``losses`` holds, for each length or window that was run, the records of every document; ``parts`` are the ids of
    the run's parts, in order.
    """

    rows: list[dict[str, Any]]
    protocol: dict[str, Any]
    counts: dict[str, int]
    document_ids: list[str]
    dataset_fingerprint: str
    wall_seconds: float
    peak_memory_bytes: int | None
    losses: dict[int, list[TokenLosses]] = field(default_factory=dict, repr=False)
    parts: list[str] = field(default_factory=list, repr=False)


def evaluate_perplexity(
    model: Any,
    tokenizer: Any,
    documents: Iterable[Document],
    *,
    protocol: str = "prefix",
    lengths: Sequence[int] = (),
    windows: Sequence[int] = (),
    stride: int | None = None,
    targets: int | None = None,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    batch_size: int = 1,
    bos: Literal["auto", "always", "never"] = "auto",
    mode: Literal["pass", "decode"] = "pass",
    one_pass: bool = True,
    run: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PerplexityResult:
    """Token-weighted perplexity of ``model`` on ``documents``, one row per length or window.

    prefix: one window per document. The row at length L scores the input of exactly L positions (BOS and the first
    L - 1 tokens, or the first L tokens): L - 1 tokens. ``nll_last`` is the mean over the tokens past the previous
    length alone, where a failing extension shows. With ``one_pass`` all rows are read off one pass at the longest
    length, which is exact when no logit depends on later tokens; pass False for a method that depends on the window's
    whole length.
    sliding: every token of a document once, in ``windows`` that overlap; ``stride`` defaults to ``default_stride``.
    stream: all documents as one text, ``windows`` of it every ``stride`` tokens (default 256), scored whole.
    rolling: every token of a document once, ``lengths`` of them at a time side by side. The start token is the
    tokenizer's BOS, or its end-of-sequence token.
    same-target: the last ``targets`` tokens of each document (default: half the shortest length, at most 2048), given
    inputs of ``lengths`` positions in all.

    ``mode`` decode reads each window token by token through a key/value cache, as generation does: for a small sample,
    to see that it gives what a pass gives.

    Documents are cut to ``max_tokens`` and skipped, and counted, below ``min_tokens``. That is by default the longest
    length or window, so that every row scores the same documents (lower, a row scores what there is), and 1 for
    stream and rolling. Reading stops after ``max_documents``. Only windows of equal length share a batch, so nothing is
    padded. ``run`` keeps the losses of each window as they come, and has those of windows that were run before.
    ``progress`` is called with the tokens processed so far and in all, by this process.

    Raises ConfigError for contradicting arguments, DataError if no document is long enough, UnsupportedModelError if
    the model's logits can't be computed in slices, CtxextError if a loss isn't finite.
    """
    plan = check_arguments(
        protocol=protocol,
        lengths=lengths,
        windows=windows,
        stride=stride,
        targets=targets,
        max_documents=max_documents,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        batch_size=batch_size,
    )

    check_positions(model)
    check_length(model, max(plan.sizes))
    with evaluating(model) as cost:
        start_id = _start_token(tokenizer, protocol, bos)
        # In a stream a token is predicted from the document before.
        least = 2 if start_id is None and protocol != "stream" else 1
        kept, texts, skipped = _select(documents, tokenizer, max_documents, max_tokens, plan.min_tokens, least)
        sizes = plan.sizes[-1:] if protocol == "prefix" and one_pass else plan.sizes
        if protocol == "stream":
            texts = [_joined(texts)]
        jobs = _jobs(plan, sizes, texts, bos=start_id is not None)
        check_head(model)
        feed_last = protocol != "rolling"  # whose inputs are as long as its targets
        run = run or Run()
        run.documents = len(kept)
        names = _part_ids(jobs, kept, texts, mode)
        score = token_nll if mode == "pass" else decoded_nll
        scores = _score(
            model, names, jobs, kept, texts, start_id, batch_size, run, progress, score, feed_last=feed_last
        )
    losses = {size: _records(kept, texts, jobs, scores, size) for size in sizes}

    settings: dict[str, Any] = {"windows" if protocol in BY_WINDOW else "lengths": plan.sizes}
    if protocol == "prefix":
        rows = _prefix_rows(plan.sizes, losses)
        settings["one_pass"] = one_pass
    else:
        rows = [{"length": size, **_row_settings(plan, i), **summarise(losses[size])} for i, size in enumerate(sizes)]
    if protocol in BY_WINDOW:
        settings["strides"] = plan.strides
    if protocol == "same-target":
        settings["targets"] = plan.targets
    limits = {"max_documents": max_documents, "max_tokens": max_tokens, "min_tokens": plan.min_tokens}
    version = PROTOCOLS[protocol]
    return PerplexityResult(
        rows=rows,
        protocol={
            "name": protocol,
            "version": version,
            "mode": mode,
            **settings,
            **limits,
            "bos": bos,
            "bos_id": start_id,
        },
        counts={
            "documents": len(kept),
            **skipped,
            "tokens_scored": sum(job.window.n_targets for job in jobs),
            "tokens_processed": sum(job.window.positions for job in jobs) - (0 if feed_last else len(jobs)),
            "windows": len(jobs),
        },
        document_ids=[document.id for document in kept],
        dataset_fingerprint=fingerprint(kept),
        wall_seconds=cost.wall_seconds,
        peak_memory_bytes=cost.peak_memory_bytes,
        losses=losses,
        parts=names,
    )


class Plan(NamedTuple):
    """What is run: sizes (lengths or windows) in ascending order, the stride of each, and which documents will do."""

    protocol: str
    sizes: list[int]
    strides: list[int]
    targets: int
    min_tokens: int


def check_arguments(
    *,
    protocol: str = "prefix",
    lengths: Sequence[int] = (),
    windows: Sequence[int] = (),
    stride: int | None = None,
    targets: int | None = None,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    batch_size: int = 1,
) -> Plan:
    """The plan of a run; needs no model.

    Raises ConfigError for arguments that ``evaluate_perplexity`` would not accept.
    """
    if protocol not in PROTOCOLS:
        near = nearest(protocol, PROTOCOLS)
        hint = f": did you mean {near!r}?" if near else ""
        raise ConfigError(f"protocol {protocol!r} is unknown ({', '.join(PROTOCOLS)}){hint}")
    sizes = _sizes(protocol, lengths, windows, stride, targets)
    strides, targets = _strides(protocol, sizes, stride), _targets(protocol, sizes, targets)
    require_whole("batch_size", batch_size, 1)
    for name, value, least in (("max_documents", max_documents, 1), ("max_tokens", max_tokens, 1)):
        if value is not None:
            require_whole(name, value, least)
    if min_tokens is None:
        min_tokens = 1 if protocol in ("stream", "rolling") else max(sizes)
    require_whole("min_tokens", min_tokens, 0)
    if protocol == "same-target" and min_tokens < max(sizes):
        raise ConfigError(
            f"protocol 'same-target' scores the same tokens at every length: min_tokens {min_tokens} is less than "
            f"the longest, {max(sizes)}; leave it out"
        )
    if max_tokens is not None and max_tokens < min_tokens:
        raise ConfigError(f"max_tokens {max_tokens} cuts every document below {min_tokens} tokens (min_tokens)")
    return Plan(protocol, sizes, strides, targets, min_tokens)


def _sizes(
    protocol: str, lengths: Sequence[int], windows: Sequence[int], stride: int | None, targets: int | None
) -> list[int]:
    by_window = protocol in BY_WINDOW
    name, sizes = ("windows", windows) if by_window else ("lengths", lengths)
    foreign = {
        "lengths" if by_window else "windows": (lengths if by_window else windows) or None,
        "stride": None if by_window else stride,
        "targets": None if protocol == "same-target" else targets,
    }
    for other, value in foreign.items():
        if value is not None:
            key = "targets" if other == "targets" else other.removesuffix("s")
            raise ConfigError(
                f"protocol {protocol!r} takes {name} (--{name[:-1]}), not {other}; "
                f"leave that out, or drop it with -s perplexity.{key}=null"
            )
    for size in sizes:
        require_whole(name, size, 2)
    require_distinct(name, sizes)
    return sorted(sizes)


def _strides(protocol: str, sizes: Sequence[int], stride: int | None) -> list[int]:
    if stride is not None:
        require_whole("stride", stride, 1)
        if protocol == "sliding" and stride >= min(sizes):
            raise ConfigError(f"stride {stride} is too long for a window of {min(sizes)}: at most {min(sizes) - 1}")
    if protocol == "stream":
        return [stride or 256 for _ in sizes]
    return [stride or default_stride(size) for size in sizes]


def _targets(protocol: str, sizes: Sequence[int], targets: int | None) -> int:
    if protocol != "same-target":
        return 0
    if targets is None:
        return min(2048, min(sizes) // 2)
    require_whole("targets", targets, 1)
    if targets > min(sizes) - 1:
        raise ConfigError(f"targets {targets} don't fit an input of {min(sizes)} positions: at most {min(sizes) - 1}")
    return targets


def _row_settings(plan: Plan, i: int) -> dict[str, Any]:
    if plan.protocol in BY_WINDOW:
        return {"window": plan.sizes[i], "stride": plan.strides[i]}
    return {"targets": plan.targets} if plan.protocol == "same-target" else {}


def _start_token(tokenizer: Any, protocol: str, bos: Literal["auto", "always", "never"]) -> int | None:
    if protocol not in ("stream", "rolling"):
        return resolve_bos(tokenizer, bos)
    if bos != "auto":
        raise ConfigError(f"protocol {protocol!r} settles the start token itself: leave bos at auto")
    if protocol == "stream":
        return None
    start_id: int | None = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start_id is None:
        raise ConfigError("protocol 'rolling' needs a tokenizer with a BOS or end-of-sequence token, this has neither")
    return start_id


class _Text(NamedTuple):
    """Token ids of a text, the bytes that each adds, and the document that each is from, with its index there."""

    ids: Tensor
    size: NDArray[np.int32]
    document: NDArray[np.int32]
    token: NDArray[np.int32]


def _joined(texts: Sequence[_Text]) -> _Text:
    return _Text(
        torch.cat([text.ids for text in texts]),
        *(np.concatenate(parts) for parts in zip(*(text[1:] for text in texts), strict=True)),
    )


class _Job(NamedTuple):
    """One forward pass: a window of text number ``text`` for the rows of ``size``."""

    size: int
    text: int
    window: Window


def _jobs(plan: Plan, sizes: Sequence[int], texts: Sequence[_Text], *, bos: bool) -> list[_Job]:
    """Every window of every text, for each size."""
    jobs = []
    for size in sizes:
        stride = plan.strides[plan.sizes.index(size)]
        for i, text in enumerate(texts):
            n_tokens = len(text.ids)
            windows: Iterable[Window]
            if plan.protocol == "prefix":
                windows = [prefix_window(n_tokens, size, bos=bos)]
            elif plan.protocol == "sliding":
                windows = sliding_windows(n_tokens, size, stride, bos=bos)
            elif plan.protocol == "stream":
                windows = stream_windows(n_tokens, size, stride)
            elif plan.protocol == "rolling":
                windows = rolling_windows(n_tokens, size)
            else:
                windows = [target_window(n_tokens, size, plan.targets, bos=bos)]
            jobs += [_Job(size, i, window) for window in windows if window.n_targets > 0]
        if not any(job.size == size for job in jobs):
            raise DataError(f"{sum(len(text.ids) for text in texts)} tokens are too few for a window of {size}")
    return jobs


def _select(
    documents: Iterable[Document],
    tokenizer: Any,
    max_documents: int | None,
    max_tokens: int | None,
    min_tokens: int,
    least: int,
) -> tuple[list[Document], list[_Text], dict[str, int]]:
    """The documents to score, their tokens, and how many were skipped; reads no further than it must.

    A document of fewer than ``least`` tokens has none that can be scored, and counts as empty.
    """
    kept: list[Document] = []
    texts: list[_Text] = []
    short = empty = longest = 0
    for document in documents:
        ids = tokenize(tokenizer, document.text)[:max_tokens]
        longest = max(longest, len(ids))
        if len(ids) < least:
            empty += 1
        elif len(ids) < min_tokens:
            short += 1
        else:
            size = token_sizes(tokenizer, document.text)[: len(ids)]
            token = np.arange(len(ids), dtype=np.int32)
            texts.append(_Text(torch.tensor(ids), size, np.full_like(token, len(kept)), token))
            kept.append(document)
            if len(kept) == max_documents:
                break
    if not kept:
        raise DataError(
            f"no document has {max(min_tokens, 2)} tokens: the longest of {short + empty} has {longest}; "
            "ask for shorter lengths, lower min_tokens, or give longer documents"
        )
    return kept, texts, {"skipped_short": short, "skipped_empty": empty}


def _part_ids(jobs: Sequence[_Job], documents: Sequence[Document], texts: Sequence[_Text], mode: str) -> list[str]:
    """A name for each job's window that says all that its losses depend on besides the model and its tokens."""
    hashes = [fingerprint([document])[:12] for document in documents]
    joined = [hashlib.sha256(text.ids.numpy().tobytes()).hexdigest()[:12] for text in texts]
    names = []
    for job in jobs:
        window, text = job.window, texts[job.text]
        if len(texts) == len(documents):
            number = int(text.document[0])
            source = f"{documents[number].id}|{hashes[number]}"
        else:
            source = f"{len(documents)} documents|{joined[job.text]}"  # a cut moves all that stands behind it
        source += "|decoded" if mode == "decode" else ""
        span = f"{window.begin}-{window.end}|{window.target_begin}" + ("|started" if window.started else "")
        names.append(f"{job.size}|{span}|{source}")
    return names


def _score(
    model: Any,
    names: Sequence[str],
    jobs: Sequence[_Job],
    documents: Sequence[Document],
    texts: Sequence[_Text],
    start_id: int | None,
    batch_size: int,
    run: Run,
    progress: Callable[[int, int], None] | None,
    score: Callable[..., Tensor],
    *,
    feed_last: bool,
) -> list[Tensor]:
    """The losses of each job's targets."""
    start = torch.tensor([] if start_id is None else [start_id], dtype=torch.long)
    batches = equal_batches(
        zip(names, jobs, strict=True), batch_size, key=lambda item: (item[1].window.positions, item[1].window.n_targets)
    )
    own = run.share(batches, lambda item: item[0], lambda item: item[1].window.positions)
    done, total = 0, sum(job.window.positions for batch in own for _, job in batch)
    for batch in own:
        windows = [(texts[job.text].ids, job.window) for _, job in batch]
        ids = [torch.cat([start[: window.started], text[window.begin : window.end]]) for text, window in windows]
        losses = score(model, torch.stack(ids), windows[0][1].n_targets, feed_last=feed_last)
        for (name, job), nll in zip(batch, losses, strict=True):
            _check_finite(nll, job, documents, texts[job.text])
            run.add(name, {"size": job.size, "tokens": len(nll)}, nll.numpy())
        done += sum(window.positions for _, window in windows)
        if progress is not None:
            progress(done, total)
    parts = run.collect()
    return [torch.from_numpy(np.array(parts[name].losses)) for name in names]


def _check_finite(nll: Tensor, job: _Job, documents: Sequence[Document], text: _Text) -> None:
    if not nll.isfinite().all():
        wrong = int((~nll.isfinite()).nonzero()[0])
        token = job.window.target_begin + wrong
        raise CtxextError(
            f"document {documents[text.document[token]].id!r}: the loss of token {text.token[token]} is "
            f"{float(nll[wrong])}: the model's logits are not finite; check the patch, try float32"
        )


def _records(
    documents: Sequence[Document], texts: Sequence[_Text], jobs: Sequence[_Job], scores: Sequence[Tensor], size: int
) -> list[TokenLosses]:
    """The scores of one size by document, windows in order."""
    columns: list[list[NDArray[Any]]] = [[] for _ in range(6)]
    for number, (job, nll) in enumerate(zip(jobs, scores, strict=True)):
        if job.size != size:
            continue
        text, window = texts[job.text], job.window
        own = slice(window.target_begin, window.end)
        context = np.arange(window.context, window.context + window.n_targets, dtype=np.int32)
        parts = (
            text.document[own],
            text.token[own],
            nll.numpy(),
            context,
            np.full_like(context, number),
            text.size[own],
        )
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    document, *arrays = (np.concatenate(column) for column in columns)
    return [TokenLosses(documents[i].id, *(array[document == i] for array in arrays)) for i in range(len(documents))]


def _prefix_rows(lengths: Sequence[int], losses: dict[int, list[TokenLosses]]) -> list[dict[str, Any]]:
    rows = []
    for previous, length in zip([0, *lengths], lengths, strict=False):
        records = losses.get(length, losses[max(losses)])
        last = summarise(within(records, previous, length))
        row = {"length": length, **summarise(within(records, 0, length))}
        rows.append(row | {f"{name}_last": last[name] for name in ("nll", "tokens", "perplexity")})
    return rows
