"""Runs a partition: one fused kernel call for each region, merged by log-sum-exp, with exact gradients.

Work equals that of causal attention and memory is linear in the length: no score matrix, no mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctxext.attention import kernels
from ctxext.attention.partition import Block, Region

ROTATED = 2**18
"""Elements that are rotated at a time, so that temporaries stay in the processor's cache."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float, turned: Tensor | None = None
) -> Tensor:
    """Attention over all regions of all blocks, differentiable in query, key and value.

    Args:
        query: ``[B, H, T, d]``, the last T columns, as the rotary module left them.
        key: ``[B, K, S, d]``, as cached.
        value: ``[B, K, S, d]``.
        blocks: cover the last T columns in order.
        scale: factor on the scores.
        turned: the key as turned for the only block, where the caller has it.

    Returns:
        ``[B, H, T, d]``, in the query's dtype.
    """
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out: Tensor = _Attention.apply(query, key, value, blocks, scale)  # type: ignore[no-untyped-call]
        return out
    return _forward(query, key, value, blocks, scale, turned)[0]


def rotate(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    gain: Tensor | None = None,
    *,
    back: bool = False,
    exact: bool = True,
) -> Tensor:
    """Rotate every column by ``position * inv_freq`` radians, in fp32 or better.

    Args:
        x: ``[B, H, T, d]``, the two halves of d holding the pairs, as LLaMA-type models lay them out.
        positions: int64 or fp64 ``[T]``.
        inv_freq: fp32 ``[d/2]``, radians per position.
        gain: fp32 ``[T]``, factor on each column.
        back: rotate the other way.
        exact: angles without rounding error, whatever the position; otherwise those of stock rotary embeddings, which
            multiply in fp32 and at position 100,000 are off by thousandths of a radian.

    Returns:
        A new contiguous tensor in the dtype of ``x``.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    product = torch.float64 if exact else wide
    positions, inv_freq = positions.to(product), inv_freq.to(product)
    if x.device.type != "mps":  # which has no fp64
        positions, inv_freq = positions.to(x.device), inv_freq.to(x.device)
    gain = None if gain is None else gain.to(x.device, wide)
    batch, heads, length, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = length if x.device.type != "cpu" else max(1, ROTATED // (batch * heads * dim))
    for start in range(0, length, columns):
        part = slice(start, start + columns)
        angles = positions[part, None] * inv_freq
        if product != wide:
            angles -= (angles / math.tau).round_() * math.tau
        angles = angles.to(wide).to(x.device)
        cos, sin = angles.cos(), angles.sin()
        if gain is not None:
            cos, sin = cos * gain[part, None], sin * gain[part, None]
        first, second = x[:, :, part].to(wide).chunk(2, dim=-1)
        out[:, :, part, : dim // 2] = torch.addcmul(first * cos, second, sin, value=1 if back else -1)
        out[:, :, part, dim // 2 :] = torch.addcmul(second * cos, first, sin, value=-1 if back else 1)
    return out


class _Call(NamedTuple):
    """One call of a kernel: columns of the keys, whether it is a triangle, and whether all is read backwards.

    Kernels know one triangle, in which query t sees keys 0 to t. Read backwards it is the one in which query t sees the
    keys from t on.
    """

    keys: slice
    causal: bool = False
    backwards: bool = False


def _calls(region: Region, length: int) -> list[_Call]:
    """The kernel calls of a region with so many queries: its triangle, and what every query sees."""
    start, stop = region.keys.start, region.keys.stop
    if region.shape == "full" or length == 1:
        return [_Call(region.keys)]
    if region.shape == "lower":
        edge = stop - length
        rest = [_Call(slice(start, edge))] if edge > start else []
        return [*rest, _Call(slice(edge, stop), causal=True)]
    edge = start + length
    rest = [_Call(slice(edge, stop))] if stop > edge else []
    return [_Call(slice(start, edge), causal=True, backwards=True), *rest]


def _turned(query: Tensor, turn: Tensor | None, block: Block) -> Tensor:
    if turn is not None:
        return rotate(query, turn, block.inv_freq, block.gain, exact=block.exact)
    if block.gain is not None:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        return (query.to(wide) * block.gain.to(query.device, wide)[:, None]).to(query.dtype)
    return query


class _TurnedKeys:
    """The keys as a block's ``key_turn`` makes them, kept while the next block's are the same."""

    def __init__(self, key: Tensor, turned: Tensor | None = None) -> None:
        self.key = key
        self.turned = turned
        self.block: Block | None = None

    def of(self, block: Block) -> Tensor:
        """``[B, K, S', d]``, the first columns."""
        assert block.key_turn is not None  # a region is turned only if there is one
        size = block.key_turn.numel()
        before = self.block
        if self.turned is None or (before is not None and (before.step != block.step or self.turned.shape[2] < size)):
            self.turned = rotate(self.key[:, :, :size], block.key_turn, block.inv_freq, exact=block.exact)
        self.block = block
        return self.turned


def _operands(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    key, value = key[:, :, call.keys], value[:, :, call.keys]
    return (query.flip(2), key.flip(2), value.flip(2)) if call.backwards else (query, key, value)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float, turned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, d]`` and log-sum-exp ``[B, H, T]`` over all regions."""
    out = lse = torch.empty(0, device=query.device)
    first = key.shape[2] - query.shape[2]
    keys = _TurnedKeys(key, turned)
    for block in blocks:
        columns = slice(block.queries.start - first, block.queries.stop - first)
        own = query[:, :, columns]
        merged: tuple[Tensor, Tensor] | None = None
        for region in block.regions:
            states = _turned(own, region.turn, block), keys.of(block) if region.turned else key, value
            for call in _calls(region, own.shape[2]):
                part = kernels.forward(*_operands(*states, call), scale, causal=call.causal)
                if call.backwards:
                    part = part[0].flip(2), part[1].flip(2)
                merged = part if merged is None else _merge(*merged, *part)
        assert merged is not None  # every query sees at least itself
        if len(blocks) == 1:
            return merged[0].to(query.dtype), merged[1]
        if out.numel() == 0:
            out = torch.empty((*query.shape[:3], value.shape[3]), dtype=query.dtype, device=query.device)
            lse = torch.empty(query.shape[:3], dtype=merged[1].dtype, device=query.device)
        out[:, :, columns], lse[:, :, columns] = merged
    return out, lse


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax-weighted mean of two partial results; the larger log-sum-exp is subtracted, so nothing overflows."""
    total = torch.logaddexp(lse, other_lse)
    wide = total.dtype
    out = (
        out.to(wide).mul_((lse - total).exp()[..., None]) if out.dtype != wide else out * (lse - total).exp()[..., None]
    )
    return out.addcmul_(other.to(wide), (other_lse - total).exp()[..., None]), total


def _shares(
    outcome: tuple[Tensor, Tensor, Tensor], operands: tuple[Tensor, Tensor, Tensor], scale: float, call: _Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a call's query, key and value, from the output's gradient, the merged output and log-sum-exp."""
    grad, out, lse = (x.flip(2) for x in outcome) if call.backwards else outcome
    query_grad, key_grad, value_grad = kernels.backward(grad, *operands, out, lse, scale, causal=call.causal)
    if call.backwards:
        return query_grad.flip(2), key_grad.flip(2), value_grad.flip(2)
    return query_grad, key_grad, value_grad


class _Attention(torch.autograd.Function):
    """Each region's fused backward, handed the merged output and log-sum-exp, gives its exact share of the gradients.

    Rotated queries and keys are computed again rather than kept.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float) -> Tensor:
        out, lse = _forward(query, key, value, blocks, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        wide = lse.dtype
        query_grad = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        key_grad, value_grad = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (key, value))
        first = key.shape[2] - query.shape[2]
        keys = _TurnedKeys(key)
        turned_grad: Tensor | None = None  # of the keys that blocks of one step share
        for block, following in itertools.zip_longest(ctx.blocks, ctx.blocks[1:]):
            columns = slice(block.queries.start - first, block.queries.stop - first)
            own = query[:, :, columns]
            outcome = grad[:, :, columns], out[:, :, columns], lse[:, :, columns]
            own_grad = torch.zeros(own.shape, dtype=wide, device=own.device)
            for region in block.regions:
                states = _turned(own, region.turn, block), keys.of(block) if region.turned else key, value
                keys_grad = key_grad
                if region.turned:
                    if turned_grad is None:
                        turned_grad = torch.zeros(states[1].shape, dtype=wide, device=key.device)
                    keys_grad = turned_grad
                region_grad = torch.zeros(own.shape, dtype=wide, device=own.device)
                for call in _calls(region, own.shape[2]):
                    shares = _shares(outcome, _operands(*states, call), ctx.scale, call)
                    region_grad += shares[0]
                    keys_grad[:, :, call.keys] += shares[1]
                    value_grad[:, :, call.keys] += shares[2]
                # The rotation's transpose is the rotation back, with the same gain.
                own_grad += (
                    _turned(region_grad, None, block)
                    if region.turn is None
                    else rotate(region_grad, region.turn, block.inv_freq, block.gain, back=True, exact=block.exact)
                )
            query_grad[:, :, columns] = own_grad
            if turned_grad is not None and (following is None or following.step != block.step):
                turn = block.key_turn
                key_grad[:, :, : len(turn)] += rotate(turned_grad, turn, block.inv_freq, back=True, exact=block.exact)
                turned_grad = None
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), None, None
