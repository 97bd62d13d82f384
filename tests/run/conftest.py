"""Rank processes that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zerocheck.ranks.pool import Pool
from zerocheck.run.trial import TARGET


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """For all runs of the module; they must survive every one of them."""
    with Pool(TARGET, patience_s=1.5) as running:
        yield running
