"""Settings for all tests: no network, repeatable, deprecations of Transformers are errors."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import tiny

# These models are so small that a second thread only waits, and on a busy machine waits long.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def strictly() -> Iterator[None]:
    """What would be a warning of Transformers about ctxext is an error."""
    with tiny.strictly():
        yield
