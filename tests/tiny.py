"""Tiny random models of every supported architecture, with attention sharp enough for position errors to show."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

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
}
"""One setting of every method, for models with eight frequencies."""


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


def tokens(length: int, batch: int = 1, *, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
