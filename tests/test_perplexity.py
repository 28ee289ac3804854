"""The windows in closed form, and both protocols against losses computed the slow way."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from test_scoring import Counter
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import tiny
from ctxext.data import Document, fingerprint
from ctxext.errors import ConfigError, CtxextError, DataError
from ctxext.evaluation.perplexity import PerplexityResult, evaluate_perplexity
from ctxext.evaluation.protocols import sliding_windows

BOS = 1
CHECKS = 2
"""Forward passes of the check of the head, before the first window."""
ROUNDING = {"rel": 1e-5}
"""fp32 matrix products of other shapes add in another order."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On tensors this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def numbers(*, add_bos: bool) -> PreTrainedTokenizerFast:
    """The text "5 17 3" has the ids 5, 17, 3; the tokenizer knows a BOS, and adds it or doesn't."""
    words = {"<unk>": 0, "<s>": BOS} | {str(i): i for i in range(2, tiny.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def document(n_tokens: int, seed: int) -> Document:
    return Document(f"doc-{seed}", " ".join(map(str, tiny.tokens(n_tokens, seed=seed)[0].tolist())))


def ids_of(doc: Document) -> Tensor:
    return torch.tensor([int(word) for word in doc.text.split()])


@functools.cache
def naive_losses(model: nn.Module, input_ids: tuple[int, ...]) -> Tensor:
    """Losses of the second id onwards, from full logits in float64."""
    ids = torch.tensor([input_ids])
    with torch.no_grad():
        log_p = model(input_ids=ids).logits.double().log_softmax(-1)
    return -log_p[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]


def naive_sliding(model: nn.Module, doc: Document, window: int, stride: int, bos: bool) -> Tensor:
    """Straight from the definition, token by token: which window scores it, and with what before it."""
    x = ids_of(doc).tolist()
    capacity = window - bos
    losses = []
    for t in range(0 if bos else 1, len(x)):
        k = 0 if t < capacity else math.ceil((t + 1 - capacity) / stride)
        end = min(k * stride + capacity, len(x))
        begin = max(0, end - capacity)
        losses.append(naive_losses(model, (BOS,) * bos + tuple(x[begin:end]))[t - begin + bos - 1])
    return torch.stack(losses)


def evaluate(model: nn.Module, docs: Sequence[Document], *, add_bos: bool = True, **settings: Any) -> PerplexityResult:
    return evaluate_perplexity(model, numbers(add_bos=add_bos), docs, **settings)


DOCS = [document(n, seed) for n, seed in ((90, 1), (64, 2), (101, 3))]


@pytest.mark.parametrize("add_bos", [True, False])
def test_prefix_scores_exactly_the_tokens_of_an_input_of_that_length(add_bos: bool) -> None:
    model = tiny.model()
    result = evaluate(model, DOCS, lengths=[16, 33, 60], add_bos=add_bos)
    for row, length in zip(result.rows, [16, 33, 60], strict=True):
        inputs = [((BOS,) * add_bos + tuple(ids_of(doc).tolist()))[:length] for doc in DOCS]
        losses = torch.cat([naive_losses(model, ids) for ids in inputs])
        assert (row["length"], row["documents"], row["tokens"]) == (length, 3, 3 * (length - 1))
        assert row["nll"] == pytest.approx(losses.mean().item(), **ROUNDING)
        assert row["perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-4)


def test_prefix_rows_of_one_pass_equal_separate_passes_and_separate_runs() -> None:
    model = tiny.model()
    one = evaluate(model, DOCS, lengths=[10, 31, 64])
    several = evaluate(model, DOCS, lengths=[10, 31, 64], one_pass=False)
    alone = [evaluate(model, DOCS, lengths=[n], min_tokens=64).rows[0] for n in (10, 31, 64)]
    assert one.counts["windows"] == 3
    assert several.counts["windows"] == 9
    for a, b, c in zip(one.rows, several.rows, alone, strict=True):
        assert a["nll"] == pytest.approx(b["nll"], **ROUNDING)
        assert a["nll_last"] == pytest.approx(b["nll_last"], **ROUNDING)
        assert b["nll"] == c["nll"]
        assert a["tokens"] == b["tokens"] == c["tokens"]


def test_prefix_runs_one_window_of_the_longest_length_per_document() -> None:
    model, shapes = tiny.model(), []
    model.model.register_forward_pre_hook(lambda m, args, kw: shapes.append(kw["input_ids"].shape), with_kwargs=True)
    evaluate(model, DOCS, lengths=[20, 50])
    assert shapes[CHECKS:] == [(1, 50)] * 3


def test_last_part_is_the_mean_of_the_tokens_past_the_previous_length() -> None:
    rows = evaluate(tiny.model(), DOCS, lengths=[50, 20, 64]).rows
    assert [row["length"] for row in rows] == [20, 50, 64]
    assert [row["tokens_last"] for row in rows] == [3 * 19, 3 * 30, 3 * 14]
    assert rows[0]["nll_last"] == rows[0]["nll"]
    total = sum(row["nll_last"] * row["tokens_last"] for row in rows)
    assert total / rows[2]["tokens"] == pytest.approx(rows[2]["nll"], rel=1e-12)
    assert rows[1]["perplexity_last"] == pytest.approx(math.exp(rows[1]["nll_last"]), rel=1e-12)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize(("window", "stride"), [(32, 8), (33, 32), (20, 7)])
def test_sliding_equals_the_definition_token_by_token(window: int, stride: int, add_bos: bool) -> None:
    model = tiny.model()
    [row] = evaluate(model, DOCS, protocol="sliding", windows=[window], stride=stride, add_bos=add_bos).rows
    losses = torch.cat([naive_sliding(model, doc, window, stride, add_bos) for doc in DOCS])
    assert row["nll"] == pytest.approx(losses.mean().item(), **ROUNDING)
    assert (row["window"], row["stride"], row["length"], row["tokens"]) == (window, stride, window, len(losses))


def test_the_headline_is_the_token_mean_and_not_the_mean_over_windows() -> None:
    model, [doc] = tiny.model(), DOCS[:1]
    losses = naive_sliding(model, doc, 32, 8, True)
    edges = [0, *[w.end for w in sliding_windows(90, 32, 8, bos=True)]]
    window_mean = torch.stack([losses[a:b].mean() for a, b in itertools.pairwise(edges)]).mean().item()
    [row] = evaluate(model, [doc], protocol="sliding", windows=[32], stride=8).rows
    assert row["nll"] == pytest.approx(losses.mean().item(), **ROUNDING)
    assert abs(window_mean - losses.mean().item()) > 0.01
    assert row["compatible"]["window_mean_perplexity"] == pytest.approx(math.exp(window_mean), rel=1e-4)


@pytest.mark.parametrize(("length", "stride"), [(20, 7), (33, 33)])
def test_a_stream_is_scored_as_by_longloras_script(length: int, stride: int) -> None:
    """Every window whole, the mean of each, and the mean of those."""
    model = tiny.model()
    data = torch.cat([ids_of(doc) for doc in DOCS]).tolist()
    starts = list(range(0, len(data) - length, stride))
    starts.pop()
    means = torch.stack([naive_losses(model, tuple(data[start : start + length])).mean() for start in starts])
    result = evaluate(model, DOCS, protocol="stream", windows=[length], stride=stride)
    [row] = result.rows
    assert row["compatible"] == {
        "windows": len(starts),
        "window_mean_perplexity": pytest.approx(means.mean().exp().item(), rel=1e-4),
    }
    assert row["tokens"] == len(starts) * (length - 1)
    assert sum(map(len, result.losses[length])) == row["tokens"]


@pytest.mark.parametrize("add_bos", [True, False])
def test_rolling_scores_every_token_once_from_the_start_token_on(add_bos: bool) -> None:
    model, doc, length = tiny.model(), DOCS[0], 32
    x = ids_of(doc).tolist()
    losses = [naive_losses(model, (BOS, *x[:32])), naive_losses(model, tuple(x[31:64]))]
    losses.append(naive_losses(model, tuple(x[57:90]))[6:])  # filled up from the left
    [row] = evaluate(model, [doc], protocol="rolling", lengths=[length], add_bos=add_bos).rows
    assert row["tokens"] == 90
    assert row["nll"] == pytest.approx(torch.cat(losses).mean().item(), **ROUNDING)


def test_rolling_feeds_no_more_than_its_length() -> None:
    model, inputs = tiny.model(), []
    model.model.register_forward_pre_hook(lambda m, args, kw: inputs.append(kw["input_ids"]), with_kwargs=True)
    result = evaluate(model, DOCS[:1], protocol="rolling", lengths=[32])
    assert [ids.shape[1] for ids in inputs[CHECKS:]] == [32, 32, 32]
    assert result.counts["tokens_processed"] == 96


@pytest.mark.parametrize("add_bos", [True, False])
def test_same_targets_are_predicted_from_ever_more_text(add_bos: bool) -> None:
    model = tiny.model()
    result = evaluate(model, DOCS, protocol="same-target", lengths=[20, 64, 33], targets=11, add_bos=add_bos)
    for row, length in zip(result.rows, [20, 33, 64], strict=True):
        inputs = [(BOS,) * add_bos + tuple(ids_of(doc)[-(length - add_bos) :].tolist()) for doc in DOCS]
        losses = torch.cat([naive_losses(model, ids)[-11:] for ids in inputs])
        assert (row["length"], row["targets"], row["tokens"]) == (length, 11, 33)
        assert row["nll"] == pytest.approx(losses.mean().item(), **ROUNDING)
    scored = [[record.token.tolist() for record in records] for records in result.losses.values()]
    assert scored[0] == scored[1] == scored[2]


def test_records_say_what_was_scored_where() -> None:
    result = evaluate(tiny.model(), DOCS[:2], protocol="sliding", windows=[32], stride=8)
    first, second = result.losses[32]
    assert (first.document, second.document) == ("doc-1", "doc-2")
    assert first.token.tolist() == list(range(90))
    assert first.context[:40].tolist() == [*range(1, 32), *range(24, 32), 24]
    assert len(set(first.window.tolist()) | set(second.window.tolist())) == result.counts["windows"]
    words = DOCS[0].text.split(" ")
    assert first.size.tolist() == [len(words[0]), *(1 + len(word) for word in words[1:])]
    assert first.loss.dtype == "float32"


def test_bits_per_byte_count_the_bytes_of_what_was_scored() -> None:
    [row] = evaluate(tiny.model(), DOCS[:1], protocol="sliding", windows=[32], stride=8).rows
    assert row["bytes"] == len(DOCS[0].text)
    assert row["bits_per_byte"] == pytest.approx(row["nll"] * 90 / math.log(2) / len(DOCS[0].text))


def test_intervals_are_over_documents() -> None:
    docs = [document(60, seed) for seed in range(32)]
    rows = [evaluate(tiny.model(), docs[:n], lengths=[50]).rows[0] for n in (32, 12, 1)]
    assert [row["interval"] for row in rows] == ["cluster bootstrap", "t", None]
    assert rows[0]["ci95"][0] < rows[0]["perplexity"] < rows[0]["ci95"][1]
    assert rows[2]["ci95"] is None


def test_a_long_document_weighs_more_than_a_short_one() -> None:
    model, docs = tiny.model(), [document(30, 4), document(300, 5)]
    [row] = evaluate(model, docs, protocol="sliding", windows=[30], stride=10).rows
    means = [evaluate(model, [doc], protocol="sliding", windows=[30], stride=10).rows[0] for doc in docs]
    assert row["nll"] == pytest.approx((30 * means[0]["nll"] + 300 * means[1]["nll"]) / 330, rel=1e-12)


def test_every_window_begins_with_one_bos() -> None:
    model, inputs = tiny.model(), []
    model.model.register_forward_pre_hook(lambda m, args, kw: inputs.append(kw["input_ids"]), with_kwargs=True)
    evaluate(model, DOCS, protocol="sliding", windows=[32], stride=8)
    for ids in inputs[CHECKS:]:
        assert ids[:, 0].eq(BOS).all()
        assert ids[:, 1:].ne(BOS).all()


def test_no_window_holds_two_documents() -> None:
    model, inputs = tiny.model(), []
    model.model.register_forward_pre_hook(lambda m, args, kw: inputs.append(kw["input_ids"]), with_kwargs=True)
    evaluate(model, DOCS, protocol="sliding", windows=[32], stride=8, batch_size=4, bos="never")
    for row in (row for ids in inputs[CHECKS:] for row in ids.tolist()):
        assert any(" ".join(map(str, row)) in doc.text for doc in DOCS)


@pytest.mark.parametrize(
    "settings", [{"lengths": [20, 60]}, {"protocol": "sliding", "windows": [24, 40], "stride": 9}], ids=lambda s: str(s)
)
def test_batch_size_does_not_change_the_result(settings: dict[str, Any]) -> None:
    model = tiny.model()
    one, four = (evaluate(model, DOCS, batch_size=n, **settings) for n in (1, 4))
    assert one.counts == four.counts
    for a, b in zip(one.rows, four.rows, strict=True):
        assert a["nll"] == pytest.approx(b["nll"], **ROUNDING)
        assert a["ci95"] == pytest.approx(b["ci95"], **ROUNDING)
        assert (a["tokens"], a["bytes"], a["compatible"]["windows"]) == (
            b["tokens"],
            b["bytes"],
            b["compatible"]["windows"],
        )


def test_a_certain_model_has_perplexity_one() -> None:
    doc = Document("count", " ".join(map(str, range(2, 128))))
    for settings in ({"lengths": [50, 120]}, {"protocol": "sliding", "windows": [32], "stride": 8}):
        for row in evaluate(Counter(), [doc], bos="never", **settings).rows:
            assert (row["nll"], row["perplexity"]) == (0.0, 1.0)


def test_no_more_documents_are_read_than_are_used() -> None:
    def source() -> Iterator[Document]:
        yield document(5, 1)
        yield document(70, 2)
        yield document(70, 3)
        raise AssertionError("read too far")

    result = evaluate(tiny.model(), source(), lengths=[64], max_documents=2)
    assert result.document_ids == ["doc-2", "doc-3"]
    assert result.counts["skipped_short"] == 1
    assert result.dataset_fingerprint == fingerprint([document(70, 2), document(70, 3)])


@pytest.mark.parametrize("add_bos", [True, False])
def test_empty_and_one_token_documents_are_harmless(add_bos: bool) -> None:
    docs = [Document("empty", ""), Document("one", "7"), document(40, 1)]
    result = evaluate(tiny.model(), docs, lengths=[16, 30], min_tokens=0, add_bos=add_bos)
    assert result.counts["skipped_empty"] == (1 if add_bos else 2)
    assert [row["documents"] for row in result.rows] == [2 if add_bos else 1] * 2
    assert [row["tokens"] for row in result.rows] == [15 + add_bos, 29 + add_bos]
    assert result.counts["tokens_scored"] == 29 + add_bos


def test_counts_say_what_was_scored_and_processed() -> None:
    result = evaluate(tiny.model(), [document(100, 1)], protocol="sliding", windows=[32], stride=16)
    n = math.ceil((100 - 31) / 16) + 1
    expected = {"documents": 1, "skipped_short": 0, "skipped_empty": 0, "tokens_scored": 100}
    assert result.counts == expected | {"tokens_processed": 32 * n, "windows": n}


def test_max_tokens_cuts_each_document() -> None:
    whole = evaluate(tiny.model(), [document(50, 1)], protocol="sliding", windows=[20], stride=5)
    long = Document("doc-1", f"{document(50, 1).text} 9 9 9 9 9")
    cut = evaluate(tiny.model(), [long], protocol="sliding", windows=[20], stride=5, max_tokens=50)
    assert cut.rows == whole.rows


def test_rows_with_lowered_min_tokens_score_what_there_is() -> None:
    rows = evaluate(tiny.model(), [document(30, 1), document(80, 2)], lengths=[20, 40, 60], min_tokens=20).rows
    assert [row["tokens"] for row in rows] == [19 + 19, 30 + 39, 30 + 59]
    assert [row["tokens_last"] for row in rows] == [19 + 19, 11 + 20, 20]


def test_no_document_long_enough_is_an_error_that_names_the_longest() -> None:
    with pytest.raises(DataError, match="no document has 200 tokens: the longest of 3 has 101"):
        evaluate(tiny.model(), DOCS, lengths=[200])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "lengths: none given"),
        ({"protocol": "sliding"}, "windows: none given"),
        ({"protocol": "slide", "windows": [16]}, "'slide' is unknown .* did you mean 'sliding'"),
        ({"lengths": [16], "windows": [16]}, r"takes lengths \(--length\), not windows"),
        ({"protocol": "sliding", "lengths": [16], "windows": [16]}, r"takes windows \(--window\), not lengths"),
        ({"protocol": "rolling", "windows": [16]}, r"takes lengths \(--length\), not windows"),
        ({"protocol": "stream", "lengths": [16]}, r"takes windows \(--window\), not lengths"),
        ({"lengths": [16], "targets": 4}, r"takes lengths \(--length\), not targets"),
        ({"protocol": "same-target", "lengths": [16, 32], "targets": 16}, "don't fit an input of 16 positions"),
        ({"protocol": "same-target", "lengths": [16, 32], "min_tokens": 20}, "min_tokens 20 is less than the longest"),
        ({"protocol": "rolling", "lengths": [16], "bos": "never"}, "leave bos at auto"),
        ({"lengths": [16], "stride": 4}, r"takes lengths \(--length\), not stride"),
        ({"lengths": [1]}, "at least 2, got 1"),
        ({"lengths": [16.0]}, "whole number"),
        ({"lengths": [True, 16]}, "whole number"),
        ({"lengths": [16, 16]}, "twice"),
        ({"protocol": "sliding", "windows": [64, 16], "stride": 16}, "too long for a window of 16: at most 15"),
        ({"protocol": "sliding", "windows": [16], "stride": 0}, "stride must be"),
        ({"lengths": [16], "batch_size": 0}, "batch_size must be"),
        ({"lengths": [16], "max_documents": 0}, "max_documents must be"),
        ({"lengths": [16], "max_tokens": 12}, "max_tokens 12 cuts every document below 16"),
        ({"lengths": [16], "bos": "sometimes"}, "sometimes"),
    ],
)
def test_contradicting_arguments_are_one_line_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        evaluate(tiny.model(), DOCS, **settings)
    assert "\n" not in str(error.value)


def test_a_stream_keeps_documents_of_one_token() -> None:
    docs = [document(40, 1), Document("one", "7"), document(40, 2)]
    result = evaluate(tiny.model(), docs, protocol="stream", windows=[30], stride=10)
    assert result.counts["skipped_empty"] == 0
    assert result.document_ids == ["doc-1", "one", "doc-2"]
    assert {record.document: len(record) > 0 for record in result.losses[30]}["one"]


def test_a_stream_without_a_window_is_an_error() -> None:
    with pytest.raises(DataError, match="90 tokens are too few for a window of 80"):
        evaluate(tiny.model(), DOCS[:1], protocol="stream", windows=[80], stride=16)


def test_a_loss_that_is_not_a_number_names_document_and_token() -> None:
    class Poisoned(Counter):
        def believe(self, ids: Tensor) -> Tensor:
            return super().believe(ids).masked_fill(ids[..., None] == 77, math.nan)

    words = ["5"] * 60
    words[40] = "77"
    with pytest.raises(CtxextError, match=r"document 'bad': the loss of token 41 is nan"):
        evaluate(
            Poisoned(),
            [Document("good", "5 " * 60), Document("bad", " ".join(words))],
            protocol="sliding",
            windows=[16],
        )


def test_a_perplexity_too_large_for_a_number_is_none_beside_its_loss() -> None:
    model = tiny.model()
    model.lm_head.weight.data *= 1e4
    [row] = evaluate(model, DOCS, lengths=[50]).rows
    assert row["nll"] > 800
    assert row["perplexity"] is None


def test_progress_counts_tokens_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    result = evaluate(tiny.model(), DOCS, lengths=[50], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(50, 150), (100, 150), (150, 150)]
    assert result.counts["tokens_processed"] == 150


def test_the_protocol_is_spelt_out() -> None:
    result = evaluate(tiny.model(), DOCS, protocol="sliding", windows=[40, 20], max_documents=2)
    limits = {"max_documents": 2, "max_tokens": None, "min_tokens": 40}
    settings = {"windows": [20, 40], "strides": [19, 39], "bos": "auto", "bos_id": BOS}
    assert result.protocol == {"name": "sliding", "version": 1, "mode": "pass", **settings, **limits}


def test_a_model_in_training_is_scored_without_dropout() -> None:
    model = tiny.model(attention_dropout=0.5)
    expected = evaluate(model, DOCS, lengths=[50]).rows
    assert evaluate(model.train(), DOCS, lengths=[50]).rows == expected
    assert model.training
