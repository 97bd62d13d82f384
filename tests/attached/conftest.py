"""One pool for the tests on ranks: its zygote takes seconds to start."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from asking import Ask

from zerocheck.ranks import Pool


@pytest.fixture(scope="session")
def attached_pool() -> Iterator[Pool]:
    with Pool("attached_targets:run", patience_s=60.0) as pool:
        yield pool


@pytest.fixture
def ask(attached_pool: Pool, tmp_path: Path) -> Ask:
    """Run a call on so many ranks; what each returned."""

    def run(call: str, ranks: int = 2, **given: Any) -> list[dict[str, Any]]:
        payload = json.dumps({"call": call, "directory": str(tmp_path / "kept"), **given})
        result = attached_pool.wait(attached_pool.submit(ranks, payload.encode()))
        try:
            assert result.outcome == "finished", result.summary(stacks=True)
            return [json.loads(one or b"null") for one in result.payloads]
        finally:
            result.release()

    return run
