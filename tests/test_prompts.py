"""The parts of every prompt: its size, and the answer's tokens behind it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxext.evaluation.prompts import Prompt, common_prefix, most_units


@given(st.lists(st.integers(1, 30), min_size=400, max_size=400), st.integers(0, 40), st.integers(0, 400))
def test_the_most_units_are_found_whatever_each_costs(costs: list[int], bare: int, room: int) -> None:
    totals = [bare, *(bare + total for total in itertools.accumulate(costs))]
    fitting = [n for n, total in enumerate(totals) if total <= room]
    assert most_units(lambda n: totals[min(n, len(costs))] + max(0, n - len(costs)), room) == max(fitting, default=-1)


def test_the_search_asks_few_times_where_units_cost_the_same() -> None:
    asked = []

    def tokens(n: int) -> int:
        asked.append(n)
        return 50 + 7 * n

    assert most_units(tokens, 131_072) == (131_072 - 50) // 7
    assert len(asked) < 20


def test_a_prompt_is_known_by_its_tokens() -> None:
    prompt = Prompt("a", "task", 10, 0, [1, 23], ("x",), [4], 2, 8)
    assert prompt.sha256 == Prompt("b", "task", 10, 1, [1, 23], ("y",), [5], 2, 8).sha256
    assert prompt.sha256 != Prompt("a", "task", 10, 0, [12, 3], ("x",), [4], 2, 8).sha256


@pytest.mark.parametrize(("a", "b", "common"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1)])
def test_a_common_prefix_ends_where_either_does(a: list[int], b: list[int], common: int) -> None:
    assert common_prefix(a, b) == common


def test_ids_that_differ_by_sixteen_bits_are_other_prompts() -> None:
    narrow, wide = (Prompt("a", "task", 10, 0, [1, 23 + more], ("x",), [4], 2, 8) for more in (0, 2**16))
    assert narrow.sha256 != wide.sha256
