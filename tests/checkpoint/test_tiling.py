from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerocheck.checkpoint.source import Stored, StoredBox
from zerocheck.checkpoint.tiling import problems


def stored(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Stored:
    return Stored(shape, torch.float32, tuple(StoredBox(*box) for box in boxes))


@pytest.mark.parametrize(
    "exact",
    [
        stored((), ((), ())),
        stored((0, 3)),
        stored((0, 3), ((0, 0), (0, 3))),
        stored((5,), ((0,), (3,)), ((3,), (2,)), ((5,), (0,))),
        stored((2, 4), ((0, 0), (2, 1)), ((0, 1), (1, 3)), ((1, 1), (1, 3))),
    ],
)
def test_exact(exact: Stored) -> None:
    assert not list(problems(exact))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (stored((5,)), "no chunk holds 5 of 5 elements, first [0]"),
        (stored((), ((), ()), ((), ())), "chunk [] and chunk [] overlap"),
        (stored(()), "no chunk holds 1 of 1 elements, first []"),
        (stored((2, 3), ((0, 0), (2, 2))), "no chunk holds 2 of 6 elements, first [0, 2]"),
        (stored((5,), ((0,), (6,))), "chunk [0:6] is out of the bounds [5]"),
        (stored((5,), ((-1,), (6,))), "chunk [-1:5] is out of the bounds [5]"),
        (stored((5,), ((0, 0), (5, 1))), "chunk [0:5, 0:1] has not the 1 dims of the tensor [5]"),
    ],
)
def test_wrong(wrong: Stored, message: str) -> None:
    assert message in list(problems(wrong))


@given(st.data())
def test_as_counted_element_by_element(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = []
    for _ in range(data.draw(st.integers(0, 5))):
        offsets = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
        sizes = tuple(
            data.draw(st.integers(0, n - start)) for n, start in zip(shape, offsets, strict=True)
        )
        boxes.append((offsets, sizes))
    held = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        held[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))] += 1
    message = " ".join(problems(stored(shape, *boxes)))
    assert ("overlap" in message) == bool((held > 1).any())
    empty = [index for index in itertools.product(*map(range, shape)) if not held[index]]
    assert ("no chunk" in message) == bool(empty)
    if empty:
        assert f"first {list(empty[0])}" in message
