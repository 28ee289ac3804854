"""The methods, one file each. ``METHODS`` is the only list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxext.errors import ConfigError, nearest
from ctxext.methods.base import Method
from ctxext.methods.clex import CLEX
from ctxext.methods.dca import DCA
from ctxext.methods.dynamic import DynamicNTK, DynamicYaRN
from ctxext.methods.llama3 import Llama3
from ctxext.methods.lm_infinite import LMInfinite
from ctxext.methods.longrope import LongRoPE
from ctxext.methods.ntk import NTK
from ctxext.methods.ntk_by_parts import NTKByParts
from ctxext.methods.pi import PI
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.rope_theta import RopeTheta
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming_llm import StreamingLLM
from ctxext.methods.yarn import YaRN

METHODS: dict[str, type[Method]] = {
    cls.model_fields["name"].default: cls
    for cls in (
        PI,
        NTK,
        NTKByParts,
        YaRN,
        RopeTheta,
        Llama3,
        LongRoPE,
        CLEX,
        DynamicNTK,
        DynamicYaRN,
        DCA,
        SelfExtend,
        ReRoPE,
        LMInfinite,
        StreamingLLM,
    )
}


def method_class(settings: Mapping[str, Any]) -> type[Method]:
    """The class that a mapping ``{name: ..., ...}`` asks for.

    Raises:
        ConfigError: there is no ``name``, or no method of that name.
    """
    if "name" not in settings:
        hint = next(
            (f" ({key} is Transformers' key; here it is name)" for key in ("rope_type", "type") if key in settings), ""
        )
        raise ConfigError(f"method.name: missing{hint}; expected one of {', '.join(METHODS)}")
    name = settings["name"]
    if not isinstance(name, str) or name not in METHODS:
        guess = nearest(str(name).lower().replace("-", "_"), METHODS)
        hint = f"did you mean {guess}? " if guess else ""
        raise ConfigError(f"method.name: unknown method {name!r}; {hint}Known methods: {', '.join(METHODS)}")
    return METHODS[name]


__all__ = [
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
    "method_class",
]
