"""A wrong norm is explained without a list of bugs, and a little more refutes it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import msgspec
import pytest
from small import layout
from test_case import CASE

from zerocheck.case.schema import Training
from zerocheck.judge.attribution.norm import attribution
from zerocheck.judge.attribution.table import Numbers
from zerocheck.judge.diagnose.named import without_names

NUMBERS = Numbers({"W": 3, "GA": 2})
PARTS = {(0, "a"): 0.31, (1, "a"): 0.07, (1, "b"): 0.113, (2, "b"): 0.029, (2, "c"): 0.53}
TOTAL = sum(PARTS.values())


def said(square: float, *, order: str = "2") -> str:
    return attribution(math.sqrt(square), PARTS, layout(), NUMBERS, 1e-7, order=order)


@pytest.mark.parametrize(
    ("square", "words"),
    [
        (TOTAL - 0.142, "in the square of the norm, that of the gradient of b is left out"),
        (TOTAL + 0.53, "that of the gradient of c counts 2 times"),
        (TOTAL + 0.38 * 2, "that of the gradient of a counts 3 times (W = 3)"),
        (TOTAL - 0.07, "that of the gradient of a on rank 1 is left out"),
        (1.0, "the norm is 1, which is any norm to the power 0"),
        (TOTAL**2, "the norm is the right one to the power 2"),
    ],
)
def test_the_weight_of_a_part(square: float, words: str) -> None:
    assert words in said(square)


def test_what_is_no_plain_weight_says_nothing() -> None:
    assert said(TOTAL + 0.1234567) == ""
    assert said(math.inf) == "" and attribution(1.5, {}, layout(), NUMBERS, 1e-7, order="2") == ""


def test_a_part_that_is_within_the_error_says_nothing() -> None:
    small = {**PARTS, (0, "c"): 1e-9}
    norm = math.sqrt(TOTAL)
    assert attribution(norm, small, layout(), NUMBERS, 1e-7, order="2") == ""


def test_of_the_largest_element_only_powers_are_known() -> None:
    assert said(1.0, order="inf") and not said(TOTAL - 0.142, order="inf")


TIGHT = msgspec.structs.replace(CASE, training=Training(steps=2, clip=1e-3))


def test_the_sharded_norm_of_one_rank(observe: Callable) -> None:
    observed = observe("zerocheck.faults.clipping:NormWithoutHead", TIGHT)
    with without_names():
        first = next(one for one in observed.judge().violations if one.obligation == "clip")
    assert re.search(r"head\..* left out", first.attribution), first.attribution
