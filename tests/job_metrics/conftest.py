"""One pool for the tests on ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from asking_job import AskJob

from zerocheck.ranks import Pool


@pytest.fixture(scope="session")
def metrics_pool() -> Iterator[Pool]:
    with Pool("metric_targets:run", patience_s=60.0) as pool:
        yield pool


@pytest.fixture
def ask_job(metrics_pool: Pool) -> AskJob:
    """Run a call on so many ranks; what each returned."""

    def run(call: str, ranks: int = 2, **given: Any) -> list[dict[str, Any]]:
        payload = json.dumps({"call": call, **given}).encode()
        result = metrics_pool.wait(metrics_pool.submit(ranks, payload))
        try:
            assert result.outcome == "finished", result.summary(stacks=True)
            return [json.loads(one or b"null") for one in result.payloads]
        finally:
            result.release()

    return run
