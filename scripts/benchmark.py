"""What ctxext costs: patched against stock, memory of the perplexity pass, start-up of the command line.

Times are given as ratios of medians within one run, alternating between the two sides, because a shared machine drifts.
"""

from __future__ import annotations

import inspect
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache

import ctxext
from ctxext.data import load_documents, tokenize
from ctxext.evaluation.perplexity import evaluate_perplexity
from ctxext.evaluation.results import write_result

MODEL = "builtin:smollm2-135m"
DATASET = "builtin:python-docs"


def main(
    repeats: Annotated[int, typer.Option(help="Pairs of runs for each time.")] = 9,
    length: Annotated[int, typer.Option(help="Tokens of the timed forward pass.")] = 1024,
    memory_length: Annotated[int, typer.Option(help="Tokens of the measured perplexity pass.")] = 16_384,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="Default: an accelerator if there is one.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the figures as JSON to this file.")] = None,
) -> None:
    """Print one table of figures."""
    figures: dict[str, Any] = {"dtype": dtype, "threads": torch.get_num_threads()}
    figures |= overhead(repeats, length, dtype, device)
    bare, scored = (in_fresh_process(task, memory_length, dtype, device) for task in (bare_backbone, perplexity_pass))
    figures |= {
        "backbone_peak_gb": bare / 1e9,
        "perplexity_peak_gb": scored / 1e9,
        "perplexity_extra_gb": (scored - bare) / 1e9,
    }
    figures["help_seconds"] = statistics.median(seconds(help_text) for _ in range(repeats))

    table = Table("figure", "value", "goal", box=None)
    table.add_row(f"forward, {length:,} tokens, YaRN / stock", f"{figures['forward_ratio']:.3f}", "1.00")
    table.add_row("decode, one token, YaRN / stock", f"{figures['decode_ratio']:.3f}", "1.00")
    table.add_row("forward, stock / stock (noise)", f"{figures['noise_ratio']:.3f}", "1.00")
    table.add_row(f"peak memory, backbone, {memory_length:,} tokens", f"{figures['backbone_peak_gb']:.2f} GB", "")
    table.add_row("  perplexity pass on top of it", f"{figures['perplexity_extra_gb']:.2f} GB", "< 0.4 GB")
    table.add_row("ctxext --help", f"{figures['help_seconds']:.2f} s", "< 0.5 s")
    Console().print(table)
    if output is not None:
        write_result(figures, output)


@torch.inference_mode()
def overhead(repeats: int, length: int, dtype: str, device: str | None) -> dict[str, float]:
    """Ratios of median times, patched over stock, of a forward pass and of one decoding step."""
    stock, _ = ctxext.load_model(MODEL, dtype=dtype, device=device)
    again, _ = ctxext.load_model(MODEL, dtype=dtype, device=device)
    patched, _ = ctxext.load_model(MODEL, ctxext.YaRN(factor=2), dtype=dtype, device=device)
    models = {"stock": stock, "again": again, "patched": patched}
    tokens = torch.randint(100, 40_000, (1, length), device=stock.device)
    times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "decode": []} for name in models}
    for round_number in track(range(repeats + 1), description="timing", console=Console(stderr=True), transient=True):
        for name, model in models.items():
            forward = seconds(lambda model=model: model(tokens, use_cache=False, logits_to_keep=1))
            cache = DynamicCache(config=model.config)
            _decode(model, cache, tokens, steps=1)
            decode = seconds(lambda model=model, cache=cache: _decode(model, cache, tokens[:, :1], steps=16))
            if round_number:  # the first round warms up
                times[name]["forward"].append(forward)
                times[name]["decode"].append(decode)

    def median(name: str, what: str) -> float:
        return statistics.median(times[name][what])

    return {
        "forward_ratio": median("patched", "forward") / median("stock", "forward"),
        "decode_ratio": median("patched", "decode") / median("stock", "decode"),
        "noise_ratio": median("again", "forward") / median("stock", "forward"),
        "forward_seconds": median("stock", "forward"),
        "decode_seconds": median("stock", "decode") / 16,
    }


def _decode(model: Any, cache: DynamicCache, tokens: torch.Tensor, *, steps: int) -> None:
    # Transformers renamed the argument during 5.x.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for _ in range(steps):
        model(tokens, use_cache=True, logits_to_keep=1, **{name: cache})


def bare_backbone(length: int, dtype: str, device: str | None) -> None:
    """One pass of the same text through the decoder, no output head."""
    model, tokenizer = ctxext.load_model(MODEL, dtype=dtype, device=device)
    document = next(load_documents(DATASET))
    tokens = torch.tensor([tokenize(tokenizer, document.text)[:length]], device=model.device)
    with torch.inference_mode():
        model.get_decoder()(input_ids=tokens, use_cache=False)


def perplexity_pass(length: int, dtype: str, device: str | None) -> None:
    """The pass with every position scored."""
    model, tokenizer = ctxext.load_model(MODEL, dtype=dtype, device=device)
    evaluate_perplexity(model, tokenizer, load_documents(DATASET), lengths=(length,), max_documents=1)


def in_fresh_process(task: Callable[..., None], *arguments: Any) -> int:
    """Peak memory in bytes of a task that has a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak_of, (task, *arguments))


def _peak_of(task: Callable[..., None], *arguments: Any) -> int:
    task(*arguments)
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def help_text() -> None:
    """Start the command line as a user does."""
    subprocess.run([sys.executable, "-m", "ctxext", "--help"], check=True, capture_output=True)


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of one call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
