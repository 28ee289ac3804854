"""LongPPL against losses computed the slow way, and key sets that travel between tokenizers and through files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_perplexity import BOS, document, ids_of, naive_losses, naive_sliding, numbers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

import ctxext
import tiny
from ctxext.data import Document, fingerprint
from ctxext.errors import ConfigError, DataError
from ctxext.evaluation.keysets import (
    DocumentKeys,
    KeySet,
    in_keys,
    merge,
    read_keys,
    text_hash,
    token_spans,
    write_keys,
)
from ctxext.evaluation.longppl import (
    LongPPLResult,
    evaluate_longppl,
    key_tokens,
    long_perplexity,
    long_short_difference,
    paired,
    select,
    spans_of_tokens,
)
from ctxext.evaluation.records import TokenLosses
from ctxext.evaluation.results import result_record
from ctxext.evaluation.runs import Run

DOCS = [document(n, seed) for n, seed in ((90, 1), (64, 2), (101, 3))]
LENGTH, SHORT, STRIDE = 60, 24, 7
LOW = {"alpha": 0.5, "beta": -6.0}
"""Thresholds that leave some key tokens to a random model."""


def evaluate(
    model: nn.Module, docs: Sequence[Document] = DOCS, *, add_bos: bool = True, **settings: Any
) -> LongPPLResult:
    own = {} if "keys" in settings else {"short": SHORT, "stride": STRIDE, **LOW}
    return evaluate_longppl(model, numbers(add_bos=add_bos), docs, **{"length": LENGTH, **own, **settings})


def record(name: str, tokens: Sequence[int], losses: Sequence[float], context: int = 1) -> TokenLosses:
    """Scores of these tokens, each with ``context`` positions before it and of two bytes."""
    token = np.array(tokens, dtype=np.int32)
    loss = np.array(losses, dtype=np.float32)
    return TokenLosses(name, token, loss, np.full_like(token, context), np.zeros_like(token), np.full_like(token, 2))


def key_set(*documents: tuple[Document, Sequence[tuple[int, int]]], **changes: Any) -> KeySet:
    settings: dict[str, Any] = {"evaluator": "x", "tokenizer": "t", "length": 60, "short": 24, "stride": 7}
    parts = tuple(DocumentKeys(doc.id, text_hash(doc.text), tuple(spans)) for doc, spans in documents)
    return KeySet(documents=parts, **{**settings, "alpha": 2.0, "beta": -2.0, **changes})


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_level(merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return fast(tokenizer)


def word_level(text: str) -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["<unk>", *dict.fromkeys(text.split())])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast(tokenizer)


def characters(text: str) -> PreTrainedTokenizerFast:
    return fast(
        Tokenizer(models.BPE({"<unk>": 0} | {c: i for i, c in enumerate(sorted(set(text)), 1)}, [], unk_token="<unk>"))
    )


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_long_short_difference_is_that_of_two_naive_passes(add_bos: bool) -> None:
    model = tiny.model()
    result = evaluate(model, add_bos=add_bos)
    differences = long_short_difference(result.losses[LENGTH], result.losses[SHORT])
    for doc, ours in zip(DOCS, differences, strict=True):
        read = Document(doc.id, " ".join(doc.text.split()[: LENGTH - add_bos]))
        long = naive_losses(model, ((BOS,) * add_bos + tuple(ids_of(read).tolist())))
        expected = naive_sliding(model, read, SHORT, STRIDE, add_bos) - long
        assert expected.abs().max() > 0.1
        assert torch.from_numpy(ours) == pytest.approx(expected, abs=1e-4)


def test_a_key_token_s_short_context_is_almost_as_long_as_the_window() -> None:
    result = evaluate(tiny.model())
    keys = {(r.document, t) for r in result.key_losses for t in r.token.tolist()}
    contexts = [
        context
        for r in result.losses[SHORT]
        for t, context in zip(r.token.tolist(), r.context.tolist(), strict=True)
        if (r.document, t) in keys
    ]
    assert len(contexts) == len(keys) > 3
    assert min(contexts) >= SHORT - STRIDE
    assert max(contexts) < SHORT


def test_key_tokens_gain_more_than_alpha_and_reach_beta() -> None:
    long = [record("a", [0, 1, 2, 3, 4], [0.5, 0.5, 0.5, 2.5, 2.0], context=9)]
    short = [record("a", [0, 1, 2, 3, 4], [9.0, 2.5, 2.6, 9.0, 9.0])]
    # Token 0 is the first, 1 gains exactly alpha, 3 stays below beta, 4 is exactly at it.
    assert key_tokens(long, short)[0].token.tolist() == [2]
    assert key_tokens(long, short, alpha=1.9)[0].token.tolist() == [1, 2]
    assert key_tokens(long, short, beta=-3)[0].token.tolist() == [2, 3, 4]


def test_differences_are_matched_by_document_and_token() -> None:
    long = [record("a", [1, 2, 3], [1, 2, 3], context=9), record("b", [1], [5], context=9)]
    short = [record("b", [1], [7]), record("a", [3, 5, 2], [30, 50, 20])]
    first, second = long_short_difference(long, short)
    assert np.array_equal(first, [np.nan, 18, 27], equal_nan=True)
    assert second.tolist() == [2]


def test_a_token_with_the_same_context_twice_has_no_difference() -> None:
    assert long_short_difference([record("a", [1], [1.0])], [record("a", [1], [1.0001])])[0].tolist() == [0]


@pytest.mark.parametrize(
    ("short", "message"),
    [
        ([record("b", [1], [1])], "same documents"),
        ([record("a", [1], [1]), record("a", [2], [1])], "same documents"),
        ([record("a", [1, 1], [1, 2])], "'a' has a token scored twice"),
    ],
)
def test_losses_that_do_not_match_are_an_error(short: list[TokenLosses], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        long_short_difference([record("a", [1], [1])], short)


def test_longppl_is_the_exponential_of_the_mean_loss_over_all_key_tokens() -> None:
    keys = [record("a", [1, 2, 3], [1, 1, 1]), record("b", [1], [3]), record("c", [], [])]
    row = long_perplexity(keys, [*keys, record("d", [1, 2, 3, 4], [2, 2, 2, 2])])
    assert row["perplexity"] == pytest.approx(math.exp(1.5))
    assert (row["tokens"], row["documents"], row["share"]) == (4, 2, 0.5)
    assert row["nll_all"] == pytest.approx(1.75)
    script = (3 * math.exp(1) + math.exp(3)) / 4
    assert row["compatible"]["document_weighted_perplexity"] == pytest.approx(script)


def test_the_interval_is_over_documents_and_not_over_tokens() -> None:
    few = [record(str(i), range(1, 3), [i, i]) for i in range(12)]
    many = [record(str(i), range(1, 201), [i] * 200) for i in range(12)]
    assert long_perplexity(few, few)["ci95"] == pytest.approx(long_perplexity(many, many)["ci95"])
    assert long_perplexity(many[:1], many)["ci95"] is None


@pytest.mark.parametrize(("documents", "each", "insufficient"), [(10, 50, False), (9, 60, True), (10, 49, True)])
def test_few_key_tokens_or_documents_are_insufficient(documents: int, each: int, insufficient: bool) -> None:
    keys = [record(str(i), range(1, each + 1), [1.0] * each) for i in range(documents)]
    assert long_perplexity(keys, keys)["insufficient"] is insufficient


def test_without_a_key_token_the_result_says_so() -> None:
    result = evaluate(tiny.model(), alpha=1e6)
    [row] = result.rows
    assert (row["tokens"], row["perplexity"], row["share"], row["insufficient"]) == (0, None, 0.0, True)
    assert row["nll_all"] > 0
    with pytest.raises(ConfigError, match="no key token to compare"):
        paired(result, result)


TEXT = "Zürich  naïve 数字 🙂🙂 plain words é again"
TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-level merged": byte_level([("Ġ", "w"), ("Ġw", "o"), ("a", "i"), ("Ã", "¼"), ("Ġ", "Ġ")]),
    "word-level": word_level(TEXT),
    "characters": characters(TEXT),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("overlap", ["contained", "any"])
def test_key_tokens_come_back_from_their_spans(name: str, overlap: Any) -> None:
    tokenizer, doc = TOKENIZERS[name], Document("d", TEXT)
    spans = token_spans(tokenizer, TEXT)
    for i in range(1, len(spans)):
        [keys] = spans_of_tokens([record("d", [i], [1.0])], [doc], tokenizer)
        every = [record("d", range(len(spans)), [1.0] * len(spans))]
        [chosen] = select(every, [doc], tokenizer, key_set((doc, keys.spans)), overlap=overlap)
        same_characters = [j for j, span in enumerate(spans.tolist()) if span == spans[i].tolist()]
        assert chosen.token.tolist() == same_characters
        assert (len(same_characters) > 1) == (name.startswith("byte") and spans[i].tolist() in SHARED[name])


def shared(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Characters that the tokenizer cuts into several tokens."""
    texts = [(i, c, len(c.encode())) for i, c in enumerate(TEXT)]
    merged = "ü" if "Ã¼" in tokenizer.get_vocab() else ""
    return [[i, i + 1] for i, c, n_bytes in texts if n_bytes > 1 and c != merged]


SHARED = {name: shared(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def test_keys_of_words_are_found_by_other_tokenizers() -> None:
    doc = Document("d", TEXT)
    [keys] = spans_of_tokens([record("d", [1, 5], [1.0] * 2)], [doc], TOKENIZERS["word-level"])
    assert [TEXT[a:b] for a, b in keys.spans] == ["naïve", "words"]
    for name in ("byte-level", "byte-level merged", "characters"):
        spans = token_spans(TOKENIZERS[name], TEXT)
        every = [record("d", range(len(spans)), [1.0] * len(spans))]
        [chosen] = select(every, [doc], TOKENIZERS[name], key_set((doc, keys.spans)))
        found = merge(spans[chosen.token])
        # A token that begins with the blank before a key is within the key.
        assert [TEXT[a:b].strip() for a, b in found] == ["naïve", "words"]


def test_a_longer_token_is_a_key_only_where_any_overlap_will_do() -> None:
    doc = Document("d", TEXT)
    [keys] = spans_of_tokens([record("d", [10], [1.0])], [doc], TOKENIZERS["characters"])
    assert [TEXT[a:b] for a, b in keys.spans] == ["ï"]
    spans = token_spans(TOKENIZERS["word-level"], TEXT)
    array = np.array(keys.spans)
    assert not in_keys(spans, array, TEXT).any()
    touched = in_keys(spans, array, TEXT, overlap="any")
    assert [TEXT[a:b] for a, b in spans[touched]] == ["naïve"]


def test_a_blank_that_two_tokens_share_is_no_overlap() -> None:
    text = "ab cd"
    spans = np.array([[0, 3], [2, 5], [2, 3]])
    assert in_keys(spans, np.array([[0, 3]]), text, overlap="any").tolist() == [True, False, True]
    assert in_keys(spans, np.array([[0, 2]]), text).tolist() == [True, False, False]


def test_tokens_of_no_character_are_never_keys() -> None:
    assert merge(np.array([[3, 3]])) == ()
    assert not in_keys(np.array([[1, 1]]), np.array([[0, 4]]), "abcd", overlap="any").any()
    assert not in_keys(np.array([[0, 1]]), np.empty((0, 2), dtype=np.int64), "abcd").any()


def test_a_normalising_tokenizer_s_keys_are_in_the_original_text() -> None:
    text = "one ﬁsh KELVIN"
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(" efhiklnosv")}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    spans = token_spans(fast(tokenizer), text)
    assert len(spans) == len(text) + 1
    [keys] = spans_of_tokens([record("d", [5, 8], [1.0] * 2)], [Document("d", text)], fast(tokenizer))
    assert [text[a:b] for a, b in keys.spans] == ["ﬁ", " "]


def test_touching_and_overlapping_spans_are_one() -> None:
    assert merge(np.array([[4, 6], [0, 2], [2, 3], [5, 9], [11, 12]])) == ((0, 3), (4, 9), (11, 12))


def test_the_first_token_is_never_a_key() -> None:
    doc = DOCS[1]
    result = evaluate(tiny.model(), [doc], keys=key_set((doc, [(0, len(doc.text))])))
    assert result.key_losses[0].token.tolist() == list(range(1, LENGTH - 1))


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match="Slow is a slow tokenizer"):
        evaluate_longppl(tiny.model(), Slow(), DOCS, length=LENGTH, short=SHORT)


def test_a_tokenizer_that_gives_tokens_no_place_is_refused() -> None:
    class Broken:
        is_fast = True

        def __call__(self, text: str, **_: Any) -> Any:
            return type("Encoded", (), {"offset_mapping": [(0, 0), (3, 3)]})

    with pytest.raises(ConfigError, match="every token an empty place"):
        token_spans(Broken(), "some text")


def test_keys_go_through_a_file_unchanged(tmp_path: Path) -> None:
    keys = evaluate(tiny.model(), evaluator="tiny").keys
    write_keys(keys, tmp_path / "keys.json")
    assert read_keys(tmp_path / "keys.json") == keys
    assert read_keys(tmp_path) == keys
    assert read_keys(tmp_path).hash == keys.hash
    assert (keys.evaluator, keys.length, keys.short, keys.stride) == ("tiny", LENGTH, SHORT, STRIDE)
    assert (keys.alpha, keys.beta, keys.tokenizer) == (0.5, -6.0, f"{type(numbers(add_bos=True)).__name__}, 128 tokens")


def test_the_hash_is_of_texts_and_spans_alone() -> None:
    a, b = (DOCS[0], [(2, 4)]), (DOCS[1], [(5, 9)])
    first = key_set(a, b)
    assert first.hash == key_set(b, a, evaluator="y", alpha=3.0).hash
    assert first.hash == key_set((dataclasses.replace(DOCS[0], id="renamed"), [(2, 4)]), b).hash
    assert len({first.hash, key_set(a).hash, key_set(a, (DOCS[1], [(5, 10)])).hash}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "this is not JSON"),
        ([], "this is no key set"),
        ({"format": "results"}, "this is no key set"),
        ({"version": 2}, "version 2 of the key set format is unknown"),
        ({"alpha": "much"}, "alpha: .*number"),
        ({"documents": [{"id": "a", "sha256": "b"}]}, r"documents.0.spans: field required"),
        ({"documents": [{"id": "a", "sha256": "b", "spans": [[3, 5], [5, 8]]}]}, "'a' has the span 5-8 after"),
        ({"documents": [{"id": "a", "sha256": "b", "spans": [[-3, 5]]}]}, "'a' has the span -3-5 after"),
        ({"documents": [{"id": "a", "sha256": "b", "spans": [[3, 3]]}]}, "'a' has the span 3-3 after"),
        ({"documents": []}, "changed by hand or cut"),
        ({"hash": None}, "changed by hand or cut"),
    ],
)
def test_a_file_that_is_no_good_key_set_is_a_one_line_error(tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "k.json"
    write_keys(key_set((DOCS[0], [(2, 4)])), file)
    stored = json.loads(file.read_text())
    text = "{" if change is None else json.dumps({**stored, **change} if isinstance(change, dict) else change)
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_keys(file)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_a_one_line_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match="can't be read"):
            read_keys(path)


def test_a_missing_document_and_a_changed_text_are_one_line_errors() -> None:
    keys = key_set((DOCS[0], [(2, 4)]), (DOCS[1], [(2, 4)]))
    with pytest.raises(DataError, match=r"'doc-2' of the key set is missing \(1 of 2 are\)"):
        evaluate(tiny.model(), DOCS[:1], keys=keys)
    with pytest.raises(DataError, match=r"'doc-1': its text differs .*sha256"):
        evaluate(tiny.model(), [Document("doc-1", DOCS[0].text + " 5"), DOCS[1]], keys=keys)
    with pytest.raises(DataError, match=r"'doc-3' is not in the key set \(2 documents\)"):
        keys.spans_of(DOCS[2])


def test_the_keys_choose_the_documents_and_reading_stops_at_the_last() -> None:
    def source() -> Any:
        yield Document("short", "7 8")
        yield from (DOCS[0], dataclasses.replace(DOCS[0], id="again"), document(99, 9), DOCS[1])
        raise AssertionError("read too far")

    keys = key_set((DOCS[1], [(2, 9)]), (DOCS[0], [(2, 9)]))
    result = evaluate(tiny.model(), source(), keys=keys)
    assert result.document_ids == ["doc-1", "doc-2"]
    assert (result.counts["skipped_repeated"], result.counts["skipped_without_keys"]) == (1, 2)
    assert evaluate(tiny.model(), source(), keys=keys, max_documents=1).document_ids == ["doc-1"]


def test_a_document_shorter_than_the_length_is_scored_if_it_is_in_the_key_set() -> None:
    doc = document(20, 4)
    result = evaluate(tiny.model(), [doc], keys=key_set((doc, [(0, len(doc.text))])))
    assert result.rows[0]["tokens"] == 19


def test_a_text_that_comes_twice_counts_once() -> None:
    result = evaluate(tiny.model(), [DOCS[0], dataclasses.replace(DOCS[0], id="again"), DOCS[1]])
    assert result.document_ids == ["doc-1", "doc-2"]
    assert result.counts["skipped_repeated"] == 1
    with pytest.raises(DataError, match="two documents have the id 'doc-1'"):
        evaluate(tiny.model(), [DOCS[0], dataclasses.replace(DOCS[1], id="doc-1")])


def test_own_keys_given_back_give_the_same_row() -> None:
    model = tiny.model()
    own = evaluate(model, evaluator="tiny")
    given = evaluate(model, keys=own.keys)
    assert own.rows[0]["tokens"] > 3
    assert given.rows == [own.rows[0] | {"keys": "tiny"}]
    assert own.rows[0]["keys"] == "self"
    assert set(given.losses) == {LENGTH}
    assert own.protocol == given.protocol


def test_key_tokens_are_those_of_the_naive_definition() -> None:
    model = tiny.model()
    result = evaluate(model)
    for doc, keys in zip(DOCS, result.key_losses, strict=True):
        read = Document(doc.id, " ".join(doc.text.split()[: LENGTH - 1]))
        long = naive_losses(model, (BOS, *ids_of(read).tolist()))
        gain = naive_sliding(model, read, SHORT, STRIDE, True) - long
        assert keys.token.tolist() == [t for t in range(1, len(long)) if gain[t] > 0.5 and long[t] < 6]
        assert torch.from_numpy(keys.loss) == pytest.approx(long[keys.token], rel=1e-4)


def test_counts_and_provenance_cover_both_passes() -> None:
    result = evaluate(tiny.model())
    assert result.counts["tokens_scored"] == 3 * (LENGTH - 1)
    later = sum(math.ceil((LENGTH - SHORT) / STRIDE) for _ in DOCS)
    assert result.counts["windows"] == len(result.parts) == 3 + 3 + later
    assert result.counts["tokens_processed"] == 3 * LENGTH + (3 + later) * SHORT
    assert result.counts["key_tokens"] == result.rows[0]["tokens"]
    assert result.dataset_fingerprint == fingerprint(DOCS)
    protocol = {"name": "longppl", "version": 1, "keys": result.keys.hash, "length": 60, "short": 24, "stride": 7}
    start = {"bos": "auto", "bos_id": BOS}
    assert result.protocol == {**protocol, "alpha": 0.5, "beta": -6.0, "overlap": "contained", **start}


def test_a_record_is_made_of_it_as_of_a_perplexity() -> None:
    model = tiny.model()
    record = result_record(
        "longppl",
        evaluate(model),
        model=model,
        model_id="tiny",
        tokenizer=numbers(add_bos=True),
        dataset_id="numbers",
        configuration={},
        seed=None,
    )
    assert record["dataset"]["document_ids"] == ["doc-1", "doc-2", "doc-3"]
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_short_context_is_half_the_trained_length_by_default_patched_or_not() -> None:
    model = tiny.model()
    settings = {"short": None, "stride": None, "alpha": None, "beta": None}
    expected = {"short": tiny.TRAINED // 2, "stride": tiny.TRAINED // 8, "alpha": 2.0, "beta": -2.0}
    assert expected.items() <= evaluate(model, DOCS[:1], **settings).protocol.items()
    with ctxext.patch(model, tiny.METHODS["yarn"]):
        result = evaluate(model, DOCS[:1], **settings)
    assert expected.items() <= result.protocol.items()
    assert result.keys.evaluator == "LlamaForCausalLM with yarn"


def test_two_models_on_the_same_keys_are_paired_by_document() -> None:
    first = evaluate(tiny.model())
    second = evaluate(tiny.model(seed=5), keys=first.keys)
    estimate = paired(first, second)
    assert estimate.clusters == 3
    assert estimate.value == pytest.approx(first.rows[0]["nll"] - second.rows[0]["nll"])
    ratio = first.rows[0]["perplexity"] / second.rows[0]["perplexity"]
    assert math.exp(estimate.value) == pytest.approx(ratio)


def test_results_on_different_keys_are_not_compared() -> None:
    first, second = evaluate(tiny.model()), evaluate(tiny.model(seed=5))
    with pytest.raises(ConfigError, match=f"{first.keys.hash[:12]}, {second.keys.hash[:12]}"):
        paired(first, second)


def test_results_of_other_settings_texts_or_tokenizers_are_not_compared() -> None:
    model, keys = tiny.model(), key_set(*((doc, [(4, 30)]) for doc in DOCS[:2]))
    first = evaluate(model, keys=keys)
    with pytest.raises(ConfigError, match=r"length differs \(60, 50\)"):
        paired(first, evaluate(model, keys=keys, length=50))
    with pytest.raises(ConfigError, match=r"overlap differs \('contained', 'any'\)"):
        paired(first, evaluate(model, keys=keys, overlap="any"))
    with pytest.raises(ConfigError, match=r"documents differ \(2 and 1\)"):
        paired(first, evaluate(model, keys=keys, max_documents=1))
    text = DOCS[0].text + DOCS[1].text
    other = evaluate_longppl(model, characters(text), DOCS, length=LENGTH, keys=keys)
    with pytest.raises(ConfigError, match="document 'doc-1': key tokens differ"):
        paired(first, other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"short": 60}, "short context of 60 positions must be less than length 60"),
        ({"stride": 24}, "stride 24 is too long for short windows of 24: at most 23"),
        ({"short": None, "stride": None, "length": 32}, "short context of 32 positions must be less than length 32"),
        ({"stride": 0}, "stride must be"),
        ({"length": 2}, "length must be"),
        ({"alpha": -1.0}, "alpha must be"),
        ({"alpha": math.nan}, "alpha must be"),
        ({"beta": 0.0}, "beta must be below 0"),
        ({"overlap": "all"}, "overlap 'all' is not contained or any"),
        ({"keys": key_set(), "short": 30}, "short 30 is about finding keys, .* found with short 24"),
    ],
)
def test_contradicting_arguments_are_one_line_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        evaluate(tiny.model(), **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("stop_at", [2, 6], ids=["in the long pass", "in the short pass"])
def test_a_killed_run_goes_on_to_the_same_result(tmp_path: Path, stop_at: int) -> None:
    model, calls = tiny.model(), []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == stop_at:
            raise KeyboardInterrupt

    whole = evaluate(model, evaluator="tiny")
    run = Run(tmp_path / "run")
    run.begin({"a": 1})
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, evaluator="tiny", run=run, progress=stop)
    run.close()  # as the end of a process does
    resumed = Run(tmp_path / "run", resume=True)
    resumed.begin({"a": 1})
    result = evaluate(model, evaluator="tiny", run=resumed, progress=lambda done, total: calls.append(done))
    resumed.finish({"rows": result.rows}, result.parts)
    assert resumed.reused == stop_at
    assert len(calls) == len(result.parts)
    assert (result.rows, result.counts, result.keys) == (whole.rows, whole.counts, whole.keys)
    assert read_keys(tmp_path / "run") == whole.keys


def test_a_run_that_is_overwritten_leaves_no_keys_behind(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.begin({"a": 1})
    run.finish({}, evaluate(tiny.model(), run=run).parts)
    assert read_keys(tmp_path).documents
    Run(tmp_path, overwrite=True).begin({"a": 2})
    with pytest.raises(ConfigError, match="can't be read"):
        read_keys(tmp_path)
