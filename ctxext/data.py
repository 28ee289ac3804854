"""Evaluation text: documents from a builtin, local files or the hub, and their tokens.

Which parts of a document are scored is decided in ``evaluation.perplexity``.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from datasets import load_dataset
from numpy.typing import NDArray

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
_POLICIES = ("auto", "always", "never")


@dataclass(frozen=True)
class Document:
    """One text of a data set; ``id`` names its source and row, without the folders above it."""

    id: str
    text: str


def load_documents(
    dataset: str, *, config_name: str | None = None, split: str | None = None, text_column: str = "text"
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
            - a hub id.
        config_name: configuration of a hub data set.
        split: split of a hub data set; by default the first of test, validation, train that it has. The split is part
            of each document's id.
        text_column: where the text of a row is.

    Raises:
        DataError: the data set can't be found or read, is empty, or has a row without text.
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
        return _read_hub(dataset, config_name, split, text_column)
    if config_name is not None or split is not None:
        raise DataError(f"{dataset!r} has no configurations or splits, only hub data sets have: leave them out")
    return _read_builtin(dataset) if is_builtin else _read_files(_files(path, dataset), text_column)


def dataset_id(dataset: str) -> str:
    """``dataset`` as result files show it: a local path is cut to its last component, ``local:`` before it."""
    return model_id(dataset)


def fingerprint(documents: Iterable[Document]) -> str:
    """The sha256 of ids and texts in order, each preceded by its length, so that no two lists share one."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.id, document.text):
            content = part.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "big"))
            digest.update(content)
    return digest.hexdigest()


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
        "emozilla/pg19) or a local .jsonl file"
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


def _read_hub(dataset: str, config_name: str | None, split: str | None, text_column: str) -> Iterator[Document]:
    try:
        splits = load_dataset(dataset, name=config_name, streaming=True)
    except Exception as error:  # whatever is raised here is about the data set or the way to it
        if "scripts are no longer supported" in str(error):
            raise _script_error(dataset) from error
        raise DataError(f"can't load {dataset!r}: {explain(error)}") from error
    chosen = split if split is not None else next((name for name in _SPLITS if name in splits), None)
    if chosen not in splits:
        near = nearest(chosen or "", splits)
        hint = f": did you mean {near!r}?" if near else ": give one of them as split"
        raise DataError(f"{dataset!r} has the splits {', '.join(splits)}, not {chosen or ' or '.join(_SPLITS)}{hint}")
    return _hub_documents(splits[chosen], f"{dataset}:{chosen}", text_column)


def _hub_documents(rows: Iterable[dict[str, Any]], source: str, text_column: str) -> Iterator[Document]:
    count = 0
    try:
        for count, row in enumerate(rows, start=1):
            yield Document(f"{source}:{count}", _text(row, text_column, f"{source}:{count}"))
    except DataError:
        raise
    except Exception as error:  # a connection that breaks, or a file that can't be parsed
        raise DataError(f"{source} can't be read after row {count}: {explain(error)}") from error
    if count == 0:
        raise DataError(f"{source} holds no rows: choose another split")


def _text(row: dict[str, Any], column: str, where: str) -> str:
    if column not in row:
        near = nearest(column, row)
        hint = f": did you mean {near!r}?" if near else ": name one of them as text_column"
        raise DataError(f"{where} has no column {column!r} but {', '.join(row)}{hint}")
    text = row[column]
    if not isinstance(text, str):
        kind = "nothing" if text is None else f"a value of type {type(text).__name__}"
        raise DataError(f"{where} has {kind} in column {column!r}: every row needs a string there")
    return text


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
