"""A stream of tokens through StreamingLLM: does it stay as good, as fast and as small, and as good as starting afresh?

Reads builtin text in pieces through a cache that evicts, then reads windows of the same text from scratch and compares
the losses of their last tokens, one by one.
"""

from __future__ import annotations

import inspect
import math
import resource
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import ctxext
from ctxext.data import load_documents, tokenize
from ctxext.evaluation.statistics import clustered_mean
from ctxext.files import write_json

SCORED = 32
"""Last tokens of each window that are compared."""


def main(
    tokens: Annotated[int, typer.Option(help="Length of the stream.")] = 65_536,
    window: Annotated[int, typer.Option(help="Last tokens attended to.")] = 2048,
    piece: Annotated[int, typer.Option(help="Tokens read at a time.")] = 256,
    samples: Annotated[int, typer.Option(help="Windows that are read from scratch.")] = 48,
    model: Annotated[str, typer.Option(help="Hub id, folder, GGUF file or builtin.")] = "builtin:smollm2-135m",
    dataset: Annotated[str, typer.Option(help="Its documents are read as one text.")] = "builtin:python-stdlib",
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 where that is fast.")] = "float32",
    output: Annotated[Path | None, typer.Option(help="Write the figures as JSON to this file.")] = None,
) -> None:
    """Print what the stream cost and lost by parts, and the comparison."""
    loaded, tokenizer = ctxext.load_model(model, ctxext.StreamingLLM(window=window), dtype=dtype)
    ids = _text(tokenizer, dataset, tokens + 1).to(loaded.device)
    losses, parts = _stream(loaded, ids, piece)
    again = _from_scratch(loaded, ids, window, samples)

    console = Console()
    table = Table("tokens", "perplexity of these", "seconds for 1,000", "peak memory", box=None)
    for part in parts:
        table.add_row(
            f"to {part['to']:,}", f"{math.exp(part['nll']):.2f}", f"{part['seconds']:.2f}", f"{part['peak_gb']:.3f} GB"
        )
    console.print(table)
    streamed = torch.stack([losses[end - SCORED : end] for end in again])
    afresh = torch.stack(list(again.values()))
    difference = clustered_mean((streamed - afresh).double().sum(1).tolist(), [SCORED] * len(again))
    ratio, interval = math.exp(difference.value), [math.exp(end) for end in difference.ci95 or ()]
    console.print(
        f"the last {SCORED} tokens of {len(again)} windows: perplexity {math.exp(streamed.mean()):.2f} in the stream, "
        f"{math.exp(afresh.mean()):.2f} read from scratch; ratio {ratio:.3f}"
        + (f" (95 % interval {interval[0]:.3f} to {interval[1]:.3f})" if interval else "")
    )
    figures = {"parts": parts, "stream": float(streamed.mean()), "scratch": float(afresh.mean())}
    figures |= {"ratio": ratio, "ratio_interval": interval}
    if output is not None:
        write_json(figures | {"command": sys.argv}, output)


def _text(tokenizer: Any, dataset: str, length: int) -> torch.Tensor:
    """The first so many tokens ``[1, n]`` of the data set, read as one text."""
    ids: list[int] = []
    for document in load_documents(dataset):
        ids += tokenize(tokenizer, document.text)
        if len(ids) >= length:
            return torch.tensor([ids[:length]])
    raise typer.BadParameter(f"{dataset} has only {len(ids):,} tokens")


@torch.no_grad()
def _stream(model: Any, ids: torch.Tensor, piece: int) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """The loss of every token after the first, fp32 ``[n - 1]``, and what each eighth of the stream cost."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache: Any = ctxext.StreamingCache(model)
    end = ids.shape[1] - 1
    losses, parts, clock, since = [], [], time.perf_counter(), 0
    marks = [round(end * i / 8) for i in range(1, 9)]
    starts = range(0, end, piece)
    for start in track(starts, description="reading", console=Console(stderr=True), transient=True):
        stop = min(start + piece, end)
        logits = model(ids[:, start:stop], use_cache=True, **{name: cache}).logits[0].float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, start + 1 : stop + 1], reduction="none").cpu())
        if stop >= marks[0]:
            marks.pop(0)
            now, whole = time.perf_counter(), torch.cat(losses)
            parts.append(
                {
                    "to": stop,
                    "nll": float(whole[since:].mean()),
                    "seconds": (now - clock) / (stop - since) * 1000,
                    "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
                }
            )
            clock, since = now, stop
    return torch.cat(losses), parts


@torch.no_grad()
def _from_scratch(model: Any, ids: torch.Tensor, window: int, samples: int) -> dict[int, torch.Tensor]:
    """Losses ``[SCORED]`` of the last tokens of windows that are spread over the stream, by where they end."""
    end = ids.shape[1] - 1
    ends = torch.linspace(window, end, samples).long().tolist()
    found = {}
    for stop in track(ends, description="from scratch", console=Console(stderr=True), transient=True):
        logits = model(ids[:, stop - window : stop], use_cache=False, logits_to_keep=SCORED).logits[0].float()
        targets = ids[0, stop - SCORED + 1 : stop + 1]
        found[stop] = torch.nn.functional.cross_entropy(logits, targets, reduction="none").cpu()
    return found


if __name__ == "__main__":
    typer.run(main)
