"""The same ranks, with DeepSpeed imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from borrowing import borrowed

from zerocheck.ranks.pool import Pool


@pytest.fixture(scope="module")
def pool(deepspeed_pool: Pool) -> Iterator[Pool]:
    with borrowed(deepspeed_pool, patience_s=60.0) as ranks:
        yield ranks
