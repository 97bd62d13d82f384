"""`--optimizer path/to/file.py:Class`: the user's own optimizer under each implementation."""

from __future__ import annotations

from pathlib import Path

import own_optimizers
import pytest
from collected import RunsOf

from zerocheck.errors import UsageError
from zerocheck.protocol.replies import Description
from zerocheck.run.execute.user_optimizer import with_optimizers
from zerocheck.run.findings.case_file import read_for_replay
from zerocheck.run.replay import replay

LION, NORMALIZED, DERIVED, CORRECTED, FACTORED, KEEPS_DIMS, RIGHT, WRONG, FIXING = (
    f"{own_optimizers.__file__}:{name}"
    for name in (
        "Lion",
        "Normalized",
        "Derived",
        "Corrected",
        "Factored",
        "KeepsDims",
        "right",
        "wrong",
        "fixing",
    )
)


JUDGED = ("update", "roundtrip", "continuation", "persistent")


@pytest.mark.every(9)
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (LION, "fsdp2"),
        (NORMALIZED, "zero2"),
        (DERIVED, "ddp"),
        (CORRECTED, "fsdp2"),
        (CORRECTED, "zero1"),
        (FACTORED, "ddp"),
        (KEEPS_DIMS, "zero3"),
    ],
)
def test_right_implementations_hold_and_resume(run: RunsOf, optimizer: str, name: str) -> None:
    counted = run(name, optimizer=optimizer, obligations=JUDGED, max_cases=4)
    assert not [one for one in counted.findings_of(name) if one.known is None]
    for obligation in JUDGED:
        assert counted.implementations[name].cells[obligation].status in ("holds", "known")  # type: ignore[index]
    for case in run.cases():
        assert case.optimizer.user is not None and case.optimizer.user.location == optimizer
    assert {case.start.step > 0 for case in run.cases()} == {True, False}


@pytest.mark.long
def test_a_wrong_sharding_is_named_and_replayed(run: RunsOf) -> None:
    counted = run(RIGHT, WRONG, optimizer=NORMALIZED, shrink=True, world_sizes=(2,), max_cases=4)
    assert not counted.findings_of(RIGHT)
    (finding,) = counted.findings_of(WRONG)
    assert finding.causes == ("step of each shard alone",)
    assert finding.violation is not None
    assert "run on the rows of each of 2 ranks alone" in finding.violation.attribution
    assert finding.optimizer == NORMALIZED and "2 ranks" in finding.size
    path = Path(finding.case_file)
    with pytest.raises(UsageError, match=f"let its code run: --optimizer {NORMALIZED}"):
        read_for_replay(path, implementation=WRONG)
    file = read_for_replay(path, implementation=WRONG, optimizer=NORMALIZED)
    again = replay(file, implementation=WRONG, optimizer=NORMALIZED, ranks=run.pool)
    assert again.exit_code == 1 and again.verdict.startswith("reproduced bit for bit")
    right = replay(file, implementation=RIGHT, optimizer=NORMALIZED, ranks=run.pool)
    assert right.exit_code == 0
    other = replay(file, implementation=RIGHT, optimizer=LION, ranks=run.pool)
    assert "the optimizer is not that of the file" in other.verdict


def test_an_implementation_may_say_which_it_has(run: RunsOf) -> None:
    counted = run(FIXING, max_cases=2)
    assert counted.implementations[FIXING].cells["update"].status == "holds"
    assert all(case.optimizer.user is not None for case in run.cases())
    with pytest.raises(UsageError, match=r"has the optimizer .*:Normalized of its own"):
        run(FIXING, optimizer=LION)


def test_another_optimizer_than_that_of_the_cases_is_refused(run: RunsOf) -> None:
    with pytest.raises(UsageError, match="Normalized, whose state has 'step', 'momentum', and no"):
        run(RIGHT, optimizer=LION, world_sizes=(2, 3), max_cases=4)


@pytest.mark.parametrize(
    ("fixed", "why"),
    [({"kind": "sgd"}, "has sgd"), (f"{own_optimizers.__file__}:Normalized", "of its own")],
)
def test_two_optimizers_do_not_go_together(run: RunsOf, fixed: object, why: str) -> None:
    described = {"mine": Description(fixed={"optimizer": fixed})}
    with pytest.raises(UsageError, match=why):
        with_optimizers(run.pool, described, LION, world_size=2)
