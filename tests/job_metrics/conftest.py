"""One pool for the tests on ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from borrowing import Ask, answers, shared

from zerocheck.ranks import Pool


@pytest.fixture(scope="session")
def metrics_pool() -> Iterator[Pool]:
    with shared(Pool("metric_targets:run", patience_s=60.0)) as pool:
        yield pool


@pytest.fixture
def ask_job(metrics_pool: Pool) -> Ask:
    """Run a call on so many ranks; what each returned."""

    def run(call: str, ranks: int = 2, **given: Any) -> list[dict[str, Any]]:
        return answers(metrics_pool, ranks, call=call, **given)

    return run
