"""Whole runs over what users bring: every way to break has its verdict, and the run goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from collected import Collect, Run, whole_run
from slices import sliced

from zerocheck.case.schema import Case, Model, Training
from zerocheck.errors import UsageError
from zerocheck.ranks.pool import Pool
from zerocheck.run.engine import AHEAD, run
from zerocheck.run.execute.trial import Trial
from zerocheck.run.findings.case_file import read as read_case
from zerocheck.run.findings.case_file import read_for_replay
from zerocheck.run.findings.case_file import write as write_case
from zerocheck.run.findings.crash_watch import ALIKE
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.records.journal import Journal, read
from zerocheck.run.records.records import CaseFinished, Finding, RunFinished
from zerocheck.run.replay import replay

SUBJECTS = Path(__file__).with_name("subjects.py")


@pytest.fixture
def run_subject(tmp_path: Path, pool: Pool) -> Run:
    """run_subject("Name", ...) -> (exit code, records)."""

    def start(name: str, **given: object) -> tuple[int, Collect]:
        options = {"world_sizes": (2,), "max_cases": 2, "report_dir": tmp_path} | given
        return whole_run(pool, f"{SUBJECTS}:{name}", **options)

    return start


def test_a_sharder_of_a_few_lines_holds(run_subject: Run) -> None:
    code, records = run_subject("build", world_sizes=(1, 3), max_cases=sliced(12, 6))
    assert code == 0, records[-1]
    statuses = {record.status for record in records.of(CaseFinished)}
    assert statuses <= {"holds", "unsupported"}
    assert "holds" in statuses
    assert not records.of(Finding)


def test_cases_ask_only_for_what_an_implementation_handles(run_subject: Run) -> None:
    """Code that knows nothing of weights, scaling and unfreezing is not asked for them; masked
    cases hold by the declared mean of means."""
    _, records = run_subject("Plain", max_cases=sliced(60, 24), profile="ci")
    finished = records.of(CaseFinished)
    assert {record.status for record in finished} <= {"holds", "unsupported"}, [
        record.judgement.violations for record in finished if record.status == "violated"
    ]
    assert any(record.case.data.masked and record.status == "holds" for record in finished)
    for record in finished:
        assert record.case.training.loss_scale is record.case.training.unfreeze is None


@pytest.mark.parametrize(
    ("name", "field", "status"),
    [
        ("Plain", "loss_scale", "unsupported"),
        ("Plain", "unfreeze", "unsupported"),
        ("build", "loss_scale", "unsupported"),
        ("build", "unfreeze", "holds"),
        ("Scaled", "loss_scale", "holds"),
    ],
)
def test_a_case_that_asks_for_more_is_unsupported_with_the_reason(
    pool: Pool, name: str, field: str, status: str
) -> None:
    asked = {"loss_scale": 8.0, "overflow": 1} if field == "loss_scale" else {"unfreeze": 1}
    case = Case(model=Model(frozen=("stem.*",)), training=Training(steps=3, **asked))
    outcome = Trial(pool, f"{SUBJECTS}:{name}", case).outcome()
    assert outcome.status == status, outcome.judgement
    if status == "unsupported":
        assert f"training.{field}" in outcome.reason


def test_a_missing_average_is_named_and_replayed_bit_for_bit(run_subject: Run, pool: Pool) -> None:
    code, records = run_subject("not_averaged", world_sizes=(1, 2, 3), max_cases=4)
    assert code == 1
    finding = records.of(Finding)[-1]
    assert {record.number for record in records.of(Finding)} == {0}
    assert finding.causes == ("gradient x W",)
    assert finding.confirmed == 1
    assert finding.violation is not None
    assert finding.violation.step == 0
    assert finding.title == "gradient is 2 times too large: summed over 2 ranks, not averaged"
    assert finding.violation.ratio is not None
    assert finding.violation.ratio > 1e6
    name = f"{SUBJECTS}:not_averaged"
    with pytest.raises(UsageError, match=re.escape("say so again to let its code run: --impl")):
        read_for_replay(Path(finding.case_file))
    file = read_for_replay(Path(finding.case_file), implementation=name)
    replayed = replay(file, implementation=name, ranks=pool)
    assert replayed is not None
    assert replayed.verdict.startswith("reproduced bit for bit: violated again")
    assert replayed.exit_code == 1
    other = replay(file, implementation="fsdp2", ranks=pool)
    assert other is not None
    assert other.outcome.status == "holds"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("KilledInStep1", "crashed", "rank 1 died of SIGKILL"),
        ("Aborts", "crashed", "rank 0 died of SIGABRT"),
        ("Exits", "crashed", "raised SystemExit"),
        ("RaisesOnOneRank", "crashed", "raised ArithmeticError: rank 1 has had enough"),
        ("ConstructorRaises", "crashed", "raised LookupError: no such layer"),
        ("WrongShape", "crashed", "shards() gave parameter of 'head.weight' with"),
        ("Hangs", "hung", "rank 0 waited"),
    ],
)
def test_every_way_to_break_has_its_verdict(
    run_subject: Run, name: str, status: str, message: str
) -> None:
    code, records = run_subject(name, max_cases=1, profile="quick", seed=3, shrink=False)
    assert code == 1
    (case,) = records.of(CaseFinished)
    assert case.status == status, case.reason
    finding = records.of(Finding)[-1]
    assert finding.status == status
    assert finding.confirmed == 1
    assert message in finding.reason
    # Where each rank stood is said of all of them.
    assert "rank 0" in finding.reason
    assert "rank 1" in finding.reason
    assert Path(finding.case_file).is_file()


def test_a_hang_names_the_collective_that_each_rank_was_in(run_subject: Run) -> None:
    _, records = run_subject("Hangs", max_cases=1, seed=3, shrink=False)
    reason = records.of(Finding)[-1].reason
    last = re.findall(r"last collective (\S+) #(\d+)", reason)
    assert len(last) == 2
    assert last[0] != last[1]
    assert records.of(Finding)[-1].causes == ("different collectives",)


def test_a_run_stops_where_every_case_crashes_alike(run_subject: Run) -> None:
    """One finding of the simplest case, which is not searched for; the rest is not run."""
    code, records = run_subject("ConstructorRaises", world_sizes=(1, 2), max_cases=20)
    assert code == 1
    count = len(records.of(CaseFinished))
    assert ALIKE <= count <= ALIKE + AHEAD
    assert {record.status for record in records.of(CaseFinished)} == {"crashed"}
    assert {finding.number for finding in records.of(Finding)} == {0}
    finding = records.of(Finding)[-1]
    line = SUBJECTS.read_text().splitlines().index('        raise LookupError("no such layer")') + 1
    assert finding.place.startswith("build (") and finding.place.endswith(f"subjects.py:{line})")
    assert (finding.cases, finding.left_out) == (count, 20 - count)
    assert finding.size == "1 rank, no blocks, 1 step"
    assert finding.extent == "with all options at their default, on one rank already"
    (why,) = records.of(RunFinished)[0].why
    assert f"stopped after {count} cases that crash alike at {finding.place}" in why
    assert why.endswith(f"(1 finding): {20 - count} cases were not run")


def test_a_run_goes_on_where_a_feature_crashes(run_subject: Run) -> None:
    """Though all of its cases have that: the simplest one does not crash."""
    code, records = run_subject("RaisesWithClip", max_cases=8, features=("clip",), shrink=False)
    finished = [record.status for record in records.of(CaseFinished)]
    assert code == 1 and len(finished) == 8 and {*finished} == {"crashed", "unsupported"}
    assert finished.count("crashed") > ALIKE
    finding = records.of(Finding)[-1]
    assert finding.left_out == 0 and finding.size == ""
    _, records = run_subject("RaisesWithClip", max_cases=8)
    assert {record.status for record in records.of(CaseFinished)} >= {"crashed", "holds"}
    assert records.of(Finding)[-1].left_out == 0


def test_a_crash_names_the_sizes_of_collectives(run_subject: Run) -> None:
    """gloo says no more than that a connection was closed."""
    _, records = run_subject("ReducesOtherSizes", max_cases=1, seed=3, shrink=False)
    finding = records.of(Finding)[-1]
    assert finding.causes == ("different collectives",)
    assert finding.title == f"the ranks {finding.status}: they called different collectives"
    last = re.findall(r"last collective allreduce\((\d+)\)", finding.reason)
    assert last == ["64", "1"]


def test_other_cases_go_on_after_a_kill(run_subject: Run) -> None:
    _, records = run_subject("KilledInStep1", max_cases=6, seed=1, shrink=False)
    statuses = [record.status for record in records.of(CaseFinished)]
    assert len(statuses) == 6
    # A case of one step ends before the kill.
    assert "crashed" in statuses
    assert len({f.number for f in records.of(Finding)}) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Refuses", "this machine is too small"), ("RefusesOnOneRank", "nothing for rank 0")],
)
def test_unsupported_everywhere_is_nothing_checked(
    run_subject: Run, name: str, reason: str
) -> None:
    code, records = run_subject(name, max_cases=2, world_sizes=(2,))
    assert code == 1
    assert {record.status for record in records.of(CaseFinished)} == {"unsupported"}
    (end,) = records.of(RunFinished)
    assert "nothing was checked" in end.why[0]
    assert reason in end.why[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoBuild", "lacks build()"),
        ("Misdeclared", "capabilities 'loss_scaling'; did you mean 'loss_scale'"),
        ("OldName", "`handles` is called `capabilities`"),
        ("NoStep", "is a class without train_step()"),
        ("number", "is of type int; needed is a subclass of zerocheck.Implementation"),
        ("two_arguments", "a build function takes (model, case, mesh)"),
        ("Buidl", "has no 'Buidl'; did you mean 'build'?"),
    ],
)
def test_what_cannot_be_used_is_said(run_subject: Run, name: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        run_subject(name)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module\n", "No module named 'no_such_module' (line 1)"),
        ("def build(:\n", "SyntaxError"),
        ("raise SystemExit(3)\n", "it ends the process, as by sys.exit(3) (line 1)"),
        ("import os\nos._exit(4)\n", "ended the process that tried it"),
    ],
)
def test_a_file_that_does_not_import(tmp_path: Path, pool: Pool, text: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        run(RunOptions(implementations=(f"{path}:build",), report_dir=tmp_path), [], ranks=pool)
    assert message in str(error.value)


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_a_whole_journal_and_no_process(
    tmp_path: Path, how: signal.Signals
) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "zerocheck",
            "run",
            f"{SUBJECTS}:Slow",
            "--world-sizes",
            "2,3",
            "--report-dir",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    journal = tmp_path / "journal.ndjson"
    deadline = time.monotonic() + 60
    while not (journal.is_file() and journal.read_bytes().count(b"\n") >= 4):
        assert time.monotonic() < deadline, "no verdict in 60 s"
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    process.send_signal(how)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == (130 if how == signal.SIGINT else -9), said.decode()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    records = read(journal)
    assert len([record for record in records if isinstance(record, CaseFinished)]) >= 2
    if how == signal.SIGINT:
        end = records[-1]
        assert isinstance(end, RunFinished)
        assert end.outcome == "interrupted"
        assert end.exit_code == 130
        assert not [reason for reason in end.why if "nothing was checked" in reason]


def test_a_case_file_that_cannot_be_used_is_refused(tmp_path: Path, run_subject: Run) -> None:
    _, records = run_subject("ConstructorRaises", max_cases=4, shrink=False)
    good = Path(records.of(Finding)[-1].case_file)
    assert isinstance(read_case(good).case, Case)
    data = good.read_bytes()
    raw = msgspec.json.decode(data)
    huge = msgspec.json.decode(data)
    huge["case"]["model"] |= {"width": 1 << 20, "inputs": 1 << 20, "blocks": []}
    bad = {
        "truncated": (data[: len(data) // 2], "ends too early"),
        "empty": (b"", "the file is empty"),
        "version": (msgspec.json.encode(raw | {"format": 9}), "case file format 9"),
        "not a case": (b"[1, 2]", "is not a case file"),
        "huge": (msgspec.json.encode(huge), "elements"),
    }
    for name, (content, message) in bad.items():
        path = tmp_path / f"{name}.json"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=re.escape(message)):
            read_case(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_case(tmp_path / "absent.json")


def test_the_journal_of_a_run_reads_back(tmp_path: Path, pool: Pool) -> None:
    collected = Collect()
    with Journal(tmp_path / "journal.ndjson") as journal:
        options = RunOptions(
            implementations=("zero1",), world_sizes=(2,), max_cases=3, report_dir=tmp_path
        )
        assert run(options, [journal, collected], ranks=pool) == 0
    assert read(tmp_path / "journal.ndjson") == list(collected)


@pytest.mark.long
def test_a_gradient_that_is_not_shown_is_recovered(run_subject: Run) -> None:
    code, records = run_subject("Hidden", world_sizes=(1, 2, 3), max_cases=sliced(45, 12))
    assert code == 0, records[-1]
    tiers = {r.judgement.tier for r in records.of(CaseFinished) if r.judgement is not None}
    assert tiers == {"state only"}
    code, records = run_subject(
        "HiddenNotAveraged", world_sizes=(2, 3), max_cases=sliced(10, 5), shrink=sliced(True, False)
    )
    assert code == 1
    findings = records.of(Finding)
    assert {finding.obligation for finding in findings} == {"gradient"}
    assert ("gradient x W",) in {finding.causes for finding in findings}


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["NeverClips", "HiddenNeverClips"])
def test_a_gradient_that_is_never_clipped_is_named(run_subject: Run, name: str) -> None:
    code, records = run_subject(name, world_sizes=(2, 3), max_cases=8, shrink=False)
    assert code == 1
    findings = {f.number: f for f in records.of(Finding)}
    assert {(f.obligation, f.causes) for f in findings.values()} == {("clip", ("not clipped",))}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ReturnsNoReport", "train_step must return zerocheck.StepReport, got NoneType"),
        ("Misspells", "unknown moment in step.reached 'reducd'; did you mean 'reduced'?"),
    ],
)
def test_misuse_of_the_contract_is_the_headline(run_subject: Run, name: str, message: str) -> None:
    code, records = run_subject(name, max_cases=1, shrink=False)
    assert code == 1
    assert message in records.of(Finding)[-1].title


@pytest.mark.long
def test_a_frozen_parameter_may_say_that_it_has_no_gradient(run_subject: Run) -> None:
    code, _ = run_subject("GradientsOfFrozen", world_sizes=(2,), max_cases=12)
    assert code == 0


def test_two_findings_of_one_name_have_a_file_each(tmp_path: Path, run_subject: Run) -> None:
    _, records = run_subject("ConstructorRaises", max_cases=4, shrink=False)
    case_file = read_case(Path(records.of(Finding)[-1].case_file))
    first, second = (write_case(tmp_path / "two", "build", case_file) for _ in range(2))
    assert first != second
    assert read_case(first) == read_case(second) == case_file


def test_a_world_size_beyond_memory_is_refused_before_anything_runs(run_subject: Run) -> None:
    with pytest.raises(UsageError, match="1024"):
        run_subject("build", world_sizes=(1, 1024))
