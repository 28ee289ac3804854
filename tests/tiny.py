"""Tiny random models of every supported architecture, with attention sharp enough for position errors to show."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import warning_once

import ctxext

TRAINED = 64
VOCABULARY = 128

_MOE = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": _MOE,
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **_MOE},
}
FAMILIES = tuple(_EXTRA)

METHODS: dict[str, ctxext.Method] = {
    "pi": ctxext.PI(factor=4),
    "ntk": ctxext.NTK(factor=4),
    "ntk_by_parts": ctxext.NTKByParts(factor=4, beta=8),
    "yarn": ctxext.YaRN(factor=4),
    "rope_theta": ctxext.RopeTheta(rope_theta=1e6, factor=4),
    "llama3": ctxext.Llama3(factor=4),
    "longrope": ctxext.LongRoPE(factor=4, long_factor=(1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4)),
    "dynamic_ntk": ctxext.DynamicNTK(step=16),
    "dynamic_yarn": ctxext.DynamicYaRN(step=16, factor=2),
    "dca": ctxext.DCA(chunk_size=24, local_size=8),
    "self_extend": ctxext.SelfExtend(neighbor_window=19, group_size=6),
    "rerope": ctxext.ReRoPE(window=20, leak=6.5),
    "lm_infinite": ctxext.LMInfinite(n_global=5, n_local=23, distance_limit=23),
    "streaming_llm": ctxext.StreamingLLM(n_sink=3, window=20),
    "clex": ctxext.CLEX(factor=4),
}
"""One setting of every method, for models with eight frequencies."""

STATIC = [name for name, method in METHODS.items() if not method.changes_attention]
"""Those that fixed frequencies express, so that Transformers alone runs their checkpoints on its own attention."""


def config(family: str = "llama", **changes: Any) -> PretrainedConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TRAINED,
        # The usual 0.02 makes attention so flat that wrong positions stay below any tolerance.
        "initializer_range": 0.3,
        # Pinned, because the defaults of the architectures differ.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoConfig.for_model(family, **{**settings, **_EXTRA[family], **changes})


def model(family: str = "llama", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(family, **changes)).eval()


def save_checkpoint(path: Path, **changes: Any) -> None:
    """A model and a tokenizer with one token per byte, as files."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{c: i + 3 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
    model("llama", vocab_size=len(vocabulary), **changes).save_pretrained(path)


def tokens(length: int, batch: int = 1, *, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def logits(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Largest difference of two elements."""
    return (first.double() - second.double()).abs().max().item()


def in_pieces(model: PreTrainedModel, ids: torch.Tensor, ends: Sequence[int], cache: Any) -> torch.Tensor:
    """Logits of a forward pass in pieces that end at ``ends``, through a key-value cache."""
    names = inspect.signature(model.forward).parameters
    # Transformers 5.24 renames the argument; older releases also want positions for a static cache.
    name = "cache" if "cache" in names else "past_key_values"
    outputs = []
    for start, end in itertools.pairwise([0, *ends]):
        extra = {"cache_position": torch.arange(start, end)} if "cache_position" in names else {}
        outputs.append(logits(model, ids[:, start:end], use_cache=True, **{name: cache}, **extra))
    return torch.cat(outputs, dim=1)


@contextmanager
def transformers_log() -> Iterator[list[str]]:
    """Everything that Transformers logs as a warning or worse."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    warning_once.cache_clear()
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@contextmanager
def strictly() -> Iterator[None]:
    """One thread, because tiny tensors gain nothing from more, and no deprecation in Transformers' log."""
    # What its own assisted generation says about itself is not about ctxext.
    own = "Passing `generation_config` together with generation-related arguments"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with transformers_log() as messages:
            yield
    finally:
        torch.set_num_threads(threads)
    assert [text for text in messages if "deprecat" in text.lower() and own not in text] == []
