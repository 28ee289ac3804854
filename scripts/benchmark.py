"""What ctxext costs against the stock model: time and memory of every kind of method, start-up of the command line.

The sides of a comparison are run in turn, and a time is given as the median of the ratios within the rounds, because a
shared machine drifts.
"""

from __future__ import annotations

import ctypes.util
import gc
import inspect
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

import ctxext
from ctxext import memory
from ctxext.attention import engine
from ctxext.data import load_documents, tokenize
from ctxext.evaluation.passkey import evaluate_passkey
from ctxext.evaluation.perplexity import evaluate_perplexity
from ctxext.files import write_json
from ctxext.loss import summed_loss
from ctxext.models import read_config
from ctxext.planning import meta_model, ways

MODEL = "builtin:smollm2-135m"
DATASET = "builtin:python-docs"
WINDOW = 4096
ATTENTION: dict[str, ctxext.Method] = {
    "dca": ctxext.DCA(),
    "dynamic_yarn": ctxext.DynamicYaRN(),
    "self_extend": ctxext.SelfExtend(),
    "rerope": ctxext.ReRoPE(),
    "lm_infinite": ctxext.LMInfinite(n_local=WINDOW),
    "streaming_llm": ctxext.StreamingLLM(window=WINDOW),
}
LONG = {"dca": "<= 1.00"}
ALONE = {
    "dca": "<= 1.10",
    "self_extend": "<= 1.25",
    "rerope": "<= 1.25",
    "lm_infinite": "<= 0.6",
    "streaming_llm": "<= 0.6",
}
PREFILL = {**ALONE, "dynamic_yarn": "<= 1.15"}
DECODE = {"dca": "<= 1.15", "dynamic_yarn": "<= 1.25"} | dict.fromkeys(
    ("self_extend", "rerope", "lm_infinite", "streaming_llm"), "<= 1.3"
)
TRAINING = {"dca": "<= 1.5"}
"""Goals, as ratios to the stock model in the same run."""


def main(
    part: Annotated[
        list[str] | None,
        typer.Option(help="static, attention, model, training, evaluation or plan; may be repeated. Default: all."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"Of those that change attention: {', '.join(ATTENTION)}; may be repeated. Default: all."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Pairs of runs for each time.")] = 9,
    length: Annotated[int, typer.Option(help="Tokens of the timed forward pass, static methods.")] = 1024,
    prefill: Annotated[int, typer.Option(help="Tokens of the cache in which attention methods are timed.")] = 16_384,
    prefill_repeats: Annotated[int, typer.Option(help="Whole-model passes of that length for each method.")] = 3,
    memory_length: Annotated[int, typer.Option(help="Tokens of the passes whose memory is measured.")] = 16_384,
    training_length: Annotated[int, typer.Option(help="Tokens of the timed training step.")] = 4096,
    evaluation_length: Annotated[int, typer.Option(help="Tokens of the evaluations that are timed.")] = 16_384,
    plan_length: Annotated[
        int, typer.Option(help="Tokens of the passes whose memory is foreseen and measured.")
    ] = 2048,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="Default: an accelerator if there is one.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the figures as JSON to this file.")] = None,
) -> None:
    """Print one table of figures."""
    parts = {"static", "attention", "model", "training", "evaluation", "plan"}
    if unknown := set(part or ()) - parts:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: expected {', '.join(sorted(parts))}")
    chosen = set(part or parts)
    if unknown := set(method or ()) - set(ATTENTION):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: expected {', '.join(ATTENTION)}")
    methods = {name: each for name, each in ATTENTION.items() if method is None or name in method}
    figures: dict[str, Any] = {"dtype": dtype, "threads": torch.get_num_threads()}
    table = Table("figure", "value", "goal", box=None)

    def show(name: str, label: str, goal: str = "", unit: str = "") -> None:
        value = figures[name]
        text = "not measured here" if value is None else f"{value:.{2 if unit else 3}f}{unit}"
        table.add_row(label, text, goal)
        if output is not None:  # after every figure: what is measured isn't lost if the rest fails
            write_json(figures, output)

    if "static" in chosen:
        figures |= overhead(repeats, length, dtype, device)
        bare, scored = (peak_memory(task, memory_length, dtype, device) for task in (bare_backbone, perplexity_pass))
        figures["backbone_peak_gb"] = None if bare is None else bare / 1e9
        figures["perplexity_extra_gb"] = None if bare is None or scored is None else (scored - bare) / 1e9
        figures["help_seconds"] = statistics.median(seconds(help_text) for _ in range(repeats))
        show("forward_ratio", f"forward, {length:,} tokens, YaRN / stock", "1.00")
        show("decode_ratio", "decode, one token, YaRN / stock", "1.00")
        show("noise_ratio", "forward, stock / stock (noise)", "1.00")
        show("backbone_peak_gb", f"memory above weights, backbone, {memory_length:,} tokens", unit=" GB")
        show("perplexity_extra_gb", "  perplexity pass on top of it", "< 0.4 GB", " GB")
        show("help_seconds", "ctxext --help", "< 0.5 s", " s")
    if "attention" in chosen:
        for tokens, goals in ((prefill, ALONE), (2 * prefill, LONG)):
            figures |= attention_alone(methods, tokens, max(3, repeats // 2), dtype, device)
            for name in methods:
                label = f"attention alone, {tokens:,} tokens, {name} / stock"
                show(f"attention_{name}_{tokens}", label, goals.get(name, ""))
    if "model" in chosen:
        figures |= whole_model(methods, prefill, prefill_repeats, dtype, device)
        for name in methods:
            show(f"prefill_{name}", f"prefill, {prefill:,} tokens, {name} / stock", PREFILL[name])
        for name in methods:
            base = f"stock at {WINDOW:,}" if name == "streaming_llm" else "stock"
            show(f"decode_{name}", f"decode, one token at {prefill:,}, {name} / {base}", DECODE[name])
        stock, *peaks = (peak_memory(prefill_pass, memory_length, name, dtype, device) for name in (None, *methods))
        figures["memory_stock_gb"] = None if stock is None else stock / 1e9
        for name, peak in zip(methods, peaks, strict=True):
            figures[f"memory_{name}"] = None if stock is None or peak is None else peak / stock
            show(f"memory_{name}", f"memory above weights, {memory_length:,} tokens, {name} / stock", "<= 1.10")
    if "training" in chosen:
        figures |= training_step(methods, training_length, prefill_repeats, dtype, device)
        for name in methods:
            label = f"training step, {training_length:,} tokens, {name} / stock"
            show(f"training_{name}", label, TRAINING.get(name, ""))
    if "evaluation" in chosen:
        figures |= evaluations(evaluation_length, prefill_repeats, dtype, device)
        show("curve_ratio", f"perplexity at four lengths up to {evaluation_length:,} / decoder alone", "<= 1.2")
        show("passkey_ratio", f"one passkey prompt of {evaluation_length:,}, forced / decoder alone", "<= 1.3")
    if "plan" in chosen:
        for label, foreseen in foreseen_memory(plan_length, dtype).items():
            measured = peak_memory(planned_pass, label, plan_length, dtype, device)
            name = "plan_" + "_".join(label.replace(",", "").lower().split())
            figures[f"{name}_gb"] = None if measured is None else measured / 1e9
            figures[name] = None if measured is None else foreseen / measured
            show(f"{name}_gb", f"memory above weights and states, {plan_length:,} tokens, {label}", unit=" GB")
            show(name, "  foreseen by ctxext plan / measured", "0.75 to 1.25")
    Console().print(table)


@torch.no_grad()
def overhead(repeats: int, length: int, dtype: str, device: str | None) -> dict[str, float]:
    """Ratios of times, patched over stock, of a forward pass and of one decoding step."""
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

    return {
        "forward_ratio": ratio(times["patched"]["forward"], times["stock"]["forward"]),
        "decode_ratio": ratio(times["patched"]["decode"], times["stock"]["decode"]),
        "noise_ratio": ratio(times["again"]["forward"], times["stock"]["forward"]),
        "forward_seconds": statistics.median(times["stock"]["forward"]),
        "decode_seconds": statistics.median(times["stock"]["decode"]) / 16,
    }


def _decode(model: Any, cache: Any, tokens: torch.Tensor, *, steps: int) -> None:
    # Transformers renamed the argument during 5.x.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for _ in range(steps):
        model(tokens, use_cache=True, logits_to_keep=1, **{name: cache})


@torch.no_grad()
def attention_alone(
    methods: dict[str, ctxext.Method], length: int, repeats: int, dtype: str, device: str | None
) -> dict[str, float]:
    """Ratios of times over stock causal attention, on random tensors of SmolLM2-135M's shapes."""
    spec = ctxext.RopeSpec(100_000.0, 64, 8192)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    query, key, value = (
        torch.randn(1, length, heads, 64, device=where, dtype=getattr(torch, dtype)).transpose(1, 2)
        for heads in (9, 3, 3)
    )
    calls: dict[str, Callable[[], Any]] = {
        "stock": lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    }
    for name, method in methods.items():
        partition = method.partition(spec)
        assert partition is not None  # all of them have one
        blocks = partition.blocks(torch.arange(length), 0)
        calls[name] = lambda blocks=blocks: engine.attend(query, key, value, blocks, 64**-0.5)
    times: dict[str, list[float]] = {name: [] for name in calls}
    console = Console(stderr=True)
    description = f"attention alone, {length:,} tokens"
    for round_number in track(range(repeats + 1), description=description, console=console, transient=True):
        for name, call in calls.items():
            elapsed = seconds(call)
            if round_number:  # the first round warms up
                times[name].append(elapsed)
    return {f"attention_{name}_{length}": ratio(times[name], times["stock"]) for name in methods}


@torch.no_grad()
def whole_model(
    methods: dict[str, ctxext.Method], length: int, repeats: int, dtype: str, device: str | None
) -> dict[str, float]:
    """Ratios of times over the stock model: a pass that fills the cache, and steps of one token from there.

    Steps of ``streaming_llm`` are taken in a cache that evicts, and compared with those of the stock model in a cache
    as long as its window.
    """
    model, _ = ctxext.load_model(MODEL, dtype=dtype, device=device)
    tokens = torch.randint(100, 40_000, (1, length), device=model.device)
    passes: dict[str, list[float]] = {name: [] for name in ("stock", "window", *methods)}
    steps: dict[str, list[float]] = {name: [] for name in passes}
    plan = [name for _ in range(repeats) for name in passes if name != "window" or "streaming_llm" in methods]
    model(tokens[:, :1024], use_cache=False, logits_to_keep=1)  # warms up
    for name in track(plan, description="whole model", console=Console(stderr=True), transient=True):
        patch = ctxext.patch(model, methods[name]) if name in methods else None
        cache = ctxext.StreamingCache(model) if name == "streaming_llm" else DynamicCache(config=model.config)
        given = tokens[:, :WINDOW] if name == "window" else tokens
        passes[name].append(seconds(lambda cache=cache, given=given: _decode(model, cache, given, steps=1)))
        _decode(model, cache, tokens[:, :1], steps=2)
        steps[name].append(seconds(lambda cache=cache: _decode(model, cache, tokens[:, :1], steps=24)))
        if patch is not None:
            patch.remove()
    figures = {f"prefill_{name}": ratio(passes[name], passes["stock"]) for name in methods}
    for name in methods:
        figures[f"decode_{name}"] = ratio(steps[name], steps["window" if name == "streaming_llm" else "stock"])
    figures["prefill_stock_seconds"] = statistics.median(passes["stock"])
    figures["decode_stock_seconds"] = statistics.median(steps["stock"]) / 24
    return figures


def training_step(
    methods: dict[str, ctxext.Method], length: int, repeats: int, dtype: str, device: str | None
) -> dict[str, float]:
    """Ratios of times of a forward and backward pass over the stock model's."""
    model, _ = ctxext.load_model(MODEL, dtype=dtype, device=device)
    model.train()
    tokens = torch.randint(100, 40_000, (1, length), device=model.device)

    def step() -> None:
        model.zero_grad()
        # The decoder alone: the output head costs the same everywhere.
        model.get_decoder()(tokens, use_cache=False).last_hidden_state.float().square().mean().backward()

    times: dict[str, list[float]] = {name: [] for name in ("stock", *methods)}
    plan = [name for _ in range(repeats) for name in times]
    step()  # warms up
    for name in track(plan, description="training", console=Console(stderr=True), transient=True):
        # The trained length is lowered, so that the step has chunks to cross and a scale to follow.
        short = None
        if name in methods:
            changes: dict[str, int] = {"original_max_position_embeddings": length // 2}
            if name == "lm_infinite":
                changes["n_local"] = length // 2
            elif name == "streaming_llm":
                changes["window"] = length // 2 - methods[name].n_sink
            short = methods[name].model_copy(update=changes)
        patch = None if short is None else ctxext.patch(model, short)
        times[name].append(seconds(step))
        if patch is not None:
            patch.remove()
    ratios = {f"training_{name}": ratio(times[name], times["stock"]) for name in methods}
    return {**ratios, "training_stock_seconds": statistics.median(times["stock"])}


def evaluations(length: int, repeats: int, dtype: str, device: str | None) -> dict[str, float]:
    """Ratios of times of evaluations over one pass of as many tokens through the decoder, per prompt for passkeys."""
    model, tokenizer = ctxext.load_model(MODEL, dtype=dtype, device=device)
    documents = list(load_documents(DATASET))
    tokens = torch.tensor([tokenize(tokenizer, documents[0].text)[:length]], device=model.device)
    lengths = [length // 8, length // 4, length // 2, length]

    def backbone() -> None:
        with torch.no_grad():
            model.get_decoder()(input_ids=tokens, use_cache=False)

    calls: dict[str, Callable[[], Any]] = {
        "backbone": backbone,
        "curve": lambda: evaluate_perplexity(model, tokenizer, documents, lengths=lengths, max_documents=1),
        "passkey": lambda: evaluate_passkey(
            model, tokenizer, lengths=[length], depths=[0.5], trials=2, answers="forced"
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    _warm_up(model)
    plan = [name for _ in range(repeats) for name in calls]
    for name in track(plan, description="evaluations", console=Console(stderr=True), transient=True):
        times[name].append(seconds(calls[name]) / (2 if name == "passkey" else 1))
    return {
        "curve_ratio": ratio(times["curve"], times["backbone"]),
        "passkey_ratio": ratio(times["passkey"], times["backbone"]),
        "backbone_seconds": statistics.median(times["backbone"]),
    }


def ratio(times: list[float], stock: list[float]) -> float:
    """Median over the rounds of one time divided by the other."""
    return statistics.median(ours / theirs for ours, theirs in zip(times, stock, strict=True))


def bare_backbone(length: int, dtype: str, device: str | None) -> Callable[[], Any]:
    """One pass of the same text through the decoder, no output head."""
    model, tokenizer = ctxext.load_model(MODEL, dtype=dtype, device=device)
    document = next(load_documents(DATASET))
    tokens = torch.tensor([tokenize(tokenizer, document.text)[:length]], device=model.device)
    _warm_up(model)
    return lambda: model.get_decoder()(input_ids=tokens, use_cache=False)


def perplexity_pass(length: int, dtype: str, device: str | None) -> Callable[[], Any]:
    """The pass with every position scored."""
    model, tokenizer = ctxext.load_model(MODEL, dtype=dtype, device=device)
    documents = list(load_documents(DATASET))
    _warm_up(model)
    return lambda: evaluate_perplexity(model, tokenizer, documents, lengths=(length,), max_documents=1)


def prefill_pass(length: int, name: str | None, dtype: str, device: str | None) -> Callable[[], Any]:
    """One pass that fills a cache, with a method or without."""
    model, _ = ctxext.load_model(MODEL, None if name is None else ATTENTION[name], dtype=dtype, device=device)
    tokens = torch.randint(100, 40_000, (1, length), device=model.device)
    _warm_up(model)
    return lambda: _decode(model, DynamicCache(config=model.config), tokens, steps=1)


def foreseen_memory(length: int, dtype: str) -> dict[str, int]:
    """What ``ctxext plan`` says that each pass holds beside weights, gradients and moments, in bytes."""
    found = memory.sizes(meta_model(read_config(MODEL)))
    given = memory.Input(length, 1, getattr(torch, dtype).itemsize)
    held = {label: way(given) for label, way in ways(found, bf16=dtype == "bfloat16", lora_rank=16).items()}
    return {label: one.cache + one.activations + one.logits for label, one in held.items()}


def planned_pass(label: str, length: int, dtype: str, device: str | None) -> Callable[[], Any]:
    """One of the passes that ``ctxext plan`` speaks of."""
    model, _ = ctxext.load_model(MODEL, dtype="float32" if label.startswith("train") else dtype, device=device)
    tokens = torch.randint(100, 40_000, (1, length), device=model.device)
    _warm_up(model)
    if label == "prefill":
        return lambda: _decode(model, DynamicCache(config=model.config), tokens, steps=1)
    if label == "all logits":
        return lambda: model(tokens)
    if label == "decode":
        shape = (1, model.config.num_key_value_heads, length, model.config.head_dim)
        keys = torch.randn(shape, dtype=model.dtype, device=model.device)
        return lambda: _decode_after(model, keys)
    model.train()
    if "checkpointing" in label:
        # Transformers renamed it during 5.x.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    whole: Any = model
    if label.startswith("LoRA"):
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        whole = get_peft_model(model, LoraConfig(r=16, target_modules=names))
    for parameter in whole.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1e-6)  # zeros would take no memory before they are written to
    return lambda: _train(whole, model, tokens, autocast=dtype == "bfloat16", sliced="labels" not in label)


def _decode_after(model: Any, keys: torch.Tensor) -> None:
    """One token with a cache that appears at once, so that nothing else takes memory."""
    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        cache.update(keys, keys, layer)
    _decode(model, cache, torch.zeros(1, 1, dtype=torch.int64, device=model.device), steps=1)


@torch.enable_grad()
def _train(whole: Any, model: Any, tokens: torch.Tensor, *, autocast: bool, sliced: bool) -> None:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        if sliced:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            loss = summed_loss(model, tokens, tokens, positions)
        else:
            loss = whole(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()


@torch.no_grad()
def _warm_up(model: Any) -> None:
    """What libraries allocate once is no part of a run's memory."""
    model(torch.arange(64, device=model.device)[None], use_cache=False)


def peak_memory(task: Callable[..., Callable[[], Any]], *arguments: Any) -> int | None:
    """Peak memory in bytes of the run that ``task`` prepares, above what is held before it; in a process of its own."""
    # glibc gives large blocks back as soon as they are freed, so that the peak is what was alive at once.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_above, (task, *arguments))


@torch.no_grad()
def _peak_above(task: Callable[..., Callable[[], Any]], *arguments: Any) -> int | None:
    run = task(*arguments)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    if not Path("/proc/self/clear_refs").exists():
        return None
    if (libc := ctypes.util.find_library("c")) is not None and hasattr(ctypes.CDLL(libc), "malloc_trim"):
        ctypes.CDLL(libc).malloc_trim(0)  # loading left freed pages behind, in which the run would hide
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    """A figure of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith(f"{field}:"))


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
