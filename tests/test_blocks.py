"""Packing: every token once, in order, at the position it has in its document; the same blocks wherever one starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxext import blocks as blocks_module
from ctxext.blocks import IGNORED, Block, Blocks, Packing, Place
from ctxext.data import Document
from ctxext.errors import ConfigError, DataError

BOS, EOS = 1, 2


class Letters:
    """One token per character, so that a test knows what each token is."""

    bos_token_id, eos_token_id = BOS, EOS

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def documents(*texts: str) -> Any:
    return lambda: iter([Document(f"d{i}", text) for i, text in enumerate(texts)])


def taken(count: int, read: Any, packing: Packing, place: Place | None = None) -> list[Block]:
    return list(itertools.islice(Blocks(read, Letters(), packing, place), count))


def text_of(block: Block) -> str:
    return "".join({BOS: "<", EOS: ">"}.get(i, chr(i)) for i in block.ids.tolist())


def in_order(found: list[Block]) -> list[str]:
    return sorted(map(text_of, found))


def test_documents_fill_blocks_one_after_the_other_each_from_position_zero() -> None:
    (block,) = taken(1, documents("abc", "defg"), Packing(10))
    assert text_of(block) == "<abc><defg"
    assert block.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_the_first_token_of_a_piece_is_not_predicted_from_another_document() -> None:
    (block,) = taken(1, documents("abc", "defg"), Packing(10))
    assert block.labels.tolist() == [IGNORED, *block.ids[1:5], IGNORED, *block.ids[6:]]
    assert block.targets == 8


def test_a_document_that_is_cut_goes_on_as_a_piece_of_its_own() -> None:
    found = taken(2, documents("abcdefgh", "ijk"), Packing(6))
    assert in_order(found) == ["<abcde", "fgh><i"]
    rest = next(block for block in found if text_of(block) == "fgh><i")
    assert rest.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert rest.labels[0] == IGNORED


def test_concatenated_documents_are_one_text() -> None:
    (block,) = taken(1, documents("abc", "defg"), Packing(10, pack="concat"))
    assert block.positions.tolist() == list(range(10))
    assert block.labels.tolist() == [IGNORED, *block.ids[1:]]


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    length=st.integers(2, 17),
    shuffled=st.integers(1, 5),
)
@settings(max_examples=80, deadline=None)
def test_an_epoch_holds_every_token_once_but_for_what_is_left_at_the_end(
    lengths: list[int], length: int, shuffled: int
) -> None:
    texts = [chr(97 + i) * n for i, n in enumerate(lengths)]
    stream = "".join(f"<{text}>" for text in texts if text)
    whole = len(stream) // length
    if whole == 0:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "SHUFFLED", shuffled)
        found = taken(whole, documents(*texts), Packing(length))
    assert in_order(found) == sorted(stream[i * length : (i + 1) * length] for i in range(whole))


def test_each_epoch_has_its_own_order_and_the_same_blocks() -> None:
    text = "".join(chr(97 + i % 26) for i in range(400))
    found = taken(80, documents(text), Packing(10))
    first, second = found[:40], found[40:]
    assert in_order(first) == in_order(second)
    assert list(map(text_of, first)) != list(map(text_of, second))


def test_another_seed_is_another_order() -> None:
    text = "".join(chr(97 + i % 26) for i in range(400))
    first, second = (list(map(text_of, taken(40, documents(text), Packing(10, seed=seed)))) for seed in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize(
    "packing", [Packing(7), Packing(7, "concat"), Packing(7, positions="pose", target=50)], ids=str
)
@pytest.mark.parametrize("done", [0, 1, 3, 4, 9, 10, 23])
def test_going_on_from_any_place_gives_the_blocks_that_would_have_come(
    monkeypatch: pytest.MonkeyPatch, packing: Packing, done: int
) -> None:
    monkeypatch.setattr(blocks_module, "SHUFFLED", 4)
    read = documents("ab" * 13, "", "xyz" * 9, "q", "m" * 20)
    stream = Blocks(read, Letters(), packing)
    for _ in range(done):
        next(stream)
    place = Place(**stream.place.as_dict())
    expected, found = (
        list(itertools.islice(blocks, 20)) for blocks in (stream, Blocks(read, Letters(), packing, place))
    )
    for one, other in zip(expected, found, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_going_on_reads_no_text_that_stands_before_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "SHUFFLED", 2)
    texts = ["a" * 8, "b" * 8, "c" * 8, "d" * 8]
    stream = Blocks(documents(*texts), Letters(), Packing(10))
    for _ in range(3):
        next(stream)
    place = stream.place
    tokenized: list[str] = []

    class Watching(Letters):
        def __call__(self, text: str, **_: Any) -> Any:
            tokenized.append(text[:1])
            return super().__call__(text)

    next(Blocks(documents(*texts), Watching(), Packing(10), place))
    assert set(tokenized) == {"b", "c", "d"}  # the second document's end is where the first group ended


def test_text_that_has_changed_since_is_noticed() -> None:
    stream = Blocks(documents("a" * 50), Letters(), Packing(10))
    next(stream), next(stream)
    with pytest.raises(DataError, match="has changed since"):
        Blocks(documents("a" * 20 + "b" + "a" * 29), Letters(), Packing(10), stream.place)


def test_pose_cuts_a_block_in_two_and_moves_the_second_part_away() -> None:
    found = taken(200, documents("a" * 2000), Packing(10, positions="pose", target=64))
    gaps = []
    for block in found:
        steps = np.diff(block.positions)
        assert block.positions[0] == 0
        assert (steps >= 1).all()
        assert (steps > 1).sum() <= 1
        assert block.positions[-1] < 64
        gaps.append(int(block.positions[-1]) - 9)
    assert min(gaps) < 5  # every gap from 0
    assert max(gaps) > 49  # to the whole target
    cuts = {int(np.diff(block.positions).argmax()) + 1 for block in found if block.positions[-1] > 9}
    assert cuts == set(range(1, 10))


def test_pose_takes_each_block_from_one_document() -> None:
    found = taken(4, documents("abcdefghij", "klm", "nopqrstuvw"), Packing(6, positions="pose", target=20))
    assert in_order(found) == sorted(["<abcde", "fghij>", "<nopqr", "stuvw>"])


def test_pose_needs_a_document_that_fills_a_block() -> None:
    with pytest.raises(DataError, match=r"no document has 20 tokens.*the longest has 12"):
        taken(1, documents("a" * 10, "b" * 5), Packing(20, positions="pose", target=64))


def test_pose_needs_a_target_beyond_the_block() -> None:
    with pytest.raises(ConfigError, match="sequence_length below"):
        taken(1, documents("a" * 10), Packing(20, positions="pose", target=20))


def test_less_text_than_a_block_is_an_error() -> None:
    with pytest.raises(DataError, match=r"has 12 tokens, less than one block of 20"):
        taken(1, documents("", "a" * 10), Packing(20))


def test_tokens_beyond_the_trained_length_are_counted_by_position() -> None:
    (block,) = taken(1, documents("abcdefgh", "ijk"), Packing(14))
    # 10 tokens of the first document (positions 0 to 9), 4 of the second
    assert block.targets_beyond(4) == 6
    assert block.targets_beyond(10) == 0


def test_a_tokenizer_without_special_tokens_adds_none() -> None:
    class Bare(Letters):
        bos_token_id = eos_token_id = None  # type: ignore[assignment]

    block = next(Blocks(documents("abc", "def"), Bare(), Packing(6)))
    assert text_of(block) == "abcdef"


def test_data_that_breaks_off_raises_its_own_error() -> None:
    def read() -> Iterator[Document]:
        yield Document("a", "a" * 10)
        raise DataError("row 2 can't be read")

    with pytest.raises(DataError, match="row 2"):
        taken(1, read, Packing(5))
