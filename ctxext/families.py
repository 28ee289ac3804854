"""Where the supported architectures keep their rotary embedding, and what a checkpoint's config says about it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ctxext.errors import ConfigError, UnsupportedModelError
from ctxext.methods import METHODS, Method, method_class
from ctxext.methods.base import as_longrope
from ctxext.rope import RopeSpec


@dataclass(frozen=True)
class Family:
    """One architecture: attribute names below its decoder (``model.base_model``)."""

    model_type: str
    rotary: str = "rotary_emb"
    layers: str = "layers"
    attention: str = "self_attn"


FAMILIES: dict[str, Family] = {
    model_type: Family(model_type)
    for model_type in ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
}
"""To add an architecture with these seams: add its ``model_type`` here and a tiny config to ``tests/tiny.py``."""


def find_family(model: PreTrainedModel) -> Family:
    """The row for a model.

    Raises:
        UnsupportedModelError: the architecture isn't in the table, or the model isn't built like its row.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model, PreTrainedModel) or model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} ({type(model).__name__}) is not supported ({', '.join(FAMILIES)}); "
            "if its rotary embedding is one module that returns (cos, sin), add a row to ctxext/families.py"
        )
    family = FAMILIES[model_type]
    rotary_names = [name for name, module in model.named_modules() if "RotaryEmbedding" in type(module).__name__]
    expected = [name for name, module in model.named_modules() if module is rotary_module(model, family)]
    if not expected or rotary_names != expected:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model_type}): expected one rotary embedding, the decoder's {family.rotary!r}, "
            f"but found {rotary_names or 'none'}; nothing was patched"
        )
    return family


def rotary_module(model: PreTrainedModel, family: Family) -> nn.Module | None:
    """The module that gives every layer its cosine and sine, or None if it isn't where the family keeps it."""
    return getattr(model.base_model, family.rotary, None)


def stock_frequencies(rotary_class: type[nn.Module], config: PretrainedConfig) -> tuple[torch.Tensor, float, str]:
    """What Transformers alone would compute on loading ``config``: frequencies, attention factor, rope type.

    Raises whatever Transformers raises on a config that it can't load.
    """
    with torch.device("cpu"):
        # A copy, because building the module completes the config's rope_parameters in place.
        fresh: Any = rotary_class(copy.deepcopy(config))
    return fresh.inv_freq.float(), float(fresh.attention_scaling), str(fresh.rope_type)


def rotary_dim(config: PretrainedConfig) -> int:
    """Number of rotated dimensions of a head.

    Raises:
        UnsupportedModelError: only a part of the head is rotated, or the number is odd.
    """
    parameters = rope_parameters(config)
    partial = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"partial_rotary_factor {partial}: models that rotate a part of the head are not supported"
        )
    # Mixtral leaves head_dim None, and Qwen3's differs from hidden_size / heads.
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if dim % 2 or dim < 4:
        raise UnsupportedModelError(f"head_dim {dim}: an even number of at least 4 is needed")
    return dim


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The config's ``rope_parameters``.

    Raises:
        UnsupportedModelError: they are missing, or differ by layer type.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not isinstance(parameters.get("rope_theta"), (int, float)):
        raise UnsupportedModelError(
            f"config.rope_parameters has no rope_theta ({parameters!r}); it was probably edited after loading: "
            "load the model again and extend it with ctxext.patch"
        )
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError(f"rope_parameters that differ by layer type are not supported: {list(parameters)}")
    return parameters


def trained_rope(config: PretrainedConfig, method: Method, *, replace_scaling: bool = False) -> RopeSpec:
    """The rotary embedding before any scaling, to which a method's factor refers, so that factors never compound.

    Args:
        config: the unpatched model's config.
        method: its ``original_max_position_embeddings``, where given, settles the trained length.
        replace_scaling: drop a scaling that the checkpoint was trained with (llama3, longrope).

    Raises:
        UnsupportedModelError: the checkpoint is scaled, and its base or its trained length can't be told.
    """
    parameters = rope_parameters(config)
    dim = rotary_dim(config)
    record = extension_record(config)
    if record is not None:
        if record["method"]["name"] != "rope_theta":
            return RopeSpec(record["rope_theta"], dim, record["original_max_position_embeddings"])
        if method.original_max_position_embeddings is None:
            raise UnsupportedModelError(
                f"the checkpoint was given a new base with ctxext ({record['method']}), and how far it was then "
                "trained is not recorded; give original_max_position_embeddings in the method"
            )
    theta = float(parameters["rope_theta"])
    rope_type = str(parameters.get("rope_type", "default"))
    given = method.original_max_position_embeddings
    if "type" in parameters and parameters["type"] != rope_type:
        raise UnsupportedModelError(
            f"config.rope_parameters name two scalings, type {parameters['type']!r} and rope_type {rope_type!r}; "
            "remove the wrong one from config.json"
        )
    if rope_type == "default":
        return RopeSpec(theta, dim, config.max_position_embeddings)

    recorded = parameters.get(
        "original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None)
    )
    if rope_type not in ("yarn", "linear") and not replace_scaling:
        raise UnsupportedModelError(
            f"the checkpoint is already scaled with {rope_type} ({_short(parameters)}), which a factor can't be "
            "relative to; pass replace_scaling=True (--replace-scaling) to start again from the unscaled base"
        )
    if given is None and rope_type == "yarn" and recorded == config.max_position_embeddings:
        raise UnsupportedModelError(
            f"the checkpoint is already scaled with yarn ({_short(parameters)}), and its trained length is given as "
            "its max_position_embeddings, which Transformers also fills in where none is recorded; give "
            "original_max_position_embeddings in the method"
        )
    if given is None and recorded is None:
        raise UnsupportedModelError(
            f"the checkpoint is already scaled with {rope_type} ({_short(parameters)}) and doesn't record its trained "
            "length; give original_max_position_embeddings in the method"
        )
    trained: Any = given or recorded
    return RopeSpec(theta, dim, int(trained))


def extension_record(config: PretrainedConfig) -> dict[str, Any] | None:
    """What ``patch`` wrote into a saved checkpoint about its method and the base that it extended, or None.

    ``trained`` in it says that the method has learned something, and rotates otherwise than it started.

    Raises:
        UnsupportedModelError: the record can't be read, or ``rope_parameters`` were changed by hand since.
    """
    record = getattr(config, "ctxext", None)
    if record is None:
        return None
    try:
        settings = dict(record["method"])
        spec = RopeSpec(
            float(record["rope_theta"]), rotary_dim(config), int(record["original_max_position_embeddings"])
        )
        known = settings["name"] in METHODS
        method = method_class(settings).model_validate(settings) if known else None
        if method is not None and method.changes_attention:
            expected = {"rope_type": "default", "rope_theta": spec.rope_theta}
        else:
            expected = {} if method is None else method.rope_parameters(spec)
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"config.ctxext, which says how this checkpoint was extended, can't be read ({type(error).__name__}); it "
            "may come from a newer ctxext; remove the key from config.json to take the checkpoint as it is"
        ) from error
    parameters = rope_parameters(config)
    edited, trained = any(parameters.get(key) != value for key, value in expected.items()), False
    if edited and method is not None and record.get("learned"):
        # What was learned is known from the parameters alone; everything else in them has to be the method's.
        stretched = as_longrope(spec, method.lengths(spec), *method.scaled_rope(spec))
        trained = all(parameters.get(key) == value for key, value in stretched.items() if not key.endswith("_factor"))
    if edited and not trained:
        raise UnsupportedModelError(
            f"config.ctxext says that this checkpoint was extended with {settings}, but its rope_parameters "
            f"({_short(parameters)}) are others; remove the key ctxext from config.json if they are meant"
        )
    return {
        "method": settings,
        "rope_theta": spec.rope_theta,
        "original_max_position_embeddings": spec.original_max_position_embeddings,
        "trained": trained,
    }


def check_trained_length(config: PretrainedConfig, rotary: nn.Module, method: Method) -> None:
    """Refuse a config whose length was raised after loading, which would be mistaken for the trained length."""
    loaded = getattr(rotary, "original_max_seq_len", None)
    if loaded not in (None, config.max_position_embeddings) and method.original_max_position_embeddings is None:
        raise ConfigError(
            f"config.max_position_embeddings is {config.max_position_embeddings}, but the model was loaded with "
            f"{loaded}; give original_max_position_embeddings (the trained length) in the method"
        )


def window_layers(config: PretrainedConfig) -> tuple[int, int] | None:
    """Number of layers whose attention sees only a sliding window, and the window in tokens; None if there are none."""
    window = getattr(config, "sliding_window", None)
    if not window:
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or config.model_type in ("mistral", "mixtral", "qwen3_moe"):
        return int(config.num_hidden_layers), int(window)
    count = sum(layer_type == "sliding_attention" for layer_type in layer_types)
    return (count, int(window)) if count else None


def _short(parameters: dict[str, Any]) -> str:
    """Settings on one line, without long lists."""
    return ", ".join(f"{key}={value}" for key, value in parameters.items() if not isinstance(value, (list, tuple)))
