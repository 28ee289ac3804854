"""Rotary position embedding as plain mathematics: tensors in, tensors out, no model.

What a context-extension method does to these frequencies is in ``ctxext.methods``; the module that a model calls is in
``ctxext.rotary``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeSpec:
    """The rotary embedding that a checkpoint was trained with, before any extension.

    Attributes:
        rope_theta: base of the geometric series of frequencies (b in the papers).
        rotary_dim: number of rotated dimensions of a head (d in the papers), even.
        original_max_position_embeddings: trained length in tokens (L in the papers).
    """

    rope_theta: float
    rotary_dim: int
    original_max_position_embeddings: int


def position_frequencies(rope_theta: float, rotary_dim: int) -> torch.Tensor:
    """``b^(2i/d)`` for i = 0 .. d/2 - 1: the reciprocals of the RoPE frequencies, fp32 ``[d/2]``.

    The indices are integers until the last moment, and the arithmetic is that of Transformers, so that equal settings
    give equal bits, and a framework that builds floating ranges in half precision does no harm.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / rotary_dim
    positions: torch.Tensor = rope_theta**exponents
    return positions


def default_inv_freq(rope_theta: float, rotary_dim: int) -> torch.Tensor:
    """RoPE's own frequencies ``theta_i = b^(-2i/d)`` in radians per token, fp32 ``[d/2]``.

    Reference: RoFormer (https://arxiv.org/abs/2104.09864), section 3.2.2.
    """
    return 1.0 / position_frequencies(rope_theta, rotary_dim)


def rotation(
    position_ids: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles, as LLaMA-type attention expects them.

    The product of position and frequency is elementwise in fp32: a matrix product would be cast down by autocast.

    Args:
        position_ids: integers ``[B, T]``.
        inv_freq: fp32 ``[d/2]``, radians per token.
        attention_factor: factor on cosine and sine; a score is multiplied by its square.
        dtype: dtype of the result, that of the hidden states.

    Returns:
        ``cos, sin``, each ``[B, T, d]``, the frequencies laid out twice.
    """
    angles = position_ids[..., None].to(torch.float32) * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    cos = angles.cos() * attention_factor
    sin = angles.sin() * attention_factor
    return cos.to(dtype), sin.to(dtype)


def wavelengths(inv_freq: torch.Tensor) -> torch.Tensor:
    """Tokens per full turn, ``2 pi / theta_i``, of each frequency; fp32 ``[d/2]``."""
    return 2 * math.pi / inv_freq
