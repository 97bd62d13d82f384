"""Which shards tile a tensor, and what is said where they do not."""

from __future__ import annotations

import pytest
import torch
from small import layout

from zerocheck.judge.assemble import Observation
from zerocheck.judge.ownership import Ownership, tiling_fault
from zerocheck.protocol.observations import Entry, RankObservation, Recorded
from zerocheck.protocol.verdicts import Violation

Range = tuple[int, int]


def _flat(*held: tuple[int, Range], shape: tuple[int, ...] = (10,)) -> str:
    return tiling_fault([(rank, Entry("w", shape, *part)) for rank, part in held], shape)


def _boxes(*held: tuple[int, tuple[Range, Range]], shape: tuple[int, int] = (4, 4)) -> str:
    return tiling_fault(
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
    ("held", "message"),
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
        ([(0, (0, 10)), (1, (0, 10)), (1, (0, 10))], "elements 0 to 9 stand twice on rank 1"),
    ],
)
def test_tilings_that_are_not(held: list, message: str) -> None:
    assert message in _flat(*held)


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
    assert tiling_fault(list(enumerate(pieces)), (2, 3)) == ""
    wrong = [*pieces[:3], Entry("w", (2, 3), 5, 6)]
    assert "overlap" in tiling_fault(list(enumerate(wrong)), (2, 3))
    mixed = [pieces[0], Entry("w", (2, 3), 1, 5)]
    assert "mixed" in tiling_fault(list(enumerate(mixed)), (2, 3))


def test_a_shard_without_elements_is_in_nobodys_way() -> None:
    assert _flat((0, (0, 5)), (1, (3, 3)), shape=(5,)) == ""
    assert _flat((0, (0, 2)), (1, (2, 2)), (2, (2, 5)), (3, (5, 5)), shape=(5,)) == ""


def test_an_empty_tensor_and_a_scalar() -> None:
    assert _flat((0, (0, 0)), shape=(0,)) == ""
    assert _flat((0, (0, 1)), shape=()) == ""


def test_boxes_that_only_touch_and_boxes_that_cross() -> None:
    rows = ((0, 2), (0, 4)), ((2, 4), (0, 4))
    assert _boxes((0, rows[0]), (1, rows[1])) == ""
    assert "overlap" in _boxes((0, rows[0]), (1, ((1, 4), (0, 2))))
    assert "overlap" in _boxes((0, rows[0]), (1, rows[1]), (2, ((1, 3), (1, 3))))
    quarter = ((0, 2), (0, 2))
    assert "4 of 16" in _boxes((0, quarter), (1, ((2, 4), (0, 4))))
    assert "twice on rank 3" in _boxes((3, quarter), (3, quarter))


WHOLE = (
    Entry("a", (2,), 0, 2),
    Entry("b", (2, 2), 0, 4),
    Entry("c", (), 0, 1),
    Entry("d", (0,), 0, 0),
    Entry("e", (1,), 0, 1),
)


def _owned(
    *ranks: tuple[Entry, ...], role: str = "parameter", frozen: str = ""
) -> Violation | None:
    """The violation of shards of a role; of other roles everything is there on rank 0."""
    point = "reduced" if role == "gradient" else "state"
    seen = []
    for held in ranks:
        records = [Recorded(0, point, role, 0, 0, 0, "float32")]
        if role != "parameter":
            records.append(Recorded(0, "state", "parameter", 1, 0, 0, "float32"))
        seen.append(RankObservation(manifests=(tuple(held), WHOLE), records=tuple(records)))
    observation = Observation(layout(frozen=frozen), seen, lambda rank, record: torch.empty(0))
    judge = Ownership(observation)
    first = judge.check(0, point)  # type: ignore[arg-type]
    again = judge.check(0, point)  # type: ignore[arg-type]
    assert first == again
    return first


def _without(*names: str) -> tuple[Entry, ...]:
    return tuple(entry for entry in WHOLE if entry.name not in names)


def test_every_role_is_looked_at() -> None:
    for role in ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "gradient", "step"):
        scalars = tuple(Entry(entry.name, (), 0, 1) for entry in WHOLE)
        fine = scalars if role == "step" else WHOLE
        assert _owned(fine, fine, role=role) is None
        violation = _owned(fine, (*fine, Entry("x", (), 0, 1)), role=role)
        assert violation is not None and violation.role == role and violation.ranks == (1,)
        assert violation.tensors == ("x",) and "does not have" in violation.explanation
    violation = _owned(WHOLE, (Entry("a", (3,), 0, 2),), role="step")
    assert violation is not None and "global shape" in violation.explanation


def test_a_shape_that_is_not_the_models() -> None:
    violation = _owned(WHOLE, (Entry("b", (4,), 0, 4),))
    assert violation is not None and violation.tensors == ("b",)
    assert "[4] on rank 1; the model has [2, 2]" in violation.explanation


def test_what_nobody_holds() -> None:
    assert _owned(_without("a"), _without("c")) is None
    violation = _owned(_without("c"), _without("c"))
    assert violation is not None and violation.tensors == ("c",) and violation.ranks == ()
    # A moment may not be there yet.
    for role in ("exp_avg", "gradient"):
        assert _owned(_without("c"), role=role) is None
        half = (*_without("b"), Entry("b", (2, 2), 0, 2))
        violation = _owned(half, role=role)
        assert violation is not None and violation.tensors == ("b",) and violation.ranks == (0,)
    gone = Entry("b", (2, 2), 0, 4, None, False)
    assert _owned((*_without("b"), gone), role="gradient") is None


def test_what_is_frozen_has_no_moments() -> None:
    assert _owned(WHOLE, frozen="c") is None
    for role in ("exp_avg", "gradient"):
        violation = _owned(WHOLE, role=role, frozen="c")
        assert violation is not None and "frozen" in violation.explanation
        assert _owned(_without("c"), role=role, frozen="c") is None
        gone = Entry("c", (), 0, 1, None, False)
        assert _owned((*_without("c"), gone), role=role, frozen="c") is None
