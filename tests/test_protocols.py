"""Which tokens a protocol scores, in closed form and against the arithmetic of the published scripts."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxext.config import PerplexitySection
from ctxext.errors import ConfigError
from ctxext.evaluation.protocols import (
    PROTOCOLS,
    default_stride,
    prefix_window,
    rolling_windows,
    sliding_windows,
    stream_windows,
    target_window,
)


def test_the_configuration_knows_every_protocol() -> None:
    assert set(get_args(PerplexitySection.model_fields["protocol"].annotation)) == set(PROTOCOLS)


@given(n=st.integers(0, 400), window=st.integers(2, 80), bos=st.booleans(), data=st.data())
def test_windows_score_every_token_once_with_enough_before_it(
    n: int, window: int, bos: bool, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window - 1))
    cut = list(sliding_windows(n, window, stride, bos=bos))
    targets = [t for w in cut for t in range(w.target_begin, w.end)]
    assert targets == list(range(0 if bos else 1, n))
    for k, w in enumerate(cut):
        assert 0 <= w.begin <= w.target_begin < w.end <= n
        assert w.end - w.begin == min(window - bos, n)  # full, also the last one, unless the document is short
        assert w.context >= (1 if k == 0 else window - stride)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(("n", "window", "stride"), [(1000, 100, 10), (1000, 100, 99), (101, 100, 7), (5000, 512, 256)])
def test_the_number_of_windows_is_the_closed_form(n: int, window: int, stride: int, bos: bool) -> None:
    assert len(list(sliding_windows(n, window, stride, bos=bos))) == math.ceil((n - (window - bos)) / stride) + 1


@pytest.mark.parametrize("n", [2, 50, 99])
def test_a_document_within_the_window_takes_one_window(n: int) -> None:
    assert list(sliding_windows(n, 100, 10, bos=True)) == [(0, n, 0, True)]


@pytest.mark.parametrize("stride", [0, 100, 101])
def test_windows_refuse_a_stride_that_would_leave_tokens_without_context(stride: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and 99"):
        list(sliding_windows(1000, 100, stride, bos=False))


def test_default_stride_is_256_up_to_8192_and_an_eighth_above() -> None:
    assert [default_stride(w) for w in (512, 8192, 16384, 131072)] == [256, 256, 2048, 16384]
    assert default_stride(64) == 63


@given(n=st.integers(2, 400), length=st.integers(2, 80), bos=st.booleans())
def test_a_prefix_is_as_long_as_it_says_and_scored_but_for_its_first_position(n: int, length: int, bos: bool) -> None:
    window = prefix_window(n, length, bos=bos)
    assert window.positions == min(length, n + bos)
    assert window.n_targets == window.positions - 1
    assert window.context == 1


@given(n=st.integers(1, 500), length=st.integers(2, 80), stride=st.integers(1, 100))
def test_the_windows_of_a_stream_are_those_of_longloras_script(n: int, length: int, stride: int) -> None:
    starts, begin = [], 0
    while begin < n - length:
        starts.append(begin)
        begin += stride
    expected = [(start, start + length, start + 1, False) for start in starts[: len(starts) - 1]]
    assert list(stream_windows(n, length, stride)) == expected


def harness_windows(tokens: list[int], start: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Context and continuation of every request of lm-evaluation-harness, from its documentation: disjoint
    continuations of ``length`` tokens, each after one token of context, the last after as many as fill the input."""
    requests = []
    for first in range(0, len(tokens), length):
        continuation = tokens[first : first + length]
        context = [start] if first == 0 else tokens[max(0, first - 1 - (length - len(continuation))) : first]
        requests.append((context, continuation))
    return requests


@given(n=st.integers(1, 300), length=st.integers(2, 70))
def test_rolling_windows_are_those_of_the_harness(n: int, length: int) -> None:
    tokens = list(range(1000, 1000 + n))
    found = [
        (
            [7] * window.started + tokens[window.begin : window.target_begin],
            tokens[window.target_begin : window.end],
        )
        for window in rolling_windows(n, length)
    ]
    assert found == harness_windows(tokens, 7, length)
    assert all(window.positions - 1 <= length for window in rolling_windows(n, length))


@given(
    n=st.integers(40, 400),
    lengths=st.lists(st.integers(20, 40), min_size=2, max_size=4, unique=True),
    targets=st.integers(1, 19),
    bos=st.booleans(),
)
def test_the_same_tokens_are_the_targets_at_every_length(n: int, lengths: list[int], targets: int, bos: bool) -> None:
    windows = [target_window(n, length, targets, bos=bos) for length in lengths]
    assert {(window.target_begin, window.end) for window in windows} == {(n - targets, n)}
    assert [window.positions for window in windows] == lengths
    assert all(window.begin >= 0 for window in windows)
