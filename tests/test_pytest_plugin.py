"""parametrize_with_checks and the plugin, in pytest sessions of their own."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import zerocheck
from zerocheck.errors import UsageError
from zerocheck.judge.verdict import EQUIVALENCE
from zerocheck.report.checks import groups_of
from zerocheck.testing import importable_name, parametrize_with_checks

pytest_plugins = ["pytester"]

COUNT = len(EQUIVALENCE) + 1
"""Tests that cases without features exercise: the basic one of each obligation, and coverage."""

SKIPPED = sum(len(groups_of(obligation)) - 1 for obligation in EQUIVALENCE)
"""Tests of groups that such cases do not exercise."""

# A test module and a conftest that replaces the engine: records come from hand_made.
MODULE = """
import zerocheck

class MyFSDP:
    pass

@zerocheck.parametrize_with_checks([MyFSDP], world_sizes=(2, 3), max_cases=5, seed=3)
def test_sharding(check):
    check()
"""

CONFTEST = """
import sys, types
import hand_made, msgspec

calls = []

def run(options, handlers):
    calls.append(options)
    assert len(calls) == 1, "the checks of one implementation share one run"
    assert options.world_sizes == (2, 3) and options.cases == 5 and options.seed == 3
    (name,) = options.implementations
    for record in hand_made.{records}:
        if isinstance(record, hand_made.RunStarted):
            record = msgspec.structs.replace(record, implementations=(name,))
        elif hasattr(record, "implementation"):
            record = msgspec.structs.replace(record, implementation=name)
        for handler in handlers:
            handler.handle(record)

sys.modules["zerocheck.run.engine"] = types.SimpleNamespace(run=run)  # starts without torch
"""


def session(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    """A pytest session with the plugin, which an installed zerocheck brings by itself."""
    installed = entry_points(group="pytest11", name="zerocheck")
    plugin = () if installed else ("-p", "zerocheck.pytest_plugin")
    return pytester.runpytest_subprocess(*plugin, *args)


@pytest.fixture
def here(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(test_mine=MODULE)
    return pytester


def test_all_hold(here: pytest.Pytester) -> None:
    here.makeconftest(CONFTEST.format(records="held()"))
    result = session(here, "-v")
    result.assert_outcomes(passed=COUNT, skipped=SKIPPED)
    result.stdout.fnmatch_lines(
        ["*test_sharding?MyFSDP-gradient-basic? PASSED*", "zerocheck report: *report.md"]
    )


def test_a_violation_fails_its_check_with_the_finding(here: pytest.Pytester) -> None:
    here.makeconftest(CONFTEST.format(records="failed()[:3] + [hand_made.finding()]"))
    result = session(here, "--zerocheck-report-dir", "out")
    # One case has 3 ranks, so the group `world` is exercised.
    world = len(EQUIVALENCE)
    result.assert_outcomes(passed=COUNT + world - 1, failed=1, skipped=SKIPPED - world)
    result.stdout.fnmatch_lines(
        [
            "VIOLATED test_mine.py:MyFSDP: the reduced gradient is 4 times too large",
            "  obligation  gradient: *",
            "  replay      zerocheck replay * --implementation test_mine.py:MyFSDP",
            "FAILED *MyFSDP-gradient-basic? - VIOLATED*",
        ]
    )
    (directory,) = (here.path / "out").iterdir()
    assert {path.name for path in directory.iterdir()} >= {"journal.ndjson", "report.md"}


def test_what_no_case_exercised_fails(here: pytest.Pytester) -> None:
    here.makeconftest(CONFTEST.format(records="held()[:1] + [hand_made.case(clip=`not exercised`)]")
                      .replace("`", "'"))  # fmt: skip
    result = session(here, "-rs")
    result.assert_outcomes(passed=COUNT - 1, failed=1, skipped=SKIPPED)
    result.stdout.fnmatch_lines(
        [
            "nothing was checked for clip: none of 1 cases exercised it (obligations can *",
            "SKIPPED *gradient with features of sharding: not exercised in 1 cases",
        ]
    )


def test_nothing_checked_fails(here: pytest.Pytester) -> None:
    records = "held()[:1] + [hand_made.case(status='unsupported', reason='no mesh')]"
    here.makeconftest(CONFTEST.format(records=records))
    result = session(here)
    result.assert_outcomes(failed=COUNT + SKIPPED)
    result.stdout.fnmatch_lines(["*nothing was checked: *unsupported, most often since no mesh"])


def test_a_known_issue_is_expected_to_fail(here: pytest.Pytester) -> None:
    here.makeconftest(CONFTEST.format(records="known()"))
    result = session(here, "-rx")
    # What is published is wrong since the gradient is.
    result.assert_outcomes(passed=COUNT - 2, xfailed=2, skipped=SKIPPED)
    result.stdout.fnmatch_lines(["*gradient: 1 holds, 1 known: *: upstream divides by nothing*"])


def test_a_stale_known_issue_fails(here: pytest.Pytester) -> None:
    here.makeconftest(CONFTEST.format(records="held()[:-1] + [hand_made.stale()]"))
    result = session(here)
    result.assert_outcomes(passed=COUNT - 1, failed=1, skipped=SKIPPED)
    result.stdout.fnmatch_lines(
        [
            "STALE *: a known issue does not show any more",
            "*to do *remove known.toml*",
        ]
    )


KNOWN = """
[[issue]]
fingerprint = "test_mine.py:MyFSDP / gradient"
reason = "it is so"
"""


@pytest.mark.parametrize("how", ["argument", "ini", "missing"])
def test_files_of_known_issues_arrive(here: pytest.Pytester, how: str) -> None:
    check = "assert [issue.reason for issue in options.issues] == ['it is so']"
    here.makeconftest(
        CONFTEST.format(records="held()").replace("    (name,)", f"    {check}\n    (name,)")
    )
    here.path.joinpath("known.toml").write_text(KNOWN)
    if how == "argument":
        given = MODULE.replace("seed=3", "seed=3, known_issues=['none', 'known.toml']")
        here.makepyfile(test_mine=given)
    else:
        name = "known.toml" if how == "ini" else "other.toml"
        here.makeini(f"[pytest]\nzerocheck_known_issues =\n    none\n    {name}\n")
    result = session(here)
    if how == "missing":
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines(["*cannot read known issues *other.toml: No such file*"])
    else:
        result.assert_outcomes(passed=COUNT, skipped=SKIPPED)


def test_a_failure_of_the_engine_is_not_repeated(here: pytest.Pytester) -> None:
    here.makeconftest(
        """
import sys, types, zerocheck
calls = []
def run(options, handlers):
    calls.append(options)
    assert len(calls) == 1
    raise zerocheck.UsageError("MyFSDP lacks train_step()")
sys.modules["zerocheck.run.engine"] = types.SimpleNamespace(run=run)
"""
    )
    result = session(here)
    result.assert_outcomes(failed=COUNT + SKIPPED)
    result.stdout.fnmatch_lines(["*UsageError: MyFSDP lacks train_step()"])


def test_checks_of_one_run_go_to_one_worker(here: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    here.makeconftest(CONFTEST.format(records="held()"))
    session(here, "-n2", "--dist", "loadgroup").assert_outcomes(passed=COUNT, skipped=SKIPPED)


def test_wrong_options_are_said_at_collection(here: pytest.Pytester) -> None:
    here.makepyfile(
        test_mine="""
import zerocheck
@zerocheck.parametrize_with_checks(["fsdp"])
def test_sharding(check):
    check()
"""
    )
    result = session(here)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*unknown implementation 'fsdp'; did you mean 'fsdp2'*"])


def test_for_real(here: pytest.Pytester) -> None:
    """A build function of the user and a built-in name, judged by the real engine."""
    here.makepyfile(
        test_mine="""
import torch, zerocheck
from torch.nn.parallel import DistributedDataParallel

def my_ddp(model, case, mesh):
    model = DistributedDataParallel(model, find_unused_parameters=True)
    return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))

def forgets_decay(model, case, mesh):
    built = my_ddp(model, case, mesh)
    for group in built.optimizer.param_groups:
        group["weight_decay"] = 0.0
    return built

my_ddp.semantics = forgets_decay.semantics = zerocheck.Semantics(buffers="rank0")

@zerocheck.parametrize_with_checks([my_ddp, forgets_decay], world_sizes=(1, 2), max_cases=4)
def test_sharding(check):
    check()
"""
    )
    result = session(here, "-v")
    result.stdout.fnmatch_lines(
        [
            "*my_ddp-update-basic? PASSED*",
            "*forgets_decay-update-basic? FAILED*",
            "  replay *forgets_decay*",
        ]
    )
    assert result.parseoutcomes()["failed"] == 1


class AtTheTop:
    """Something that rank processes can import."""


def test_names() -> None:
    name = importable_name(AtTheTop)
    path, _, attribute = name.rpartition(":")
    assert attribute == "AtTheTop" and Path(path).resolve() == Path(__file__).resolve()
    assert importable_name(zerocheck.Implementation).startswith("zerocheck.contract.")


def test_what_ranks_could_not_import() -> None:
    class Local:
        pass

    for given in (Local, lambda *_: None):
        with pytest.raises(UsageError, match="is not at the top of its module"):
            parametrize_with_checks([given])
    with pytest.raises(UsageError, match="needed is a class, a function"):
        parametrize_with_checks([AtTheTop()])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="at least one"):
        parametrize_with_checks([])
    with pytest.raises(UsageError, match="takes a list"):
        parametrize_with_checks("fsdp2")
