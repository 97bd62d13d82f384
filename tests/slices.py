"""How much of what is long is run: a slice in `tox`, all of it in `tox -e conformance`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

VARIABLE = "ZEROCHECK_TESTS"
WHOLE = os.environ.get(VARIABLE) == "whole"


def paired(first: Sequence[T], second: Sequence[S]) -> list[tuple[T, S]]:
    """Return all pairs where everything is run, else each of both once at least."""
    each = max(len(first), len(second))
    return sliced(
        [(one, other) for one in first for other in second],
        [(first[n % len(first)], second[n % len(second)]) for n in range(each)],
    )


def sliced(whole: T, part: T) -> T:
    """`whole` where everything is run, else `part`."""
    return whole if WHOLE else part
