"""Rank processes that files of tests have one after the other.

What forks them imports torch for seconds, so it is started once for each worker of pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from zerocheck.errors import HarnessError
from zerocheck.ranks.pool import Pool


@contextmanager
def borrowed(pool: Pool, *, patience_s: float) -> Iterator[Pool]:
    """The pool with this patience. Afterwards its ranks are ended: who comes next has new ones."""
    asked, pool._patience_s = pool._patience_s, patience_s
    try:
        yield pool
    finally:
        pool._patience_s = asked
        pool._lose("the tests that wanted it are over")
        for team in list(pool._teams):
            with suppress(HarnessError, OSError):  # where a test killed what forks them
                pool._end(team)
        pool._queue.clear()
        pool._cores.release()
