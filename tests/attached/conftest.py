"""One pool for the tests on ranks: its zygote takes seconds to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from borrowing import Ask, answers, shared

from zerocheck.ranks import Pool


@pytest.fixture(scope="session")
def attached_pool() -> Iterator[Pool]:
    with shared(Pool("attached_targets:run", patience_s=60.0)) as pool:
        yield pool


@pytest.fixture
def ask(attached_pool: Pool, tmp_path: Path) -> Ask:
    """Run a call on so many ranks; what each returned."""

    def run(call: str, ranks: int = 2, **given: Any) -> list[dict[str, Any]]:
        options = {"call": call, "directory": str(tmp_path / "kept"), **given}
        return answers(attached_pool, ranks, **options)

    return run
