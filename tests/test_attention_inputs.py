"""What models with changed attention accept, and what they refuse."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import DynamicCache

import attending
import ctxext
import tiny
from attending import CACHED, FORWARD, MAIN, alone, cache_name, dense, gappy, greedy, padded, patched, ranks, step, warm

pytestmark = attending.MARKS


DOCUMENTS = (70, 1, 28, 66)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("setting", MAIN)
def test_packed_documents_are_as_if_alone(setting: str, family: str) -> None:
    model, ids = patched(setting, family), tiny.tokens(sum(DOCUMENTS), 2)
    position_ids = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    for positions in (position_ids, position_ids.expand(2, -1)):
        logits = tiny.logits(model, ids, position_ids=positions, use_cache=False)
        for i, (start, end) in itertools.product(
            range(2), itertools.pairwise(itertools.accumulate(DOCUMENTS, initial=0))
        ):
            assert tiny.difference(logits[i, start:end], alone(setting, family, ids[i, start:end])) < FORWARD


@pytest.mark.parametrize("setting", MAIN)
def test_rows_of_a_batch_may_be_packed_differently_and_padded(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(110, 2)
    positions = torch.stack(
        (
            torch.cat((torch.zeros(9), torch.arange(80), torch.arange(21))),
            torch.cat((torch.arange(100), torch.zeros(10))),
        )
    ).long()
    mask = torch.ones(2, 110, dtype=torch.int64)
    mask[0, :9] = mask[1, 100:] = 0
    logits = tiny.logits(model, ids, position_ids=positions, attention_mask=mask, use_cache=False)
    assert logits.isfinite().all()
    for i, start, end in ((0, 9, 89), (0, 89, 110), (1, 0, 100)):
        assert tiny.difference(logits[i, start:end], alone(setting, "llama", ids[i, start:end])) < FORWARD


def test_borders_of_packed_documents_must_be_those_of_the_positions() -> None:
    model, ids = patched("dca"), tiny.tokens(sum(DOCUMENTS))
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    borders = torch.tensor([0, *itertools.accumulate(DOCUMENTS)], dtype=torch.int32)
    given = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 70, "max_length_k": 70}
    expected = tiny.logits(model, ids, position_ids=positions, use_cache=False)
    assert torch.equal(tiny.logits(model, ids, position_ids=positions, use_cache=False, **given), expected)
    for others in ({}, {"position_ids": torch.arange(sum(DOCUMENTS))[None]}):
        with pytest.raises(ctxext.UnsupportedModelError, match="cu_seq_lens_q: method dca tells packed documents"):
            model(ids, use_cache=False, **given, **others)


def test_reading_both_ways_is_refused() -> None:
    with pytest.raises(ctxext.UnsupportedModelError, match="is_causal=False: method dca reads from left to right"):
        patched("dca")(tiny.tokens(30), is_causal=False)


@pytest.mark.parametrize("setting", MAIN)
def test_packed_documents_with_a_cache_are_refused(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(100)
    positions = torch.cat((torch.arange(60), torch.arange(40)))[None]
    for extra in ({}, {"use_cache": True}, {cache_name(model): DynamicCache(config=model.config), "use_cache": False}):
        with pytest.raises(ctxext.UnsupportedModelError, match="use_cache=False for packed documents"):
            model(ids, position_ids=positions, **extra)


@pytest.mark.parametrize("setting", MAIN)
def test_positions_with_gaps_are_the_reference_s(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(90, 2)
    plain = tiny.logits(model, ids)
    for positions in (gappy(90), torch.arange(90) + 1000, torch.arange(90) * 7):
        found, expected = (
            tiny.logits(m, ids, position_ids=positions[None], use_cache=False) for m in (model, dense(setting))
        )
        assert tiny.difference(found, expected) < FORWARD
        if int(positions[0]) == 0:  # methods that go by distances alone don't mind where a text begins
            assert tiny.difference(found, plain) > 1e-2


@pytest.mark.parametrize("setting", MAIN)
def test_shifted_positions_with_a_cache_are_refused(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(80)
    for shifted in (torch.arange(80)[None] + 1, torch.arange(80)[None] * 2):
        with pytest.raises(ctxext.UnsupportedModelError, match="must count each row's tokens from 0"):
            model(ids, position_ids=shifted)
    cache = warm(model, ids, 70)
    for wrong in (69, 71, 0):
        with pytest.raises(ctxext.UnsupportedModelError, match="must count each row's tokens from 0"):
            step(model, ids[:, 70:71], cache, position_ids=torch.tensor([[wrong]]))


MASKS = {
    "four dimensions": (torch.ones(1, 1, 80, 80, dtype=torch.bool), "attention_mask of shape"),
    "four dimensions, additive": (torch.zeros(1, 1, 80, 80), "attention_mask of shape"),
    "one additive row for all queries": (torch.zeros(1, 1, 1, 80), "attention_mask"),
    "three dimensions": (torch.ones(1, 80, 80), "attention_mask of shape"),
    "too short": (torch.ones(1, 79), r"attention_mask has shape \(1, 79\)"),
    "of another batch": (torch.ones(2, 80), r"attention_mask has shape \(2, 80\)"),
    "no tensor": ([[1] * 80], "attention_mask of shape list"),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("setting", ["dca", "ntk"])
def test_masks_that_say_more_than_padding_are_refused(setting: str, mask: str) -> None:
    given_mask, text = MASKS[mask]
    with pytest.raises(ctxext.UnsupportedModelError, match=text):
        patched(setting)(tiny.tokens(80), attention_mask=given_mask)


@pytest.mark.parametrize("setting", MAIN)
def test_a_mask_for_the_new_tokens_only_is_refused(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(80)
    cache = warm(model, ids, 70)
    with pytest.raises(ctxext.UnsupportedModelError, match="70 of them in the cache"):
        step(model, ids[:, 70:71], cache, attention_mask=torch.ones(1, 1))


@pytest.mark.parametrize("setting", MAIN)
def test_negative_positions_are_refused(setting: str) -> None:
    with pytest.raises(ctxext.UnsupportedModelError, match="negative"):
        patched(setting)(tiny.tokens(20), position_ids=torch.arange(-5, 15)[None], use_cache=False)


@pytest.mark.parametrize("cached", [False, True])
def test_fewer_or_more_positions_than_tokens_are_refused(*, cached: bool) -> None:
    model = patched("dca_yarn")
    for positions in (torch.tensor([[0]]), torch.arange(21)[None]):
        with pytest.raises(ctxext.UnsupportedModelError, match=r"position_ids has shape .* but there are 20 tokens"):
            model(tiny.tokens(20), position_ids=positions, use_cache=cached)


@pytest.mark.parametrize("setting", MAIN)
def test_dropout_is_refused_in_training_only(setting: str) -> None:
    model, ids = patched(setting, attention_dropout=0.1), tiny.tokens(90)
    assert tiny.difference(tiny.logits(model, ids)[0], alone(setting, "llama", ids[0])) < FORWARD
    with pytest.raises(ctxext.UnsupportedModelError, match=r"attention_dropout 0\.1"):
        model.train()(ids)


@pytest.mark.parametrize("setting", MAIN)
def test_attention_weights_are_refused_unless_they_exist(setting: str) -> None:
    model, ids = patched(setting), tiny.tokens(20)
    with pytest.raises(ctxext.UnsupportedModelError, match="attention='naive'"):
        model(ids, output_attentions=True)
    with pytest.raises(ctxext.UnsupportedModelError, match="attention='naive'"):
        model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("setting", MAIN)
def test_attention_weights_of_the_reference_are_right(setting: str, family: str) -> None:
    model, (ids, mask) = patched(setting, family, attention="naive"), padded((90, 40, 67))
    with torch.no_grad():
        output = model(ids, attention_mask=mask, output_attentions=True)
        single = model(ids[1:2, 50:], output_attentions=True)
    assert len(output.attentions) == 2
    for weights, expected in zip(output.attentions, single.attentions, strict=True):
        assert weights.shape == (3, 4, 90, 90)
        # Sums of fp32 numbers that are below one.
        assert tiny.difference(weights.sum(-1), mask[:, None].expand(-1, 4, -1)) < 1e-5
        assert (weights * (1 - mask[:, None, None])).abs().max() == 0
        assert torch.equal(weights, weights.tril())
        assert tiny.difference(weights[1, :, 50:, 50:], expected[0]) < FORWARD


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("setting", MAIN)
def test_generate_returns_attention_weights_of_the_reference(setting: str, *, static: bool) -> None:
    model, (ids, mask) = patched(setting, attention="naive"), padded((70, 40))
    options = {"cache_implementation": "static", "disable_compile": True} if static else {}
    generated = greedy(model, ids, 4, attention_mask=mask, output_attentions=True, **options)
    assert len(generated.attentions) == 4
    for n, layers in enumerate(generated.attentions):
        for weights in layers:
            new = weights.shape[2]
            assert new == (70 if n == 0 else 1)
            queries = torch.cat((mask, mask.new_ones(2, n)), dim=1)[:, -new:]
            assert tiny.difference(weights.sum(-1), queries[:, None].expand(-1, 4, -1)) < 1e-5
            assert weights[1, :, :, :30].abs().max() == 0
            assert weights.shape[-1] >= 70 + n
            assert static or weights.shape[-1] == 70 + n


@pytest.mark.parametrize("setting", MAIN)
def test_the_decoder_takes_its_arguments_by_position_too(setting: str) -> None:
    model, (ids, mask) = patched(setting), padded((90, 30))
    expected = tiny.logits(model, ids, attention_mask=mask)
    with torch.no_grad():
        hidden = model.model(ids, mask, ranks(mask)).last_hidden_state
        assert tiny.difference(model.lm_head(hidden), expected) == 0
        cache = DynamicCache(config=model.config)
        hidden = torch.cat(
            (model.model(ids[:, :80], mask[:, :80], None, cache)[0], model.model(ids[:, 80:], mask, None, cache)[0]),
            dim=1,
        )
    assert tiny.difference(model.lm_head(hidden), expected) < CACHED


@pytest.mark.parametrize("setting", MAIN)
def test_embeddings_stand_in_for_ids(setting: str) -> None:
    model, (ids, mask) = patched(setting), padded((90, 30))
    embeds = model.get_input_embeddings()(ids)
    with torch.no_grad():
        logits = model(inputs_embeds=embeds, attention_mask=mask).logits
        assert torch.equal(logits, model(ids, attention_mask=mask).logits)
        assert torch.equal(
            model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=6, do_sample=False),
            model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)[:, 90:],
        )


def test_a_compiled_model_gives_the_same_logits() -> None:
    torch._dynamo.reset()
    model, ids = patched("ntk", num_hidden_layers=1), tiny.tokens(90)
    compiled, cache = torch.compile(model, backend="eager"), DynamicCache(config=model.config)
    inputs = {"use_cache": True, cache_name(model): cache}
    outputs = [tiny.logits(compiled, ids[:, a:b], **inputs) for a, b in ((0, 70), (70, 71), (71, 90))]
    assert tiny.difference(torch.cat(outputs, dim=1), tiny.logits(model, ids)) < CACHED
    torch._dynamo.reset()


def test_a_layer_called_without_its_decoder_is_an_error() -> None:
    model, hidden = patched(), torch.zeros(1, 4, 64)
    embeddings = model.model.rotary_emb(hidden, torch.arange(4)[None])
    with pytest.raises(ctxext.PatchError, match="without its decoder"):
        model.model.layers[0](hidden, position_embeddings=embeddings)
