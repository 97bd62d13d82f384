"""How much of what is long is run: a slice in `tox`, all of it in `tox -e conformance`."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import pytest

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


def thinned(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Leave one in n of the tests of each function marked `every(n)`, and one at least.

    Which ones depends on the function's name, so that functions with the same parameters keep
    different ones.
    """
    functions = [item.nodeid.partition("[")[0] for item in items]
    numbers = Counter(functions)
    places = {function: zlib.crc32(function.encode()) for function in numbers}
    kept = []
    for item, function in zip(items, functions, strict=True):
        marker = item.get_closest_marker("every")
        each = 1 if marker is None else min(marker.args[0], numbers[function])
        if places[function] % each == 0:
            kept.append(item)
        places[function] += 1
    return kept
