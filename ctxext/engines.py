"""The commands with which other engines run an extended model, and what each of them can't run.

What an engine does with a setting was read in the sources of vLLM, SGLang and llama.cpp as of autumn 2026. Where one of
them computes other numbers from the same settings, it is told what makes them equal, or the export is refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ctxext.errors import UnsupportedModelError
from ctxext.families import find_family, rope_parameters, rotary_dim, rotary_module, stock_frequencies
from ctxext.methods import YaRN
from ctxext.patching import active_patch
from ctxext.rope import RopeSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Engine = Literal["transformers", "vllm", "sglang", "llama.cpp"]
RopeFormat = Literal["v5", "v4"]

# Names of architectures in GGUF files.
_GGUF_NAMES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}


@dataclass(frozen=True)
class Target:
    """What an engine is to run: a ``folder`` that was exported, or the base model by ``name`` with settings laid over.

    ``gguf`` says that the base model is a GGUF file; ``revision`` is its commit, if it is on the hub.
    """

    name: str
    folder: bool
    gguf: bool = False
    revision: str | None = None


def commands(engine: Engine, model: PreTrainedModel, target: Target, rope_format: RopeFormat) -> list[list[str]]:
    """Commands, each as a list of arguments, that run ``target`` as ``model`` is patched; none for Transformers.

    ``model`` may be without weights.

    Raises:
        UnsupportedModelError: the engine can't run this, or not exactly.
    """
    if engine == "transformers":
        return []
    patch = active_patch(model)
    if patch is not None and patch.method.changes_attention:
        raise UnsupportedModelError(
            f"{engine} can't run {patch.method.name}: it changes attention itself, which only ctxext does in this way; "
            "use a static method (yarn, ntk, ...), or pin a dynamic one with seq_len"
        )
    rotary: Any = rotary_module(model, find_family(model)) if patch is None else patch.original_rotary
    config = model.config
    inv_freq, attention_factor, rope_type = stock_frequencies(type(rotary), config)
    if rope_type not in ("default", "linear", "yarn", "llama3", "longrope"):
        raise UnsupportedModelError(f"{engine}: rotary scaling {rope_type!r} follows the input's length; extend anew")
    before = (model.config if patch is None else patch.original_config).rope_parameters
    if engine == "llama.cpp":
        return _llama_cpp(config, inv_freq, attention_factor, before, target)
    overrides = _overrides(engine, config, attention_factor, before, target, rope_format)
    length = config.max_position_embeddings
    commit = ["--revision", target.revision] if target.revision and not target.folder else []
    if engine == "vllm":
        if rope_type == "yarn":
            # vLLM takes no length above this product, which may fall short of a rounded target by a fraction.
            parameters = config.rope_parameters
            length = min(length, math.floor(parameters["factor"] * parameters["original_max_position_embeddings"]))
        extra = ["--hf-overrides", json.dumps(overrides)] if overrides else []
        return [["vllm", "serve", target.name, *commit, "--max-model-len", str(length), *extra]]
    extra = ["--json-model-override-args", json.dumps(overrides)] if overrides else []
    command = ["python", "-m", "sglang.launch_server", "--model-path", target.name, *commit]
    return [[*command, "--context-length", str(length), *extra]]


def written(parameters: dict[str, Any], rope_format: RopeFormat) -> dict[str, Any]:
    """``rope_parameters`` as keys of config.json: as they are, or as releases 4 of Transformers read them."""
    if rope_format == "v5":
        return {"rope_parameters": parameters}
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    default = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": None if default else scaling}


def _overrides(
    engine: Engine,
    config: PreTrainedConfig,
    attention_factor: float,
    before: dict[str, Any],
    target: Target,
    rope_format: RopeFormat,
) -> dict[str, Any]:
    """What has to be laid over the config that vLLM or SGLang finds at the target."""
    parameters = dict(rope_parameters(config))
    own: dict[str, Any] = {}
    if parameters.get("rope_type") == "yarn":
        if (ratio := _to_default(attention_factor, parameters)) != 1:
            # SGLang, and older releases of vLLM, multiply the default by attn_factor and leave out attention_factor.
            own["attn_factor"] = ratio
    elif parameters.get("rope_type") == "longrope":
        if list(parameters["short_factor"]) != list(parameters["long_factor"]):
            raise UnsupportedModelError(f"{engine}: longrope with two sets of factors follows the input's length")
        own |= {"short_mscale": attention_factor, "long_mscale": attention_factor}
    parameters |= own
    overrides: dict[str, Any] = {}
    if not target.folder:
        if target.gguf:
            raise UnsupportedModelError(f"{engine}: a GGUF file can't be given other settings; export a folder")
        if left := sorted(key for key, value in before.items() if value is not None and key not in parameters):
            raise UnsupportedModelError(
                f"{engine}: the base model's own {', '.join(left)} would stay in effect under other settings; export a "
                "folder"
            )
        overrides["max_position_embeddings"] = config.max_position_embeddings
    if own or not target.folder:
        overrides |= written(parameters, rope_format)
    if getattr(config, "dual_chunk_attention_config", None) is not None:
        overrides["dual_chunk_attention_config"] = None  # or the engine would run what it says
    return overrides


def _llama_cpp(
    config: PreTrainedConfig,
    inv_freq: torch.Tensor,
    attention_factor: float,
    before: dict[str, Any],
    target: Target,
) -> list[list[str]]:
    parameters, length = rope_parameters(config), config.max_position_embeddings
    rope_type, theta = parameters.get("rope_type", "default"), float(parameters["rope_theta"])
    architecture = _GGUF_NAMES[config.model_type]
    metadata = {} if target.folder else {f"{architecture}.context_length": f"int:{length}"}
    flags = ["-c", str(length), "--rope-freq-base", repr(theta)]
    if rope_type == "longrope":
        raise UnsupportedModelError(
            "llama.cpp takes no divisor for each frequency (ntk_by_parts, longrope, yarn with ramp: rotations); use "
            "yarn, ntk, pi or rope_theta"
        )
    if not target.folder and before.get("rope_type") in ("llama3", "longrope"):
        raise UnsupportedModelError(
            f"llama.cpp: GGUF files of this model hold its {before['rope_type']} scaling as a tensor, which no flag "
            "replaces; export a folder"
        )
    if rope_type == "llama3":
        _check_llama3(config, parameters, target)
        flags += ["--rope-scaling", "none"]
    elif rope_type == "default":
        flags += ["--rope-scaling", "none"]
    else:
        flags += ["--rope-scaling", rope_type, "--rope-scale", repr(float(parameters["factor"]))]
    if rope_type == "yarn":
        flags += _yarn_flags(config, parameters, inv_freq)
        if (ratio := _to_default(attention_factor, parameters)) != 1:
            # --yarn-attn-factor is overwritten with the default; this is multiplied with it.
            metadata[f"{architecture}.rope.scaling.attn_factor"] = f"float:{ratio!r}"
    if metadata:
        flags += ["--override-kv", ",".join(f"{key}={value}" for key, value in metadata.items())]
    if not target.folder:
        return [["llama-server", "-m", target.name if target.gguf else "MODEL.gguf", *flags]]
    file = f"{target.name}/model.gguf"
    return [
        ["python", "convert_hf_to_gguf.py", target.name, "--outfile", file],
        ["llama-server", "-m", file, *flags],
    ]


def _to_default(attention_factor: float, parameters: dict[str, Any]) -> float:
    """The attention factor relative to YaRN's own, exactly 1 where it is that one up to rounding."""
    default = 0.1 * math.log(max(parameters["factor"], 1)) + 1
    return 1.0 if math.isclose(attention_factor, default, rel_tol=1e-9) else attention_factor / default


def _check_llama3(config: PreTrainedConfig, parameters: dict[str, Any], target: Target) -> None:
    """llama.cpp has this scaling as a tensor, which its converter computes from a trained length of its own."""
    original = parameters["original_max_position_embeddings"]
    if _GGUF_NAMES[config.model_type] != "llama":
        raise UnsupportedModelError(f"llama.cpp has llama3 scaling for LLaMA and Mistral only, not {config.model_type}")
    if not target.folder:
        raise UnsupportedModelError(
            "llama.cpp has no flag for llama3 scaling; export a folder, which its converter reads"
        )
    if original != getattr(config, "original_max_position_embeddings", 8192):
        raise UnsupportedModelError(
            f"llama.cpp's converter takes 8192 for the trained length of llama3 scaling, not {original}; use yarn, ntk"
        )


def _yarn_flags(config: PreTrainedConfig, parameters: dict[str, Any], inv_freq: torch.Tensor) -> list[str]:
    original, beta_fast, beta_slow = (
        parameters.get("original_max_position_embeddings") or config.max_position_embeddings,
        float(parameters.get("beta_fast") or 32),
        float(parameters.get("beta_slow") or 1),
    )
    spec = RopeSpec(float(parameters["rope_theta"]), rotary_dim(config), original)
    # llama.cpp's arithmetic: the ends of the ramp are whole dimensions.
    theirs = YaRN(factor=parameters["factor"], beta_fast=beta_fast, beta_slow=beta_slow)
    if not torch.allclose(theirs.scaled_rope(spec)[0], inv_freq, rtol=1e-5, atol=0):
        raise UnsupportedModelError(
            "llama.cpp rounds the ends of YaRN's ramp to whole dimensions, and these settings (truncate: false) don't; "
            "use truncate: true"
        )
    betas = ["--yarn-beta-fast", repr(beta_fast), "--yarn-beta-slow", repr(beta_slow)]
    return ["--yarn-orig-ctx", str(original), *betas]
