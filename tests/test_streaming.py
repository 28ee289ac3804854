"""The cache that forgets: the logits of any other cache, in bounded memory."""

from __future__ import annotations

import copy
import itertools
import pickle
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


def test_memory_is_taken_in_pieces_of_one_size_and_seldom() -> None:
    model, ids = patched("lm_infinite"), tiny.tokens(150)
    cache, sizes, places, logits = ctxext.StreamingCache(model), set(), [0], []
    for i in range(150):
        logits.append(pieces(model, ids[:, i : i + 1], (1,), cache=cache))
        keys = cache.layers[0].keys
        sizes.add(keys.untyped_storage().nbytes() // keys[:, :, 0].nbytes)
        places.append(keys.data_ptr())
    needed = cache.first + cache.last - 1
    assert sizes == {needed + 5 + 1}
    # Once at the start, and then whenever five tokens more than needed are held.
    assert sum(a != b for a, b in itertools.pairwise(places)) <= 1 + (150 - needed) // 6 + 1
    assert tiny.difference(torch.cat(logits, dim=1)[0], alone("lm_infinite", "llama", ids[0])) < CACHED


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


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_flow_through_the_cache(*, frozen: bool) -> None:
    ids, found = tiny.tokens(60), []
    for sizes in ((60,), (25, 5, 5, 25)):
        model = patched("streaming")
        if frozen:  # so that keys and values of the first layer need no gradient
            model.requires_grad_(False)
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
        cache = ctxext.StreamingCache(model)
        logits = torch.cat([step(model, piece, cache) for piece in ids.split(sizes, dim=1)], dim=1)
        logits[:, -20:].logsumexp(-1).mean().backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert tiny.difference(*found) < 1e-4 * found[0].abs().max()


def shallow(cache: Any) -> Any:
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


@pytest.mark.parametrize("copied", [copy.deepcopy, shallow, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_and_the_original_go_on_apart(copied: Any) -> None:
    model, ids, other = patched("streaming"), tiny.tokens(140), tiny.tokens(140, seed=5)
    caches, texts = [ctxext.StreamingCache(model)], [ids[:, :60], ids[:, :60]]
    pieces(model, ids[:, :60], [50, *range(51, 61)], cache=caches[0])
    caches.append(copied(caches[0]))
    for turn in range(60):
        for which in (0, 1) if turn % 3 else (1, 0, 0):
            more = (ids, other)[which][:, turn : turn + 1]
            texts[which] = torch.cat((texts[which], more), dim=1)
            logits = pieces(model, more, (1,), cache=caches[which])
            assert tiny.difference(logits[0, 0], alone("streaming", "llama", texts[which][0])[-1]) < CACHED


def test_a_shallow_copy_is_the_same_cache() -> None:
    model, ids = patched("streaming"), tiny.tokens(90)
    cache = ctxext.StreamingCache(model)
    twin = copy.copy(cache)
    logits = [pieces(model, ids[:, i : i + 1], (1,), cache=(cache, twin, twin)[i % 3]) for i in range(90)]
    assert tiny.difference(torch.cat(logits, dim=1)[0], alone("streaming", "llama", ids[0])) < CACHED


@pytest.mark.parametrize("size", [1, 40])
def test_a_mask_that_is_forgotten_is_refused_and_changes_nothing(size: int) -> None:
    model, (ids, mask) = patched("streaming"), padded((200, 170))
    cache, found = ctxext.StreamingCache(model), []
    for start in range(0, 200, size):
        piece = ids[:, start : start + size]
        if start > 60:
            with pytest.raises(ctxext.UnsupportedModelError, match="isn't the one that they were read with"):
                pieces(model, piece, (size,), cache=cache)
            positions = torch.arange(size)[None].expand(2, -1)
            with pytest.raises(ctxext.UnsupportedModelError, match="position_ids must count"), torch.no_grad():
                step(model, piece, cache, attention_mask=mask[:, : start + size], position_ids=positions)
        with torch.no_grad():
            found.append(step(model, piece, cache, attention_mask=mask[:, : start + size]))
    assert_rows_as_if_alone(torch.cat(found, dim=1), "streaming", "llama", ids, mask)


def test_a_pass_that_broke_off_is_noticed() -> None:
    model, ids = patched("streaming"), tiny.tokens(60)
    cache = ctxext.StreamingCache(model)
    pieces(model, ids[:, :50], (50,), cache=cache)

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = model.model.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        pieces(model, ids[:, 50:], (10,), cache=cache)
    handle.remove()
    with pytest.raises(ctxext.PatchError, match="a pass broke off"):
        pieces(model, ids[:, 50:], (10,), cache=cache)
    cache.reset()
    assert tiny.difference(pieces(model, ids, (60,), cache=cache)[0], alone("streaming", "llama", ids[0])) < CACHED


def test_pieces_read_under_autocast_round_nothing_that_is_cached() -> None:
    model, ids, found = patched("streaming"), tiny.tokens(120), []
    for cache in (ctxext.StreamingCache(model), DynamicCache(config=model.config)):
        logits = []
        for i, piece in enumerate(ids.split(8, dim=1)):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=i % 3 == 1):
                logits.append(step(model, piece, cache).float())
        found.append(torch.cat(logits, dim=1))
    assert torch.equal(*found)


def test_rows_with_other_padding_may_be_rearranged() -> None:
    model, (ids, mask) = patched("lm_infinite"), padded((150, 99))
    cache, rows, found = ctxext.StreamingCache(model), torch.tensor([0, 1]), []
    for start in range(0, 150, 6):
        with torch.no_grad():
            found.append(step(model, ids[rows, start : start + 6], cache, attention_mask=mask[rows, : start + 6]))
        found[-1] = torch.stack([found[-1][(rows == i).nonzero()[-1, 0]] for i in range(2)])
        if len(rows) == 2:
            cache.batch_repeat_interleave(2)
            rows = rows.repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 1, 0, 2]))
            rows = rows[torch.tensor([3, 1, 0, 2])]
        else:
            cache.batch_select_indices(torch.tensor([0, 2]))
            rows = rows[torch.tensor([0, 2])]
            assert sorted(rows.tolist()) == [0, 1]
    assert_rows_as_if_alone(torch.cat(found, dim=1), "lm_infinite", "llama", ids, mask)


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
    with pytest.raises(ctxext.UnsupportedModelError, match="80 tokens that were not read under this patch"):
        step(model, ids[:, 80:81], cache)
    cache.reset()
    with pytest.raises(ctxext.UnsupportedModelError, match="keeps the first 3 and the last 20 tokens"):
        step(model, ids, cache)
    ctxext.patch(model, ctxext.StreamingLLM(n_sink=3, window=20), replace=True)
    pieces(model, ids[:, :80], (80,), cache=cache)
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
    # In stock rotary embeddings an angle is off by half a radian there. Self-Extend counts in groups of six.
    model, ids = patched(setting), tiny.tokens(60)
    near, *far = (
        tiny.logits(model, ids, use_cache=False, position_ids=torch.arange(60)[None] + start)
        for start in (702, 3 * 2**15 + 702, 300 * 2**15 + 702)
    )
    assert all(tiny.difference(near, logits) < CACHED for logits in far)


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
