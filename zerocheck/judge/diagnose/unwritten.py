"""NaN from memory that was never written: ranks of a case fill such memory with it, a job does not.

In a case NaN among finite values shows such a read. In a job, which nothing fills, it shows none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ... import causes as bugs
from ...protocol.verdicts import Explanation

_FILLED = ContextVar("filled", default=True)


@contextmanager
def memory_of_a_job() -> Iterator[None]:
    """Within the context, memory that was never written is as the job has it."""
    token = _FILLED.set(False)
    try:
        yield
    finally:
        _FILLED.reset(token)


def unwritten(text: str) -> Explanation:
    """Return what explains NaN where finite values are right.

    text: the beginning of the sentence, such as "the gradient holds NaN".
    """
    if not _FILLED.get():
        return Explanation(f"{text}, where a finite value is right", ())
    return Explanation(
        f"{text}: memory that was never written was read (zerocheck fills such memory with NaN)",
        (bugs.UNINITIALISED_MEMORY,),
    )
