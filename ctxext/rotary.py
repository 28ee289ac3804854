"""The rotary modules that ``patch`` installs in place of the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ctxext.rope import rotation

LEARNED = "learned"
"""Name of the module with learned weights in a :class:`LearnedRotaryEmbedding`."""


class ScaledRotaryEmbedding(nn.Module):
    """Cosine and sine from fixed frequencies that no cast can round.

    The frequencies are a plain attribute, not a buffer: ``model.to(dtype)`` and ``model.half()`` would round a buffer,
    loading on the meta device would lose it, and a state dict might carry it. They follow the model's device, and each
    move starts again from the exact values.
    """

    def __init__(
        self,
        inv_freq: torch.Tensor,
        attention_factor: float,
        device: torch.device | None = None,
        *,
        period: int | None = None,
    ) -> None:
        super().__init__()
        self.period = period
        self._exact = inv_freq.detach().to(device="cpu", dtype=torch.float32, copy=True)
        self.inv_freq = self._exact.to(device or self._exact.device, copy=True)
        self.attention_scaling = float(attention_factor)
        # DDP counts buffers when it wraps a model, and fails if the only one is gone; this one means nothing.
        placeholder = torch.zeros(1, dtype=torch.int64, device=self.inv_freq.device)
        self.register_buffer("placeholder", placeholder, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine ``[B, T, d]`` in the dtype and on the device of the hidden states ``x`` ``[B, T, D]``.

        With a ``period``, of the positions modulo it: what is left to rotate, the patched attention does.
        """
        inv_freq = self.inv_freq if self.inv_freq.device == x.device else self._exact.to(x.device)
        position_ids = position_ids.to(x.device)
        if self.period is not None:
            position_ids = position_ids % self.period
        return rotation(position_ids, inv_freq, self.attention_scaling, x.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ScaledRotaryEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        device = fn(torch.empty(0, device=self.inv_freq.device)).device
        self.inv_freq = self._exact.to(device, copy=True)
        return self

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        period = "" if self.period is None else f", period={self.period}"
        return f"frequencies={self._exact.numel()}, attention_factor={self.attention_scaling:.6g}{period}"


class LearnedRotaryEmbedding(nn.Module):
    """Cosine and sine from frequencies that a module gives, whose weights are trained with the model.

    The weights stay fp32 through ``model.to(dtype)`` and ``model.half()``. They stay where they are when the model goes
    to the meta device, and when a state dict without them is loaded: a plain checkpoint has nothing to say of them.

    Args:
        learned: see :meth:`ctxext.methods.base.Method.learned_rope`.
        factor: what it is called with.
        attention_factor: factor on cosine and sine.
        device: of the model.
    """

    period: None = None
    placeholder: torch.Tensor

    def __init__(
        self, learned: nn.Module, factor: float, attention_factor: float, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.learned, self.factor = learned, factor
        self.attention_scaling = float(attention_factor)
        # As in ScaledRotaryEmbedding; it also says where the module is.
        self.register_buffer("placeholder", torch.zeros(1, dtype=torch.int64, device="cpu"), persistent=False)
        self._kept: tuple[float, list[torch.Tensor], torch.Tensor] | None = None
        self.register_load_state_dict_post_hook(_tolerate_plain_checkpoints)  # type: ignore[no-untyped-call]
        if device is not None:
            self.to(device)

    @property
    def inv_freq(self) -> torch.Tensor:
        """The frequencies as they are now, fp32 ``[d/2]``, on the model's device."""
        return self._exact.to(self.placeholder.device)

    @property
    def _exact(self) -> torch.Tensor:
        with torch.no_grad():
            frequencies: torch.Tensor = self.learned(self.factor)
            return frequencies.detach()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine ``[B, T, d]`` in the dtype and on the device of the hidden states ``x`` ``[B, T, D]``."""
        inv_freq = self._frequencies().to(x.device)
        return rotation(position_ids.to(x.device), inv_freq, self.attention_scaling, x.dtype)

    @contextmanager
    def at(self, factor: float) -> Iterator[None]:
        """Rotate as for another factor within the block."""
        usual = self.factor
        self.factor = factor
        try:
            yield
        finally:
            self.factor = usual

    def _frequencies(self) -> torch.Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            self._kept = None
            frequencies: torch.Tensor = self.learned(self.factor)
            return frequencies
        # While a text is decoded nothing changes from token to token. Weights are compared by value, because there
        # are ways to write into them that leave no trace.
        weights = [parameter.detach() for parameter in self.learned.parameters()]
        if self._kept is not None:
            factor, then, frequencies = self._kept
            same = (a.device == b.device and torch.equal(a, b) for a, b in zip(weights, then, strict=True))
            if factor == self.factor and all(same):
                return frequencies
        frequencies = self.learned(self.factor)
        self._kept = (self.factor, [weight.clone() for weight in weights], frequencies)
        return frequencies

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LearnedRotaryEmbedding:
        def move(weight: torch.Tensor) -> torch.Tensor:
            device = fn(weight).device
            return weight if device.type == "meta" else weight.to(device)

        super()._apply(fn, recurse=False)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        if recurse:
            self.learned._apply(move)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"factor={self.factor:g}, attention_factor={self.attention_scaling:.6g}"


def _tolerate_plain_checkpoints(module: nn.Module, incompatible: Any) -> None:
    """Take learned weights off the list of those that a state dict lacks, if it has none of them."""
    names = tuple(f"{LEARNED}.{name}" for name, _ in module.get_submodule(LEARNED).named_parameters())
    missing = [key for key in incompatible.missing_keys if key.endswith(names)]
    if len(missing) == len(names):
        for key in missing:
            incompatible.missing_keys.remove(key)
