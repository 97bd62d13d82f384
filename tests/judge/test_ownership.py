"""Which shards tile a tensor, and what is said where they do not."""

from __future__ import annotations

import pytest

from zerocheck.drive.observation import Entry
from zerocheck.judge.ownership import _tiling

Range = tuple[int, int]


def _flat(*held: tuple[int, Range], shape: tuple[int, ...] = (10,)) -> str:
    return _tiling([(rank, Entry("w", shape, *part)) for rank, part in held], shape)


def _boxes(*held: tuple[int, tuple[Range, Range]], shape: tuple[int, int] = (4, 4)) -> str:
    return _tiling(
        [
            (rank, Entry("w", shape, 0, (b[0][1] - b[0][0]) * (b[1][1] - b[1][0]), b))
            for rank, b in held
        ],
        shape,
    )


@pytest.mark.parametrize(
    "held",
    [
        [(0, (0, 10))],
        [(0, (0, 10)), (1, (0, 10)), (2, (0, 10))],
        [(0, (0, 4)), (1, (4, 10))],
        [(1, (4, 10)), (0, (0, 4))],
        [(0, (0, 4)), (0, (4, 7)), (1, (7, 10)), (2, (10, 10))],
        [(0, (0, 5)), (1, (5, 10)), (2, (0, 5)), (3, (5, 10))],
    ],
)
def test_tilings_that_are_whole(held: list) -> None:
    assert _flat(*held) == ""


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([(0, (0, 4)), (1, (5, 10))], "no rank holds elements 4 to 4 of 10"),
        ([(0, (0, 4)), (1, (4, 9))], "no rank holds elements 9 to 9 of 10"),
        ([(0, (1, 10))], "no rank holds elements 0 to 0 of 10"),
        (
            [(0, (0, 6)), (1, (4, 10))],
            "elements 4 to 5 are held by rank 0 as part of 0 to 5 and by rank 1 as part of 4 to 9",
        ),
        ([(0, (0, 10)), (1, (0, 5))], "elements 0 to 4 are held by rank"),
        ([(0, (0, 10)), (0, (0, 10))], "elements 0 to 9 stand twice on rank 0"),
    ],
)
def test_tilings_that_are_not(held: list, said: str) -> None:
    assert said in _flat(*held)


def test_boxes() -> None:
    left, right = ((0, 4), (0, 2)), ((0, 4), (2, 4))
    assert _boxes((0, left), (1, right)) == ""
    assert _boxes((0, left), (1, right), (2, left), (3, right)) == ""
    assert "8 of 16 elements are held by no rank" in _boxes((0, left))
    assert "overlap" in _boxes((0, left), (1, ((0, 4), (1, 4))))


def test_flat_ranges_among_boxes() -> None:
    """A column of a transposed matrix in parts: some of its pieces are flat ranges too."""
    pieces = [
        Entry("w", (2, 3), 0, 2, ((0, 2), (0, 1))),
        Entry("w", (2, 3), 1, 2),
        Entry("w", (2, 3), 4, 6),
        Entry("w", (2, 3), 2, 3),
    ]
    assert _tiling(list(enumerate(pieces)), (2, 3)) == ""
    wrong = [*pieces[:3], Entry("w", (2, 3), 5, 6)]
    assert "overlap" in _tiling(list(enumerate(wrong)), (2, 3))
    mixed = [pieces[0], Entry("w", (2, 3), 1, 5)]
    assert "mixed" in _tiling(list(enumerate(mixed)), (2, 3))


def test_an_empty_tensor_and_a_scalar() -> None:
    assert _flat((0, (0, 0)), shape=(0,)) == ""
    assert _flat((0, (0, 1)), shape=()) == ""
