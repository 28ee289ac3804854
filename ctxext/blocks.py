"""Training data: documents as blocks of one length, each token with the position at which the model is to see it.

Reading documents is data.py's part, the loop that trains on blocks training.py's.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxext.data import Document, tokenize
from ctxext.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHUFFLED = 256
"""Blocks that are shuffled at a time; as many are held in memory."""
IGNORED = -100
"""The label of a token that is not scored; what torch's cross-entropy leaves out by default."""

Ints = NDArray[np.int64]


class Block(NamedTuple):
    """Tokens that are read together.

    Attributes:
        ids: ``[T]``.
        positions: ``[T]``; where they don't ascend, another piece begins, which sees nothing of those before.
        labels: ``[T]``: at each position the id that is to be predicted from what stands before it, which is its own
            id, or ``IGNORED`` where nothing of the same piece does.
    """

    ids: Ints
    positions: Ints
    labels: Ints

    def squeezed(self, target: int, shown: int) -> Block:
        """The block with its gap, drawn evenly to show up to ``target`` tokens, as if drawn to show ``shown`` of them.

        Only for a block with positions ``pose``; without a gap it stays as it is.
        """
        length = len(self.ids)
        places = np.arange(length, dtype=np.int64)
        gap = (self.positions - places) * (shown - length + 1) // (target - length + 1)
        return self._replace(positions=places + gap)

    @property
    def targets(self) -> int:
        """How many tokens are scored."""
        return int((self.labels != IGNORED).sum())

    def targets_beyond(self, length: int) -> int:
        """How many of them stand at a position that a model trained to ``length`` tokens has not seen."""
        return int(((self.labels != IGNORED) & (self.positions >= length)).sum())


@dataclass(frozen=True)
class Packing:
    """How documents become blocks.

    Attributes:
        length: tokens of a block.
        pack: ``documents``: a block is filled with one document after the other, none of which sees another, and a
            document that is cut goes on in the next block as one of its own. ``concat``: all documents are one text.
        positions: ``consecutive``, or ``pose``: the block is cut at random in two, and the second part moved away by a
            random distance, so that blocks of ``length`` show relative positions up to ``target``. Every block is then
            from one document, unless ``pack`` is ``concat``.
        target: the length to show with ``pose``.
        seed: of the order of blocks, and of ``pose``.

    PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training (https://arxiv.org/abs/2309.10400),
    section 3.2, with two parts whose text is contiguous; here the cut is drawn evenly from all there are.
    """

    length: int
    pack: str = "documents"
    positions: str = "consecutive"
    target: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Place:
    """Where the next block is: enough to go on from there without reading the text before again.

    Attributes:
        epoch: times that all documents have been read.
        group: groups of blocks before, in this epoch.
        document: documents before the group's first token.
        offset: tokens of its document before that.
        taken: blocks of the group that have been taken.
        digest: of the blocks that have been taken of the group, to notice that the text has changed.
    """

    epoch: int = 0
    group: int = 0
    document: int = 0
    offset: int = 0
    taken: int = 0
    digest: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Blocks:
    """An endless iterator over blocks, in an order that depends on data and seed alone.

    Documents are read in their order, again and again; groups of ``SHUFFLED`` blocks are shuffled, differently each
    time. What is left over at the end of the data is dropped.

    Args:
        read: gives all documents, the same each time.
        tokenizer: its BOS token opens each document and its end-of-sequence token closes it, where it has them.
        packing: what blocks are like.
        place: where to go on.
    """

    def __init__(
        self,
        read: Callable[[], Iterator[Document]],
        tokenizer: PreTrainedTokenizerBase,
        packing: Packing,
        place: Place | None = None,
    ) -> None:
        if packing.positions == "pose" and packing.target <= packing.length:
            raise ConfigError(
                f"positions pose shows {packing.length} tokens as if they were spread over {packing.target}: give a "
                "sequence_length below that"
            )
        self._read, self._tokenizer, self._packing = read, tokenizer, packing
        self._start = place or Place()
        self._groups = self._all_groups(self._start)
        self._group: list[Block] = []
        self._here = self._next = self._start
        self._digest = hashlib.sha256()
        if self._start.taken:
            self._open_group()
            for _ in range(self._start.taken):
                next(self)
            if self.place.digest != self._start.digest:
                raise DataError("the data set has changed since the checkpoint was written: training can't go on")

    def __iter__(self) -> Blocks:
        return self

    def __next__(self) -> Block:
        if self._here.taken >= len(self._group):
            self._open_group()
        block = self._group[self._here.taken]
        self._digest.update(block.ids.tobytes())
        self._digest.update(block.positions.tobytes())
        self._here = Place(**{**self._here.as_dict(), "taken": self._here.taken + 1})
        return block

    @property
    def place(self) -> Place:
        """Where the next block is."""
        return Place(**{**self._here.as_dict(), "digest": self._digest.hexdigest() if self._here.taken else ""})

    def _open_group(self) -> None:
        self._here, self._group = next(self._groups)
        self._digest = hashlib.sha256()

    def _all_groups(self, place: Place) -> Iterator[tuple[Place, list[Block]]]:
        """Every group from ``place`` on, shuffled, with its own place."""
        for epoch in itertools.count(place.epoch):
            group = place.group
            blocks = self._epoch(place.document, place.offset)
            document, offset = place.document, place.offset
            while found := list(itertools.islice(blocks, SHUFFLED)):
                random = np.random.default_rng([self._packing.seed, epoch, group])
                order = random.permutation(len(found))
                here = Place(epoch, group, document, offset)
                yield here, [self._placed(found[i][0], random) for i in order]
                document, offset = found[-1][1]
                group += 1
            if group == 0:
                raise self._too_short()
            place = Place(epoch + 1)

    def _epoch(self, document: int, offset: int) -> Iterator[tuple[list[list[int]], tuple[int, int]]]:
        """Blocks as pieces of token ids, and the document and offset at which the next one begins."""
        length, whole = self._packing.length, self._packing.pack == "documents" and self._packing.positions == "pose"
        pieces: list[list[int]] = []
        room = length
        for index, text in enumerate(itertools.islice(self._read(), document, None), start=document):
            ids = self._ids(text)
            while offset < len(ids):
                piece = ids[offset : offset + room]
                offset += len(piece)
                if whole and len(piece) < length:
                    break  # a block is from one document, or not at all
                pieces.append(piece)
                room -= len(piece)
                if room == 0:
                    yield pieces, (index, offset)
                    pieces, room = [], length
            offset = 0

    def _ids(self, document: Document) -> list[int]:
        ids = tokenize(self._tokenizer, document.text)
        first, last = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        return [*([] if first is None else [first]), *ids, *([] if last is None else [last])] if ids else []

    def _placed(self, pieces: list[list[int]], random: np.random.Generator) -> Block:
        """The block with its positions."""
        length = self._packing.length
        ids = np.fromiter(itertools.chain(*pieces), dtype=np.int64, count=length)
        labels = ids.copy()
        if self._packing.pack == "concat":
            positions = np.arange(length, dtype=np.int64)
            labels[0] = IGNORED
        else:
            positions = np.concatenate([np.arange(len(piece), dtype=np.int64) for piece in pieces])
            labels[positions == 0] = IGNORED
        if self._packing.positions == "pose":
            cut = int(random.integers(1, length))
            positions[cut:] += int(random.integers(0, self._packing.target - length, endpoint=True))
        return Block(ids, positions, labels)

    def _too_short(self) -> DataError:
        length = self._packing.length
        if self._packing.pack == "documents" and self._packing.positions == "pose":
            longest = max((len(self._ids(document)) for document in self._read()), default=0)
            return DataError(
                f"no document has {length} tokens, as a block with positions pose needs (the longest has {longest}): "
                "lower sequence_length, or join documents with pack: concat"
            )
        total = sum(len(self._ids(document)) for document in self._read())
        return DataError(f"the whole data set has {total} tokens, less than one block of {length} (sequence_length)")
