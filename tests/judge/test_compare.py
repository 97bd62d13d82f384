"""What is inside an enclosure, at its very edges, and what is said of what is not."""

from __future__ import annotations

import math

import pytest
import torch

from zerocheck.floating_point import FP32, Enclosure
from zerocheck.judge.compare import (
    all_finite,
    compare,
    describe,
    different_bits,
    exactly,
    same_bits,
)
from zerocheck.judge.layout import Formats, ParameterLayout, ParameterPlace
from zerocheck.protocol.verdicts import Explanation

LARGEST = torch.finfo(torch.float32).max


def _of(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _inside(observed: float, exact: float, bound: float) -> bool:
    return compare(_of(observed), Enclosure(_of(exact), _of(bound)))[1] is None


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_edge_is_inside(sign: float) -> None:
    for side in (0.25, -0.25):
        assert _inside(sign + side, sign, 0.25)
        assert not _inside(math.nextafter(sign + side, 9.0 * side), sign, 0.25)
    assert _inside(sign, sign, 0.0)
    assert not _inside(math.nextafter(sign, 0.0), sign, 0.0)


def test_the_share_is_the_largest() -> None:
    enclosure = Enclosure(_of(0.0, 0.0, 0.0), _of(2.0, 4.0, 0.0))
    assert compare(_of(1.0, -3.0, 0.0), enclosure) == (0.75, None)
    assert compare(_of(), Enclosure(_of(), _of())) == (0.0, None)
    share, misfit = compare(_of(1.0, -8.0, 0.0), enclosure)
    assert misfit is not None
    assert (share, misfit.ratio.tolist()) == (2.0, [0.0, 2.0, 0.0])
    assert misfit.outside.tolist() == [False, True, False]
    share, misfit = compare(_of(1.0, -8.0, 1.0), enclosure)
    assert misfit is not None
    assert (share, misfit.ratio.tolist()) == (math.inf, [0.0, 2.0, math.inf])


def test_nan_and_infinity_are_outside_unless_one_device_has_them_too() -> None:
    inf, nan = math.inf, math.nan
    assert not _inside(nan, 1.0, 1e9) and not _inside(inf, 1.0, 1e9)
    assert not _inside(1.0, nan, 1e9) and not _inside(1.0, 1.0, nan)
    assert _inside(nan, nan, 0.0) and _inside(nan, nan, nan)
    for sign in (1.0, -1.0):
        assert _inside(sign * inf, sign * LARGEST, 0.0)
        assert _inside(sign * inf, sign * (LARGEST - 2.0**100), 2.0**100)
        assert not _inside(sign * inf, sign * (LARGEST - 2.0**101), 2.0**100)
        assert not _inside(-sign * inf, sign * LARGEST, 0.0)
        assert _inside(sign * inf, sign * inf, nan)
        assert not _inside(sign * LARGEST, sign * inf, nan)
    share, misfit = compare(_of(inf, 0.5), Enclosure(_of(LARGEST, 0.0), _of(1.0, 1.0)))
    assert (share, misfit) == (0.5, None)  # of the bound of what is finite
    # One that is excused does not excuse another.
    enclosure = Enclosure(_of(LARGEST, 0.0, 0.0), _of(1.0, 1.0, 1.0))
    share, misfit = compare(_of(inf, 3.0, nan), enclosure)
    assert misfit is not None
    assert misfit.outside.tolist() == [False, True, True]
    assert misfit.ratio.tolist() == [0.0, 3.0, inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits(dtype: torch.dtype) -> None:
    left = torch.tensor([1.0, 0.0, math.nan], dtype=dtype)
    assert same_bits(left, left.clone())
    assert not different_bits(left, left.clone()).any()
    for element, value in ((0, 1.0078125), (1, -0.0), (2, 1.0)):
        right = left.clone()
        right[element] = value
        assert not same_bits(left, right), "NaN elsewhere"
        assert different_bits(left, right).nonzero().tolist() == [[element]]
        assert not same_bits(left[element : element + 1], right[element : element + 1])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_element_that_is_not_finite_is_seen(bad: float) -> None:
    vector = torch.ones(1000)
    assert all_finite(vector) and all_finite(torch.empty(0))
    vector[777] = bad
    assert not all_finite(vector)
    vector[3] = -bad
    assert not all_finite(vector)


def test_finite_elements_whose_sum_overflows_are_finite() -> None:
    vector = torch.full((8,), torch.finfo(torch.float32).max)
    assert vector.sum().isinf() and all_finite(vector)
    vector[1] = math.inf
    assert not all_finite(vector)


def test_bits_of_integers() -> None:
    left = torch.tensor([1, 2])
    assert same_bits(left, left.clone()) and not same_bits(left, left + 1)
    assert different_bits(left, torch.tensor([1, 3])).tolist() == [False, True]


def _layout() -> ParameterLayout:
    places = (
        ParameterPlace("a", (2,), 0, 2, True, 0),
        ParameterPlace("b", (2, 2), 2, 6, True, 0),
        ParameterPlace("c", (1,), 6, 7, True, 0),
    )
    by_name = {place.name: place for place in places}
    trainable = torch.ones(7, dtype=torch.bool)
    return ParameterLayout(places, 7, by_name, trainable, {}, Formats(((FP32, None),), 7))


def test_what_is_said_names_the_worst_element() -> None:
    observed = _of(0.0, 3.0, 0.0, 0.0, 0.0, 5.0, 2.0)
    misfit = compare(observed, Enclosure(torch.zeros_like(observed), _of(*[1.0] * 7)))[1]
    assert misfit is not None
    given = {"obligation": "update", "step": 4, "role": "parameter", "ranks": (1,)}
    message = describe(misfit, _layout(), **given, explanation=Explanation("x"))
    assert message.tensors == ("b", "a", "c") and message.element == (1, 1)
    assert (message.observed, message.expected, message.bound, message.ratio) == (
        5.0,
        0.0,
        1.0,
        5.0,
    )
    assert (message.wrong, message.total, message.step, message.ranks) == (3, 7, 4, (1,))
    assert not message.mild and message.causes == ()


def test_what_is_said_of_some_elements() -> None:
    observed = _of(3.0, math.nan, 0.0)
    misfit = compare(observed, exactly(torch.zeros(3)))[1]
    assert misfit is not None
    message = describe(
        misfit,
        _layout(),
        obligation="clip",
        step=0,
        role="gradient",
        ranks=(),
        explanation=Explanation("x", ("y",)),
        elements=torch.tensor([1, 3, 0]),
    )
    assert message.tensors == ("a", "b") and message.element == (1,)
    assert (message.observed, message.ratio, message.wrong, message.total) == (3.0, None, 2, 3)
    assert message.causes == ("y",)


def test_exactly_leaves_no_room() -> None:
    made = exactly(torch.tensor([[1.5], [2.5]]))
    assert made.exact.tolist() == [1.5, 2.5] and made.bound.tolist() == [0.0, 0.0]
    assert made.exact.dtype == made.bound.dtype == torch.float64
