"""A key-value cache that forgets what no later token attends to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from ctxext.attention.bands import Bands
from ctxext.errors import PatchError, UnsupportedModelError

SLACK = 256
"""Columns beyond those needed that a cache may hold before they are evicted, all at once."""


class _Columns:
    """Grows and shrinks a tensor ``[B, H, n, D]`` in memory of steady size.

    Tensors of ever new sizes would cut an allocator's memory into pieces, and a process grow though its tensors don't.
    Nothing that an earlier result holds is ever written to: neither what autograd has saved nor what a copy of the
    cache goes on with.
    """

    def __init__(self) -> None:
        self._whole: Tensor | None = None
        self._taken = 0

    def append(self, held: Tensor, new: Tensor, room: int) -> Tensor:
        """``held`` and, behind it, ``new``; where that needs other memory, it is for ``room`` columns at least."""
        before, after = held.shape[2], held.shape[2] + new.shape[2]
        if torch.is_grad_enabled() or held.dtype != new.dtype:  # of two precisions, the result has the finer one
            return torch.cat((held, new), dim=2)
        whole = self._whole
        if whole is None or not self._goes_on(whole, held, new) or whole.shape[2] < after:
            whole = self._whole = new.new_empty(*new.shape[:2], max(room, after), new.shape[3])
            whole[:, :, :before] = held
        whole[:, :, before:after] = new
        self._taken = after
        return whole[:, :, :after]

    def keep(self, held: Tensor, columns: Tensor, room: int) -> Tensor:
        """These columns of ``held``, int64 ``[1, n]``, or one row for each of the batch's, ``[B, n]``."""
        columns = columns.to(held.device)
        if len(columns) == 1:
            kept = held.index_select(2, columns[0])
        else:
            kept = held.gather(2, columns[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]))
        self._whole = None
        return kept if torch.is_grad_enabled() else self.append(kept[:, :, :0], kept, room)

    def _goes_on(self, whole: Tensor, held: Tensor, new: Tensor) -> bool:
        """Whether ``held`` is all that has been written to the memory so far, so that ``new`` can follow in it."""
        if whole.is_inference() and not torch.is_inference_mode_enabled():
            return False
        same = whole.data_ptr() == held.data_ptr() and whole.stride() == held.stride() and len(whole) == len(held)
        return same and self._taken == held.shape[2] and (whole.dtype, whole.device) == (new.dtype, new.device)


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer; its length is the number of tokens read, not of those kept."""

    is_croppable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0
        self.columns = torch.empty(1, 0, dtype=torch.int64, device="cpu")
        """Which of all tokens read each column holds: int64 ``[1, n]``, or ``[B, n]`` where rows differ."""
        self.expected: int | None = None
        """Tokens read after the pass that has been planned."""
        self.room = 0
        """Columns that this pass and the ones like it need."""
        self._keys, self._values = _Columns(), _Columns()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before, self.seen = self.seen, self.seen + key_states.shape[-2]
        if not before or self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys = self._keys.append(self.keys, key_states, self.room)
        self.values = self._values.append(self.values, value_states, self.room)
        self.columns, self.expected = followed(self.columns, before, self.seen), None
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.seen

    def reset(self) -> None:
        super().reset()
        self.keys = self.values = self.expected = None
        self.is_initialized, self.seen, self.columns = False, 0, self.columns.new_empty(1, 0)

    def keep(self, columns: Tensor) -> None:
        """Only these columns, int64 ``[1, n]`` or one row for each of the batch's: ``[B, n]``."""
        self.columns = self.columns.expand(len(columns), -1).gather(1, columns)
        if self.keys is not None and self.values is not None:
            self.keys = self._keys.keep(self.keys, columns, self.room)
            self.values = self._values.keep(self.values, columns, self.room)

    def drop(self, tokens: int) -> None:
        """Without the last so many tokens."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :-tokens], self.values[:, :, :-tokens]
            self.columns, self.seen = self.columns[:, :-tokens], self.seen - tokens

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self._rearrange(lambda columns: columns[beam_idx.to(columns.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rearrange(lambda columns: columns.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Any) -> None:
        super().batch_select_indices(indices)
        self._rearrange(lambda columns: columns[indices.to(columns.device)])

    def _rearrange(self, rearranged: Callable[[Tensor], Tensor]) -> None:
        """Other rows, where they differ."""
        if len(self.columns) > 1:
            self.columns = rearranged(self.columns)


def followed(columns: Tensor, past: int, end: int) -> Tensor:
    """Tokens ``[1 or B, n]`` and, behind them, those from ``past`` to ``end``."""
    new = torch.arange(past, end, device=columns.device).expand(len(columns), -1)
    return torch.cat((columns, new), dim=1)


class StreamingCache(Cache):
    """The cache of a model whose method sees first and last tokens only; what lies between is really evicted.

    Keys, values and the work of attention stay the same however many tokens are read; only a mask of the padding grows,
    a byte for each token of a padded batch. Give it to ``generate`` or to the model as any other cache:
    ``model.generate(ids, past_key_values=StreamingCache(model))``. Logits are those that any other cache gives. What
    was evicted can't come back, so assisted generation, which crops, refuses it.

    Args:
        model: patched with ``streaming_llm`` or ``lm_infinite``.

    Raises:
        PatchError: no patch is on.
        UnsupportedModelError: the method attends to all earlier tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        from ctxext.patching import active_patch, unwrap

        patch = active_patch(model)
        if patch is None:
            raise PatchError("a StreamingCache needs a model that is patched with streaming_llm or lm_infinite")
        ends = patch.partition.ends if isinstance(patch.partition, Bands) else None
        if ends is None:
            raise UnsupportedModelError(
                f"method {patch.method.name} attends to all earlier tokens, so a StreamingCache has nothing to evict; "
                "use streaming_llm or lm_infinite"
            )
        super().__init__(layers=[_Layer() for _ in range(unwrap(model).config.num_hidden_layers)])
        self.first, self.last = ends

    @property
    def _own(self) -> list[_Layer]:
        layers: Any = self.layers
        return layers  # type: ignore[no-any-return]

    @property
    def columns(self) -> Tensor:
        """Which of all tokens read each cached column holds: int64 ``[1, n]``, or ``[B, n]`` where rows differ."""
        return self._own[0].columns

    def begin(self, partition: Any, past: int, length: int, valid: Tensor | None) -> Tensor:
        """Evict before the next tokens are read.

        Args:
            partition: of the patch that is on now.
            past: tokens read so far.
            length: tokens to be read.
            valid: bool ``[B, past + length]`` on the CPU, which tokens are no padding, or None if all are.

        Returns:
            Which token each column holds during this pass: int64 ``[1, S]`` or ``[B, S]``.

        Raises:
            PatchError: an earlier pass broke off between two layers.
            UnsupportedModelError: the patch attends to other tokens than this cache keeps.
        """
        if getattr(partition, "ends", None) != (self.first, self.last):
            raise UnsupportedModelError(
                f"this StreamingCache keeps the first {self.first:,} and the last {self.last:,} tokens, which isn't "
                "what the patch that is on attends to; make a new one"
            )
        if any(layer.seen != past for layer in self._own):
            raise PatchError("a pass broke off and left this StreamingCache half filled; reset() it, or make a new one")
        needed = self.first + self.last - 1
        for layer in self._own:
            layer.room, layer.expected = needed + SLACK + length, past + length
        if self.columns.shape[1] > needed + SLACK:
            kept = self._needed(past, needed, valid)
            for layer in self._own:
                layer.keep(kept)
        return followed(self.columns, past, past + length)

    def _needed(self, past: int, needed: int, valid: Tensor | None) -> Tensor:
        """Columns, int64 ``[1 or B, needed]``, that the next tokens attend to."""
        if valid is None:
            held = self.columns
            seen, end = torch.ones_like(held, dtype=torch.bool), torch.tensor([[past]], device="cpu")
        else:
            columns = self.columns.expand(len(valid), -1)
            ranks = valid[:, :past].cumsum(1)
            end = ranks[:, -1:]  # the position of the next token
            held, seen = ranks.gather(1, columns) - 1, valid.gather(1, columns)
        wanted = seen & ((held < self.first) | (held > end - self.last))
        # The same number in every row: a row with fewer tokens keeps padding too.
        return wanted.long().argsort(dim=1, descending=True, stable=True)[:, :needed].sort(dim=1).values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append; as any cache.

        Raises:
            PatchError: the pass didn't come through a patched model, which would not know what is missing.
        """
        layer = self._own[layer_idx]
        if layer.seen + key_states.shape[-2] != layer.expected:
            raise PatchError("a StreamingCache was given to a model that isn't patched with the method it was made for")
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Raises:
            UnsupportedModelError: tokens were evicted already, which the tokens before would attend to.
        """
        removed = abs(tokens_to_remove)
        if tokens_to_remove > 0:  # how earlier releases say how much is to be left
            removed = max(0, self.get_seq_length() - tokens_to_remove)
        if not removed:
            return
        if self.columns.shape[1] != self.get_seq_length():
            raise UnsupportedModelError(
                "a StreamingCache that has evicted tokens can't be cropped; use a DynamicCache for assisted generation"
            )
        for layer in self._own:
            layer.drop(removed)
