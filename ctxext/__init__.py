"""Extend the context window of LLaMA- and Qwen-type models, prove that it is on, and measure whether it worked.

Names are imported when first used, so that ``import ctxext`` costs nothing until a model is touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxext.attention.streaming import StreamingCache as StreamingCache
    from ctxext.autopatching import autopatch as autopatch
    from ctxext.config import load_config as load_config
    from ctxext.errors import ConfigError as ConfigError
    from ctxext.errors import CtxextError as CtxextError
    from ctxext.errors import DataError as DataError
    from ctxext.errors import ModelLoadError as ModelLoadError
    from ctxext.errors import PatchError as PatchError
    from ctxext.errors import UnsupportedModelError as UnsupportedModelError
    from ctxext.inspection import Inspection as Inspection
    from ctxext.inspection import inspect as inspect
    from ctxext.methods import CLEX as CLEX
    from ctxext.methods import DCA as DCA
    from ctxext.methods import METHODS as METHODS
    from ctxext.methods import NTK as NTK
    from ctxext.methods import PI as PI
    from ctxext.methods import DynamicNTK as DynamicNTK
    from ctxext.methods import DynamicYaRN as DynamicYaRN
    from ctxext.methods import Llama3 as Llama3
    from ctxext.methods import LMInfinite as LMInfinite
    from ctxext.methods import LongRoPE as LongRoPE
    from ctxext.methods import Method as Method
    from ctxext.methods import NTKByParts as NTKByParts
    from ctxext.methods import ReRoPE as ReRoPE
    from ctxext.methods import RopeTheta as RopeTheta
    from ctxext.methods import SelfExtend as SelfExtend
    from ctxext.methods import StreamingLLM as StreamingLLM
    from ctxext.methods import YaRN as YaRN
    from ctxext.models import load_model as load_model
    from ctxext.patching import Patch as Patch
    from ctxext.patching import patch as patch
    from ctxext.patching import unpatch as unpatch
    from ctxext.rope import RopeSpec as RopeSpec

_EXPORTS = {
    "ctxext.attention.streaming": ("StreamingCache",),
    "ctxext.autopatching": ("autopatch",),
    "ctxext.config": ("load_config",),
    "ctxext.errors": (
        "ConfigError",
        "CtxextError",
        "DataError",
        "ModelLoadError",
        "PatchError",
        "UnsupportedModelError",
    ),
    "ctxext.inspection": ("Inspection", "inspect"),
    "ctxext.methods": (
        "CLEX",
        "DCA",
        "METHODS",
        "NTK",
        "PI",
        "DynamicNTK",
        "DynamicYaRN",
        "LMInfinite",
        "Llama3",
        "LongRoPE",
        "Method",
        "NTKByParts",
        "ReRoPE",
        "RopeTheta",
        "SelfExtend",
        "StreamingLLM",
        "YaRN",
    ),
    "ctxext.models": ("load_model",),
    "ctxext.patching": ("Patch", "patch", "unpatch"),
    "ctxext.rope": ("RopeSpec",),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}

__version__ = "0.1.0"
__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ctxext' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
