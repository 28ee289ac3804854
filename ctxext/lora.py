"""LoRA for context extension: adapters on the attention, what a method learns, if asked for norms and embeddings."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import nn

from ctxext.config import LoRASection
from ctxext.errors import ConfigError
from ctxext.patching import active_patch


def add_lora(model: Any, settings: LoRASection) -> Any:
    """The model within peft, with only the adapters, what ``trainable`` names and what its method learns left to train.

    Low-rank adapters alone are not enough for long text; norms and embeddings are what is missing (LongLoRA:
    https://arxiv.org/abs/2309.12307, section 3.3). What is trained whole is saved with the adapter.

    Raises:
        ConfigError: peft isn't installed, or no module has such a name.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError('lora needs the package peft: pip install "ctxext[peft]"')
    from peft import LoraConfig, get_peft_model

    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if missing := sorted(set(settings.target_modules) - names):
        raise ConfigError(
            f"lora.target_modules: {', '.join(missing)}: no such linear layer ({', '.join(sorted(names))})"
        )
    saved = []
    if "norm" in settings.trainable:
        saved += sorted({name.rsplit(".", 1)[-1] for name, module in model.named_modules() if _is_norm(module)})
    more: dict[str, Any] = {}
    if "embed" in settings.trainable:
        embeddings = model.get_input_embeddings()
        saved.append(next(name for name, module in model.named_modules() if module is embeddings).rsplit(".", 1)[-1])
        if model.config.tie_word_embeddings:
            # The output head is the same tensor, and has to stay it.
            more["ensure_weight_tying"] = True
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha or 2 * settings.rank,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
        modules_to_save=saved or None,
        task_type="CAUSAL_LM",
        **more,
    )
    wrapped = get_peft_model(model, config)
    patch = active_patch(model)
    if patch is not None and patch.learned is not None:
        patch.learned.requires_grad_(True)
    return wrapped


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")
