"""Hypothesis strategies for cases, which draw like `drawing.draw` and shrink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from .drawing import CaseMaker, draw
from .schema import Case


def cases(
    *, world_sizes: Sequence[int], fixed: Mapping[str, Any] | None = None
) -> st.SearchStrategy[Case]:
    """Strategy of valid cases with one of the world sizes; the simplest has the first world size.

    fixed: nested case fields that are not drawn, such as {"training": {"clip": None}}. Raises
    UsageError if they are fields that no case has.
    """
    return _cases(CaseMaker(world_sizes, fixed))


@st.composite
def _cases(choose: st.DrawFn, maker: CaseMaker) -> Case:
    case = maker.make(
        lambda n: choose(_below(n)),
        # What is drawn inside of one strategy is cut out as a whole when a case shrinks.
        part=lambda make: choose(st.builds(make)),
    )
    assume(case is not None)
    assert case is not None
    return case


@cache
def _below(n: int) -> st.SearchStrategy[int]:
    return st.integers(0, n - 1)


__all__ = ["cases", "draw"]
