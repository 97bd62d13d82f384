"""Rank processes that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from borrowing import borrowed

from zerocheck.ranks.pool import Pool


@pytest.fixture(scope="module")
def pool(session_pool: Pool) -> Iterator[Pool]:
    with borrowed(session_pool, patience_s=60.0) as ranks:
        yield ranks
