"""The most that is held at any instant, from the allocator's events."""

from __future__ import annotations

from collections import Counter

from zerocheck.compat_memory import Allocation
from zerocheck.drive.attribution import GONE, LOOKED, LOOKING, USED, Attribution, PhaseEnd
from zerocheck.drive.holders import Claim, Claims
from zerocheck.drive.measure import peaks
from zerocheck.protocol.layout import NUMBER_BYTES, Peak
from zerocheck.protocol.measurements import HARNESS, LOCAL

BUILT, FORWARD, BACKWARD = PhaseEnd(-1, "built"), PhaseEnd(0, "forward"), PhaseEnd(0, "backward")
STEP, CLOSED = PhaseEnd(0, "step"), PhaseEnd(0, "closed")
ENDS = [one.mark for one in (BACKWARD, STEP, CLOSED)]


def seen(
    *events: str | Allocation, forward: Claims | None = None, built: Claims | None = None
) -> list[Peak]:
    looked: dict[PhaseEnd, Claims] = {
        BUILT: built or {}, FORWARD: forward or {}, BACKWARD: {}, STEP: {}, CLOSED: {},
    }  # fmt: skip
    return list(peaks(Attribution(list(events), looked, Counter())))


def gets(address: int, size: int, *operators: str) -> Allocation:
    return Allocation(address, size, operators)


def gives(address: int, size: int) -> Allocation:
    return Allocation(address, -size, ())


def test_what_comes_and_goes_within_a_phase_is_known_by_its_use() -> None:
    weight = {1: Claim(0, "parameter", "w")}
    forward, backward, step = seen(
        gets(1, 100), BUILT.mark,
        gets(2, 40), f"{USED}gathered 2", gets(3, 16), gives(2, 40), gets(4, 20), gives(4, 20),
        FORWARD.mark,
        gets(2, 30), f"{USED}bucket 2", gives(3, 16), gives(2, 30), *ENDS,
        built=weight,
    )  # fmt: skip
    assert (forward.phase, forward.step) == ("forward", 0)
    assert forward.highest == {
        "gathered": 40, "activation": 16, "other": 20, "working": 56, "gathering": 40,
    }  # fmt: skip
    assert forward.bytes == {"parameter": 100, "gathered": 40, "activation": 16}
    assert backward.highest["bucket"] == 30 and backward.highest["working"] == 46
    assert backward.highest["reducing"] == 46
    assert backward.total == 146
    assert step.total == 100 and step.highest == {}


def test_terms_are_highest_at_instants_of_their_own() -> None:
    forward, *_ = seen(
        BUILT.mark,
        gets(1, 50), f"{USED}gathered 1", gives(1, 50),
        gets(2, 60), f"{USED}bucket 2", gives(2, 60),
        FORWARD.mark, *ENDS,
    )  # fmt: skip
    assert forward.highest == {
        "gathered": 50, "bucket": 60, "working": 60, "gathering": 50, "reducing": 60,
    }  # fmt: skip
    assert forward.bytes == {"bucket": 60}


def test_what_the_harness_does_is_not_counted() -> None:
    samples = {7: Claim(1, "other", HARNESS)}
    forward, *_ = seen(
        gets(7, 1000), BUILT.mark,
        LOOKING, gets(8, 500), gives(8, 500), LOOKED,
        gets(1, 20), gives(1, 20), FORWARD.mark, *ENDS,
        forward=samples,
    )  # fmt: skip
    assert forward.bytes == {"other": 20}


def test_a_backends_memory_is_not_counted_and_a_threads_is_until_it_is_let_go_of() -> None:
    forward, backward, _ = seen(
        BUILT.mark,
        gets(1, 500, "c10d::allreduce_"),
        gets(2, 40), f"{USED}bucket 2", f"{GONE}2", gets(3, 24), gives(3, 24),
        FORWARD.mark, *ENDS,
    )  # fmt: skip
    assert forward.highest == {
        "bucket": 40, "other": 24, "working": 40, "reducing": 40,
    }  # fmt: skip
    assert backward.total == 0


def test_single_numbers_are_held_and_are_no_working_memory() -> None:
    forward, *_ = seen(
        BUILT.mark, gets(1, NUMBER_BYTES), gets(2, NUMBER_BYTES + 1), FORWARD.mark, *ENDS
    )
    assert forward.total == 2 * NUMBER_BYTES + 1
    assert forward.highest["working"] == NUMBER_BYTES + 1


def test_a_local_variable_that_a_collective_uses_is_its_own() -> None:
    local = {2: Claim(2, "other", f"{LOCAL} whole of reduce")}
    forward, *_ = seen(
        BUILT.mark, gets(2, 40), f"{USED}bucket 2", FORWARD.mark, gives(2, 40), *ENDS,
        forward=local,
    )  # fmt: skip
    assert forward.highest == {"bucket": 40, "working": 40, "reducing": 40}
