"""Tests of a slice: one in n of a function's, and others for the next function."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from slices import thinned


def _tests(function: str, count: int, every: int | None) -> list[Any]:
    marker = every and pytest.mark.every(every).mark
    return [
        SimpleNamespace(nodeid=f"{function}[{n}]", number=n, get_closest_marker=lambda _: marker)
        for n in range(count)
    ]


def test_one_in_n_is_left_of_those_that_are_marked() -> None:
    marked, others = _tests("a.py::test_a", 12, 3), _tests("a.py::test_b", 5, None)
    kept = thinned([*marked, *others])
    assert kept[-5:] == others
    numbers = [one.number for one in kept[:-5]]  # type: ignore[attr-defined]
    assert len(numbers) == 4 and {b - a for a, b in pairwise(numbers)} == {3}
    assert kept == thinned([*marked, *others])


def test_one_is_left_of_a_few() -> None:
    for name in "abcdefgh":
        assert len(thinned(_tests(f"a.py::test_{name}", 2, 9))) == 1


def test_functions_keep_different_ones() -> None:
    first = {
        thinned(_tests(f"a.py::test_{n}", 3, 3))[0].number  # type: ignore[attr-defined]
        for n in range(20)
    }
    assert first == {0, 1, 2}
