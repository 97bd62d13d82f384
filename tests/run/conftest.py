"""Rank processes that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from borrowing import borrowed
from collected import RunsOf

from zerocheck.ranks.pool import Pool


@pytest.fixture(scope="module")
def pool(session_pool: Pool) -> Iterator[Pool]:
    """For all runs of the module; they must survive every one of them."""
    with borrowed(session_pool, patience_s=1.5) as ranks:
        yield ranks


@pytest.fixture
def run(pool: Pool, tmp_path: Path) -> RunsOf:
    return RunsOf(pool, tmp_path)
