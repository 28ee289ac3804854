"""What synthetic prompts are made of: pseudo-words, numbers and uuids, drawn from a seed and never drawn twice.

No list of words is bundled. How a task puts them together is in ruler.py.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterator
from typing import Generic, TypeVar

from ctxext.errors import ConfigError

CONSONANTS = "bdfklmnprstvz"
VOWELS = "aeiou"
SYLLABLES = tuple(consonant + vowel for consonant in CONSONANTS for vowel in VOWELS)
WORD_SYLLABLES = 3
"""Syllables of every word: of equal length, no word can stand inside another and be taken for it."""
WORD_COUNT = len(SYLLABLES) ** WORD_SYLLABLES

Item = TypeVar("Item")


class Stream(Generic[Item]):
    """Items drawn as they are needed; the first n are the same whatever was asked for before."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items, self._drawn = items, list[Item]()

    def first(self, n: int) -> list[Item]:
        """A list of the first ``n`` items. Raises ConfigError if there are fewer."""
        self._drawn += itertools.islice(self._items, max(0, n - len(self._drawn)))
        if len(self._drawn) < n:
            raise ConfigError(
                f"there are only {len(self._drawn):,} different items, {n:,} are needed: lower the length"
            )
        return self._drawn[:n]


def words(rng: random.Random) -> Iterator[str]:
    """All pseudo-words of three syllables (274,625, six lower-case letters each) in random order, like "kabolu"."""
    for number in permutation(rng, WORD_COUNT):
        rest, last = divmod(number, len(SYLLABLES))
        first, middle = divmod(rest, len(SYLLABLES))
        yield SYLLABLES[first] + SYLLABLES[middle] + SYLLABLES[last]


def numbers(rng: random.Random, digits: int) -> Iterator[str]:
    """All numbers of exactly ``digits`` digits in random order."""
    least = 10 ** (digits - 1)
    return (str(least + offset) for offset in permutation(rng, 9 * least))


def uuids(rng: random.Random) -> Iterator[str]:
    """Random uuids (version 4) without end: 122 random bits each, so no two are equal."""
    while True:
        yield str(uuid.UUID(int=rng.getrandbits(128), version=4))


def permutation(rng: random.Random, n: int) -> Iterator[int]:
    """0 to n - 1 in random order, in time and memory of what is taken from it (a Fisher-Yates shuffle)."""
    moved: dict[int, int] = {}  # positions that no longer hold their own number
    for i in range(n):
        j = rng.randrange(i, n)
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)
