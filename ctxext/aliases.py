"""Short names of the data sets that long-context papers report, pinned to a commit of the hub.

Loading them is in ``data``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class HubSource:
    """Where on the hub documents are.

    ``split`` None means the first of test, validation, train. ``json_lines`` names, for each split, the files with one
    JSON object a line (pattern inside the repository); they are read as they are, past the repository's loading script.
    ``rows_are_lines`` says that a document is many rows, to be joined by :func:`articles`.
    """

    hub_id: str
    revision: str | None = None
    config_name: str | None = None
    split: str | None = None
    text_column: str = "text"
    json_lines: Mapping[str, str] | None = None
    rows_are_lines: bool = False

    def __str__(self) -> str:
        return self.hub_id if self.revision is None else f"{self.hub_id}@{self.revision}"


ALIASES: Mapping[str, HubSource] = MappingProxyType(
    {
        # Parquet copy of deepmind/pg19, which is a loading script: books from before 1919, 100 in the test split.
        "pg19": HubSource("emozilla/pg19", "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8", split="test"),
        # The repository has a loading script beside its data: gzipped JSON lines with the fields text and meta.
        "proofpile": HubSource(
            "hoskinson-center/proof-pile",
            "490b980249446f2f3bd2df3a8cf085d0f2de240a",
            split="test",
            json_lines=MappingProxyType(
                {
                    "train": "train/proofpile_train_*.jsonl.gz",
                    "validation": "dev/proofpile_dev.jsonl.gz",
                    "test": "test/proofpile_test.jsonl.gz",
                }
            ),
        ),
        # Parquet with the columns report and summary; 973 reports in the test split.
        "govreport": HubSource(
            "ccdv/govreport-summarization",
            "4e21184e01ae8017e2c036e180fe5e541fef60a0",
            config_name="document",
            split="test",
            text_column="report",
        ),
        # Parquet with one line of Wikipedia a row.
        "wikitext": HubSource(
            "Salesforce/wikitext",
            "b08601e04326c79dfdd32d625aee71d232d685c3",
            config_name="wikitext-103-raw-v1",
            split="test",
            rows_are_lines=True,
        ),
    }
)
"""Name -> source. The commit fixes text and order of the documents, as long as the hub keeps it."""

# The heading of an article is `= Title =`; sections have more signs, with blanks between them: `= = Section = =`.
_TITLE = re.compile(r"= (?!=).+(?<!=) =")


def articles(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join numbered lines of WikiText into articles, each with the number of its first line.

    An article starts at a line ``= Title =`` between blank ones (or at an end of the text). Lines are put together
    unchanged, so that the articles hold all of the text; what stands before the first title is an article too, unless
    it is blank. No more than one article is held at a time.

    Reference: Pointer Sentinel Mixture Models (https://arxiv.org/abs/1609.07843), which WikiText comes from.
    """
    current, ahead = itertools.tee(lines)
    next(ahead, None)
    start, before = 1, ""
    parts: list[str] = []
    for (number, line), (_, after) in itertools.zip_longest(current, ahead, fillvalue=(0, "")):
        if _TITLE.fullmatch(line.strip()) and not before.strip() and not after.strip():
            if any(part.strip() for part in parts):
                yield start, "".join(parts)
            start, parts = number, []
        parts.append(line)
        before = line
    if any(part.strip() for part in parts):
        yield start, "".join(parts)
