"""Evaluation text: documents from a builtin, local files or the hub, and their tokens.

The short names of data sets on the hub are in ``aliases``. Which parts of a document are scored is decided in
``evaluation.perplexity``.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import numpy as np
from datasets import load_dataset
from numpy.typing import NDArray

from ctxext.aliases import ALIASES, HubSource, articles
from ctxext.errors import ConfigError, DataError, nearest
from ctxext.models import explain, looks_like_path, model_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PYTHON_DOCS = "builtin:python-docs"
PYTHON_STDLIB = "builtin:python-stdlib"
# Folders of the standard library that some distributions leave out, or that hold what isn't the library's own.
_NOT_STDLIB = {"__pycache__", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
_NOT_STDLIB |= {"dist-packages", "test", "tests", "tkinter", "turtledemo", "venv"}
_LOADERS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}
_SPLITS = ("test", "validation", "train")
_TRAINING_SPLITS = ("train", "validation", "test")
_TOKEN_IDS = ("input_ids", "tokens")  # what columns of token ids are called
_POLICIES = ("auto", "always", "never")


@dataclass(frozen=True)
class Document:
    """One text of a data set; ``id`` names its source and row, without the folders above it."""

    id: str
    text: str


def load_documents(
    dataset: str,
    *,
    config_name: str | None = None,
    split: str | None = None,
    text_column: str | None = None,
    revision: str | None = None,
    for_training: bool = False,
) -> Iterator[Document]:
    """Stream the documents of ``dataset`` in a fixed order.

    The source is looked up at once; rows are read, and their errors raised, as the iterator gets to them.

    Args:
        dataset: one of

            - ``builtin:python-docs``: one document, the topics of Python's language reference, longest first (ties by
              name), joined by a blank line. Its text differs between Python versions.
            - ``builtin:python-stdlib``: the source files of Python's standard library, one document a file, longest
              first (ties by name). They differ between Python versions too.
            - a ``.txt`` file (one document), a ``.jsonl`` or ``.parquet`` file (one document a row), or a folder of
              them (sorted by name, without its subfolders).
            - ``pg19``, ``proofpile``, ``govreport`` or ``wikitext``: the test split of PG-19, the proof-pile,
              GovReport and WikiText-103 (raw, its lines joined into articles), from a fixed commit on the hub
              (:data:`ctxext.aliases.ALIASES`). A file or folder of that name in the working directory comes first.
            - a hub id.
        config_name: configuration of a hub data set.
        split: split of a hub data set; by default the first of test, validation, train that it has. The split is part
            of each document's id.
        text_column: where the text of a row is; by default ``text`` (``report`` for ``govreport``).
        revision: branch, tag or commit of a hub data set; by default the present one, for a short name its fixed one.
            Only a commit fixes the text; the hub's own branch ``refs/convert/parquet``, where it has one, holds a
            data set as parquet, but follows its changes.
        for_training: take the split train where the hub data set has one and no other is given.

    Raises:
        DataError: the data set can't be found or read, is empty, has a row without text, or holds token ids instead.
    """
    if not dataset.strip():
        raise DataError(
            f"the data set's name is empty: give a file, a folder, a hub id, {PYTHON_DOCS} or {PYTHON_STDLIB}"
        )
    is_builtin = dataset.startswith("builtin:")
    path = Path(os.path.expanduser(dataset))
    if not is_builtin and not path.exists():
        if looks_like_path(dataset):
            raise DataError(
                f"{dataset!r} not found: it looks like a path, not a hub id (owner/name); check the spelling"
            )
        given = {"config_name": config_name, "split": split, "text_column": text_column, "revision": revision}
        given = {name: value for name, value in given.items() if value is not None}
        return _read_hub(dataset, given, _TRAINING_SPLITS if for_training else _SPLITS)
    if config_name is not None or split is not None or revision is not None:
        raise DataError(
            f"{dataset!r} has no configurations, splits or revisions, only hub data sets have: leave them out"
        )
    return _read_builtin(dataset) if is_builtin else _read_files(_files(path, dataset), text_column or "text")


def dataset_id(dataset: str, *, revision: str | None = None) -> str:
    """``dataset`` as result files show it.

    A local path is cut to its last component, ``local:`` before it; a short name is followed by the repository and
    revision that it stands for, ``pg19 (emozilla/pg19@c021...)``, and a hub id by ``revision`` if one is given.
    """
    id_ = model_id(dataset)
    if id_ in ALIASES:
        source = ALIASES[id_] if revision is None else replace(ALIASES[id_], revision=revision)
        return f"{id_} ({source})"
    return id_ if revision is None else f"{id_}@{revision}"


def require_disjoint(
    train: Iterable[Document], evaluation: Iterable[Document], *, names: str = "training and evaluation data"
) -> None:
    """Refuse to evaluate on what a model was trained on.

    Compared are ids, and whole texts by their sha256; blank texts don't count. Part of a document, or a document with
    other blanks or spelling, is not recognised. Both are read once, and only hashes of ``train`` are kept.
    ``names`` is what the error calls the two.

    Raises:
        DataError: a document of ``evaluation`` has the text or the id of one of ``train``.
    """
    ids, texts = set(), set()
    for document in train:
        ids.add(_sha256(document.id))
        texts.add(_sha256(document.text))
    first, count = "", 0
    for document in evaluation:
        same_text = bool(document.text.strip()) and _sha256(document.text) in texts
        if same_text or _sha256(document.id) in ids:
            count += 1
            first = first or f"{document.id!r} is in both (the same {'text' if same_text else 'id'})"
    if count:
        raise DataError(
            f"{names} overlap in {count} document{'s' if count > 1 else ''}: {first}; evaluate on "
            "another split, take them out, or rename files that only share a name"
        )


def without_overlap(train: Iterable[Document], held_out: Iterable[Document]) -> Iterator[Document]:
    """The documents of ``train``, each compared with all of ``held_out`` as :func:`require_disjoint` compares them.

    ``held_out`` is read first, and only hashes of it are kept. Raises DataError at the first document that is in both.
    """
    hashes = {_sha256(part) for document in held_out for part in (document.id, document.text) if part.strip()}
    for document in train:
        if _sha256(document.text) in hashes or _sha256(document.id) in hashes:
            raise DataError(
                f"{document.id!r} is a document of the training data and of the evaluation data: evaluate on another "
                "split or data set, or rename files that only share a name"
            )
        yield document


def fingerprint(documents: Iterable[Document]) -> str:
    """The sha256 of ids and texts in order, each preceded by its length, so that no two lists share one."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.id, document.text):
            content = part.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "big"))
            digest.update(content)
    return digest.hexdigest()


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def resolve_bos(tokenizer: PreTrainedTokenizerBase, policy: Literal["auto", "always", "never"]) -> int | None:
    """The token id to put in front of every window, or None.

    "auto" does what the tokenizer does by itself: its BOS if an encoded text begins with it. Raises ConfigError for an
    unknown policy, and for "always" with a tokenizer that has no BOS.
    """
    if policy not in _POLICIES:
        near = nearest(policy, _POLICIES)
        raise ConfigError(
            f"bos {policy!r} is not auto, always or never" + (f": did you mean {near!r}?" if near else "")
        )
    bos_id: int | None = tokenizer.bos_token_id
    if policy == "never":
        return None
    if policy == "always":
        if bos_id is None:
            raise ConfigError(
                "bos 'always' needs a tokenizer with a BOS token, and this one has none: use auto or never"
            )
        return bos_id
    return bos_id if bos_id is not None and list(tokenizer("").input_ids[:1]) == [bos_id] else None


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of ``text``, without special tokens in front or behind, however long it is."""
    # verbose=False: a text longer than the model's window is the point here, not worth a warning.
    return list(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False).input_ids)


def token_sizes(tokenizer: PreTrainedTokenizerBase, text: str) -> NDArray[np.int32]:
    """How many bytes each token of ``text`` adds to it in UTF-8; zeros if the tokenizer doesn't tell (slow ones)."""
    if not getattr(tokenizer, "is_fast", False):
        return np.zeros(len(tokenize(tokenizer, text)), dtype=np.int32)
    encoded = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    per_character = 1 + (points >= 0x80) + (points >= 0x800).astype(np.int64) + (points >= 0x10000)
    upto = np.concatenate([[0], np.cumsum(per_character)])
    # Tokens may share a character, and leave out blanks between them: each is counted once, with what ends it.
    ends = np.maximum.accumulate(np.array([end for _, end in encoded.offset_mapping], dtype=np.int64))
    return np.diff(upto[ends], prepend=0).astype(np.int32)


def _read_builtin(dataset: str) -> Iterator[Document]:
    builtins = {PYTHON_DOCS: _python_docs, PYTHON_STDLIB: _python_stdlib}
    if dataset not in builtins:
        near = nearest(dataset, builtins)
        hint = f": did you mean {near!r}?" if near else ""
        raise DataError(f"{dataset!r} is not a builtin data set ({', '.join(builtins)}){hint}")
    return iter(builtins[dataset]())


def _python_docs() -> list[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            f"{PYTHON_DOCS!r} needs pydoc_data, which this Python lacks: use a .txt file instead"
        ) from error
    texts = [text for _, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0]))]
    return [Document(PYTHON_DOCS, "\n\n".join(texts))]


def _python_stdlib() -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(root) for file in root.rglob("*.py")]
    names = [name for name in names if _NOT_STDLIB.isdisjoint(name.parts)]
    if not names:
        raise DataError(f"{PYTHON_STDLIB!r} needs the library's source files, which this Python lacks: use a folder")
    texts = {name.as_posix(): (root / name).read_text(encoding="utf-8", errors="replace") for name in names}
    ordered = sorted(texts.items(), key=lambda item: (-len(item[1]), item[0]))
    return [Document(f"{PYTHON_STDLIB}/{name}", text) for name, text in ordered]


def _files(path: Path, dataset: str) -> list[Path]:
    """The data files that ``path`` stands for, in order; never an empty list."""
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        if f"{path.resolve().name}.py" in names:
            raise _script_error(dataset)
        files = [path / name for name in names if Path(name).suffix.lower() in _LOADERS and name[0] != "."]
        files = [file for file in files if file.is_file()]
        if not files:
            found = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise DataError(f"folder {dataset!r} has no {', '.join(_LOADERS)} file (found: {found or 'nothing'})")
        return files
    if path.suffix.lower() == ".py":
        raise _script_error(dataset)
    if path.suffix.lower() not in _LOADERS:
        raise DataError(f"{dataset!r} can't be read: give a {', '.join(_LOADERS)} file, or a folder of them")
    return [path]


def _script_error(dataset: str) -> DataError:
    return DataError(
        f"{dataset!r} is a loading script, which datasets no longer runs: use a parquet copy of it (for pg19: "
        f"emozilla/pg19; the names {', '.join(ALIASES)} need no script) or a local .jsonl file"
    )


def _read_files(files: list[Path], text_column: str) -> Iterator[Document]:
    if text_column != "text" and all(file.suffix.lower() == ".txt" for file in files):
        raise DataError(f"text_column {text_column!r} has no meaning for .txt files: leave it out")
    for file in files:
        if file.stat().st_size == 0:
            raise DataError(f"{file.name!r} is empty: remove it, or put text in it")
        loader = _LOADERS[file.suffix.lower()]
        options = {"sample_by": "document"} if loader == "text" else {}
        column = "text" if loader == "text" else text_column
        count = 0
        for count, row in enumerate(_local_rows(file, loader, options), start=1):
            id_ = file.name if loader == "text" else f"{file.name}:{count}"
            yield Document(id_, _text(row, column, id_))
        if count == 0:
            raise DataError(f"{file.name!r} holds no rows: remove it, or put text in it")


def _local_rows(file: Path, loader: str, options: dict[str, str]) -> Iterator[dict[str, Any]]:
    try:
        with _silent_datasets():
            # A name is a pattern to datasets: unescaped brackets would match other files, or none without an error.
            name = glob.escape(os.path.abspath(file))
            rows = iter(load_dataset(loader, data_files=name, split="train", streaming=True, **options))
        while True:
            with _silent_datasets():
                row = next(rows, None)
            if row is None:
                return
            yield row
    except Exception as error:  # parsers, codecs and file systems each raise their own; all are about the file
        raise DataError(f"{file.name!r} can't be read as {file.suffix.lower()}: {explain(error)}") from error


def _read_hub(dataset: str, given: dict[str, Any], order: Sequence[str]) -> Iterator[Document]:
    if order is _TRAINING_SPLITS:
        given = {"split": None, **given}  # not the split that an alias is evaluated on
    source = replace(ALIASES.get(dataset, HubSource(dataset)), **given)
    name = dataset_id(dataset, revision=given.get("revision"))
    if source.json_lines is not None and source.config_name is not None:
        raise DataError(f"{name!r} has no configurations: leave {source.config_name!r} out")
    try:
        splits = _hub_splits(source)
    except Exception as error:  # whatever is raised here is about the data set or the way to it
        if "scripts are no longer supported" in str(error):
            raise _script_error(dataset) from error
        near = None if "/" in dataset or dataset in ALIASES else nearest(dataset, ALIASES)
        hint = f"; did you mean {near!r}?" if near else ""
        raise DataError(f"can't load {name!r}: {explain(error)}{hint}") from error
    chosen = source.split or next((split for split in order if split in splits), None)
    if chosen not in splits:
        near = nearest(chosen or "", splits)
        hint = f": did you mean {near!r}?" if near else ": give one of them as split"
        raise DataError(f"{name!r} has the splits {', '.join(splits)}, not {chosen or ' or '.join(order)}{hint}")
    return _hub_documents(splits[chosen], source, f"{source.hub_id}:{chosen}")


def _hub_splits(source: HubSource) -> dict[str, Iterable[dict[str, Any]]]:
    """The rows of each split, read as they are needed."""
    if source.json_lines is None:
        splits = load_dataset(source.hub_id, name=source.config_name, revision=source.revision, streaming=True)
        return dict(splits)
    root = f"hf://datasets/{source.hub_id}@{quote(source.revision or 'main', safe='')}"
    files = {split: f"{root}/{pattern}" for split, pattern in source.json_lines.items()}
    # As text: the JSON loader needs the same fields in every row, also in those that nobody reads.
    lines = load_dataset("text", data_files=files, streaming=True)
    return {split: _parsed(rows) for split, rows in lines.items()}


def _parsed(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, Any]]:
    return (json.loads(row["text"]) for row in rows)


def _hub_documents(rows: Iterable[dict[str, Any]], source: HubSource, where: str) -> Iterator[Document]:
    texts = _hub_texts(rows, source.text_column, where)
    for number, text in articles(texts) if source.rows_are_lines else texts:
        yield Document(f"{where}:{number}", text)


def _hub_texts(rows: Iterable[dict[str, Any]], column: str, where: str) -> Iterator[tuple[int, str]]:
    count = 0
    try:
        for count, row in enumerate(rows, start=1):
            yield count, _text(row, column, f"{where}:{count}")
    except DataError:
        raise
    except Exception as error:  # a connection that breaks, or a file that can't be parsed
        raise DataError(f"{where} can't be read after row {count}: {explain(error)}") from error
    if count == 0:
        raise DataError(f"{where} holds no rows: choose another split")


def _text(row: dict[str, Any], column: str, where: str) -> str:
    ids = column if column in row else next((name for name in _TOKEN_IDS if name in row), None)
    if ids is not None and _are_token_ids(row[ids]):
        raise _tokens_error(row, column, ids, where)
    if column not in row:
        near = nearest(column, row)
        hint = f": did you mean {near!r}?" if near else ": name one of them as text_column"
        raise DataError(f"{where} has no column {column!r} but {', '.join(row)}{hint}")
    text = row[column]
    if not isinstance(text, str):
        kind = "nothing" if text is None else f"a value of type {type(text).__name__}"
        raise DataError(f"{where} has {kind} in column {column!r}: every row needs a string there")
    return text


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value[:8])


def _tokens_error(row: dict[str, Any], column: str, ids: str, where: str) -> DataError:
    texts = [name for name, value in row.items() if isinstance(value, str)]
    instead = f"name a column of text as text_column ({', '.join(texts)}), or give" if texts else "give"
    missing = "" if ids == column else f"no column {column!r} but "
    return DataError(
        f"{where} has {missing}token ids in column {ids!r}, which mean something to the tokenizer that made them only: "
        f"{instead} a copy of the data set with text"
    )


@contextmanager
def _silent_datasets() -> Iterator[None]:
    """No log lines of datasets about a local file: the error that follows them says the same."""
    levels = [(handler, handler.level) for handler in logging.getLogger("datasets").handlers]
    for handler, _ in levels:
        handler.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)
