"""What the tests of patching share: models patched by ctxext, and the same models in Transformers' own words."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers import PreTrainedModel

import ctxext
import tiny

YARN = tiny.METHODS["yarn"]
METHODS = list(tiny.METHODS)
ATTENTION = [name for name in METHODS if name not in tiny.STATIC]

EITHER = ["yarn", "dca"]
"""One of each kind, where the method is not what is tested."""

TARGET = 256

_FACTORS = [
    1 / ((1 - g) / 4 + g) for g in (min(max((64 * 10 ** (-i / 2) / 2 / math.pi - 1) / 7, 0), 1) for i in range(8))
]

# The static settings in Transformers' own words, from the papers' formulas.
NATIVE: dict[str, dict[str, Any]] = {
    "pi": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "ntk": {"rope_type": "default", "rope_theta": 1e4 * 4 ** (16 / 14)},
    # Before training.
    "clex": {"rope_type": "default", "rope_theta": 1e4 * 4 ** (16 / 14)},
    "ntk_by_parts": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
        "short_factor": _FACTORS,
        "long_factor": _FACTORS,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    "rope_theta": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4],
        "long_factor": [1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4],
    },
}


def native(method: str, family: str = "llama", **changes: Any) -> PreTrainedModel:
    # Transformers' YaRN needs the head's width spelled out, which Mixtral's config leaves open.
    parameters = copy.deepcopy(NATIVE[method])
    return tiny.model(family, max_position_embeddings=TARGET, head_dim=16, rope_parameters=parameters, **changes)


def patched(method: str = "yarn", family: str = "llama", **changes: Any) -> PreTrainedModel:
    model = tiny.model(family, **changes)
    ctxext.patch(model, tiny.METHODS[method])
    return model


def plain_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A state dict without what a method has learned, which a plain model has no place for."""
    return {key: value for key, value in model.state_dict().items() if ".rotary_emb." not in key}


def gradients(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that a patch could leave behind."""
    modules = dict(model.named_modules())
    return {
        "modules": {name: id(module) for name, module in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "configs": {name: id(vars(module).get("config")) for name, module in modules.items()},
        "settings": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "hooks": {
            name: [id(hook) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())]
            + [len(module._forward_pre_hooks_with_kwargs)]
            for name, module in modules.items()
        },
        "keys": list(model.state_dict()),
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }


def assert_as_before(model: PreTrainedModel, before: dict[str, Any]) -> None:
    now = snapshot(model)
    for name, buffer in before.pop("buffers").items():
        assert torch.equal(now["buffers"][name], buffer), name
    for what, value in before.items():
        assert now[what] == value, what


def greedy(model: PreTrainedModel, **settings: Any) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    prompt = tiny.tokens(50)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, **settings
    )
