"""One pool for most tests: its zygote takes seconds to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from borrowing import shared
from ranks_asking import TARGET, Ask

from zerocheck.ranks import JobResult, Pool
from zerocheck.ranks.cores import Cores


@pytest.fixture(scope="session")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    # Times are asserted here, so it does not queue behind other runs on the machine.
    cores = Cores(directory=str(tmp_path_factory.mktemp("cores")))
    with shared(Pool(TARGET, patience_s=1.0, grace_s=0.4, cores=cores)) as pool:
        yield pool


@pytest.fixture
def ask(shared_pool: Pool) -> Ask:
    """Run one job to its end."""

    def run(world_size: int, what: str = "", **options: Any) -> JobResult:
        result = shared_pool.wait(shared_pool.submit(world_size, what.encode(), **options))
        result.release()
        return result

    return run
