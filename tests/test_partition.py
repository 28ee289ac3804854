"""Relative positions and the blocks that attention is cut into."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attending
import ctxext
import tiny
from attending import SETTINGS, SPEC, L, borders, frequencies_of, patched, relative_of
from ctxext.attention.bands import Bands
from ctxext.attention.partition import moved
from ctxext.rope import RopeSpec

pytestmark = attending.MARKS


def shown(chunk_size: int, local_size: int, queries: Sequence[int], keys: Sequence[int]) -> list[list[int]]:
    partition = ctxext.DCA(chunk_size=chunk_size, local_size=local_size).partition(RopeSpec(1e4, 16, 4096))
    return partition.relative_positions(torch.tensor(queries), torch.tensor(keys)).tolist()


def test_queries_of_a_chunk_are_turned_as_in_the_papers_example() -> None:
    assert shown(10, 4, range(6, 12), [0]) == [[6], [7], [8], [9], [9], [9]]
    assert shown(10, 4, range(12, 18), [0]) == [[9]] * 6
    assert shown(10, 4, range(600, 606), [0]) == [[9]] * 6


def test_rows_of_relative_positions_are_those_written_by_hand() -> None:
    assert shown(12, 4, [20], range(21)) == [
        [11, 10, 9, 8, 7, 6, 5, 4, 11, 10, 9, 8, 7, 6, 5, 4, 4, 3, 2, 1, 0]
    ]  # fmt: skip
    assert shown(12, 4, [18], range(19)) == [[11, 10, 9, 8, 7, 6, 5, 4, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]


sizes = st.integers(2, 40).flatmap(lambda c: st.tuples(st.just(c), st.integers(1, c // 2)))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 300))
def test_relative_positions_of_dca_are_bounded_and_exact_nearby(sizes: tuple[int, int], query: int) -> None:
    chunk_size, local_size = sizes
    method = ctxext.DCA(chunk_size=chunk_size, local_size=local_size)
    row = shown(chunk_size, local_size, [query], range(query + 1))[0]
    assert row == [relative_of(method, query, j) for j in range(query + 1)]
    for distance, relative in enumerate(reversed(row)):
        assert 0 <= relative <= min(distance, chunk_size - 1)
        assert distance > local_size or relative == distance


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name.startswith("dca") and name != "dca_yarn"])
def test_a_text_of_one_chunk_is_read_as_by_the_plain_model(setting: str) -> None:
    plain, model = tiny.model(), patched(setting)
    stride = borders(setting, 1000)[0]
    for length in {1, max(1, stride - 1), stride}:
        ids = tiny.tokens(length)
        assert tiny.difference(tiny.logits(model, ids), tiny.logits(plain, ids)) < 1e-5
    ids = tiny.tokens(L + 40)
    assert tiny.difference(tiny.logits(model, ids), tiny.logits(plain, ids)) > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("setting", ["ntk", "ntk_step_1", "yarn", "yarn_default"])
def test_dynamic_methods_read_the_trained_length_as_the_plain_model_does(setting: str, family: str) -> None:
    plain, model, ids = tiny.model(family), patched(setting, family), tiny.tokens(L + 40)
    for length in (1, L - 1, L):
        assert tiny.difference(tiny.logits(model, ids[:, :length]), tiny.logits(plain, ids[:, :length])) < 5e-5
    longer, plainly = tiny.logits(model, ids), tiny.logits(plain, ids)
    assert tiny.difference(longer[:, :L], plainly[:, :L]) < 5e-5
    assert tiny.difference(longer[:, L:], plainly[:, L:]) > 1e-2


@st.composite
def columns(draw: Any) -> tuple[list[int], int]:
    gaps = draw(st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=50))
    positions = list(itertools.accumulate(gaps))
    shift = draw(st.sampled_from([1, 0, 5, 60]))
    return [position - gaps[0] + shift for position in positions], draw(st.integers(0, len(gaps) - 1))


methods = st.one_of(
    sizes.map(lambda s: ctxext.DCA(chunk_size=s[0], local_size=s[1], temperature=0.5)),
    st.integers(1, 30).map(lambda n: ctxext.DynamicNTK(step=n)),
    st.integers(1, 30).map(lambda n: ctxext.DynamicYaRN(step=n, factor=1)),
    st.integers(1, 50).map(lambda w: ctxext.SelfExtend(neighbor_window=w, group_size=60, log_n=True)),
    st.integers(1, 50).map(lambda w: ctxext.ReRoPE(window=w)),
    st.integers(1, 50).map(lambda w: ctxext.ReRoPE(window=w, leak=24.5)),
    st.tuples(*[st.integers(1, 60)] * 3).map(
        lambda s: ctxext.LMInfinite(n_global=s[0], n_local=s[1], distance_limit=s[2])
    ),
    st.tuples(st.integers(1, 8), st.integers(1, 50)).map(lambda s: ctxext.StreamingLLM(n_sink=s[0], window=s[1])),
)


@settings(max_examples=300, deadline=None)
@given(methods, columns(), st.sampled_from([2**15, 120, 61]))
def test_blocks_cover_every_pair_once_at_its_relative_position(
    method: ctxext.Method, columns: tuple[list[int], int], period: int
) -> None:
    assert_blocks_cover_every_pair(method, *columns, period)


@pytest.mark.parametrize("period", [61, 64, 2**15])
@pytest.mark.parametrize("setting", [name for name, m in SETTINGS.items() if isinstance(m.partition(SPEC), Bands)])
def test_blocks_of_a_long_text_cross_the_rotary_modules_periods(setting: str, period: int) -> None:
    # Consecutive positions make long runs of queries; those that begin within a period have borders that cross it.
    if setting not in ("static_log", "streaming_default"):  # which reach further than these periods
        for first in (7, 66, 75):
            assert_blocks_cover_every_pair(SETTINGS[setting], list(range(150)), first, period)


def assert_blocks_cover_every_pair(method: ctxext.Method, positions: list[int], first: int, period: int) -> None:
    partition, where = method.partition(SPEC), torch.tensor(positions)
    if isinstance(partition, Bands):  # the rotary module begins again within the text
        partition = dataclasses.replace(partition, period=period)
    count = torch.zeros(len(positions), len(positions), dtype=torch.int64)
    end = first
    for block in partition.blocks(where, first):
        assert block.queries.start == end < block.queries.stop
        end, length = block.queries.stop, block.queries.stop - block.queries.start
        for region in block.regions:
            keys_at = (where % partition.period).double()
            if region.turned:
                keys_at = keys_at[: len(block.key_turn)] + block.key_turn
            for t in range(length):
                column, later = block.queries.start + t, length - 1 - t
                start = region.keys.start + (t if region.shape == "upper" else 0)
                stop = region.keys.stop - (later if region.shape == "lower" else 0)
                count[column, start:stop] += 1
                at = positions[column] % partition.period + (0 if region.turn is None else float(region.turn[t]))
                for s in range(start, stop):
                    relative = relative_of(method, positions[column], positions[s])
                    assert at - float(keys_at[s]) == pytest.approx(relative, abs=1e-9)
        for t, query in enumerate(where[block.queries]):
            frequencies, gain = frequencies_of(method, int(query))
            torch.testing.assert_close(block.inv_freq.tolist(), frequencies, rtol=1e-5, atol=0)  # fp32
            assert (1.0 if block.gain is None else float(block.gain[t])) == pytest.approx(gain, rel=1e-5)
    assert end == len(positions)
    expected = torch.tensor([[j <= i and relative_of(method, i, j) is not None for j in positions] for i in positions])
    expected[:first] = False
    assert torch.equal(count, expected.long())


def test_what_blocks_share_is_moved_to_a_device_once() -> None:
    positions = torch.arange(400)
    blocks = ctxext.SelfExtend(neighbor_window=19, group_size=6).partition(SPEC).blocks(positions, 0)
    there = moved(blocks, torch.device("meta"))
    assert len(blocks) > 10
    assert len({id(block.key_turn) for block in there if block.key_turn is not None}) == 1
    for block, other in zip(blocks, there, strict=True):
        assert (block.queries, block.step) == (other.queries, other.step)
        for region, placed in zip(block.regions, other.regions, strict=True):
            assert region._replace(turn=None) == placed._replace(turn=None)
            assert (region.turn is None) == (placed.turn is None)
            assert placed.turn is None or (placed.turn.is_meta and placed.turn.shape == region.turn.shape)
    assert moved(blocks, torch.device("cpu")) is blocks
