"""Each method against published numbers, closed forms in float64, and Transformers."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ctxext
import tiny
from ctxext.rope import RopeSpec, default_inv_freq

TINY = RopeSpec(10_000.0, 16, 64)
LLAMA2 = RopeSpec(10_000.0, 128, 4096)
QWEN = RopeSpec(1_000_000.0, 128, 32768)
SHAPES = [
    RopeSpec(theta, dim, original)
    for theta in (10_000.0, 500_000.0, 1_000_000.0)
    for dim in (16, 64, 80, 96, 128, 256)
    for original in (512, 4096, 8192, 32768, 131_072)
]
FACTORS = (1.0, 1.25, 2.0, 4.0, 10.0, 32.0)
_CONFIG = LlamaConfig()
DYNAMIC = (ctxext.DynamicNTK, ctxext.DynamicYaRN)
ATTENTION = [name for name in tiny.METHODS if name not in tiny.STATIC]
# Rounding of a power in fp32: 6e-8 in the exponent times ln(1e6), and a few roundings after it.
CLOSE = {"rtol": 1e-6, "atol": 0.0}


def frequencies(method: ctxext.Method, spec: RopeSpec = TINY) -> torch.Tensor:
    return method.scaled_rope(spec)[0]


def attention_factor(method: ctxext.Method, spec: RopeSpec = TINY) -> float:
    return method.scaled_rope(spec)[1]


def plain(spec: RopeSpec, theta: float | None = None) -> torch.Tensor:
    base = theta or spec.rope_theta
    return torch.tensor([base ** (-2 * i / spec.rotary_dim) for i in range(spec.rotary_dim // 2)], dtype=torch.float64)


def by_parts(spec: RopeSpec, factor: float, alpha: float, beta: float) -> torch.Tensor:
    """Equations 17-20 of the YaRN paper, one dimension at a time."""
    result = []
    for theta in plain(spec).tolist():
        turns = spec.original_max_position_embeddings * theta / (2 * math.pi)
        gamma = min(max((turns - alpha) / (beta - alpha), 0.0), 1.0)
        result.append((1 - gamma) * theta / factor + gamma * theta)
    return torch.tensor(result, dtype=torch.float64)


def of_transformers(parameters: dict[str, Any], spec: RopeSpec, target: int) -> tuple[torch.Tensor, float]:
    config = copy.copy(_CONFIG)
    config.head_dim, config.max_position_embeddings = spec.rotary_dim, target
    # Past the constructor, which completes and judges what it is given.
    config.rope_parameters = {"rope_theta": spec.rope_theta, **parameters}
    if parameters["rope_type"] == "default":
        return default_inv_freq(config.rope_parameters["rope_theta"], spec.rotary_dim), 1.0
    inv_freq, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return inv_freq, float(factor)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            ctxext.YaRN(factor=4),
            [1.0, 0.2371708, 0.05, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        ),
        (
            ctxext.YaRN(factor=4, truncate=False),
            [1.0, 0.1985835, 0.02559525, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        ),
        (
            ctxext.NTK(factor=4),
            [1.0, 0.2594128, 0.06729501, 0.01745719, 0.004528618, 0.001174782, 0.0003047534, 7.905695e-05],
        ),
    ],
    ids=["yarn", "yarn without truncate", "ntk"],
)
def test_frequencies_are_the_published_ones(method: ctxext.Method, expected: list[float]) -> None:
    # The numbers are given to seven digits.
    torch.testing.assert_close(frequencies(method), torch.tensor(expected), rtol=5e-7, atol=0)


@pytest.mark.parametrize(
    ("theta", "dim", "original", "factor", "low", "high", "attention"),
    [
        (1e4, 128, 4096, 16, 20, 46, 1.277259),
        (5e5, 128, 8192, 4, 18, 35, 1.138629),
        (1e6, 128, 32768, 4, 23, 40, 1.138629),
        (1e6, 64, 32768, 4, 11, 20, 1.138629),
        (1e5, 64, 8192, 4, 10, 20, 1.138629),
        (1e4, 64, 2048, 8, 8, 21, 1.207944),
        # Clamped at d - 1 = 63 rather than at d/2 - 1 = 31.
        (1e4, 64, 131_072, 4, 22, 35, 1.138629),
    ],
)
def test_yarn_ramps_between_the_published_dimensions(
    theta: float, dim: int, original: int, factor: float, low: int, high: int, attention: float
) -> None:
    spec, yarn = RopeSpec(theta, dim, original), ctxext.YaRN(factor=factor)
    assert yarn.correction_range(spec) == (low, high)
    assert attention_factor(yarn, spec) == pytest.approx(attention, abs=5e-7)
    ratio = plain(spec) / frequencies(yarn, spec).double()
    torch.testing.assert_close(ratio[: low + 1], torch.ones(low + 1, dtype=torch.float64), rtol=1e-6, atol=0)
    assert (ratio[low + 1 : high] > 1.0001).all()
    assert (ratio[low + 1 : high] < factor * 0.9999).all()
    torch.testing.assert_close(ratio[high:], torch.full_like(ratio[high:], factor), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("factor", "base"), [(2, 20_221.26), (4, 40_889.94), (8, 82_684.62)])
def test_ntk_enlarges_the_base_as_published(factor: float, base: float) -> None:
    assert ctxext.NTK(factor=factor).scaled_theta(LLAMA2) == pytest.approx(base, abs=0.005)


def test_ntk_base_of_the_tiny_head() -> None:
    assert ctxext.NTK(factor=4).scaled_theta(TINY) == pytest.approx(48_760.546, abs=5e-4)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1.1386294361119891),
        ({"attention_factor": 1.0}, 1.0),
        ({"attention_factor": 0.87825}, 0.87825),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.5}, (0.0707 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"mscale": 0.707, "mscale_all_dim": 0.5, "factor": 1.0}, 1.0),
        ({"ramp": "rotations"}, 1.1386294361119891),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(settings: dict[str, Any], expected: float) -> None:
    assert attention_factor(ctxext.YaRN(**{"factor": 4, **settings})) == pytest.approx(expected, rel=1e-12)


def test_yarn_attention_factor_of_the_published_mscales() -> None:
    method = ctxext.YaRN(factor=4, mscale=0.707, mscale_all_dim=0.5)
    assert attention_factor(method) == pytest.approx(1.0268362, abs=5e-8)


def test_longrope_attention_factor_is_the_papers() -> None:
    method = ctxext.LongRoPE(factor=4, long_factor=[2] * 8)
    assert attention_factor(method) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)), rel=1e-12)
    assert attention_factor(ctxext.LongRoPE(factor=4, long_factor=[2] * 8, attention_factor=1.5)) == 1.5


@pytest.mark.parametrize("factor", FACTORS)
def test_pi_divides_every_frequency(factor: float) -> None:
    for spec in SHAPES:
        torch.testing.assert_close(
            frequencies(ctxext.PI(factor=factor), spec).double(), plain(spec) / factor, **CLOSE, msg=str(spec)
        )


def test_pi_reads_position_m_as_m_over_the_factor() -> None:
    squeezed = torch.arange(0, 64, 4)[:, None] * frequencies(ctxext.PI(factor=4))
    torch.testing.assert_close(squeezed.cos(), (torch.arange(16)[:, None] * default_inv_freq(1e4, 16)).cos())


@pytest.mark.parametrize("factor", FACTORS)
def test_ntk_is_a_larger_base(factor: float) -> None:
    for spec in SHAPES:
        base = spec.rope_theta * factor ** (spec.rotary_dim / (spec.rotary_dim - 2))
        torch.testing.assert_close(
            frequencies(ctxext.NTK(factor=factor), spec).double(), plain(spec, base), **CLOSE, msg=str(spec)
        )


def test_ntk_divides_the_slowest_frequency_by_the_factor_and_keeps_the_fastest() -> None:
    for spec in SHAPES:
        ratio = plain(spec) / frequencies(ctxext.NTK(factor=8), spec).double()
        assert ratio[0].item() == 1
        assert ratio[-1].item() == pytest.approx(8, rel=2e-6)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 32.0), (0.5, 8.0), (2.0, 3.0)])
@pytest.mark.parametrize("factor", FACTORS)
def test_ntk_by_parts_follows_the_paper(factor: float, alpha: float, beta: float) -> None:
    method = ctxext.NTKByParts(factor=factor, alpha=alpha, beta=beta)
    for spec in SHAPES:
        ours, expected = frequencies(method, spec).double(), by_parts(spec, factor, alpha, beta)
        # As parts of the plain frequency: a steep ramp enlarges the rounding of theta by beta / (beta - alpha).
        tolerance = {"rtol": 0, "atol": 1e-6 * (1 + beta / (beta - alpha))}
        torch.testing.assert_close(ours / plain(spec), expected / plain(spec), **tolerance, msg=str(spec))
        assert attention_factor(method, spec) == 1.0


@pytest.mark.parametrize("factor", FACTORS)
def test_yarn_with_the_papers_ramp_has_the_frequencies_of_ntk_by_parts(factor: float) -> None:
    for spec in SHAPES:
        inv_freq, attention = ctxext.YaRN(factor=factor, ramp="rotations").scaled_rope(spec)
        torch.testing.assert_close(inv_freq.double(), by_parts(spec, factor, 1, 32), rtol=2e-6, atol=0, msg=str(spec))
        assert attention == pytest.approx(0.1 * math.log(factor) + 1, rel=1e-12)


def test_the_two_ramps_of_yarn_differ_as_much_as_the_papers_do() -> None:
    code, paper = (frequencies(ctxext.YaRN(factor=16, ramp=ramp), LLAMA2) for ramp in ("dimension", "rotations"))
    assert ((code - paper).abs() / torch.minimum(code, paper)).max() > 2


@pytest.mark.parametrize("theta", [500_000.0, 1_000_000.0])
def test_base_change_is_plain_rope_with_another_base(theta: float) -> None:
    for spec in SHAPES:
        inv_freq, attention = ctxext.RopeTheta(rope_theta=theta).scaled_rope(spec)
        torch.testing.assert_close(inv_freq.double(), plain(spec, theta), **CLOSE, msg=str(spec))
        assert attention == 1.0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["pi", "ntk", "ntk_by_parts", "yarn", "llama3"]),
    theta=st.floats(100, 1e8),
    dim=st.integers(2, 128).map(lambda half: 2 * half),
    original=st.integers(256, 1_000_000),
    factor=st.floats(1, 128),
)
@example(name="yarn", theta=1e4, dim=4, original=256, factor=2.0)
@example(name="llama3", theta=1e4, dim=4, original=256, factor=1.0)
def test_frequencies_lie_between_plain_and_interpolated(
    name: str, theta: float, dim: int, original: int, factor: float
) -> None:
    spec = RopeSpec(theta, dim, original)
    ratio = default_inv_freq(theta, dim).double() / frequencies(ctxext.METHODS[name](name=name, factor=factor), spec)
    assert (ratio >= 1 - 1e-5).all()
    assert (ratio <= factor * (1 + 1e-5)).all()
    # Slower frequencies are never slowed less than faster ones.
    assert (ratio.diff() >= -1e-5 * factor).all()


YARN_SETTINGS: list[dict[str, Any]] = [
    {},
    {"truncate": False},
    {"beta_fast": 16.0, "beta_slow": 2.0},
    {"beta_fast": 64.0, "beta_slow": 0.5, "truncate": False},
    {"attention_factor": 1.0},
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 0.5},
]


@pytest.mark.parametrize("factor", FACTORS)
def test_pi_is_linear_of_transformers(factor: float) -> None:
    for spec in SHAPES:
        expected, _ = of_transformers({"rope_type": "linear", "factor": factor}, spec, 1 << 20)
        torch.testing.assert_close(frequencies(ctxext.PI(factor=factor), spec), expected, **CLOSE, msg=str(spec))


@pytest.mark.parametrize("settings", YARN_SETTINGS, ids=str)
@pytest.mark.parametrize("factor", FACTORS)
def test_yarn_is_yarn_of_transformers(factor: float, settings: dict[str, Any]) -> None:
    for spec in SHAPES:
        original = spec.original_max_position_embeddings
        parameters = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **settings}
        expected, attention = of_transformers(parameters, spec, int(factor * original))
        method = ctxext.YaRN(factor=factor, **settings)
        torch.testing.assert_close(frequencies(method, spec), expected, **CLOSE, msg=str(spec))
        assert attention_factor(method, spec) == pytest.approx(attention, rel=1e-12)


@pytest.mark.parametrize("settings", [{}, {"low_freq_factor": 2.0, "high_freq_factor": 16.0}], ids=str)
@pytest.mark.parametrize("factor", FACTORS)
def test_llama3_is_llama3_of_transformers(factor: float, settings: dict[str, Any]) -> None:
    for spec in SHAPES:
        original = spec.original_max_position_embeddings
        parameters = {
            "rope_type": "llama3",
            "factor": factor,
            "original_max_position_embeddings": original,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **settings,
        }
        expected, _ = of_transformers(parameters, spec, int(factor * original))
        torch.testing.assert_close(
            frequencies(ctxext.Llama3(factor=factor, **settings), spec), expected, **CLOSE, msg=str(spec)
        )


@pytest.mark.parametrize("settings", [{}, {"attention_factor": 1.19}], ids=str)
@pytest.mark.parametrize("factor", FACTORS)
def test_longrope_is_the_long_half_of_longrope_of_transformers(factor: float, settings: dict[str, Any]) -> None:
    for spec in SHAPES:
        half, original = spec.rotary_dim // 2, spec.original_max_position_embeddings
        factors = [1 + 63 * i / half for i in range(half)]
        parameters = {
            "rope_type": "longrope",
            "factor": factor,
            "original_max_position_embeddings": original,
            "short_factor": factors,
            "long_factor": factors,
            **settings,
        }
        expected, attention = of_transformers(parameters, spec, int(factor * original))
        method = ctxext.LongRoPE(factor=factor, long_factor=factors, **settings)
        torch.testing.assert_close(frequencies(method, spec), expected, **CLOSE, msg=str(spec))
        assert attention_factor(method, spec) == pytest.approx(attention, rel=1e-12)


@pytest.mark.parametrize("spec", [TINY, LLAMA2, QWEN], ids=["tiny", "llama2", "qwen"])
@pytest.mark.parametrize("name", tiny.STATIC)
def test_exported_rope_parameters_mean_the_same_to_transformers(name: str, spec: RopeSpec) -> None:
    method = tiny.METHODS[name]
    if name == "longrope":
        method = method.model_copy(update={"long_factor": tuple(1 + i / 4 for i in range(spec.rotary_dim // 2))})
    expected, attention = of_transformers(method.rope_parameters(spec), spec, method.lengths(spec).target)
    torch.testing.assert_close(frequencies(method, spec), expected, rtol=1e-7, atol=0)
    assert attention_factor(method, spec) == pytest.approx(attention, rel=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        ctxext.PI(factor=1),
        ctxext.NTK(factor=1),
        ctxext.NTKByParts(factor=1),
        ctxext.YaRN(factor=1),
        ctxext.YaRN(factor=1, truncate=False),
        ctxext.YaRN(factor=1, ramp="rotations"),
        ctxext.YaRN(max_position_embeddings=4096),
        ctxext.Llama3(factor=1),
        ctxext.LongRoPE(factor=1, long_factor=[1] * 64),
        ctxext.RopeTheta(rope_theta=10_000),
    ],
    ids=repr,
)
def test_factor_one_changes_no_bit(method: ctxext.Method) -> None:
    inv_freq, attention = method.scaled_rope(LLAMA2)
    assert torch.equal(inv_freq, default_inv_freq(1e4, 128))
    assert attention == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"factor": 4},
        {"max_position_embeddings": 256},
        {"factor": 4, "max_position_embeddings": 256},
        {"factor": 4, "original_max_position_embeddings": 64},
        {"max_position_embeddings": 256, "original_max_position_embeddings": 64},
        {"factor": 4, "max_position_embeddings": 256, "original_max_position_embeddings": 64},
    ],
    ids=str,
)
def test_any_two_lengths_give_the_third(settings: dict[str, Any]) -> None:
    method = ctxext.YaRN(**settings)
    assert method.lengths(TINY) == (64, 4.0, 256)
    assert torch.equal(frequencies(method), frequencies(ctxext.YaRN(factor=4)))


@pytest.mark.parametrize("settings", [{}, {"original_max_position_embeddings": 64}], ids=str)
@pytest.mark.parametrize("name", [name for name in tiny.STATIC if name not in ("rope_theta", "longrope")])
def test_no_length_at_all_is_an_error(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ctxext.ConfigError, match=r"give factor or max_position_embeddings.*64"):
        ctxext.METHODS[name](name=name, **settings).scaled_rope(TINY)


@pytest.mark.parametrize(
    "settings",
    [
        {"factor": 4, "max_position_embeddings": 80, "original_max_position_embeddings": 64},
        {"factor": 1, "max_position_embeddings": 256, "original_max_position_embeddings": 64},
        {"factor": 4, "max_position_embeddings": 255, "original_max_position_embeddings": 64},
        {"factor": 4, "max_position_embeddings": 257, "original_max_position_embeddings": 64},
    ],
    ids=str,
)
def test_lengths_that_contradict_each_other_are_an_error_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"max_position_embeddings {settings['max_position_embeddings']}"):
        ctxext.YaRN(**settings)


def test_lengths_that_contradict_the_models_own_are_an_error() -> None:
    with pytest.raises(ctxext.ConfigError, match=r"factor 4 .* 64 is 256, not max_position_embeddings 512"):
        ctxext.YaRN(factor=4, max_position_embeddings=512).scaled_rope(TINY)


def test_a_target_below_the_trained_length_is_an_error() -> None:
    with pytest.raises(ctxext.ConfigError, match=r"32 is below the trained length 64"):
        ctxext.PI(max_position_embeddings=32).scaled_rope(TINY)
    with pytest.raises(ValueError, match=r"32 is below the trained length 64"):
        ctxext.PI(max_position_embeddings=32, original_max_position_embeddings=64)


def test_an_explicit_factor_wins_over_the_ratio_of_lengths() -> None:
    # As in transformers#38224, where max 80 and original 64 made 1.25 of an explicit 4.
    spec = RopeSpec(10_000.0, 16, 80)
    method = ctxext.YaRN(factor=4, original_max_position_embeddings=64)
    assert torch.equal(frequencies(method, spec), frequencies(ctxext.YaRN(factor=4), TINY))
    assert method.lengths(spec).target == 256


@pytest.mark.parametrize(("original", "target"), [(4096, 10_000), (100, 333), (8192, 24_000), (64, 65)])
def test_an_odd_target_is_reached_exactly(original: int, target: int) -> None:
    spec = RopeSpec(10_000.0, 64, original)
    assert ctxext.PI(max_position_embeddings=target).lengths(spec) == (original, target / original, target)


@pytest.mark.parametrize(
    ("original", "factor", "target"), [(100, 2.3, 230), (100, 4.35, 435), (1000, 1.001, 1001), (64, 2.5, 160)]
)
def test_the_target_is_factor_times_original_whatever_binary_fractions_do(
    original: int, factor: float, target: int
) -> None:
    assert ctxext.PI(factor=factor).lengths(RopeSpec(10_000.0, 64, original)).target == target


def test_a_fractional_target_is_rounded_down() -> None:
    assert ctxext.PI(factor=1.3).lengths(TINY).target == 83  # 83.2


def test_base_change_needs_no_length_and_takes_one() -> None:
    assert ctxext.RopeTheta(rope_theta=1e6).lengths(TINY) == (64, 1.0, 64)
    assert ctxext.RopeTheta(rope_theta=1e6, max_position_embeddings=256).lengths(TINY) == (64, 4.0, 256)


def test_original_length_scales_the_ramp() -> None:
    inherited = frequencies(ctxext.YaRN(factor=4), dataclasses.replace(LLAMA2, original_max_position_embeddings=2048))
    assert torch.equal(frequencies(ctxext.YaRN(factor=4, original_max_position_embeddings=2048), LLAMA2), inherited)
    assert not torch.equal(frequencies(ctxext.YaRN(factor=4), LLAMA2), inherited)


@pytest.mark.parametrize("name", ATTENTION)
def test_methods_that_change_attention_reach_four_times_the_trained_length_unless_told(name: str) -> None:
    assert ctxext.METHODS[name]().lengths(TINY) == (64, 4.0, 256)
    assert ctxext.METHODS[name](max_position_embeddings=640).lengths(TINY) == (64, 10.0, 640)
    assert ctxext.METHODS[name](original_max_position_embeddings=32).lengths(TINY) == (32, 4.0, 128)


@pytest.mark.parametrize(
    "method",
    [ctxext.DCA(max_position_embeddings=32), *(cls(max_position_embeddings=32) for cls in DYNAMIC)],
    ids=repr,
)
def test_a_target_below_the_trained_length_is_an_error_of_methods_that_change_attention_too(
    method: ctxext.Method,
) -> None:
    with pytest.raises(ctxext.ConfigError, match=r"max_position_embeddings 32 is below the trained length 64"):
        method.lengths(TINY)


def test_dca_takes_its_target_from_the_factor_and_refuses_one_that_contradicts_it() -> None:
    assert ctxext.DCA(factor=8).lengths(TINY) == (64, 8.0, 512)
    with pytest.raises(ctxext.ConfigError, match=r"factor 8 .* 64 is 512, not max_position_embeddings 640"):
        ctxext.DCA(factor=8, max_position_embeddings=640).lengths(TINY)


# Dynamic methods


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (32, [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278]),
        (64, [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278]),
        (128, [1.0, 0.2512738, 0.06313851, 0.01586505, 0.00398647, 0.001001695, 0.0002516998, 6.324555e-05]),
    ],
)
def test_dynamic_ntk_has_the_frequencies_of_the_length(length: int, expected: list[float]) -> None:
    inv_freq, attention = ctxext.DynamicNTK(factor=4).scaled_to(TINY, length)
    # The numbers are given to seven digits.
    torch.testing.assert_close(inv_freq, torch.tensor(expected), rtol=5e-7, atol=0)
    assert attention == 1.0


def test_dynamic_ntk_slows_the_slowest_frequency_by_the_scale() -> None:
    inv_freq, _ = ctxext.DynamicNTK(factor=4).scaled_to(TINY, 256)
    assert inv_freq[-1].item() == pytest.approx(2.432521e-05, rel=5e-7)


@pytest.mark.parametrize("spec", [TINY, LLAMA2, QWEN], ids=["tiny", "llama2", "qwen"])
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_dynamic_ntk_is_dynamic_of_transformers(factor: float, spec: RopeSpec) -> None:
    original, config = spec.original_max_position_embeddings, copy.copy(_CONFIG)
    config.head_dim, config.max_position_embeddings = spec.rotary_dim, original
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": spec.rope_theta, "factor": factor}
    for length in (original // 2, original, original + 17, 2 * original, 9 * original):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
        inv_freq, _ = ctxext.DynamicNTK(factor=factor).scaled_to(spec, length)
        torch.testing.assert_close(inv_freq, expected, **CLOSE, msg=str(length))


@pytest.mark.parametrize("length", [32, 64, 65, 96, 256, 1000])
def test_dynamic_yarn_is_yarn_at_the_ratio_of_the_lengths(length: int) -> None:
    inv_freq, attention = ctxext.DynamicYaRN(factor=1).scaled_to(TINY, length)
    ratio = max(1.0, length / 64)
    # The ramp of the paper's code, from Transformers.
    parameters = {"rope_type": "yarn", "factor": ratio, "original_max_position_embeddings": 64}
    expected, _ = of_transformers(parameters, TINY, length)
    torch.testing.assert_close(inv_freq, expected, **CLOSE)
    assert attention == pytest.approx(0.1 * math.log(ratio) + 1, rel=1e-12)


@pytest.mark.parametrize("cls", DYNAMIC)
def test_each_query_has_the_scale_of_its_own_position_in_steps(cls: Any) -> None:
    partition = cls(step=16, factor=3).partition(TINY)
    positions = torch.tensor([0, 63, 64, 79, 80, 200])
    lengths = [64, 64, 80, 80, 96, 208]  # the least 64 + k * 16 above the position
    inv_freq, gain = partition.frequencies_at(positions)
    for i, length in enumerate(lengths):
        expected, attention = cls(factor=3).scaled_to(TINY, length)
        assert torch.equal(inv_freq[i], expected), length
        # Scores have the factor of the query and that of the key; fp32.
        assert gain[i].item() == pytest.approx(attention**2, rel=1e-7), length


@pytest.mark.parametrize(("seq_len", "factor", "scale"), [(128, 4, 5), (256, 2, 7), (96, 2, 2), (256, 1, 4)])
def test_a_pinned_dynamic_method_is_the_static_one_at_its_scale(seq_len: int, factor: float, scale: float) -> None:
    for dynamic, static in ((ctxext.DynamicNTK, ctxext.NTK), (ctxext.DynamicYaRN, ctxext.YaRN)):
        pinned, expected = dynamic(factor=factor, seq_len=seq_len), static(factor=scale)
        inv_freq, attention = pinned.scaled_rope(TINY)
        assert torch.equal(inv_freq, frequencies(expected))
        assert attention == attention_factor(expected)
        assert pinned.rope_parameters(TINY) == expected.rope_parameters(TINY)
        assert not pinned.changes_attention
        assert pinned.partition(TINY) is None


@pytest.mark.parametrize("cls", DYNAMIC)
def test_a_dynamic_method_pinned_within_the_trained_length_changes_no_bit(cls: Any) -> None:
    inv_freq, attention = cls(factor=4, seq_len=32).scaled_rope(TINY)
    assert torch.equal(inv_freq, default_inv_freq(1e4, 16))
    assert attention == 1.0


@pytest.mark.parametrize("cls", DYNAMIC)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"seq_len": 128, "max_position_embeddings": 256},
            r"seq_len 128 and max_position_embeddings 256 contradict each other",
        ),
        ({"factor": 0.5}, r"factor\n.*greater than or equal to 1.*input_value=0\.5"),
        ({"step": 0}, r"step\n.*greater than or equal to 1.*input_value=0"),
        ({"step": 1.5}, r"step\n"),
        ({"attention": "flash"}, r"attention\n.*'fused' or 'naive'.*input_value='flash'"),
    ],
    ids=str,
)
def test_settings_of_dynamic_methods_that_make_no_sense_are_refused(
    cls: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**settings)


@pytest.mark.parametrize("cls", DYNAMIC)
def test_a_pinned_length_that_is_the_target_too_is_taken(cls: Any) -> None:
    assert cls(seq_len=128, max_position_embeddings=128).lengths(TINY).target == 128


# Dual Chunk Attention


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (64, 16)),
        ({"chunk_size": 40}, (40, 10)),
        ({"local_size": 3}, (64, 3)),
        ({"chunk_size": 2}, (2, 1)),
        ({"local_size": 32}, (64, 32)),
        ({"original_max_position_embeddings": 32}, (32, 8)),
        # Interpolated frequencies have been trained further.
        ({"chunk_size": 128, "frequencies": ctxext.PI(factor=2)}, (128, 32)),
    ],
    ids=str,
)
def test_sizes_of_dca_follow_the_trained_length(settings: dict[str, Any], sizes: tuple[int, int]) -> None:
    assert ctxext.DCA(**settings).sizes(TINY) == sizes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_size": 65}, r"chunk_size 65 is beyond the 64 positions"),
        ({"chunk_size": 129, "frequencies": ctxext.PI(factor=2)}, r"chunk_size 129 is beyond the 128 positions"),
        ({"chunk_size": 40, "original_max_position_embeddings": 32}, r"chunk_size 40 is beyond the 32 positions"),
        ({"local_size": 33}, r"local_size 33 must be at most half of chunk_size 64"),
    ],
    ids=str,
)
def test_sizes_of_dca_that_do_not_fit_the_model_are_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ctxext.ConfigError, match=message):
        ctxext.DCA(**settings).partition(TINY)


def test_a_method_inside_dca_keeps_its_own_settings() -> None:
    inner = ctxext.YaRN(factor=2, truncate=False)
    inv_freq, attention = ctxext.DCA(frequencies=inner).scaled_rope(TINY)
    assert torch.equal(inv_freq, frequencies(inner))
    assert attention == attention_factor(inner)


def test_a_method_inside_dca_may_be_a_mapping_and_comes_back_as_one() -> None:
    method = ctxext.DCA(frequencies={"name": "yarn", "factor": "2"})
    assert method.frequencies == ctxext.YaRN(factor=2)
    assert ctxext.DCA(**method.model_dump(mode="json", exclude_none=True)) == method


def test_temperature_follows_the_position_of_the_query() -> None:
    _, gain = ctxext.DCA(temperature=0.5).partition(TINY).frequencies_at(torch.tensor([0, 62, 63, 64, 639]))
    expected = [1, 1, 1, 0.5 * math.log(65 / 64) + 1, 0.5 * math.log(10) + 1]
    torch.testing.assert_close(gain, torch.tensor(expected), rtol=1e-7, atol=0)


def relative(method: ctxext.Method, query: int, spec: RopeSpec = TINY) -> list[float | None]:
    """Relative positions of all keys up to the query, None where it doesn't attend to them."""
    partition, where = method.partition(spec), torch.arange(query + 1)
    row = partition.relative_positions(where[-1:], where)[0].tolist()
    return [p if seen else None for p, seen in zip(row, partition.attended(where[-1:], where)[0].tolist(), strict=True)]


def test_self_extend_counts_far_tokens_in_groups_as_in_the_papers_example() -> None:
    # A text of ten tokens for a model of seven, neighbour window 4, groups of two.
    spec = RopeSpec(10_000.0, 16, 7)
    method = ctxext.SelfExtend(neighbor_window=4, group_size=2, max_position_embeddings=10)
    assert relative(method, 9, spec) == [6, 6, 5, 5, 4, 4, 3, 2, 1, 0]
    assert relative(method, 8, spec) == [6, 6, 5, 5, 4, 3, 2, 1, 0]
    # Three doesn't divide the window: the shift is floored, in whatever way the text is read.
    method = ctxext.SelfExtend(neighbor_window=4, group_size=3, max_position_embeddings=10)
    assert relative(method, 9, spec) == [6, 6, 6, 5, 5, 5, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (16, 6)),
        ({"factor": 16}, (16, 22)),
        ({"neighbor_window": 40}, (40, 10)),
        ({"group_size": 9}, (16, 9)),
        ({"frequencies": ctxext.PI(factor=2)}, (16, 3)),
        ({"max_position_embeddings": 64}, (16, 1)),
    ],
    ids=str,
)
def test_groups_of_self_extend_are_as_small_as_the_target_allows(
    settings: dict[str, Any], sizes: tuple[int, int]
) -> None:
    assert ctxext.SelfExtend(**settings).sizes(TINY) == sizes


@settings(max_examples=200, deadline=None)
@given(st.integers(8, 80), st.integers(1, 60), st.integers(8, 1000))
def test_self_extend_keeps_the_target_within_what_the_model_reads(trained: int, window: int, target: int) -> None:
    spec = RopeSpec(10_000.0, 16, trained)
    method = ctxext.SelfExtend(neighbor_window=min(window, trained), max_position_embeddings=max(target, trained))
    try:
        _, group = method.sizes(spec)
    except ctxext.ConfigError:
        assert window > trained - 3
        return
    length = max(target, trained)
    assert max(relative(method, length - 1, spec)) < trained
    if group > 1:
        smaller = method.model_copy(update={"group_size": group - 1})
        with pytest.raises(ctxext.ConfigError, match=f"a text of {length} tokens needs"):
            smaller.sizes(spec)


def test_rerope_holds_distances_at_the_window_or_lets_them_leak() -> None:
    assert relative(ctxext.ReRoPE(window=3), 7) == [3, 3, 3, 3, 3, 2, 1, 0]
    assert relative(ctxext.ReRoPE(window=3, leak=8), 7) == [3.5, 3.375, 3.25, 3.125, 3, 2, 1, 0]


def test_lm_infinite_and_streaming_llm_see_both_ends() -> None:
    no = None
    method = ctxext.LMInfinite(n_global=2, n_local=3, distance_limit=3)
    assert relative(method, 7) == [3, 3, no, no, no, 2, 1, 0]
    assert relative(ctxext.LMInfinite(n_global=2, n_local=3, distance_limit=6), 7) == [6, 6, no, no, no, 2, 1, 0]
    assert relative(ctxext.LMInfinite(n_global=2, n_local=3, distance_limit=6), 5) == [5, 4, no, 2, 1, 0]
    assert relative(ctxext.LMInfinite(n_global=1, n_local=5, distance_limit=2), 7) == [2, no, no, 2, 2, 2, 1, 0]
    # Counted inside the cache: two sinks and three tokens are positions 0 to 4, whatever was between.
    assert relative(ctxext.StreamingLLM(n_sink=2, window=3), 7) == [4, 3, no, no, no, 2, 1, 0]
    assert relative(ctxext.StreamingLLM(n_sink=2, window=3), 3) == [3, 2, 1, 0]
    assert ctxext.LMInfinite().sizes(TINY) == (64, 64)
    assert ctxext.StreamingLLM().size(TINY) == 60


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ctxext.SelfExtend(neighbor_window=65), r"neighbor_window 65 is beyond the 64 positions"),
        (ctxext.SelfExtend(neighbor_window=62), r"neighbor_window 62 leaves no room"),
        (ctxext.SelfExtend(group_size=5), r"group_size 5 .* 256 tokens needs 65 positions, and the model reads 64"),
        (ctxext.ReRoPE(window=64), r"window 64 must be below the 64 positions"),
        (ctxext.ReRoPE(leak=4), r"leak 4 .* up to 76, and the model reads 64; give a leak of 5.09 or more"),
        (ctxext.LMInfinite(distance_limit=65), r"distance_limit 65 is beyond the 64 positions"),
        (ctxext.StreamingLLM(window=61), r"n_sink 4 and window 61 are together beyond the 64 positions"),
    ],
    ids=repr,
)
def test_bands_that_do_not_fit_the_model_are_an_error(method: ctxext.Method, message: str) -> None:
    with pytest.raises(ctxext.ConfigError, match=message):
        method.partition(TINY)


@pytest.mark.parametrize("method", [ctxext.PI(factor=4, log_n=True), ctxext.ReRoPE(log_n=True)], ids=repr)
def test_log_n_sharpens_beyond_the_trained_length(method: ctxext.Method) -> None:
    _, gain = method.partition(TINY).frequencies_at(torch.tensor([0, 63, 64, 4095]))
    torch.testing.assert_close(gain, torch.tensor([1, 1, math.log(65) / math.log(64), 2]), rtol=1e-6, atol=0)


def test_a_method_that_leaves_log_n_out_is_refused() -> None:
    class Deaf(Doubling):
        def partition(self, spec: RopeSpec) -> None:
            return None

    with pytest.raises(ctxext.ConfigError, match="log_n is not supported"):
        ctxext.patch(tiny.model(), Deaf(factor=2, log_n=True))


# What the test below starts from where a field means nothing by itself, and values other than the defaults.
_BASE: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_theta": 1e6},
    "longrope": {"long_factor": [2] * 8},
    "yarn.mscale": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn.mscale_all_dim": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "ntk_by_parts.alpha": {"beta": 8},
    "*.max_position_embeddings": {"factor": None, "original_max_position_embeddings": 32},
    "dynamic_ntk.max_position_embeddings": {"factor": 4},
    "dynamic_yarn.max_position_embeddings": {"factor": 4},
}
_OTHER: dict[str, Any] = {
    "factor": 3,
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 320,
    "alpha": 2,
    "beta": 6,
    "beta_fast": 3,
    "beta_slow": 0.25,
    "attention_factor": 1.5,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
    "truncate": False,
    "ramp": "rotations",
    "rope_theta": 5e5,
    "low_freq_factor": 2,
    "high_freq_factor": 8,
    "long_factor": [3] * 8,
    "step": 16,
    "seq_len": 128,
    "chunk_size": 24,
    "local_size": 8,
    "frequencies": {"name": "ntk", "factor": 2},
    "temperature": 0.3,
    "log_n": True,
    "neighbor_window": 24,
    "group_size": 11,
    "window": 24,
    "leak": 8.0,
    "n_global": 7,
    "n_local": 24,
    "distance_limit": 24,
    "n_sink": 9,
    "amplification": 2,
    "solver_steps": 4,
}


def scores(method: ctxext.Method) -> list[list[float]]:
    """Relative position, frequencies and factor of every score where a method changes attention."""
    partition, positions = method.partition(TINY), torch.arange(200)
    if partition is None:
        return []
    inv_freq, gain = partition.frequencies_at(positions)
    relative = partition.relative_positions(positions, positions).double()
    relative[~partition.attended(positions, positions)] = -1
    return torch.cat((relative, inv_freq.double(), gain[:, None].double()), dim=1).tolist()


def effect(method: ctxext.Method) -> tuple[list[float], float, int, list[list[float]]]:
    inv_freq, attention = method.scaled_rope(TINY)
    learned = method.learned_rope(TINY)
    if learned is not None:
        # Anything but the start, where the learned part does nothing.
        for parameter in learned.parameters():
            parameter.data.add_(0.02)
        inv_freq = learned(method.lengths(TINY).factor)
    return inv_freq.tolist(), attention, method.lengths(TINY).target, scores(method)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (name, key)
        for name, cls in ctxext.METHODS.items()
        for key in cls.model_fields
        if key not in ("name", "attention") and not (key == "log_n" and cls.no_log_n)
    ],
)
def test_every_field_has_an_effect(name: str, key: str) -> None:
    base: dict[str, Any] = {"name": name, "factor": 4}
    for scope in (f"*.{key}", name, f"{name}.{key}"):
        base |= _BASE.get(scope, {})
    if key == "max_position_embeddings":
        base |= {key: 128}
    cls = ctxext.METHODS[name]
    assert effect(cls(**{**base, key: _OTHER[key]})) != effect(cls(**base))


@pytest.mark.parametrize("name", ATTENTION)
def test_naive_attention_has_the_weights_that_fused_attention_never_holds(name: str) -> None:
    fused, naive, ids = tiny.model(), tiny.model(), tiny.tokens(101)
    ctxext.patch(fused, ctxext.METHODS[name]())
    ctxext.patch(naive, ctxext.METHODS[name](attention="naive"))
    with torch.no_grad():
        weights = naive(ids, output_attentions=True).attentions
        with pytest.raises(ctxext.UnsupportedModelError, match=f"method {name} never holds attention weights"):
            fused(ids, output_attentions=True)
    # Four heads; rows of a softmax sum to one.
    assert [layer.shape for layer in weights] == 2 * [(1, 4, 101, 101)]
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(1, 4, 101))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ctxext.DCA(), ctxext.DCA(factor=8)),
        (ctxext.DCA(), ctxext.DCA(max_position_embeddings=640)),
        (ctxext.SelfExtend(group_size=16), ctxext.SelfExtend(group_size=16, factor=8)),
        (ctxext.ReRoPE(leak=20), ctxext.ReRoPE(leak=20, factor=8)),
        (ctxext.LMInfinite(), ctxext.LMInfinite(factor=8)),
        (ctxext.StreamingLLM(), ctxext.StreamingLLM(factor=8)),
        (ctxext.DynamicNTK(), ctxext.DynamicNTK(max_position_embeddings=640)),
        (ctxext.DynamicYaRN(), ctxext.DynamicYaRN(max_position_embeddings=640)),
    ],
    ids=repr,
)
def test_how_far_the_tools_read_changes_no_score(first: ctxext.Method, second: ctxext.Method) -> None:
    assert first.lengths(TINY) != second.lengths(TINY)
    assert scores(first) == scores(second)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, -math.inf, True, "abc", [4], {}], ids=repr)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        (name, key)
        for name, cls in ctxext.METHODS.items()
        for key in cls.model_fields
        if key not in ("name", "truncate", "ramp", "long_factor", "temperature", "log_n")
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(name: str, key: str, value: Any) -> None:
    base = {"name": name, "factor": 4, **_BASE.get(name, {}), **_BASE.get(f"{name}.{key}", {})}
    with pytest.raises(ValueError, match=key):
        ctxext.METHODS[name](**{**base, key: value})


@pytest.mark.parametrize("value", [-1, -0.001, math.nan, math.inf, True, "abc", [4], {}], ids=repr)
def test_a_temperature_that_makes_no_sense_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="temperature"):
        ctxext.DCA(temperature=value)


@pytest.mark.parametrize("factor", [0.5, 0.999, "0.25"])
def test_a_factor_below_one_is_refused(factor: Any) -> None:
    with pytest.raises(ValueError, match=r"factor\n.*greater than or equal to 1"):
        ctxext.PI(factor=factor)


@pytest.mark.parametrize("value", [64.5, "64.5", 1])
def test_a_length_that_is_no_whole_number_of_tokens_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="max_position_embeddings"):
        ctxext.PI(max_position_embeddings=value)


@pytest.mark.parametrize(
    "given", [{"factor": "4.0"}, {"factor": "4"}, {"factor": 4}, {"factor": "4e0"}, {"max_position_embeddings": "256"}]
)
def test_numbers_may_come_as_text(given: dict[str, Any]) -> None:
    assert ctxext.YaRN(**given).lengths(TINY) == (64, 4.0, 256)


def test_a_base_may_come_as_yamls_unquoted_1e6() -> None:
    assert ctxext.RopeTheta(rope_theta="1e6").rope_theta == 1_000_000.0


@pytest.mark.parametrize("key", ["facter", "scale", "attn_factor", "rope_type", "type", "seq_len"])
def test_unknown_settings_are_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ctxext.YaRN(**{"factor": 4, key: 1})


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (ctxext.YaRN, {"beta_fast": 1, "beta_slow": 32}, r"beta_fast 1 must be above beta_slow 32"),
        (ctxext.YaRN, {"beta_fast": 2, "beta_slow": 2}, r"beta_fast 2 must be above"),
        (ctxext.YaRN, {"beta_slow": 40}, r"must be above beta_slow 40"),
        (ctxext.YaRN, {"mscale": 1}, r"mscale and mscale_all_dim act only together"),
        (ctxext.YaRN, {"mscale_all_dim": 1}, r"mscale and mscale_all_dim act only together"),
        (ctxext.YaRN, {"mscale": 1, "mscale_all_dim": 1, "attention_factor": 1}, r"attention_factor is final"),
        (ctxext.YaRN, {"ramp": "rotations", "truncate": False}, r"truncate acts only on"),
        (ctxext.YaRN, {"ramp": "linear"}, r"ramp"),
        (ctxext.NTKByParts, {"alpha": 32, "beta": 1}, r"alpha 32 must be below beta 1"),
        (ctxext.NTKByParts, {"alpha": 2, "beta": 2}, r"alpha 2 must be below beta 2"),
        (ctxext.Llama3, {"low_freq_factor": 4, "high_freq_factor": 1}, r"low_freq_factor 4 must be below"),
        (ctxext.Llama3, {"low_freq_factor": 4}, r"low_freq_factor 4 must be below"),
        (ctxext.LongRoPE, {"long_factor": []}, r"long_factor"),
        (ctxext.LongRoPE, {"long_factor": [1, math.nan]}, r"long_factor"),
        (ctxext.LongRoPE, {"long_factor": [1, True]}, r"long_factor"),
        (ctxext.LongRoPE, {"long_factor": [1, 0]}, r"long_factor"),
        (ctxext.LongRoPE, {"long_factor": [1, -2]}, r"long_factor"),
        (ctxext.LongRoPE, {"long_factor": 4}, r"long_factor"),
        (ctxext.LongRoPE, {}, r"long_factor"),
        (ctxext.DCA, {"chunk_size": 8, "local_size": 5}, r"local_size 5 must be at most half of chunk_size 8"),
        (ctxext.DCA, {"chunk_size": 8, "local_size": 24}, r"must be at most half of chunk_size 8 \(swapped\?\)"),
        (ctxext.DCA, {"chunk_size": 1}, r"chunk_size"),
        (ctxext.DCA, {"frequencies": ctxext.DynamicNTK()}, r"frequencies: dynamic_ntk changes attention itself"),
        (ctxext.DCA, {"frequencies": {"name": "dynamic_yarn"}}, r"frequencies: dynamic_yarn changes attention itself"),
        (ctxext.DCA, {"frequencies": ctxext.DCA()}, r"frequencies: dca changes attention itself"),
        (ctxext.DCA, {"frequencies": "yarn"}, r"frequencies"),
        (ctxext.DCA, {"frequencies": {"name": "yarn", "facter": 2}}, r"facter.*value 2.*did you mean factor\?"),
        (ctxext.DCA, {"attention": "flash"}, r"attention\n.*'flash'"),
        (ctxext.ReRoPE, {"frequencies": ctxext.CLEX(factor=2)}, r"rerope: frequencies: clex learns its frequencies"),
        (ctxext.CLEX, {"log_n": True}, r"clex: log_n is not supported: its attention would not see"),
        (ctxext.LMInfinite, {"log_n": True}, r"lm_infinite: log_n is not supported: it sees the same number of tokens"),
        (ctxext.StreamingLLM, {"log_n": True}, r"streaming_llm: log_n is not supported: it sees the same number"),
        (ctxext.DynamicYaRN, {"beta_fast": 1, "beta_slow": 32}, r"beta_fast 1 must be above beta_slow 32"),
        (ctxext.RopeTheta, {}, r"rope_theta"),
        (ctxext.RopeTheta, {"rope_theta": 1}, r"rope_theta"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    cls: type[ctxext.Method], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cls(factor=4, **settings)


def test_longrope_wants_one_factor_for_each_frequency() -> None:
    with pytest.raises(ctxext.ConfigError, match=r"long_factor has 7 numbers, but the model has 8"):
        frequencies(ctxext.LongRoPE(factor=4, long_factor=[1] * 7))


def test_yarn_refuses_a_head_and_length_without_a_ramp() -> None:
    with pytest.raises(ctxext.ConfigError, match=r"no ramp between beta_fast 32 and beta_slow 1.*trained length 4"):
        frequencies(ctxext.YaRN(factor=4), RopeSpec(10_000.0, 64, 4))


def test_yarn_steps_where_the_ramp_has_no_width() -> None:
    # Both ends fall below dimension 0 and are clamped to it, as in Transformers.
    spec = RopeSpec(10_000.0, 64, 6)
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6}
    expected, _ = of_transformers(parameters, spec, 24)
    torch.testing.assert_close(frequencies(ctxext.YaRN(factor=4), spec), expected, **CLOSE)


@pytest.mark.parametrize("name", tiny.METHODS)
def test_methods_are_values(name: str) -> None:
    method = tiny.METHODS[name]
    assert hash(method) == hash(type(method)(**method.model_dump()))
    assert method == type(method).model_validate(method.model_dump(mode="json", exclude_none=True))
    with pytest.raises(ValueError, match="frozen"):
        method.factor = 8.0


@pytest.mark.parametrize(("name", "cls"), ctxext.METHODS.items())
def test_methods_say_what_they_are(name: str, cls: type[ctxext.Method]) -> None:
    assert name in tiny.METHODS, "add one setting of the method to tests/tiny.py"
    assert cls.model_fields["name"].default == name
    assert cls.title
    assert re.match(r"https://(arxiv.org/abs|kexue.fm/archives)/\d", cls.reference)
    assert cls.reference in (cls.__doc__ or "")
    assert all(field.description for key, field in cls.model_fields.items() if key != "name")


@pytest.mark.parametrize("name", tiny.METHODS)
def test_frequencies_are_fp32_on_the_cpu(name: str) -> None:
    inv_freq, attention = tiny.METHODS[name].scaled_rope(TINY)
    assert inv_freq.dtype == torch.float32
    assert inv_freq.shape == (8,)
    assert inv_freq.device.type == "cpu"
    assert isinstance(attention, float)


@pytest.mark.parametrize("name", tiny.METHODS)
def test_frequencies_do_not_depend_on_the_default_dtype(name: str) -> None:
    expected = frequencies(tiny.METHODS[name])
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(frequencies(tiny.METHODS[name]), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", tiny.METHODS)
def test_frequencies_do_not_depend_on_the_default_device(name: str) -> None:
    expected = frequencies(tiny.METHODS[name])
    # Stands for any device other than the CPU, such as torch.set_default_device("cuda").
    with torch.device("meta"):
        inv_freq = frequencies(tiny.METHODS[name])
    assert inv_freq.device.type == "cpu"
    assert torch.equal(inv_freq, expected)


class Doubling(ctxext.Method):
    """A method of a user, who writes scaled_rope() and nothing else."""

    title: ClassVar[str] = "Doubling"
    reference: ClassVar[str] = "none"
    name: Literal["doubling"] = "doubling"

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        return default_inv_freq(spec.rope_theta, spec.rotary_dim) / (1 + torch.arange(spec.rotary_dim // 2)), 1.1


def test_a_method_of_a_user_is_exported_without_further_code() -> None:
    method = Doubling(factor=2)
    expected, attention = of_transformers(method.rope_parameters(TINY), TINY, 128)
    torch.testing.assert_close(frequencies(method), expected, rtol=1e-6, atol=0)
    assert attention == 1.1
