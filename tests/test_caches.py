"""Every way of running a model gives the logits of the reference, whatever happens to its cache."""

from __future__ import annotations

import copy
import io
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import attending
import ctxext
import tiny
from attending import (
    CACHED,
    DYNAMIC,
    MAIN,
    SETTINGS,
    L,
    alone,
    assert_rows_as_if_alone,
    cache_name,
    dense,
    greedy,
    padded,
    patched,
    pieces,
    ranks,
    rebuilt,
    step,
    warm,
)
from ctxext.attention import engine, interface

pytestmark = attending.MARKS


WIDTH = 119  # a multiple of nothing, beyond several borders


def ways() -> dict[str, Callable[[Any, Tensor], Tensor]]:
    def steps_of(first: int, size: int) -> Callable[[Any, Tensor], Tensor]:
        return lambda model, ids: pieces(model, ids, [*range(first, WIDTH, size), WIDTH])

    def static(model: Any, ids: Tensor) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=WIDTH + 9)
        return tiny.in_pieces(model, ids, (30, 61, 64, 65, 66, 90, WIDTH), cache)

    return {
        "prefill then single steps": steps_of(60, 1),
        "prefill then blocks of three": steps_of(62, 3),
        "prefill then blocks of five": steps_of(10, 5),
        "pieces of forty-seven": steps_of(47, 47),
        "a static cache": static,
    }


ON_LLAMA = [(name, "llama") for name in SETTINGS if name != "yarn_default"]


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize(("setting", "family"), [*ON_LLAMA, ("dca_yarn", "qwen3"), ("yarn", "qwen3")])
def test_every_way_through_a_cache_gives_the_same_logits(setting: str, way: str, family: str) -> None:
    ids = tiny.tokens(WIDTH, 2)
    logits = ways()[way](patched(setting, family), ids)
    assert tiny.difference(logits, tiny.logits(dense(setting, family), ids, use_cache=False)) < CACHED


def new_cache(model: Any) -> dict[str, Any]:
    return {cache_name(model): DynamicCache(config=model.config)}


def assert_generated_as_if_alone(generated: Any, setting: str, family: str, mask: Tensor) -> None:
    """Each step's logits are those of the reference on the whole row without padding."""
    new = len(generated.logits)
    mask = torch.cat((mask, mask.new_ones(len(mask), new)), dim=1)
    for i, logits in enumerate(torch.stack(generated.logits, dim=1)):
        expected = alone(setting, family, generated.sequences[i], mask[i])[-new - 1 : -1]
        assert tiny.difference(logits, expected) < CACHED, f"row {i}"


GENERATE: dict[str, dict[str, Any]] = {
    "plainly": {},
    "in chunks of sixteen": {"prefill_chunk_size": 16},
    "in chunks of seven": {"prefill_chunk_size": 7},
    "statically": {"cache_implementation": "static", "disable_compile": True},
    "without a cache": {"use_cache": False, "max_new_tokens": 4, "min_new_tokens": 4},
}


@pytest.mark.parametrize("how", GENERATE)
@pytest.mark.parametrize(
    ("setting", "family"), [*((name, "llama") for name in MAIN), ("dca", "qwen3"), ("yarn", "qwen3")]
)
def test_generate_gives_the_reference_logits_for_every_row(setting: str, how: str, family: str) -> None:
    model = patched(setting, family)
    ids, mask = padded((57, 3, 94, 70))
    # Older releases prefill in chunks only into a cache that comes along.
    given_cache = new_cache if how.startswith("in chunks") else lambda model: {}
    generated = greedy(model, ids, attention_mask=mask, **GENERATE[how], **given_cache(model))
    assert_generated_as_if_alone(generated, setting, family, mask)
    ids = tiny.tokens(55)
    generated = greedy(model, ids, **GENERATE[how], **given_cache(model))
    assert_generated_as_if_alone(generated, setting, family, torch.ones_like(ids))


@pytest.mark.parametrize("setting", MAIN)
def test_a_second_turn_on_the_cache_of_the_first_is_one_text(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(58)
    first = greedy(model, ids, 10)
    cache = getattr(first, "cache", None) or first.past_key_values
    both = torch.cat((first.sequences, tiny.tokens(21, seed=5)), dim=1)
    second = greedy(model, both, 20, **{cache_name(model): cache})
    assert_generated_as_if_alone(second, setting, "llama", torch.ones_like(both))


LEFT = (5, 119, 41, 64, 73)


@pytest.mark.parametrize("positions", [False, True], ids=["", "with position_ids"])
@pytest.mark.parametrize("ends", [(WIDTH,), (16, 32, 48, 64, 80, 96, 112, WIDTH), (70, *range(71, WIDTH + 1))], ids=len)
@pytest.mark.parametrize("setting", MAIN)
def test_left_padded_rows_are_as_if_alone(setting: str, ends: Sequence[int], *, positions: bool) -> None:
    ids, mask = padded(LEFT)
    given_positions = ranks(mask).masked_fill(mask == 0, 1) if positions else None
    logits = pieces(patched(setting), ids, ends, mask, given_positions)
    assert_rows_as_if_alone(logits, setting, "llama", ids, mask)


@pytest.mark.parametrize("setting", MAIN)
def test_left_padded_rows_are_as_if_alone_in_a_static_cache_and_without_one(setting: str) -> None:
    model, (ids, mask) = patched(setting, "qwen3"), padded(LEFT)
    cache = StaticCache(config=model.config, max_cache_len=WIDTH + 20)
    logits = pieces(model, ids, (30, 60, 64, 65, 90, WIDTH), mask, cache=cache)
    assert_rows_as_if_alone(logits, setting, "qwen3", ids, mask)
    for kind in (torch.bool, torch.float32):
        logits = tiny.logits(model, ids, attention_mask=mask.to(kind), use_cache=False)
        assert_rows_as_if_alone(logits, setting, "qwen3", ids, mask)


@pytest.mark.parametrize("setting", MAIN)
def test_a_row_of_nothing_but_padding_is_finite_and_disturbs_nobody(setting: str) -> None:
    model, (ids, mask) = patched(setting), padded((0, 100, 66))
    assert not mask[0].any()
    for ends in ((100,), (50, 80, 100)):
        assert_rows_as_if_alone(pieces(model, ids, ends, mask), setting, "llama", ids, mask)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("setting", MAIN)
def test_right_padded_rows_are_as_if_alone(setting: str, *, cached: bool) -> None:
    model, (ids, mask) = patched(setting), padded(LEFT, left=False)
    logits = pieces(model, ids, (40, 80, WIDTH), mask) if cached else tiny.logits(model, ids, attention_mask=mask)
    assert_rows_as_if_alone(logits, setting, "llama", ids, mask)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("setting", MAIN)
def test_padding_between_two_turns_is_not_counted(setting: str, *, static: bool) -> None:
    model = patched(setting)
    (ids, mask), (more, more_mask) = padded((60, 71, 12), left=False), padded((20, 9, 45), left=True, seed=8)
    ids = torch.cat((ids, more, tiny.tokens(6, 3, seed=9)), dim=1)
    mask = torch.cat((mask, more_mask, torch.ones(3, 6, dtype=torch.int64)), dim=1)
    cache = StaticCache(config=model.config, max_cache_len=200) if static else None
    ends = (71, 71 + 45, *range(71 + 46, 71 + 45 + 7))
    assert_rows_as_if_alone(pieces(model, ids, ends, mask, cache=cache), setting, "llama", ids, mask)
    assert_rows_as_if_alone(pieces(model, ids, ends, mask, ranks(mask)), setting, "llama", ids, mask)


@pytest.mark.parametrize("setting", MAIN)
def test_assisted_generation_is_greedy_generation(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(60)
    expected = model.generate(ids, max_new_tokens=25, do_sample=False)
    assert expected.shape[1] > L + 8
    unlike, alike = tiny.model(seed=3), patched(setting)
    ctxext.patch(unlike, SETTINGS[setting])
    for options in ({"assistant_model": unlike}, {"assistant_model": alike}, {"prompt_lookup_num_tokens": 4}):
        found = model.generate(ids, max_new_tokens=25, do_sample=False, **options)
        assert torch.equal(found[:, : expected.shape[1]], expected)  # older releases may add a token too many


@pytest.mark.parametrize("setting", MAIN)
def test_beam_search_with_a_cache_is_beam_search_without(setting: str) -> None:
    model, (ids, mask) = patched(setting), padded((57, 70))
    options = {
        "attention_mask": mask,
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_new_tokens": 9,
        "do_sample": False,
    }
    with_cache, without = (model.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(with_cache, without)


# The dynamic methods keep rotated keys in the cache object; everything that can happen to a cache must be noticed.


@pytest.mark.parametrize("setting", DYNAMIC)
def test_a_cached_step_rotates_no_key_twice(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, rotated = patched(setting), tiny.tokens(140), []
    original = engine.rotate

    def rotate(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rotated.append(x.shape[2])
        return original(x, *args, **kwargs)

    monkeypatch.setattr(engine, "rotate", rotate)
    cache = warm(model, ids, 69)
    rotated.clear()
    pieces(model, ids[:, 69:70], (1,), cache=cache)
    assert rotated
    assert max(rotated) == 1


@pytest.mark.parametrize("upto", [69, 85])
@pytest.mark.parametrize("setting", MAIN)
def test_cropping_and_going_on_with_other_tokens_is_another_text(setting: str, upto: int) -> None:
    model, ids, other = patched(setting), tiny.tokens(90), tiny.tokens(50, seed=7)
    for removed in (1, 3, 13, 40):
        cache = warm(model, ids, upto)
        cache.crop(-removed)
        for size in (removed, 1, 1):  # back to the old length first
            kept = ids[:, : upto - removed]
            done = cache.get_seq_length() - kept.shape[1]
            logits = pieces(model, other[:, done : done + size], (size,), cache=cache)
            expected = alone(setting, "llama", torch.cat((kept, other[:, : done + size]), dim=1)[0])
            assert tiny.difference(logits[0], expected[-size:]) < CACHED


REARRANGED: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "swap": (lambda cache: cache.reorder_cache(torch.tensor([1, 0, 2])), [1, 0, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("left", [False, True], ids=["", "left-padded"])
@pytest.mark.parametrize("how", REARRANGED)
@pytest.mark.parametrize("setting", ["dca_yarn", "yarn"])
def test_rows_of_a_cache_can_be_rearranged(setting: str, how: str, *, left: bool) -> None:
    model = patched(setting)
    ids, mask = padded((69, 68, 67) if left else (69, 69, 69))
    change, rows = REARRANGED[how]
    cache = DynamicCache(config=model.config)
    pieces(model, ids, (66, 67, 68, 69), mask, cache=cache)
    change(cache)
    ids, mask = ids[rows], mask[rows]
    for seed in range(3):
        more = tiny.tokens(1, len(rows), seed=20 + seed)
        ids, mask = torch.cat((ids, more), dim=1), torch.cat((mask, torch.ones_like(more)), dim=1)
        with torch.no_grad():
            logits = step(model, more, cache, attention_mask=mask)
        for i in range(len(rows)):
            assert tiny.difference(logits[i, 0], alone(setting, "llama", ids[i], mask[i])[-1]) < CACHED


def by_layers(cache: Any) -> Any:
    """A copy that shares the tensors."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


def through_a_file(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "by layers": by_layers,
    "rebuilt": rebuilt,
    "through a file": through_a_file,
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("original_first", [False, True], ids=["copy first", "original first"])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("setting", ["dca_yarn", "ntk"])
def test_a_copied_cache_goes_on_by_itself(setting: str, way: str, *, original_first: bool, inference: bool) -> None:
    model, ids = patched(setting), tiny.tokens(69)
    with torch.inference_mode(inference):
        caches = [warm(model, ids, 69)]
        caches.append(COPIES[way](caches[0]))
        texts = [ids, ids]
        turns = [0, 1] if original_first else [1, 0]
        for turn, which in enumerate([*turns, *turns, turns[1], turns[0]]):
            more = tiny.tokens(1, seed=30 + turn)
            texts[which] = torch.cat((texts[which], more), dim=1)
            logits = pieces(model, more, (1,), cache=caches[which])
            assert tiny.difference(logits[0, -1], alone(setting, "llama", texts[which][0])[-1]) < CACHED


@pytest.mark.parametrize("setting", MAIN)
def test_a_shallow_copy_of_a_cache_is_the_same_cache(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(80)
    expected = alone(setting, "llama", ids[0])
    cache = warm(model, ids, 69)
    twin = copy.copy(cache)
    for i, which in enumerate([twin, cache, cache, twin, twin, cache]):
        logits = pieces(model, ids[:, 69 + i : 70 + i], (1,), cache=which)
        assert tiny.difference(logits[0, 0], expected[69 + i]) < CACHED


@pytest.mark.parametrize("setting", MAIN)
def test_two_caches_take_turns_on_one_model(setting: str) -> None:
    model, texts = patched(setting), [tiny.tokens(90, seed=s) for s in (1, 2)]
    expected = [alone(setting, "llama", text[0]) for text in texts]
    caches = [warm(model, texts[0], 66), warm(model, texts[1], 70)]
    for _ in range(15):
        for text, cache, reference in zip(texts, caches, expected, strict=True):
            past = cache.get_seq_length()
            logits = pieces(model, text[:, past : past + 1], (1,), cache=cache)
            assert tiny.difference(logits[0, 0], reference[past]) < CACHED


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "enable_grad": torch.enable_grad}


@pytest.mark.parametrize("modes", list(itertools.permutations(MODES, 2)), ids="-".join)
@pytest.mark.parametrize("setting", ["dca", *DYNAMIC])
def test_a_cache_filled_in_one_mode_goes_on_in_another(setting: str, modes: tuple[str, str]) -> None:
    # Frozen, because autograd refuses inference tensors, on any model.
    model, ids = patched(setting).requires_grad_(False), tiny.tokens(76)
    cache = DynamicCache(config=model.config)
    outputs = []
    for start, end in itertools.pairwise([0, *range(66, 77)]):
        with MODES[modes[0 if end < 69 or end in (72, 73) else 1]]():
            outputs.append(step(model, ids[:, start:end], cache))
    assert tiny.difference(torch.cat(outputs, dim=1)[0], alone(setting, "llama", ids[0])) < CACHED


def overwritten(cache: Any, write: Callable[[Tensor], None]) -> None:
    for layer in cache.layers:
        write(layer.keys)


def write_at(keys: Tensor) -> None:
    keys[:, :, 3:9] = 0.5


def write_in_a_view(keys: Tensor) -> None:
    keys.transpose(1, 2)[:, 3:9].fill_(0.5)


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("write", [write_at, write_in_a_view])
@pytest.mark.parametrize("setting", ["dca", *DYNAMIC])
def test_keys_that_were_overwritten_are_the_ones_that_count(
    setting: str, write: Callable[[Tensor], None], *, inference: bool
) -> None:
    model, ids = patched(setting), tiny.tokens(70)
    with torch.no_grad(), torch.inference_mode(inference):
        cache = warm(model, ids, 69)
        before = copy.deepcopy(cache)
        overwritten(cache, write)
        expected = pieces(model, ids[:, 69:], (1,), cache=rebuilt(cache))
        assert tiny.difference(pieces(model, ids[:, 69:], (1,), cache=before), expected) > 1e-2
        assert tiny.difference(pieces(model, ids[:, 69:], (1,), cache=cache), expected) < CACHED


def test_keys_put_back_by_hand_are_the_ones_that_count() -> None:
    model, ids, other = patched("ntk"), tiny.tokens(70), tiny.tokens(69, seed=4)
    cache, second = warm(model, ids, 69), warm(model, other, 69)
    kept = [(layer.keys, layer.values) for layer in cache.layers]
    replaced = [layer.keys for layer in second.layers]  # alive, so that only another identity tells
    expected = pieces(model, ids[:, 69:], (1,), cache=copy.deepcopy(cache))
    for layer, (keys, values) in zip(second.layers, kept, strict=True):
        layer.keys, layer.values = keys, values
    assert tiny.difference(pieces(model, ids[:, 69:], (1,), cache=second), expected) < CACHED
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        layer.keys, layer.values = keys, values
    assert tiny.difference(pieces(model, ids[:, 69:], (1,), cache=cache), expected) < CACHED
    assert len(replaced) == 2


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("setting", MAIN)
def test_a_mask_that_changes_for_cached_tokens_is_refused(setting: str, rows: int) -> None:
    # Positions count a row's tokens: cached keys would be taken for others than they were rotated to.
    model, ids, mask = patched(setting), tiny.tokens(76, rows), torch.ones(rows, 76, dtype=torch.int64)
    mask[0, :5] = 0  # of two rows the second is full, as all would be if the mask was forgotten
    cache = DynamicCache(config=model.config)
    pieces(model, ids, (66, 75), mask, cache=cache)
    others = torch.ones_like(mask)
    others[0, 70:75] = 0  # as many tokens, but others
    for changed in ({}, {"attention_mask": torch.ones_like(mask)}, {"attention_mask": others}):
        with pytest.raises(ctxext.UnsupportedModelError, match="attention_mask of the 75 cached tokens isn't the one"):
            # Of a copy the rows may be others, so that a mask which fits one of them is taken; none at all is not.
            step(model, ids[:, 75:], copy.deepcopy(cache) if rows == 1 or not changed else cache, **changed)
    with torch.no_grad():
        logits = step(model, ids[:, 75:], cache, attention_mask=mask)
    assert tiny.difference(logits[0, 0], alone(setting, "llama", ids[0], mask[0])[-1]) < CACHED


@pytest.mark.parametrize("setting", MAIN)
def test_a_cache_of_the_plain_model_is_refused(setting: str) -> None:
    model, ids = tiny.model(), tiny.tokens(80)
    cache = warm(model, ids, 73)
    ctxext.patch(model, SETTINGS[setting])
    with pytest.raises(ctxext.UnsupportedModelError, match="73 tokens that were not read under this patch"):
        step(model, ids[:, 73:74], cache)


@pytest.mark.parametrize("setting", MAIN)
def test_a_cache_made_by_hand_is_refused(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(80)
    cache = rebuilt(warm(model, ids, 73))
    delattr(cache.layers[0], interface._RECORD)
    with pytest.raises(ctxext.UnsupportedModelError, match="73 tokens that were not read under this patch"):
        step(model, ids[:, 73:74], cache)


@pytest.mark.parametrize(
    "methods",
    [
        (ctxext.DynamicNTK(step=16), ctxext.DynamicYaRN(step=16)),
        (ctxext.DynamicYaRN(step=16), ctxext.DynamicYaRN(step=16, factor=4)),
        (ctxext.DynamicNTK(step=16), ctxext.DynamicNTK(step=8, factor=3)),
        (ctxext.DCA(chunk_size=24, local_size=8), ctxext.DCA(chunk_size=24, local_size=4)),
    ],
    ids=["method", "factor", "step", "dca"],
)
def test_a_cache_of_other_settings_is_refused(methods: tuple[ctxext.Method, ctxext.Method]) -> None:
    model, ids = tiny.model(), tiny.tokens(80)
    ctxext.patch(model, methods[0])
    cache = warm(model, ids, 73)
    expected = pieces(model, ids[:, 73:74], (1,), cache=copy.deepcopy(cache))
    ctxext.patch(model, methods[1], replace=True)
    with pytest.raises(ctxext.UnsupportedModelError, match="73 tokens that were not read under this patch"):
        step(model, ids[:, 73:74], cache)
    ctxext.patch(model, methods[0], replace=True)
    assert torch.equal(pieces(model, ids[:, 73:74], (1,), cache=cache), expected)


@pytest.mark.parametrize("setting", MAIN)
def test_a_change_of_dtype_leaves_nothing_behind(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(90)
    wide = patched(setting, attention="naive").double()
    cache = warm(model, ids, 69)
    narrow = tiny.logits(model, ids)
    model.double()
    expected = tiny.logits(wide, ids, use_cache=False)
    # Cosines and sines of stock rotary embeddings stay fp32 within.
    assert tiny.difference(tiny.logits(model, ids), expected) < 1e-5
    logits = pieces(model, ids[:, 69:], (1, 2, 5, 21), cache=cache)
    assert tiny.difference(logits, expected[:, 69:]) < CACHED
    model.float()
    assert torch.equal(tiny.logits(model, ids), narrow)


class Text:
    """A cache, and the tokens that are in it."""

    def __init__(self, cache: Any, ids: Tensor, mask: Tensor) -> None:
        self.cache, self.ids, self.mask = cache, ids, mask

    def rearranged(self, rows: list[int]) -> None:
        self.ids, self.mask = self.ids[rows], self.mask[rows]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("setting", ["dca_yarn", "ntk", "yarn", "yarn_default", "ntk_step_1"])
def test_calls_in_any_order_give_what_a_fresh_model_gives(setting: str, seed: int) -> None:
    model, choose = patched(setting).requires_grad_(False), random.Random(seed)
    texts: list[Text] = []
    log: list[str] = []
    for turn in range(45):
        if len(texts) < 2:
            lengths = choose.choice([(66,), (70, 70), (66, 61, 1), (30, 75)])
            left = choose.random() < 0.6
            ids, mask = padded(lengths, left=left, seed=turn)
            text = Text(DynamicCache(config=model.config), ids, mask)
            logits = pieces(model, ids, (20, ids.shape[1]), mask, cache=text.cache)
            assert_rows_as_if_alone(logits, setting, "llama", ids, mask)
            texts.append(text)
        text = choose.choice(texts)
        batch, length = text.ids.shape
        action = choose.choice(
            ["append"] * 8 + ["crop", "fork", "layers", "reorder", "select", "repeat", "other", "drop"]
        )
        log.append(action)
        if action == "append":
            new = choose.choice([1, 1, 1, 1, 2, 6, 19])
            more, more_mask = tiny.tokens(new, batch, seed=100 + turn), torch.ones(batch, new, dtype=torch.int64)
            if batch > 1 and choose.random() < 0.1:
                more_mask[choose.randrange(batch)] = 0
            text.ids, text.mask = torch.cat((text.ids, more), dim=1), torch.cat((text.mask, more_mask), dim=1)
            whole = bool(text.mask.all()) and choose.random() < 0.5
            mode = choose.choice(list(MODES))
            log[-1] += f" {new} to {length} in {mode}"
            with MODES[mode]():
                logits = step(model, more, text.cache, **({} if whole else {"attention_mask": text.mask}))
            assert logits.isfinite().all(), log
            for i in range(batch):
                here = more_mask[i].bool()
                if here.any():
                    expected = alone(setting, "llama", text.ids[i], text.mask[i])[-int(here.sum()) :]
                    assert tiny.difference(logits[i, here], expected) < CACHED, log
            if length > 130:
                texts.remove(text)
        elif action == "crop":
            removed = choose.choice([1, 1, 2, 5, 20])
            text.cache.crop(-removed)
            text.ids, text.mask = text.ids[:, :-removed], text.mask[:, :-removed]
        elif action in ("fork", "layers"):
            twin = {"fork": copy.deepcopy, "layers": by_layers}[action](text.cache)
            texts.append(Text(twin, text.ids, text.mask))
        elif action == "reorder":
            rows = [choose.randrange(batch) for _ in range(batch)]
            text.cache.reorder_cache(torch.tensor(rows))
            text.rearranged(rows)
        elif action == "select" and batch > 1:
            rows = sorted(choose.sample(range(batch), batch - 1))
            text.cache.batch_select_indices(torch.tensor(rows))
            text.rearranged(rows)
        elif action == "repeat" and batch < 3:
            text.cache.batch_repeat_interleave(2)
            text.rearranged([i for i in range(batch) for _ in range(2)])
        elif action == "other":  # a pass without a cache, and a training step, in between
            ids = tiny.tokens(80, seed=turn)
            assert tiny.difference(tiny.logits(model, ids)[0], alone(setting, "llama", ids[0])) < CACHED
        elif action == "drop":
            texts.remove(text)
