"""The slow, obvious reference: every relative position written out, one softmax over each row, in float64.

Memory is quadratic in the length. Tests compare the engine with it, and ``attention: naive`` runs a model on it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctxext.attention.partition import Partition


def attend(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, partition: Partition, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, d]`` and attention weights ``[B, H, T, S]``, in the dtype of the query.

    Args:
        query: ``[B, H, T, d]``, the last T columns, as the rotary module left them.
        key: ``[B, K, S, d]``, likewise.
        value: ``[B, K, S, d]``.
        positions: int64 ``[S]``, strictly ascending.
        partition: which relative position each score sees.
        scale: factor on the scores.
    """
    wide = torch.float64 if query.device.type != "mps" else torch.float32  # which has no fp64
    groups = query.shape[1] // key.shape[1]
    positions = positions.cpu()  # where partitions work everything out, in fp64 if need be
    own = positions[-query.shape[2] :]
    bare_query = _unrotated(query.to(wide), own, partition)
    bare_key = _unrotated(key.to(wide), positions, partition).repeat_interleave(groups, dim=1)

    relative = partition.relative_positions(own, positions).to(wide).to(query.device)
    inv_freq, gain = (x.to(query.device, wide) for x in partition.frequencies_at(own))
    (q1, q2), (k1, k2) = bare_query.chunk(2, dim=-1), bare_key.chunk(2, dim=-1)
    scores = torch.zeros(*query.shape[:3], key.shape[2], dtype=wide, device=query.device)
    for i in range(inv_freq.shape[1]):
        angle = relative * inv_freq[:, i, None]
        qa, qb, ka, kb = q1[..., i, None], q2[..., i, None], k1[..., None, :, i], k2[..., None, :, i]
        scores = scores + angle.cos() * (qa * ka + qb * kb) + angle.sin() * (qa * kb - qb * ka)
    scores = scores * gain[:, None] * scale
    scores = scores.masked_fill(~partition.attended(own, positions).to(query.device), -math.inf)
    weights = scores.softmax(-1)
    out = weights @ value.to(wide).repeat_interleave(groups, dim=1)
    return out.to(query.dtype), weights.to(query.dtype)


def _unrotated(x: Tensor, positions: Tensor, partition: Partition) -> Tensor:
    """Undo what the rotary module has done, but for its attention factor."""
    angles = (positions % partition.period)[:, None].to(x.device, x.dtype) * partition.inv_freq.to(x.device, x.dtype)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
