"""Frequencies and rotations against closed forms in float64."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import tiny
from ctxext.rope import default_inv_freq, position_frequencies, rotation, wavelengths
from ctxext.rotary import ScaledRotaryEmbedding

THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
DIMS = (4, 16, 64, 80, 96, 128, 256)


def exact_inv_freq(theta: float, dim: int) -> torch.Tensor:
    return torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("theta", THETAS)
def test_frequencies_are_the_geometric_series(theta: float, dim: int) -> None:
    # fp32 rounds an exponent by 6e-8, which a base of 1e6 (ln 14) turns into 8e-7 of the power at worst.
    torch.testing.assert_close(default_inv_freq(theta, dim).double(), exact_inv_freq(theta, dim), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("theta", THETAS)
def test_frequencies_have_the_bits_of_transformers(theta: float, dim: int) -> None:
    config = LlamaConfig(head_dim=dim, rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert torch.equal(default_inv_freq(theta, dim), LlamaRotaryEmbedding(config).inv_freq)


def test_frequencies_survive_frameworks_that_build_floating_ranges_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = default_inv_freq(1e6, 128)
    arange = torch.arange

    def downcasting(*args: object, **kwargs: object) -> torch.Tensor:
        result = arange(*args, **kwargs)  # type: ignore[call-overload]
        return result.bfloat16() if result.is_floating_point() else result

    monkeypatch.setattr(torch, "arange", downcasting)
    assert torch.equal(default_inv_freq(1e6, 128), expected)


def test_position_frequencies_are_reciprocals() -> None:
    assert torch.equal(1 / position_frequencies(1e4, 16), default_inv_freq(1e4, 16))


def test_wavelengths_are_tokens_per_full_turn() -> None:
    expected = 2 * math.pi / exact_inv_freq(1e4, 16)
    torch.testing.assert_close(wavelengths(default_inv_freq(1e4, 16)).double(), expected, rtol=1e-6, atol=0)


def test_rotation_is_cosine_and_sine_of_position_times_frequency() -> None:
    positions = torch.tensor([[0, 1, 63, 64, 4095], [7, 100_000, 131_071, 3, 2]])
    cos, sin = rotation(positions, default_inv_freq(1e4, 64), 1.25, torch.float32)
    angles = positions[..., None].double() * exact_inv_freq(1e4, 64)
    # An fp32 angle of 1.3e5 is known to within 0.008 plus what the frequency's own rounding adds.
    for ours, exact in ((cos, 1.25 * angles.cos()), (sin, 1.25 * angles.sin())):
        torch.testing.assert_close(ours.double(), torch.cat((exact, exact), dim=-1), rtol=0, atol=0.03)
        torch.testing.assert_close(ours[0].double(), torch.cat((exact, exact), dim=-1)[0], rtol=0, atol=1e-3)


def test_rotation_lays_the_frequencies_out_twice() -> None:
    for part in rotation(torch.arange(50)[None], default_inv_freq(1e4, 16), 1.0, torch.float32):
        assert part.shape == (1, 50, 16)
        assert torch.equal(part[..., :8], part[..., 8:])


def test_rotation_has_the_bits_of_transformers() -> None:
    config = LlamaConfig(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    positions = torch.tensor([[0, 1, 4095, 131_071]])
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1, 4, 8), positions)
    for ours, theirs in zip(rotation(positions, default_inv_freq(1e4, 64), 1.0, torch.float32), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_attention_factor_scales_a_score_by_its_square_once() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16).unbind(0)
    cos, sin = rotation(torch.tensor([[37]]), default_inv_freq(1e4, 16), 1.1386294, torch.float32)
    rotated_query, rotated_key = apply_rotary_pos_emb(query, key, cos, sin)
    expected = (query * key).sum() * 1.1386294**2
    torch.testing.assert_close((rotated_query * rotated_key).sum(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rotation_is_rounded_only_at_the_end(dtype: torch.dtype) -> None:
    positions, inv_freq = torch.tensor([[100_003, 131_071]]), default_inv_freq(1e6, 128)
    for ours, full in zip(
        rotation(positions, inv_freq, 1.25, dtype), rotation(positions, inv_freq, 1.25, torch.float32), strict=True
    ):
        assert torch.equal(ours, full.to(dtype))


def test_rotation_ignores_autocast() -> None:
    positions, inv_freq = torch.tensor([[100_003]]), default_inv_freq(1e6, 128)
    outside = rotation(positions, inv_freq, 1.0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = rotation(positions, inv_freq, 1.0, torch.float32)
    assert torch.equal(inside[0], outside[0])
    assert torch.equal(inside[1], outside[1])


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "float"])
def test_the_module_keeps_exact_frequencies_through_casts(cast: str) -> None:
    inv_freq = default_inv_freq(1e6, 128)
    module = getattr(ScaledRotaryEmbedding(inv_freq, 1.25), cast)()
    assert torch.equal(module.inv_freq, inv_freq)
    assert module.inv_freq.dtype == torch.float32


def test_the_module_starts_again_from_exact_frequencies_after_the_meta_device() -> None:
    inv_freq = default_inv_freq(1e6, 128)
    module = ScaledRotaryEmbedding(inv_freq, 1.25).to("meta")
    assert module.inv_freq.device.type == "meta"
    assert torch.equal(module.to_empty(device="cpu").inv_freq, inv_freq)


def test_the_module_starts_again_from_exact_frequencies_whatever_was_done_to_the_live_ones() -> None:
    module = ScaledRotaryEmbedding(default_inv_freq(1e4, 16), 1.0)
    module.inv_freq.mul_(2)
    assert torch.equal(module.float().inv_freq, default_inv_freq(1e4, 16))


def test_the_module_follows_its_input_from_another_device() -> None:
    inv_freq = default_inv_freq(1e4, 16)
    module = ScaledRotaryEmbedding(inv_freq, 1.0).to("meta")
    cos, _ = module(torch.zeros(1, 3, 8), torch.arange(3)[None])
    assert torch.equal(cos, rotation(torch.arange(3)[None], inv_freq, 1.0, torch.float32)[0])


def test_the_module_adds_nothing_to_a_state_dict() -> None:
    module = ScaledRotaryEmbedding(default_inv_freq(1e4, 16), 1.0)
    assert module.state_dict() == {}
    assert list(module.parameters()) == []


def test_the_module_does_not_share_memory_with_its_argument() -> None:
    inv_freq = default_inv_freq(1e4, 16)
    module = ScaledRotaryEmbedding(inv_freq, 1.0)
    inv_freq.zero_()
    assert torch.equal(module.to(torch.float32).inv_freq, default_inv_freq(1e4, 16))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_module_answers_in_the_dtype_of_the_hidden_states(batch: int) -> None:
    module = ScaledRotaryEmbedding(default_inv_freq(1e4, 16), 1.0)
    cos, sin = module(torch.zeros(batch, 5, 8, dtype=torch.bfloat16), torch.arange(5).expand(batch, 5))
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert cos.shape == sin.shape == (batch, 5, 16)


def test_tiny_models_notice_where_tokens_stand() -> None:
    """Every comparison of logits below rests on this: attention of these models is sharp."""
    ids = tiny.tokens(100)
    for family in tiny.FAMILIES:
        model = tiny.model(family)
        near = tiny.logits(model, ids, use_cache=False)
        far = tiny.logits(model, ids, position_ids=2 * torch.arange(100)[None], use_cache=False)
        assert tiny.difference(near, far) > 0.1, family
