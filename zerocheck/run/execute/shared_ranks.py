"""Rank processes of this process, which all tests of single cases share."""

from __future__ import annotations

from ...ranks.pool import Pool
from .launch import start_ranks

_pool: Pool | None = None


def shared_ranks(implementation: str) -> Pool:
    """Return the rank processes, which are started by the first call.

    implementation: the one that is about to run; its library is imported once for all ranks if it
    is the first. Raises UsageError for a machine on which ranks cannot start.
    """
    global _pool
    if _pool is None:
        _pool = start_ranks(implementations=[implementation])
    return _pool


def close() -> None:
    """End the rank processes, if there are any. The next call of `shared_ranks` starts others."""
    global _pool
    ended, _pool = _pool, None
    if ended is not None:
        ended.close()
