"""CLEX."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ctxext.methods.base import Method, WholeNumber
from ctxext.methods.ntk import NTK, ntk_theta
from ctxext.rope import RopeSpec, default_inv_freq


class CLEX(Method):
    """Let the frequencies flow from those of the trained length to those of the target along a learned equation.

    The logarithms of the frequencies, z = ln theta, follow an ordinary differential equation over the scale t, from the
    trained frequencies at t = 1 to those in use at t = ``factor``. Its right-hand side is that of NTK-aware scaling,
    and a small network beside it::

        dz / dt = d(ln theta_NTK) / dt + W_down silu(W_up z),    z(1) = ln theta

    W_up is ``[d/2, amplification * d]``, W_down the reverse. W_down starts at zero: without training the frequencies
    are those of ``ntk``, to the bit. ``ctxext finetune`` trains both with the model, and they are saved beside it in
    ``clex.safetensors``; to other programs the trained frequencies are those of a ``longrope`` checkpoint.

    Reference: CLEX: Continuous Length Extrapolation for Large Language Models (https://arxiv.org/abs/2310.16450),
    section 3, and its released code; lambda in the paper is ``amplification``. Deviations:

    - t is ``factor``, whatever the length of the input. The authors choose it anew when the input grows, so that cached
      decoding, chunked prefill and batches would change the result, or cached keys be rotated again.
    - The bias is NTK-aware scaling by t itself, where the released code has Dynamic NTK's 2t - 1; it is integrated in
      closed form, and the solver sees the network's part alone. The network reads z; the code adds ln theta_NTK to it.
    - The solver is Runge-Kutta of fourth order with equal steps in ln t instead of t, as many for every factor.
    - t is sampled in training only if ``finetune.sample_factor`` says so. The code's scaling of queries by log n is no
      part of the method here.
    """

    title: ClassVar[str] = "CLEX"
    reference: ClassVar[str] = "https://arxiv.org/abs/2310.16450"
    untrained_factor: ClassVar[float | None] = NTK.untrained_factor
    evidence: ClassVar[str] = "made for training (2310.16450); without it the frequencies are those of ntk"

    no_log_n: ClassVar[str | None] = "its attention would not see what is learned"

    name: Literal["clex"] = "clex"
    amplification: WholeNumber = Field(
        1, ge=1, le=64, description="Width of the network in head dimensions (lambda in the paper)."
    )
    solver_steps: WholeNumber = Field(16, ge=1, le=1024, description="Runge-Kutta steps from the trained scale.")

    def scaled_rope(self, spec: RopeSpec) -> tuple[Tensor, float]:
        """Those before training; what training makes of them, the module of :meth:`learned_rope` says."""
        return _ntk_frequencies(spec, self.lengths(spec).factor), 1.0

    def learned_rope(self, spec: RopeSpec) -> FrequencyFlow:
        return FrequencyFlow(spec, self.amplification, self.solver_steps)

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": ntk_theta(spec, self.lengths(spec).factor)}


class FrequencyFlow(nn.Module):
    """The network of :class:`CLEX`, and the frequencies to which its equation leads.

    Args:
        spec: the trained rotary embedding, with d = ``rotary_dim``.
        amplification: width of the network over d.
        solver_steps: of the Runge-Kutta method.

    Attributes:
        up: fp32 ``[d/2, amplification * d]``; even in +-1 / sqrt(width), the same for every new module.
        down: fp32 ``[amplification * d, d/2]``; zero.
    """

    def __init__(self, spec: RopeSpec, amplification: int, solver_steps: int) -> None:
        super().__init__()
        self.spec, self.solver_steps = spec, solver_steps
        half, width = spec.rotary_dim // 2, amplification * spec.rotary_dim
        where: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
        noise = torch.rand(half, width, generator=torch.Generator("cpu").manual_seed(0), **where)
        self.up = nn.Parameter((2 * noise - 1) / math.sqrt(width))
        self.down = nn.Parameter(torch.zeros(width, half, **where))

    def forward(self, factor: float) -> Tensor:
        """Frequencies at scale ``factor`` in radians per token, fp32 ``[d/2]``, on the weights' device."""
        half, device = self.spec.rotary_dim // 2, self.up.device
        start = default_inv_freq(self.spec.rope_theta, self.spec.rotary_dim).log().to(device)
        rates = ntk_rates(half).to(device=device, dtype=torch.float32)
        learned = learned_logarithm(self.up, self.down, start, rates, math.log(factor), self.solver_steps)
        # At the start exp(0) = 1 exactly, and these are the frequencies of NTK-aware scaling to the bit.
        return _ntk_frequencies(self.spec, factor).to(device) * learned.exp()

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"frequencies={self.up.shape[0]}, width={self.up.shape[1]}, solver_steps={self.solver_steps}"


def ntk_rates(half: int) -> Tensor:
    """d(ln theta_i) / d(ln t) of NTK-aware scaling, -2i / (d - 2) for i = 0 .. d/2 - 1; fp64 ``[half]``."""
    return -torch.arange(half, dtype=torch.int64, device="cpu").double() / (half - 1)


def learned_logarithm(up: Tensor, down: Tensor, start: Tensor, rates: Tensor, end: float, steps: int) -> Tensor:
    """What the network adds to the logarithms of the NTK-aware frequencies; differentiable, in the dtype of ``up``.

    With u = ln t and z(u) = ``start`` + u * ``rates`` + r(u), r follows dr/du = t W_down silu(W_up z), r(0) = 0. The
    products are elementwise: as matrix products autocast would cast them down.

    Args:
        up: W_up ``[d/2, width]``.
        down: W_down ``[width, d/2]``.
        start: logarithms of the trained frequencies ``[d/2]``.
        rates: of the NTK-aware ones, see :func:`ntk_rates`; ``[d/2]``.
        end: ln of the scale.
        steps: of the solver.

    Returns:
        r(``end``), ``[d/2]``.
    """

    def slope(u: float, r: Tensor) -> Tensor:
        z = start + u * rates + r
        hidden = nn.functional.silu((z[:, None] * up).sum(0))
        return math.exp(u) * (hidden[:, None] * down).sum(0)

    return runge_kutta(slope, torch.zeros_like(start), end, steps)


def runge_kutta(slope: Callable[[float, Tensor], Tensor], start: Tensor, end: float, steps: int) -> Tensor:
    """x(``end``) for dx/du = ``slope(u, x)`` and x(0) = ``start``, by equal steps of the classical fourth order.

    Reference: Hairer, Norsett, Wanner, Solving Ordinary Differential Equations I (1993), II.1, Table 1.2.
    """
    x, h = start, end / steps
    for i in range(steps):
        u = i * h
        first = slope(u, x)
        second = slope(u + h / 2, x + h / 2 * first)
        third = slope(u + h / 2, x + h / 2 * second)
        fourth = slope(u + h, x + h * third)
        x = x + h / 6 * (first + 2 * second + 2 * third + fourth)
    return x


def _ntk_frequencies(spec: RopeSpec, factor: float) -> Tensor:
    return default_inv_freq(ntk_theta(spec, factor), spec.rotary_dim)
