"""Real observations, which tests may then change one element at a time."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from observing import Observed

from zerocheck.case.schema import Case
from zerocheck.protocol.jobs import Observe
from zerocheck.protocol.observations import RankObservation
from zerocheck.ranks.pool import Pool
from zerocheck.ranks.view import Slot
from zerocheck.run.execute.rank_replies import received


@pytest.fixture(scope="session")
def pool(session_pool: Pool) -> Pool:
    """Rank processes for all tests of the judge."""
    return session_pool


@pytest.fixture(scope="session")
def observe(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Observed]:
    """observe(implementation, case): run it and copy what was observed.

    What was observed once is kept and read again, for many tests change one thing of the same;
    anew=True runs it again. With ZEROCHECK_TEST_OBSERVATIONS=DIRECTORY it is kept there, and ranks
    are started only if something is missing: for tests/mutants, which changes the judge.
    """
    given = os.environ.get("ZEROCHECK_TEST_OBSERVATIONS")
    directory = Path(given) if given else tmp_path_factory.mktemp("observations")

    def run(implementation: str, case: Case, *, anew: bool = False) -> Observed:
        message = implementation.encode() + msgspec.json.encode(case)
        kept = directory / hashlib.sha256(message).hexdigest()
        if not kept.exists() or (anew and not given):
            observed = _run(request.getfixturevalue("pool"), implementation, case)
            kept.write_bytes(pickle.dumps((observed.seen, observed.tensors)))
        return Observed(case, *pickle.loads(kept.read_bytes()))

    return run


def _run(pool: Pool, implementation: str, case: Case) -> Observed:
    job = msgspec.msgpack.encode(Observe(implementation, case))
    result = pool.wait(pool.submit(case.world_size, job))
    assert result.outcome == "finished", result.summary()
    seen = received(result, RankObservation)
    tensors = {}
    for rank, one in enumerate(seen):
        for record in one.records:
            arena = result.arenas[rank]
            assert arena is not None
            slot = Slot(record.offset, record.numel, record.dtype)
            data = arena.tensor(slot) if record.numel else torch.empty(0)
            tensors[rank, record] = data.clone()
    result.release()
    return Observed(case, seen, tensors)
