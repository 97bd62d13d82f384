"""Rank processes that files of tests have one after the other.

What forks them imports torch for seconds, so it is started once for each worker of pytest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from zerocheck.errors import HarnessError
from zerocheck.ranks.pool import Pool

SHARED: list[Pool] = []
"""Those that live as long as the session, see `shared`."""


@contextmanager
def shared(pool: Pool) -> Iterator[Pool]:
    """The pool, for a whole session; its ranks end with each module.

    A rank that waits for its next job is not free: gloo wakes it a hundred times in a second.
    """
    with pool:
        SHARED.append(pool)
        try:
            yield pool
        finally:
            SHARED.remove(pool)


@contextmanager
def borrowed(pool: Pool, *, patience_s: float) -> Iterator[Pool]:
    """The pool with this patience. Afterwards its ranks are ended: who comes next has new ones."""
    asked, pool._patience_s = pool._patience_s, patience_s
    try:
        yield pool
    finally:
        pool._patience_s = asked
        end_ranks(pool)


def end_ranks(pool: Pool) -> None:
    """End what the pool runs, and all of its ranks."""
    pool._lose("the tests that wanted it are over")
    for team in list(pool._teams):
        with suppress(HarnessError, OSError):  # where a test killed what forks them
            pool._end(team)
    pool._queue.clear()
    pool._cores.release()


Ask = Callable[..., list[dict[str, Any]]]
"""Runs something on so many ranks, with keywords; returns what each of them answered."""


def answers(pool: Pool, ranks: int, **given: Any) -> list[dict[str, Any]]:
    """Give the keywords to the target of a pool as JSON; return the answer of each rank."""
    result = pool.wait(pool.submit(ranks, json.dumps(given).encode()))
    try:
        assert result.outcome == "finished", result.summary(stacks=True)
        return [json.loads(one or b"null") for one in result.payloads]
    finally:
        result.release()
