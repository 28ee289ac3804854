"""The few weights that a method learns: how they are saved beside a model, and found again.

In memory they are parameters of the rotary module (``ctxext.rotary``), so that optimisers, checkpoints of a training
run and wrappers that spread weights treat them as any other. A folder holds them in a file of their own,
``clex.safetensors`` for ``clex``, because programs that don't know the method would stumble over them among the model's
weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import nn

from ctxext.errors import ConfigError, ModelLoadError
from ctxext.files import write_bytes
from ctxext.rotary import LEARNED

if TYPE_CHECKING:
    from ctxext.methods import Method
    from ctxext.patching import Patch

Weights = Mapping[str, torch.Tensor]


def file_name(method: Method) -> str:
    """Name of the file with the weights of a method."""
    return f"{method.name}.safetensors"


def write_weights(module: nn.Module, method: Method, folder: str | os.PathLike[str]) -> None:
    """Write the weights of a learned module into a folder, whole or not at all; parent folders are created.

    Raises:
        ConfigError: the file can't be written.
    """
    weights = {name: value.detach().float().cpu().contiguous() for name, value in module.named_parameters()}
    write_bytes(save(weights, {"format": "pt", "method": method.name}), Path(folder) / file_name(method))


def read_weights(method: Method, folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The weights of a method that lie in a folder.

    Raises:
        ModelLoadError: the file isn't there or can't be read, or holds numbers that are not finite.
    """
    file = Path(folder) / file_name(method)
    if not file.is_file():
        raise ModelLoadError(
            f"{folder} was saved with method {method.name}, and lacks {file.name} with what it learned: copy that file "
            "too, or save the model again with model.save_pretrained(folder) while the method is on"
        )
    try:
        weights = load(file.read_bytes())
    except Exception as error:  # safetensors has errors of its own
        raise ModelLoadError(f"{file} can't be read: {error}") from error
    wrong = next((name for name, value in weights.items() if not value.isfinite().all()), None)
    if wrong is not None:
        raise ModelLoadError(f"{file} holds numbers that are not finite ({wrong})")
    return weights


def put_weights(module: nn.Module, weights: Weights, name: str) -> None:
    """Fill a learned module of method ``name``.

    Raises:
        ConfigError: other weights, or of another shape.
    """
    expected = {key: tuple(value.shape) for key, value in module.named_parameters()}
    given = {key: tuple(value.shape) for key, value in weights.items()}
    if given != expected:
        raise ConfigError(
            f"method {name}: the learned weights have shapes {given}, and these settings need {expected}: give those "
            "that they were trained with"
        )
    module.load_state_dict(weights)


def split(state: Mapping[str, Any], patch: Patch) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A state dict of the patched model, or of a wrapper around it, without the learned weights; and those.

    The latter have their names in the learned module.
    """
    place = next(name for name, module in patch.model.named_modules() if module is patch.rotary)
    ends = {f".{place}.{LEARNED}.{name}": name for name, _ in patch.rotary.get_submodule(LEARNED).named_parameters()}
    rest, learned = {}, {}
    for key, value in state.items():
        name = next((name for end, name in ends.items() if f".{key}".endswith(end)), None)
        if name is None:
            rest[key] = value
        else:
            learned[name] = value
    return rest, learned


class SavePretrained:
    """``save_pretrained`` of one model while a method with learned weights is on.

    As Transformers' own, but that the config gets the frequencies as they are now, and the learned weights go into a
    file beside the model's.
    """

    def __init__(self, patch: Patch) -> None:
        self._patch = patch

    def __call__(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Arguments are those of ``PreTrainedModel.save_pretrained``.

        Raises:
            ConfigError: ``push_to_hub`` is asked for, or the file can't be written.
        """
        if options.get("push_to_hub"):
            raise ConfigError(
                f"save_pretrained(push_to_hub=True) would leave {file_name(self._patch.method)} behind: use "
                "model.push_to_hub(name)"
            )
        patch, model = self._patch, self._patch.model
        rest, _ = split(model.state_dict() if state_dict is None else state_dict, patch)
        with patch.holding(state_dict):
            patch.update_config()
            own = type(model).save_pretrained
            own(model, save_directory, is_main_process=is_main_process, state_dict=rest, **options)
            if is_main_process:
                patch.write_weights(save_directory)
