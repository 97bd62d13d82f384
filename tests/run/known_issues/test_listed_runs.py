"""Runs with a file of known issues: what is known, a finding, or stale."""

from __future__ import annotations

from pathlib import Path

import pytest
from collected import Collect, Run, whole_run
from entry_text import entry

from zerocheck.case.features import features
from zerocheck.case.schema import Case, Training
from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.ranks.pool import Pool
from zerocheck.run.findings.case_file import read as read_case
from zerocheck.run.records.records import CaseFinished, Finding, RunFinished, RunStarted, StaleIssue

SUBJECTS = Path(__file__).parents[1] / "subjects.py"


@pytest.fixture
def run_listed(tmp_path: Path, pool: Pool) -> Run:
    """run_listed(name, entry, ...) -> (exit code, records). {} in the entry is the subject."""

    def start(name: str, text: str, **given: object) -> tuple[int, Collect]:
        subject = f"{SUBJECTS}:{name}"
        (tmp_path / "known.toml").write_text(text.replace("SUBJECT", subject))
        options = {
            "world_sizes": (3,),
            "max_cases": 6,
            "obligations": ("gradient", "update"),
            "report_dir": tmp_path,
        }
        known = (str(tmp_path / "known.toml"),)
        return whole_run(pool, subject, known_issues=known, **(options | given))

    return start


MICROBATCHES = "{ mesh = [3], training = { microbatches = 2 } }"
WRONG = entry("SUBJECT / gradient / gradient x W", features=["microbatches"], case=MICROBATCHES)


def test_nothing_but_a_known_issue_exits_0(run_listed: Run) -> None:
    code, records = run_listed("not_averaged_in_microbatches", WRONG)
    assert code == 0, records[-1]
    counted = records.tally
    (implementation,) = counted.implementations.values()
    judged = [r for r in records.of(CaseFinished) if r.status != "unsupported"]
    several = [r for r in judged if "microbatches" in features(r.case)]
    assert implementation.cases["known"] == len(several) >= 2
    assert implementation.cases["holds"] == len(judged) - len(several) >= 2
    (found,) = counted.known
    assert found.known is not None and found.known.reason == "known for long"
    assert found.tries == 0
    listed = Case(mesh=(3,), training=Training(microbatches=2))
    assert read_case(Path(found.case_file)).case == listed  # smaller than what was drawn
    assert not counted.findings and not counted.stale


@pytest.mark.long
def test_the_same_fault_with_other_features_is_a_finding(run_listed: Run) -> None:
    code, records = run_listed("not_averaged", WRONG)
    assert code == 1
    (known,), (new,) = records.tally.known, records.tally.findings
    assert known.fingerprint == new.fingerprint
    assert new.confirmed == 1
    first = {record.number: record for record in records.of(CaseFinished)}[new.case_number]
    assert first.case.training.microbatches == 1
    (implementation,) = records.tally.implementations.values()
    assert implementation.cases["known"] and implementation.cases["violated"]


def test_an_entry_that_does_not_show_is_stale(run_listed: Run) -> None:
    code, records = run_listed("build", WRONG, max_cases=2)
    assert code == 1
    (stale,) = records.of(StaleIssue)
    assert stale.seen == (
        "its own case holds, does not show it in 5 fresh rank processes either, and no other case "
        "showed it"
    )
    assert stale.advice.startswith("remove ") and "known.toml, entry 1" in stale.advice
    assert not records.of(Finding)
    (end,) = records.of(RunFinished)
    assert "a known issue is stale" in end.why[0]


@pytest.mark.long
def test_an_entry_without_a_case_is_stale_if_no_case_shows_it(run_listed: Run) -> None:
    bare = entry("SUBJECT / gradient / gradient x W", features=["microbatches"])
    code, records = run_listed("build", bare)
    assert code == 1
    assert records.of(StaleIssue)[0].seen.startswith("it has no case of its own")
    code, records = run_listed("not_averaged_in_microbatches", bare)
    assert code == 0 and not records.of(StaleIssue)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"world_sizes": (2,)}, WRONG),  # not its world size
        ({"features": ("tied",)}, WRONG),  # not its features
        ({"obligations": ("update",)}, WRONG),  # not its obligation
        ({}, entry("SUBJECT / gradient", torch="<2.0", case="{ mesh = [3] }")),
        ({}, entry("zero2 / gradient", case="{ mesh = [3] }")),
        ({}, entry("SUBJECT / gradient", features=["world-4"])),
    ],
    ids=["world size", "features", "obligation", "torch", "implementation", "no such case"],
)
def test_what_was_not_tried_is_not_stale(
    run_listed: Run, given: dict[str, object], text: str
) -> None:
    code, records = run_listed("build", text, max_cases=1, **given)
    assert code == 0, records[-1]
    assert len(records.of(CaseFinished)) == 1


@pytest.mark.long
def test_what_shows_sometimes_is_known_and_never_stale(run_listed: Run) -> None:
    rare = entry("SUBJECT / gradient / gradient x W", features=["microbatches"], sometimes=True)
    code, records = run_listed("build", rare)
    assert code == 0 and not records.of(StaleIssue)
    code, records = run_listed("not_averaged_in_microbatches", rare)
    assert code == 0 and len(records.tally.known) == 1


@pytest.mark.long
def test_an_issue_of_another_torch_is_a_finding(run_listed: Run) -> None:
    text = entry("SUBJECT / gradient / gradient x W", torch=["1.0"])
    code, records = run_listed("not_averaged", text, max_cases=1)
    assert code == 1 and len(records.tally.findings) == 1


def test_a_rare_issue_is_looked_for_before_it_is_stale(
    tmp_path: Path, pool: Pool, run_listed: Run
) -> None:
    (tmp_path / "rare.py").write_text(f"""
import pathlib, torch.distributed as dist
import subjects

def rare(model, case, mesh):
    path = pathlib.Path({str(tmp_path)!r}) / f"rank{{dist.get_rank()}}"
    with path.open("a") as file:
        file.write("x")
    return (subjects.not_averaged if path.stat().st_size == 4 else subjects.build)(
        model, case, mesh
    )
""")
    name = f"{tmp_path / 'rare.py'}:rare"
    (tmp_path / "known.toml").write_text(WRONG.replace("SUBJECT", name))
    code, collected = whole_run(
        pool,
        name,
        world_sizes=(3,),
        max_cases=1,
        obligations=("gradient", "update"),
        report_dir=tmp_path,
        known_issues=(str(tmp_path / "known.toml"),),
    )
    assert code == 0 and len(collected.tally.known) == 1 and not collected.of(StaleIssue)


@pytest.mark.long
def test_a_known_crash_lets_the_other_cases_count(run_listed: Run) -> None:
    text = entry(
        "SUBJECT / crashed / LookupError",
        features=["microbatches"],
        says="no microbatch",
        case=MICROBATCHES,
    )
    code, records = run_listed("RaisesInMicrobatches", text)
    assert code == 0, records[-1]
    (implementation,) = records.tally.implementations.values()
    assert implementation.cases["known"] >= 2 and implementation.cases["holds"] >= 2
    assert {r.known for r in records.of(CaseFinished) if r.status == "crashed"} == {
        ("gradient", "update")
    }
    code, records = run_listed("RaisesInMicrobatches", text.replace("no micro", "no macro"))
    assert code == 1
    assert [finding.status for finding in records.tally.findings] == ["crashed"]
    assert len(records.of(StaleIssue)) == 1


@pytest.mark.long
def test_cases_of_a_known_hang_are_left_out_but_for_its_own(run_listed: Run) -> None:
    text = entry("SUBJECT / hung", features=["microbatches"], case=MICROBATCHES)
    code, records = run_listed("HangsInMicrobatches", text, max_cases=16)
    assert code == 0, records[-1]
    (start,) = records.of(RunStarted)
    (left,) = start.left_out
    cases = records.of(CaseFinished)
    assert left.count + len(cases) == 16 + 1
    assert len(cases) > 8  # most of the first 16 are covered: others are drawn in their place
    assert [r.status for r in cases].count("hung") == 1
    assert cases[-1].status == "hung" and cases[-1].known == ("gradient", "update")
    assert all(r.case.training.microbatches == 1 for r in cases[:-1])


@pytest.mark.long
def test_known_hangs_do_not_use_up_the_budget(run_listed: Run) -> None:
    # Without the features of the entry, four known hangs, and the run goes on.
    text = entry("SUBJECT / hung", features=["world-2"], case="{ mesh = [2] }")
    own = "".join(text.replace("mesh = [2]", f"mesh = [2], seed = {seed}") for seed in range(4))
    code, records = run_listed("Hangs", own, world_sizes=(2, 3), max_cases=2)
    assert code == 1  # three ranks are not listed
    statuses = [(r.case.world_size, bool(r.known)) for r in records.of(CaseFinished)]
    assert statuses == [(3, False), *[(2, True)] * 4]
    (end,) = records.of(RunFinished)
    assert not any("left out after" in why for why in end.why)


def test_what_follows_from_a_known_violation_is_known(run_listed: Run) -> None:
    text = entry("SUBJECT / gradient / gradient x W", case="{ mesh = [3] }")
    code, records = run_listed("not_averaged", text, obligations=EQUIVALENCE, max_cases=12)
    assert code == 0, records[-1]
    for record in records.of(CaseFinished):
        if record.status == "violated":
            assert record.judgement is not None
            failing = {o for o, s in record.judgement.statuses.items() if s == "violated"}
            assert set(record.known) == failing
