"""Findings that show always, sometimes, or once only in fresh rank processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from collected import Collect, whole_run
from hand_made import ENVIRONMENT, VIOLATION, case

from zerocheck.ranks.pool import Pool
from zerocheck.run import engine
from zerocheck.run.findings.case_file import read
from zerocheck.run.findings.confirmation import TRIES, runs_to_see
from zerocheck.run.findings.suspicion import RACE
from zerocheck.run.records.finding_text import finding_text
from zerocheck.run.records.records import CaseFile, CaseFinished, Finding, Outcome, RunFinished
from zerocheck.run.replay import ReplayedCase, replay

# A sharder that is wrong in the runs for which `wrong(run)` says so; each rank counts its own.
SUBJECT = """
import os, pathlib, zlib
import torch, torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
import zerocheck

in_this_process = 0

def count(name):
    path = pathlib.Path({folder!r}) / f"{{name}}rank{{dist.get_rank()}}"
    with path.open("a") as file:
        file.write("x")
    return path.stat().st_size

def runs(case):
    global in_this_process
    in_this_process += 1
    return count(""), in_this_process, count(zlib.crc32(repr(case).encode()))

def build(model, case, mesh):
    fully_shard(model, mesh=mesh)
    built = zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))
    ever, here, of_case = runs(case)
    how = {how}
    if how == "gradient":
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)
    elif how == "another gradient each time":
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(3.0 + ever)
    elif how == "update":
        for group in built.optimizer.param_groups:
            group["weight_decay"] = 0.5
    elif how == "crash":
        raise LookupError("no such layer")
    return built

class Gradient(zerocheck.BuiltImplementation):
    fixed = {{"training": {{"clip": None}}, "model": {{"frozen": ()}}}}
    def build(self, model, case, mesh):
        return build(model, case, mesh)
"""


@pytest.fixture(autouse=True)
def no_builds_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sharders here count their runs."""
    monkeypatch.setattr(engine, "check_builds", lambda *_: None)


def findings(
    tmp_path: Path, pool: Pool, how: str, *, cases: int = 1, shrink: bool = True
) -> tuple[list[Finding], Collect]:
    """Findings of a run of a sharder that is wrong in the way of the expression `how`.

    `ever` is the number of the run, from 1, `here` its number in its process, `of_case` that of
    its case.
    """
    path = tmp_path / "mine.py"
    path.write_text(SUBJECT.format(folder=str(tmp_path), how=how))
    code, records = whole_run(
        pool,
        f"{path}:Gradient",
        world_sizes=(2,),
        max_cases=cases,
        obligations=("gradient", "update"),
        report_dir=tmp_path,
        shrink=shrink,
    )
    last = {record.number: record for record in records.of(Finding)}
    end = records[-1]
    assert isinstance(end, RunFinished) and end.exit_code == code
    assert code == any(not finding.suspicion for finding in last.values())
    return list(last.values()), records


def tries(found: Finding) -> tuple[int, int]:
    return found.confirmed, found.tries


def test_one_that_shows_always_is_run_once_more(tmp_path: Path, pool: Pool) -> None:
    (found,), _ = findings(tmp_path, pool, "'gradient'", shrink=False)
    assert tries(found) == (1, 1) and not found.intermittent
    assert "  reproduced  1 of 1 times in fresh rank processes\n" in finding_text(found)


def test_one_that_shows_sometimes_is_intermittent(tmp_path: Path, pool: Pool) -> None:
    (found,), _ = findings(tmp_path, pool, "'gradient' if ever in (1, 3, 6) else ''")
    assert tries(found) == (2, TRIES) and found.intermittent
    assert found.otherwise == {"holds": 3}
    assert (
        found.size == "" and found.extent == "not searched for, since it does not show every time"
    )
    title, *_, reproduced, meaning, _, _ = finding_text(found).splitlines()
    assert title.endswith("(intermittent: 2 of 5)")
    assert reproduced == (
        "  reproduced  intermittent: 2 of 5 times in fresh rank processes (otherwise: holds 3)"
    )
    assert "a race" in meaning


@pytest.mark.long
def test_other_numbers_each_time_depend_on_the_moment(tmp_path: Path, pool: Pool) -> None:
    (found,), _ = findings(tmp_path, pool, "'another gradient each time'", shrink=False)
    assert tries(found) == (TRIES, TRIES) and not found.intermittent


@pytest.mark.long
def test_the_replay_of_one_that_shows_sometimes_says_how_often(tmp_path: Path, pool: Pool) -> None:
    (found,), _ = findings(tmp_path, pool, "'gradient' if ever in (1, 3, 4, 5, 6, 8) else ''")
    assert tries(found) == (4, TRIES)
    case_file = read(Path(found.case_file))
    assert (case_file.confirmed, case_file.tries) == (4, TRIES)
    replayed = replay(read(Path(found.case_file)), implementation=found.implementation, ranks=pool)
    assert replayed is not None and replayed.exit_code == 1
    assert replayed.verdict == "intermittent: it shows in 1 of 4 runs (otherwise: holds 3)"
    assert replayed.finished.status == "violated"
    never = replay(read(Path(found.case_file)), implementation=found.implementation, ranks=pool)
    assert never is not None and never.exit_code == 0
    assert never.verdict == "not reproduced in 4 runs: holds 4; it was violated"


@pytest.mark.long
def test_the_replay_of_one_that_does_not_show_any_more_tries_again(
    tmp_path: Path, pool: Pool
) -> None:
    (found,), _ = findings(tmp_path, pool, "'gradient' if ever < 3 else ''", shrink=False)
    assert tries(found) == (1, 1)
    replayed = replay(read(Path(found.case_file)), implementation=found.implementation, ranks=pool)
    assert replayed is not None and replayed.exit_code == 0
    assert replayed.verdict == f"not reproduced in {TRIES} runs: holds {TRIES}; it was violated"


@pytest.mark.parametrize(
    ("causes", "named"),
    [
        (("local gradient only",), True),
        (VIOLATION.causes[:1], False),
        (("local gradient only", *VIOLATION.causes[:1]), False),
        ((), False),
    ],
)
def test_a_replay_that_names_it_otherwise_says_what_the_run_called_it(
    causes: tuple[str, ...], named: bool
) -> None:
    """One case does not tell apart all causes that the cases of a finding do."""
    seen = case(0, "zero2", "violated", gradient="violated")
    assert seen.judgement is not None
    judged = msgspec.structs.replace(seen.judgement, violations=(VIOLATION,))
    file = CaseFile(
        implementation="zero2",
        case=seen.case,
        status="violated",
        judgement=judged,
        environment=ENVIRONMENT,
        title="each rank holds its own local gradient",
        causes=causes,
        confirmed=1,
        tries=1,
    )
    replayed = ReplayedCase(file, "zero2")
    replayed.outcomes.append(Outcome(status="violated", judgement=judged))
    message = f"\nThe run named it by all its failing cases: {file.title}"
    assert replayed.verdict == "reproduced: violated again" + message * named
    other = ReplayedCase(file, "zero3")
    other.outcomes.append(Outcome(status="violated", judgement=judged))
    assert "The run named it" not in other.verdict


def test_how_often_one_is_run_to_see_it() -> None:
    assert [runs_to_see(k, 5) for k in range(6)] == [30, 14, 9, 6, 4, 3]
    for k in range(1, 6):
        share = (k + 1) / 7
        assert (1 - share) ** runs_to_see(k, 5) <= 0.01 < (1 - share) ** (runs_to_see(k, 5) - 1)


def test_one_that_shows_once_only_fails_no_run(tmp_path: Path, pool: Pool) -> None:
    """Its case is judged by the fresh processes, and says what was seen."""
    (found,), records = findings(tmp_path, pool, "'gradient' if ever == 1 else ''")
    assert tries(found) == (0, TRIES) and not found.intermittent and records[-1].exit_code == 0
    assert found.suspicion == RACE
    text = finding_text(found)
    assert text.startswith("NOT REPRODUCED ")
    assert "  reproduced  seen once, 0 of 5 times in fresh rank processes (otherwise: holds" in text
    (judged,) = records.of(CaseFinished)
    assert judged.status == "holds" and judged.unreproduced == found.title


@pytest.mark.long
def test_one_that_shows_in_a_second_case_counts(tmp_path: Path, pool: Pool) -> None:
    """Rare, but in other processes than the first time: a race."""
    (found,), records = findings(tmp_path, pool, "'gradient' if of_case == 1 else ''", cases=4)
    assert found.cases >= 2 and tries(found) == (0, TRIES) and records[-1].exit_code == 1
    assert found.extent.startswith(RACE) and not found.suspicion
    first, *others = [one.status for one in records.of(CaseFinished)]
    assert first == "holds" and others.count("violated") == found.cases - 1


def test_one_that_needs_a_process_that_ran_before(tmp_path: Path, pool: Pool) -> None:
    """Its own earlier case brings it: the implementation is to blame."""
    (found,), records = findings(tmp_path, pool, "'gradient' if here > 1 else ''", cases=4)
    assert tries(found) == (0, TRIES) and records[-1].exit_code == 1
    assert "leaves a state behind" in found.extent and not found.suspicion


LEAKING = """
import zerocheck
from torch.distributed.fsdp import fully_shard
import torch, sys

def built(model, case, mesh):
    fully_shard(model, mesh=mesh)
    return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))

class Leaks(zerocheck.BuiltImplementation):
    def build(self, model, case, mesh):
        sys.flags_of_mine = "left"  # of no module that is watched
        return built(model, case, mesh)

class Right(zerocheck.BuiltImplementation):
    fixed = {"training": {"clip": None}, "model": {"frozen": ()}}
    def build(self, model, case, mesh):
        made = built(model, case, mesh)
        if getattr(sys, "flags_of_mine", ""):
            model.set_force_sum_reduction_for_comms(True)
            model.set_gradient_divide_factor(1.0)
        return made
"""


@pytest.mark.long
def test_what_another_implementation_left_is_not_this_ones_fault(
    tmp_path: Path, pool: Pool
) -> None:
    path = tmp_path / "two.py"
    path.write_text(LEAKING)
    code, records = whole_run(
        pool,
        f"{path}:Leaks",
        f"{path}:Right",
        world_sizes=(2,),
        max_cases=3,
        obligations=("gradient", "update"),
        report_dir=tmp_path,
    )
    assert code == 0
    found = {record.number: record for record in records.of(Finding)}[0]
    assert found.implementation.endswith(":Right") and found.suspicion
    assert "Leaks) in the same processes, which leaves a state behind" in found.suspicion


@pytest.mark.long
def test_another_obligation_is_another_finding(tmp_path: Path, pool: Pool) -> None:
    (found,), _ = findings(tmp_path, pool, "'gradient' if ever == 1 else 'update'")
    assert found.obligation == "gradient" and tries(found) == (0, TRIES)
    assert found.otherwise == {"violated update": TRIES}


@pytest.mark.long
def test_a_crash_that_shows_sometimes(tmp_path: Path, pool: Pool) -> None:
    (found,), _ = findings(tmp_path, pool, "'crash' if ever in (1, 6) else 'gradient'")
    assert found.status == "crashed" and tries(found) == (1, TRIES) and found.intermittent
    assert Counter(found.otherwise) == {"violated gradient": TRIES - 1}
    assert found.title == "the ranks crashed: LookupError: no such layer"
