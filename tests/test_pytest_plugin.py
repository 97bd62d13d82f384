"""parametrize_with_checks and the plugin, in pytest sessions of their own."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import zerocheck
from zerocheck.errors import UsageError
from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.report.checks import groups_of
from zerocheck.testing import parametrize_with_checks
from zerocheck.user_code import importable_name

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

# They start without torch.
sys.modules["zerocheck.run.engine"] = types.SimpleNamespace(run=run)
environment = types.SimpleNamespace(untested_versions=lambda: "")
sys.modules["zerocheck.run.execute.environment"] = environment
"""


def session(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    """A pytest session with the plugin, and with none that happens to be installed here."""
    return pytester.runpytest_subprocess("-p", "zerocheck.pytest_plugin", *args)


@pytest.fixture
def here(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_mine=MODULE)
    return pytester


def test_all_hold(here: pytest.Pytester) -> None:
    here.makeconftest(CONFTEST.format(records="held()"))
    result = session(here, "-v")
    result.assert_outcomes(passed=COUNT, skipped=SKIPPED)
    result.stdout.fnmatch_lines(
        ["*test_sharding?MyFSDP-gradient-basic? PASSED*", "zerocheck report: *report.html"]
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
        ["STALE *: a known issue does not show any more", "*to do *remove known.toml*"]
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


@pytest.mark.long
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
environment = types.SimpleNamespace(untested_versions=lambda: "")
sys.modules["zerocheck.run.execute.environment"] = environment
"""
    )
    result = session(here)
    result.assert_outcomes(failed=COUNT + SKIPPED)
    result.stdout.fnmatch_lines(["MyFSDP lacks train_step()"])
    assert "Traceback" not in result.stdout.str() and "shared_run.py" not in result.stdout.str()


COUNTED = """
import os, time
from pathlib import Path
(Path(__file__).parent / f"run-{os.environ['PYTEST_XDIST_WORKER']}").touch(exist_ok=False)
time.sleep(1)  # as long as the other worker needs to come
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("dist", ["load", "loadgroup"])
def test_workers_share_a_run(
    here: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, dist: str
) -> None:
    pytest.importorskip("xdist")
    counted = "".join(f"\n    {line}" for line in COUNTED.strip().splitlines())
    conftest = CONFTEST.format(records="failed()[:3] + [hand_made.finding()]")
    here.makeconftest(
        conftest.replace("    calls.append(options)", counted + "\n    calls.append(options)")
    )
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(here.path / "summary.md"))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(here.path))
    result = session(here, "-p", "xdist", "-n2", "--dist", dist, "--junitxml=junit.xml")
    assert result.parseoutcomes()["failed"] == 1
    assert len(list(here.path.glob("run-gw*"))) == 1
    # The reports are named once, by the session that started the workers.
    assert len([line for line in result.outlines if line.startswith("zerocheck report: ")]) == 1
    (error,) = [line for line in result.outlines if line.startswith("::error ")]
    assert error.startswith("::error file=test_mine.py,line=3,title=VIOLATED test_mine.py%3AMyFSDP")
    assert "VIOLATED" in (here.path / "summary.md").read_text()
    (failure,) = ET.parse(here.path / "junit.xml").iter("failure")
    assert failure.get("message", "").startswith("VIOLATED test_mine.py:MyFSDP: the reduced")
    assert (
        (failure.text or "").strip().splitlines()[-1].startswith("  replay      zerocheck replay")
    )


SLOW = """
import time
from zerocheck.testing import progress
progress.INTERVAL_S = 0.2

def slowly(records):
    for record in records:
        if isinstance(record, hand_made.RunStarted):
            record = msgspec.structs.replace(record, started=time.time(), planned=5)
        yield record
        time.sleep(0.4)
"""


@pytest.mark.every(4)
@pytest.mark.parametrize("args", [(), ("-s",), ("-p", "xdist", "-n2"), ("-q",)])
def test_a_line_at_intervals_says_how_far_a_run_is(
    here: pytest.Pytester, args: tuple[str, ...]
) -> None:
    """Of the run alone, and not in the output of the test that waits for it."""
    if "-n2" in args:
        pytest.importorskip("xdist")
    here.makeconftest(
        CONFTEST.format(records="held(5)").replace("hand_made.held(5)", "slowly(hand_made.held(5))")
        + SLOW
    )
    result = session(here, "-rA", *args)
    result.assert_outcomes(passed=COUNT, skipped=SKIPPED)
    lines = [line for line in result.outlines if line.startswith("zerocheck: ")]
    if "-q" in args:
        assert not lines
        return
    assert any("test_mine.py:MyFSDP: 2 of 5 cases, " in line and " left" in line for line in lines)
    assert len(lines) == len(set(lines)) <= 5
    assert "Captured stdout" not in result.stdout.str()


def test_tests_are_chosen_by_obligation_and_group(here: pytest.Pytester) -> None:
    here.makeconftest(CONFTEST.format(records="failed()[:3] + [hand_made.finding()]"))
    session(here, "-k", "gradient and (basic or world)").assert_outcomes(
        passed=1, failed=1, deselected=COUNT + SKIPPED - 2
    )
    again = session(here, "--lf")
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*MyFSDP-gradient-basic*"])


def test_a_crash_shows_the_stacks_of_the_ranks(here: pytest.Pytester) -> None:
    crash = "failed()[:1] + hand_made.failed()[3:4] + hand_made.failed()[6:7]"
    here.makeconftest(CONFTEST.format(records=crash))
    result = session(here, "-k", "MyFSDP-clip-basic")
    result.stdout.fnmatch_lines(
        [
            "CRASHED test_mine.py:MyFSDP: the ranks crashed: IndexError",
            "*stacks and output of the ranks*",
            "Traceback (most recent call last):",
        ]
    )


SETTINGS_CONFTEST = """
import json, sys, types
import hand_made, msgspec
from pathlib import Path

def run(options, handlers):
    found = {name: getattr(options, name) for name in ("profile", "seed", "max_cases")}
    found["obligations"] = options.obligations
    found["issues"] = [issue.reason for issue in options.issues if "test_mine" in issue.fingerprint]
    Path(__file__).with_name("asked.json").write_text(json.dumps(found))
    for record in hand_made.held():
        for handler in handlers:
            handler.handle(record)

# They start without torch.
sys.modules["zerocheck.run.engine"] = types.SimpleNamespace(run=run)
environment = types.SimpleNamespace(untested_versions=lambda: "")
sys.modules["zerocheck.run.execute.environment"] = environment
"""


def test_settings_and_who_goes_before_whom(here: pytest.Pytester) -> None:
    here.makeconftest(SETTINGS_CONFTEST)
    here.makepyfile(
        test_mine=MODULE.replace("world_sizes=(2, 3), max_cases=5, seed=3", "seed=3, max_cases=5")
    )
    here.path.joinpath("known.toml").write_text(KNOWN)
    project = """
[tool.zerocheck]
profile = "ci"
seed = 1
max_cases = 1
obligations = ["gradient", "clip"]
known_issues = ["known.toml"]
report_dir = "reports"
[tool.pytest.ini_options]
zerocheck_obligations = "gradient"
zerocheck_seed = "2"
"""
    here.path.joinpath("pyproject.toml").write_text(project)
    (here.path / "below").mkdir()
    result = session(here, "--zerocheck-max-cases", "7", "--rootdir", str(here.path))
    result.assert_outcomes(passed=2, skipped=8)  # gradient, and coverage
    asked = json.loads((here.path / "asked.json").read_text())
    assert asked == {
        "profile": "ci",  # pyproject.toml
        "obligations": ["gradient"],  # pytest's ini file
        "seed": 3,  # the decorator
        "max_cases": 7,  # the command line
        "issues": ["it is so"],
    }
    assert [path.name for path in (here.path / "reports").glob("*/report.md")]


@pytest.mark.parametrize(
    ("project", "message"),
    [
        (
            '[tool.zerocheck]\nprofil = "ci"',
            "*pyproject.toml, [[]tool.zerocheck]: unknown key 'profil'; did you mean 'profile'*",
        ),
        (
            '[tool.pytest.ini_options]\nzerocheck_profile = "cj"',
            "zerocheck_[*] in *pyproject.toml: unknown profile 'cj'; did you mean 'ci'*",
        ),
    ],
)
def test_wrong_settings(here: pytest.Pytester, project: str, message: str) -> None:
    here.path.joinpath("pyproject.toml").write_text(project)
    result = session(here)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert "Traceback" not in result.stderr.str()


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


def ids(**given: Any) -> list[str]:
    mark = parametrize_with_checks(["fsdp2"], **given)
    return [str(parameter.id) for parameter in mark.args[1]]


def test_a_deepspeed_config_is_called_by_its_file() -> None:
    mark = parametrize_with_checks(["conf/ds_config.json", "conf/ds_config.json+gather-stale"])
    found = [str(parameter.id) for parameter in mark.args[1]]
    assert found[0].startswith("ds_config.json-ownership-")
    assert found[-1] == "ds_config.json+gather-stale-coverage"


def test_a_test_for_each_obligation_and_group() -> None:
    found = ids()
    assert len(found) == len(set(found)) == COUNT + SKIPPED
    assert "fsdp2-gradient-sharding" in found and found[-1] == "fsdp2-coverage"
    assert not any("resume" in name for name in found)
    some = ids(obligations=["memory", "roundtrip"])
    assert {name.split("-")[1] for name in some} == {
        "roundtrip", "persistent", "peak", "release", "communication", "coverage",
    }  # fmt: skip
    assert "fsdp2-roundtrip-resume" in some
    both = ids(obligations=("clip", "gradient"))
    assert ids(obligations="gradient,clip,gradient") == both and len(both) == len(set(both)) == 19


def test_obligations_are_spelled_out() -> None:
    with pytest.raises(UsageError, match="unknown obligation 'updates'; did you mean 'update'"):
        ids(obligations="updates")
    with pytest.raises(UsageError, match="unknown obligation 'memori'; did you mean 'memory'"):
        ids(obligations=["gradient", "memori"])
