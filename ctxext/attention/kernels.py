"""Attention of one rectangle or triangle of the score matrix, with the log-sum-exp that merging needs.

``forward`` and ``backward`` are all that the engine knows of a device. They run torch's fused kernels where one returns
the log-sum-exp, and plain torch everywhere else.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCORES = 2**24
"""Scores that plain attention holds at a time: 64 MiB in float32."""

Forward = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]]


class Kernel(NamedTuple):
    """The two directions of attention on one kind of device."""

    forward: Forward
    backward: Backward


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention output and the log-sum-exp of the scaled scores.

    Args:
        query: ``[B, H, T, d]``; H is a multiple of the key heads, each of which serves H / K consecutive query heads.
        key: ``[B, K, S, d]``.
        value: ``[B, K, S, d]``.
        scale: factor on the scores.
        causal: query t sees keys 0 .. t; needs T = S.

    Returns:
        Output ``[B, H, T, d]`` in the query's dtype, and log-sum-exp ``[B, H, T]`` in fp32 (fp64 for fp64 input).
    """
    batch, heads, length, dim = query.shape
    kernel = _kernel(query.device.type, query.dtype, dim if dim == value.shape[-1] else 0)
    groups = heads // key.shape[1]
    if causal or groups == 1:
        return kernel.forward(query, key, value, scale, causal)
    # Without a triangle the queries of a group are simply more queries of one head.
    folded = query.reshape(batch, key.shape[1], groups * length, dim)
    out, lse = kernel.forward(folded, key, value, scale, False)
    return out.reshape(batch, heads, length, value.shape[-1]), lse.reshape(batch, heads, length)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for one region.

    Handed the output and log-sum-exp of *all* regions of a query, each region's gradients are its exact share: the
    probabilities ``exp(score - lse)`` are then those of the one softmax over all of them.
    """
    dim = query.shape[-1]
    kernel = _kernel(query.device.type, query.dtype, dim if dim == value.shape[-1] else 0)
    # CUDA's kernels read a log-sum-exp as if it were contiguous, whatever its strides, and a block's is a slice.
    return kernel.backward(grad, query, key, value, out, lse.contiguous(), scale, causal)


@functools.lru_cache
def _kernel(device: str, dtype: torch.dtype, dim: int) -> Kernel:
    """The kernel for a kind of device, a dtype and a head dimension (0: key's and value's differ)."""
    if dim == 0:
        return PLAIN
    if device == "cpu":
        return CPU
    if device != "cuda" or dtype == torch.float64:
        return PLAIN
    half = dtype in (torch.bfloat16, torch.float16) and dim <= 256 and dim % 8 == 0
    for kernel in (CUDA_FLASH, CUDA_EFFICIENT) if half else (CUDA_EFFICIENT,):
        if _agrees_with_plain(kernel.forward, PLAIN.backward, device, dtype, dim):
            works = _agrees_with_plain(kernel.forward, kernel.backward, device, dtype, dim)
            return kernel if works else Kernel(kernel.forward, PLAIN.backward)
    warnings.warn(
        f"no fused attention kernel of torch's works on this device for {dtype}: a slow one is used", stacklevel=2
    )
    return PLAIN


def _agrees_with_plain(forward: Forward, backward: Backward, device: str, dtype: torch.dtype, dim: int) -> bool:
    """Whether kernels give plain attention's results on a small problem, on this machine."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 70, dim), (1, 2, 70, dim), (1, 2, 70, dim), (1, 4, 70, dim))
    query, key, value, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    eps = torch.finfo(dtype).eps
    scale, room, lse_room = dim**-0.5, max(4 * eps, 1e-5), max(eps, 1e-5)
    for causal in (True, False):
        plain_out, plain_lse = PLAIN.forward(query, key, value, scale, causal)
        expected = [plain_out, plain_lse]
        expected += PLAIN.backward(grad, query, key, value, plain_out, plain_lse, scale, causal)
        try:
            out, lse = forward(query, key, value, scale, causal)
            results = [out, lse, *backward(grad, query, key, value, out, lse, scale, causal)]
        except (RuntimeError, TypeError, AttributeError):
            return False
        for i, (result, reference) in enumerate(zip(results, expected, strict=True)):
            # The log-sum-exp is in fp32, whatever the dtype: what is rounded are the scores.
            limit = lse_room if i == 1 else room * max(1.0, float(reference.abs().max()))
            if not torch.allclose(result.float(), reference.float(), rtol=0, atol=limit):
                return False
    return True


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, 0.0, causal, scale=scale
    )
    return grads


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
    return out, lse


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty((), dtype=torch.int64, device=query.device)  # of dropout, which there is none of
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (grad, query, key, value, out)),
        lse, None, None, query.shape[2], key.shape[2], 0.0, causal, seed, seed, scale=scale,
    )  # fmt: skip
    query_grad, key_grad, value_grad = (x.transpose(1, 2) for x in grads)
    return query_grad, key_grad, value_grad


def _efficient_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    key, value = (_repeated(x, query.shape[1]) for x in (key, value))
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )[:2]
    return out, lse[..., : query.shape[2]]  # the kernel pads it


def _efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    key_heads = key.shape[1]
    key, value = (_repeated(x, query.shape[1]) for x in (key, value))
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, None, out, padded, seed, seed, 0.0, (True, True, True, False), causal, scale=scale
    )[:3]
    query_grad, *shared = grads
    key_grad, value_grad = (_grouped(x, key_heads).sum(2) for x in shared)
    return query_grad, key_grad, value_grad


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    wide_value = _wide(value)[:, :, None]
    for start, scores in _plain_scores(query, key, scale, causal):
        lse = scores.logsumexp(-1)
        outs.append((scores - lse[..., None]).exp_() @ wide_value)
        lses.append(lse)
        del start
    out, lse = torch.cat(outs, dim=3).flatten(1, 2), torch.cat(lses, dim=3).flatten(1, 2)
    return out.to(query.dtype), lse


def _plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide_key, wide_value = _wide(key), _wide(value)
    wide_query, wide_grad, wide_out, lse = (_grouped(x, key.shape[1]) for x in (*map(_wide, (query, grad, out)), lse))
    delta = (wide_grad * wide_out).sum(-1)
    query_grads, key_grad, value_grad = [], torch.zeros_like(wide_key), torch.zeros_like(wide_value)
    for start, scores in _plain_scores(query, key, scale, causal):
        rows = slice(start, start + scores.shape[3])
        probabilities = (scores - lse[:, :, :, rows, None]).exp_()
        value_grad += (probabilities.transpose(-1, -2) @ wide_grad[:, :, :, rows]).sum(2)
        score_grad = wide_grad[:, :, :, rows] @ wide_value[:, :, None].transpose(-1, -2)
        score_grad = score_grad.sub_(delta[:, :, :, rows, None]).mul_(probabilities).mul_(scale)
        query_grads.append(score_grad @ wide_key[:, :, None])
        key_grad += (score_grad.transpose(-1, -2) @ wide_query[:, :, :, rows]).sum(2)
    query_grad = torch.cat(query_grads, dim=3).flatten(1, 2)
    return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype)


def _plain_scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Any:
    """First row and scaled scores ``[B, K, H / K, rows, S]`` of one block of queries after the other."""
    query = _grouped(_wide(query), key.shape[1])
    transposed = _wide(key)[:, :, None].transpose(-1, -2)
    length, keys = query.shape[3], key.shape[2]
    rows = max(1, SCORES // (query[:, :, :, 0, 0].numel() * keys))
    for start in range(0, length, rows):
        scores = query[:, :, :, start : start + rows] @ transposed * scale
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(start + 1)
            scores.masked_fill_(later, -math.inf)
        yield start, scores


def _grouped(x: Tensor, key_heads: int) -> Tensor:
    """The heads ``[B, H, ...]`` as ``[B, K, H / K, ...]``."""
    return x.reshape(x.shape[0], key_heads, x.shape[1] // key_heads, *x.shape[2:])


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


CPU = Kernel(_cpu_forward, _cpu_backward)
CUDA_FLASH = Kernel(_flash_forward, _flash_backward)
CUDA_EFFICIENT = Kernel(_efficient_forward, _efficient_backward)
PLAIN = Kernel(_plain_forward, _plain_backward)
