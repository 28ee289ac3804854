"""The rotary module that ``patch`` installs in place of the model's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ctxext.rope import rotation


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
