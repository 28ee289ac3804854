"""What extending a checkpoint to a target length takes: factor, method, memory, all from its config alone."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, PretrainedConfig

from ctxext import memory
from ctxext.config import parse_method
from ctxext.errors import ConfigError, CtxextError, UnsupportedModelError
from ctxext.families import FAMILIES, extension_record, find_family, trained_rope, window_layers
from ctxext.memory import Input, Memory, Sizes
from ctxext.methods import METHODS, Method, YaRN
from ctxext.patching import Patch, patch
from ctxext.rope import RopeSpec

LONGEST = 2**24
"""Positions that float32, in which rotary embeddings count them, tells apart."""


@dataclass(frozen=True)
class Verdict:
    """What can be said of one method at the target.

    Attributes:
        method: its name.
        fits: None if ``patch`` puts the method on this model, otherwise why it doesn't.
        untrained: whether the target is within what the method is known to reach without training; None: not known.
        limit: the factor that it is known to reach without training, None: not known.
        evidence: what that rests on.
        memory: what the method adds to the stock model's memory.
    """

    method: str
    fits: str | None
    untrained: bool | None
    limit: float | None
    evidence: str
    memory: str


@dataclass(frozen=True)
class Pass:
    """One way of running the model at the target length.

    Attributes:
        name: what is run.
        memory: bytes held at the peak.
        longest: tokens of the longest input that fits, up to ``LONGEST``; None where the capacity is not known.
    """

    name: str
    memory: Memory
    longest: int | None


@dataclass(frozen=True)
class Plan:
    """What ``ctxext plan`` prints. Lengths in tokens, memory in bytes.

    Attributes:
        model: the checkpoint's name.
        model_type: its architecture.
        trained: trained length, before any scaling; None if nothing is needed.
        reach: how far the checkpoint reads as it is, by its own scaling if it has one.
        target: the wanted length.
        factor: smallest sufficient factor, rounded up to hundredths; 1 if nothing is needed.
        round_factor: the next whole number.
        method: the method's settings, or None if nothing is needed.
        yaml: the file to give to ``ctxext.patch`` and every command, or None.
        parameters: of the model, tied ones once.
        active_parameters: those that one token uses.
        dtype: of the weights outside training.
        batch_size: inputs of the target length at a time.
        capacity: memory to fit into, or None.
        passes: what the ways of running the model hold.
        verdicts: on all methods; empty if nothing is needed.
        notes: what a user should know, one sentence each.
    """

    model: str
    model_type: str
    trained: int | None
    reach: int
    target: int
    factor: float
    round_factor: float
    method: dict[str, Any] | None
    yaml: str | None
    parameters: int
    active_parameters: int
    dtype: str
    batch_size: int
    capacity: int | None
    passes: tuple[Pass, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, totals of memory included; an infinite limit is the text ``any``."""
        values = asdict(self)
        for entry, one in zip(values["passes"], self.passes, strict=True):
            entry["memory"]["total"] = one.memory.total
            entry["fits"] = None if self.capacity is None else one.memory.total <= self.capacity
        for entry in values["verdicts"]:
            entry["limit"] = "any" if entry["limit"] == math.inf else entry["limit"]
        return values


def make_plan(
    name: str,
    config: PretrainedConfig,
    target: int,
    method: Method | str | None = None,
    *,
    dtype: str = "auto",
    batch_size: int = 1,
    bf16: bool = True,
    lora_rank: int = 16,
    capacity: int | None = None,
    replace_scaling: bool = False,
) -> Plan:
    """Plan for a checkpoint of which only the config is known.

    Args:
        name: the checkpoint's, for people.
        config: its config.
        target: tokens that it shall read.
        method: settings, or the name of a method that is then set to the target. Default: yarn.
        dtype: of the weights: auto (as stored), float32, bfloat16 or float16.
        batch_size: inputs of that length at a time.
        bf16: whether training computes in bfloat16 (``finetune.precision``).
        lora_rank: of adapters (``finetune.lora.rank``).
        capacity: memory to fit into, in bytes.
        replace_scaling: as for ``patch``.

    Raises:
        UnsupportedModelError: the architecture isn't supported, or its own scaling can't be built upon.
        ConfigError: the target is out of range, the method unknown, or its settings don't reach the target.
    """
    if not 2 <= target <= LONGEST:
        raise ConfigError(
            f"target {target}: expected 2 to {LONGEST:,} tokens; float32, in which rotary embeddings count positions, "
            "doesn't tell longer ones apart"
        )
    model = meta_model(config)
    reach = own_reach(model.config)
    method = parse_method({"name": method}, method) if isinstance(method, str) else method or YaRN()
    if getattr(method, "attention", "") == "naive":
        raise ConfigError("attention: naive holds scores that grow with the square of the length: plan without it")
    trained, chosen = None, None
    verdicts: tuple[Verdict, ...] = ()
    if target > reach:
        trained, chosen = _choose(model, target, method, replace_scaling=replace_scaling)
        verdicts = tuple(
            _verdict(model, cls, method, trained, target, replace_scaling=replace_scaling) for cls in METHODS.values()
        )
    factor = 1.0 if trained is None else sufficient(trained, target)
    settings = None if chosen is None else _settings(chosen)
    rotated = chosen is not None and _keeps_rotated_keys(model, chosen, replace_scaling)
    found, stored = memory.sizes(model), dtype_of(model.config, dtype)
    given = Input(target, batch_size, stored.itemsize)
    return Plan(
        model=name,
        model_type=config.model_type,
        trained=trained,
        reach=reach,
        target=target,
        factor=factor,
        round_factor=float(math.ceil(factor)),
        method=settings,
        yaml=None if settings is None else yaml.safe_dump({"method": settings}, sort_keys=False),
        parameters=found.parameters,
        active_parameters=found.active_parameters,
        dtype=str(stored).removeprefix("torch."),
        batch_size=batch_size,
        capacity=capacity,
        passes=tuple(
            Pass(label, held(given), None if capacity is None else _longest(held, given, capacity))
            for label, held in ways(found, bf16=bf16, lora_rank=lora_rank, rotated_keys=rotated).items()
        ),
        verdicts=verdicts,
        notes=tuple(_notes(model.config, found, chosen, reach, target, lora_rank=lora_rank, bf16=bf16)),
    )


def meta_model(config: PretrainedConfig) -> Any:
    """The model without weights.

    Raises:
        UnsupportedModelError: the architecture isn't supported, or the config doesn't describe a model.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(f"model_type {config.model_type!r} is not supported ({', '.join(FAMILIES)})")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever Transformers raises here is about the config
        raise UnsupportedModelError(f"Transformers can't build a model from this config: {error}") from error
    find_family(model)
    return model


def dtype_of(config: PretrainedConfig, dtype: str) -> torch.dtype:
    """The dtype that ``dtype`` means for a checkpoint; float32 where it records none."""
    stored = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    if isinstance(stored, str):
        stored = getattr(torch, stored)
    return torch.float32 if stored is None else stored


def own_reach(config: PretrainedConfig) -> int:
    """How far the checkpoint reads as it is, in tokens: trained, or by a scaling that it was saved with."""
    record = extension_record(config)
    reach = int(config.max_position_embeddings)
    if record is None or record["method"]["name"] not in METHODS:
        return reach
    method = parse_method(record["method"], "config.ctxext")
    return max(reach, method.lengths(trained_rope(config, method)).target)


def memory_capacity(device: str | None = None) -> int | None:
    """Bytes of memory of the accelerator ``device`` (default: one if there is one), or else of this machine.

    Only what is built in counts, not what is free at the moment. None where the system doesn't tell.

    Raises:
        ConfigError: there is no such accelerator.
    """
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if place.type == "cuda":
            return int(torch.cuda.get_device_properties(place).total_memory)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {device!r} isn't here ({' '.join(str(error).split())[:80]}): give --memory to plan for another one"
        ) from error
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    built_in = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = Path("/sys/fs/cgroup/memory.max")  # of a container
    text = allowed.read_text().strip() if allowed.is_file() else "max"
    return min(built_in, int(text)) if text.isdigit() else built_in


def _choose(model: Any, target: int, method: Method, *, replace_scaling: bool) -> tuple[int, Method]:
    """Trained length, and the method with lengths that reach the target, proven on the model.

    Raises:
        ConfigError: its own lengths don't reach it.
        PatchError: the method can't be put on the model.
    """
    method = method.for_config(model.config)
    spec = trained_rope(model.config, method, replace_scaling=replace_scaling)
    trained = method.original_max_position_embeddings or spec.original_max_position_embeddings
    method = reaching(method, spec, target)
    lengths = method.lengths(spec)
    if lengths.target < target:
        raise ConfigError(
            f"method {method.name} reaches {lengths.target:,} tokens, not {target:,}: "
            f"give max_position_embeddings {target}, or a factor of at least {sufficient(trained, target):g}"
        )
    with _quietly(model, method, replace_scaling=replace_scaling):
        return trained, method


def sufficient(trained: int, target: int) -> float:
    """The smallest factor that reaches the target, rounded up to hundredths; at least 1."""
    return max(100, -(-100 * target // trained)) / 100


def reaching(method: Method, spec: RopeSpec, target: int) -> Method:
    """The method with lengths that reach the target, if its settings leave them open.

    Static methods are given the smallest sufficient factor in hundredths. The others, whose factor says something else
    and whose length changes no score, are given the target itself.
    """
    with suppress(ConfigError):  # neither factor nor length is set
        if method.lengths(spec).target >= target:
            return method
    if method.max_position_embeddings is not None or "factor" in method.model_fields_set:
        return method
    length: dict[str, Any] = {"max_position_embeddings": target}
    if not method.changes_attention:
        trained = method.original_max_position_embeddings or spec.original_max_position_embeddings
        length = {"factor": sufficient(trained, target)}
    return type(method).model_validate({**_settings(method), **length})


@contextmanager
def _quietly(model: Any, method: Method, *, replace_scaling: bool) -> Iterator[Patch]:
    """The method on the model, without the warning about sliding windows, of which a plan has a note."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with patch(model, method, replace_scaling=replace_scaling) as active:
            yield active


def _verdict(
    model: Any, cls: type[Method], chosen: Method, trained: int, target: int, *, replace_scaling: bool
) -> Verdict:
    """On a method with its defaults, or with the settings of the chosen one."""
    name, fits, added = cls.model_fields["name"].default, None, "nothing"
    original = chosen.original_max_position_embeddings
    settings = {"name": name, **({} if original is None else {"original_max_position_embeddings": original})}
    try:
        wanted = chosen if isinstance(chosen, cls) else parse_method(settings, name)
        _, method = _choose(model, target, wanted, replace_scaling=replace_scaling)
        added = "half a cache while decoding" if _keeps_rotated_keys(model, method, replace_scaling) else "nothing"
    except CtxextError as error:
        fits = " ".join(str(error).split())
    limit = cls.untrained_factor
    return Verdict(name, fits, None if limit is None else target <= limit * trained, limit, cls.evidence, added)


def _keeps_rotated_keys(model: Any, method: Method, replace_scaling: bool) -> bool:
    """Whether the method keeps a second set of keys, rotated for the latest query, beside the cache."""
    partition = method.partition(trained_rope(model.config, method, replace_scaling=replace_scaling))
    return partition is not None and partition.keeps_turned_keys


def ways(
    found: Sizes, *, bf16: bool, lora_rank: int, rotated_keys: bool = False
) -> dict[str, Callable[[Input], Memory]]:
    """What each way of running the model holds for an input, by its label.

    With ``labels`` in it, the loss is ``model(labels=...).loss``, which builds all logits; else it comes in slices.
    """

    def training(rank: int, checkpointing: bool, sliced_loss: bool) -> Callable[[Input], Memory]:
        return lambda given: memory.training(
            found, given, bf16=bf16, lora_rank=rank, checkpointing=checkpointing, sliced_loss=sliced_loss
        )

    passes: dict[str, Callable[[Input], Memory]] = {
        "prefill": lambda given: memory.prefill(found, given),
        "all logits": lambda given: memory.all_logits(found, given),
        "decode": lambda given: memory.decode(found, given, rotated_keys=rotated_keys),
    }
    for what, rank in (("train", 0), ("LoRA", lora_rank)):
        passes[f"{what}, checkpointing"] = training(rank, True, True)
        passes[what] = training(rank, False, True)
        passes[f"{what}, checkpointing, labels"] = training(rank, True, False)
        passes[f"{what}, labels"] = training(rank, False, False)
    return passes


def _longest(held: Callable[[Input], Memory], given: Input, capacity: int) -> int:
    """Tokens of the longest input that fits, 0 if none does."""
    fits, too_long = 0, LONGEST + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if held(Input(middle, given.batch, given.width)).total <= capacity:
            fits = middle
        else:
            too_long = middle
    return fits


def _settings(method: Method) -> dict[str, Any]:
    """The name, and what differs from the defaults."""
    values = method.model_dump(mode="json", exclude_none=True)
    fields = type(method).model_fields
    return {key: value for key, value in values.items() if key == "name" or getattr(method, key) != fields[key].default}


def _notes(
    config: Any, found: Sizes, method: Method | None, reach: int, target: int, *, lora_rank: int, bf16: bool
) -> list[str]:
    notes = [
        f"training: weights that train, their gradients and AdamW's moments are float32, products "
        f"{'bfloat16' if bf16 else 'float32'}; LoRA has rank {lora_rank} on the attention's linear layers"
    ]
    if method is None or not method.changes_attention:
        notes.append(
            "training counts blocks of one document each: where several share one (finetune.pack: documents), stock "
            f"attention is given a mask, of {target**2 / 1e9:,.2f} GB and more at this length; pack: concat needs none"
        )
    scaling = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if method is not None and (scaling != "default" or getattr(config, "ctxext", None)):
        notes.append(f"the checkpoint's own scaling, which reaches {reach:,} tokens, is replaced")
    if found.sparse_layers:
        notes.append("all experts are held in memory, though a token uses few")
    windows = window_layers(config)
    if windows is not None:
        notes.append(
            f"{windows[0]} of {config.num_hidden_layers} layers attend to a sliding window of {windows[1]:,} tokens: "
            "nothing beyond it is seen there; SDPA is given it as a mask that grows with the square of the length, "
            "FlashAttention needs none"
        )
    if getattr(config, "quantization_config", None) is not None:
        notes.append("the checkpoint is quantized; its weights are counted as if they were not")
    return notes
