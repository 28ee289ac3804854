"""Counts the bytes of tensors that are alive at once while real passes run: what a plan has to foresee."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made within this context, as many as were alive at once at the peak.

    What operations allocate and free within themselves is not seen, as it isn't in a plan.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        """``held`` is what was there before, and doesn't count."""
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in held)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, size: int) -> None:
        self.now -= size
