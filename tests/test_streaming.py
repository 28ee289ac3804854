"""The cache that forgets: the logits of any other cache, in bounded memory."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import attending
import ctxext
import tiny
from attending import CACHED, alone, assert_rows_as_if_alone, cache_name, greedy, padded, patched, pieces, step
from ctxext.attention import streaming

pytestmark = attending.MARKS

FORGETFUL = ("streaming", "lm_infinite", "lm_infinite_capped", "lm_infinite_global")


@pytest.fixture(autouse=True)
def _evicts_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SLACK", 5)


def held(cache: Any) -> int:
    return max(layer.keys.shape[2] for layer in cache.layers)


@pytest.mark.parametrize("setting", FORGETFUL)
@pytest.mark.parametrize("size", [1, 3, 11, 60])
def test_logits_are_those_of_a_text_read_whole(setting: str, size: int) -> None:
    model, ids = patched(setting), tiny.tokens(180, 2)
    cache = ctxext.StreamingCache(model)
    logits = pieces(model, ids, [*range(size, 180, size), 180], cache=cache)
    for i in range(2):
        assert tiny.difference(logits[i], alone(setting, "llama", ids[i])) < CACHED
    assert cache.get_seq_length() == 180
    assert held(cache) <= cache.first + cache.last - 1 + 5 + size


@pytest.mark.parametrize("setting", ["streaming", "lm_infinite"])
@pytest.mark.parametrize("size", [1, 7, 50])
def test_padded_rows_keep_their_own_first_tokens(setting: str, size: int) -> None:
    model, (ids, mask) = patched(setting, "qwen3"), padded((140, 11, 90, 64, 139))
    mask[3, 100:110] = 0  # and padding in the middle
    ids[3, 100:110] = 0
    cache = ctxext.StreamingCache(model)
    logits = pieces(model, ids, [*range(size, 140, size), 140], mask, cache=cache)
    assert_rows_as_if_alone(logits, setting, "qwen3", ids, mask)
    assert held(cache) <= cache.first + cache.last - 1 + 5 + size


def test_generate_goes_on_and_takes_a_second_turn() -> None:
    model, ids = patched("streaming"), tiny.tokens(70, 2)
    first, expected = (
        greedy(model, ids, 40, **{cache_name(model): cache})
        for cache in (ctxext.StreamingCache(model), DynamicCache(config=model.config))
    )
    assert torch.equal(first.sequences, expected.sequences)
    cache = getattr(first, "cache", None) or first.past_key_values
    assert held(cache) < 40
    both = torch.cat((first.sequences, tiny.tokens(33, 2, seed=4)), dim=1)
    second = greedy(model, both, 20, **{cache_name(model): cache})
    assert torch.equal(second.sequences, greedy(model, both, 20).sequences)


def test_beam_search_is_that_of_another_cache() -> None:
    model, (ids, mask) = patched("streaming"), padded((80, 70))
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    found = model.generate(ids, **options, **{cache_name(model): ctxext.StreamingCache(model)})
    assert torch.equal(found, model.generate(ids, **options))


def test_a_copy_and_a_reset_cache_start_where_they_say() -> None:
    model, ids = patched("streaming"), tiny.tokens(90)
    cache = ctxext.StreamingCache(model)
    pieces(model, ids[:, :80], (70, 80), cache=cache)
    twin = copy.deepcopy(cache)
    expected = alone("streaming", "llama", ids[0])[80:]
    for which in (twin, cache):
        assert tiny.difference(pieces(model, ids[:, 80:], (5, 10), cache=which)[0], expected) < CACHED
    cache.reset()
    assert tiny.difference(pieces(model, ids, (70, 90), cache=cache)[0, 80:], expected) < CACHED


def test_the_same_memory_is_used_again() -> None:
    model, ids = patched("lm_infinite"), tiny.tokens(300)
    cache = ctxext.StreamingCache(model)
    pieces(model, ids[:, :120], [*range(6, 120, 6), 120], cache=cache)
    before = [layer.keys.data_ptr() for layer in cache.layers]
    assert len(set(before)) == len(before)
    rest = [*range(6, 180, 6), 180]
    logits = pieces(model, ids[:, 120:], rest, cache=cache)
    assert [layer.keys.data_ptr() for layer in cache.layers] == before
    assert cache.layers[0].keys.untyped_storage().nbytes() <= 2 * cache.layers[0].keys.nbytes
    assert tiny.difference(logits[0], alone("lm_infinite", "llama", ids[0])[120:]) < CACHED


def test_a_long_first_piece_leaves_no_more_memory_taken_than_short_ones() -> None:
    model, ids = patched("streaming"), tiny.tokens(700)
    cache = ctxext.StreamingCache(model)
    logits = pieces(model, ids, [600, *range(601, 701)], cache=cache)
    assert cache.layers[0].keys.untyped_storage().nbytes() <= 2 * cache.layers[0].keys.nbytes
    assert tiny.difference(logits[0], alone("streaming", "llama", ids[0])) < CACHED


def test_pieces_may_be_read_with_and_without_gradients() -> None:
    model, ids = patched("streaming"), tiny.tokens(200)
    cache, found = ctxext.StreamingCache(model), []
    modes = (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode)
    for start, mode in zip(range(0, 200, 8), itertools.cycle(modes), strict=False):
        with mode():
            found.append(step(model, ids[:, start : start + 8], cache).detach().clone())
    assert tiny.difference(torch.cat(found, dim=1)[0], alone("streaming", "llama", ids[0])) < CACHED


def test_gradients_flow_through_the_cache() -> None:
    ids, found = tiny.tokens(60), []
    for sizes in ((60,), (25, 5, 5, 25)):
        model = patched("streaming")
        cache = ctxext.StreamingCache(model)
        logits = torch.cat([step(model, piece, cache) for piece in ids.split(sizes, dim=1)], dim=1)
        logits[:, -20:].logsumexp(-1).mean().backward()
        found.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert tiny.difference(*found) < 1e-4 * found[0].abs().max()


def test_rows_may_change_places_at_any_time() -> None:
    model, ids = patched("streaming"), tiny.tokens(150, 2)
    cache, order, found = ctxext.StreamingCache(model), torch.tensor([0, 1]), []
    for start in range(0, 150, 3):
        with torch.no_grad():
            found.append(step(model, ids[order, start : start + 3], cache)[order])
        order = order.flip(0)
        cache.batch_select_indices(torch.tensor([1, 0]))
    for i in range(2):
        assert tiny.difference(torch.cat(found, dim=1)[i], alone("streaming", "llama", ids[i])) < CACHED


def test_cropping_is_possible_until_something_was_evicted() -> None:
    model, ids, other = patched("streaming"), tiny.tokens(60), tiny.tokens(12, seed=3)
    cache = ctxext.StreamingCache(model)
    pieces(model, ids[:, :20], (20,), cache=cache)
    cache.crop(-7)
    logits = pieces(model, other, (12,), cache=cache)
    expected = alone("streaming", "llama", torch.cat((ids[:, :13], other), dim=1)[0])
    assert tiny.difference(logits[0], expected[13:]) < CACHED
    pieces(model, ids, (30, 60), cache=cache)
    with pytest.raises(ctxext.UnsupportedModelError, match="has evicted tokens can't be cropped"):
        cache.crop(-1)


def test_a_cache_of_another_method_or_of_none_is_refused() -> None:
    model, ids = patched("streaming"), tiny.tokens(90)
    cache = ctxext.StreamingCache(model)
    pieces(model, ids[:, :80], (80,), cache=cache)
    ctxext.patch(model, ctxext.StreamingLLM(n_sink=3, window=30), replace=True)
    with pytest.raises(ctxext.UnsupportedModelError, match="keeps the first 3 and the last 20 tokens"):
        step(model, ids[:, 80:81], cache)
    ctxext.unpatch(model)
    with pytest.raises(ctxext.PatchError, match="isn't patched"), torch.no_grad():
        step(model, ids[:, 80:81], cache)
    with pytest.raises(ctxext.PatchError, match="needs a model that is patched"):
        ctxext.StreamingCache(model)
    for method in (ctxext.DCA(), ctxext.ReRoPE(), ctxext.YaRN(factor=2)):
        with ctxext.patch(model, method), pytest.raises(ctxext.UnsupportedModelError, match="nothing to evict"):
            ctxext.StreamingCache(model)


def test_the_rotary_module_may_begin_again_within_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxext.methods.remapped.PERIOD", 40)
    model, reference = patched("streaming"), patched("streaming", attention="naive")
    assert model.model.rotary_emb.period == 40
    ids = tiny.tokens(400)
    logits = pieces(model, ids, [*range(13, 400, 13), 400], cache=ctxext.StreamingCache(model))
    assert tiny.difference(logits, tiny.logits(reference, ids, use_cache=False)) < CACHED


@pytest.mark.parametrize("setting", ["streaming", "self_extend", "rerope"])
def test_ten_million_tokens_on_angles_are_as_exact_as_at_the_start(setting: str) -> None:
    # In stock rotary embeddings an angle is off by half a radian there.
    model, ids = patched(setting), tiny.tokens(60)
    near, far = (
        tiny.logits(model, ids, use_cache=False, position_ids=torch.arange(60)[None] + start)
        for start in (2**15 + 700, 301 * 2**15 + 700)
    )
    assert tiny.difference(near, far) < CACHED


@pytest.mark.slow
def test_two_hundred_thousand_tokens_take_no_more_memory_than_twenty_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SLACK", 256)
    model, ids = tiny.model(), tiny.tokens(200_000)
    ctxext.patch(model, ctxext.StreamingLLM(window=60))
    cache = ctxext.StreamingCache(model)
    peaks = []
    with torch.no_grad():
        for start in range(0, 200_000, 100):
            size = 1 if start % 10_000 == 0 else 100
            for first in range(start, start + 100, size):
                logits = step(model, ids[:, first : first + size], cache)
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            peaks.append(max([resident, *peaks[-1:]]))
    assert held(cache) <= 63 + 256 + 100
    assert peaks[-1] < 1.01 * peaks[199]
    # Two layers see the last 120 tokens and the first four.
    ends = torch.cat((ids[:, :4], ids[:, -300:]), dim=1)
    positions = torch.cat((torch.arange(4), torch.arange(199_700, 200_000)))[None]
    expected = tiny.logits(model, ends, position_ids=positions, use_cache=False)
    assert tiny.difference(logits[0, -1], expected[0, -1]) < CACHED
