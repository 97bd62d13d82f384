"""Tests of single cases: `check`, and `strategy="hypothesis"`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.errors import FailedHealthCheck

import zerocheck
from zerocheck import strategies
from zerocheck.case.capabilities import CAPABILITIES
from zerocheck.case.mesh import AXES
from zerocheck.case.schema import Case, Training
from zerocheck.errors import Unsupported, UsageError
from zerocheck.protocol.replies import Description
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute import shared_ranks
from zerocheck.strategies import cases
from zerocheck.testing import CheckFailed, check, checks, session
from zerocheck.testing.single_case import SingleVerdict

pytest_plugins = ["pytester"]

ARTICLE = "zerocheck.faults.article:ArticleStage1"
SMALL = Case(mesh=(2,), training=Training(steps=1))


EVERYTHING = Description(restores=True, capabilities=CAPABILITIES, axes=AXES)


def supported(cases: Sequence[Case]) -> list[str | None]:
    """Refuse nothing."""
    return [None] * len(cases)


class Answering:
    """Stand-in for a judge, with one verdict."""

    def __init__(self, **fields: Any) -> None:
        self.answer = SingleVerdict(**fields)
        self.judged: list[Case] = []

    def verdict(self, case: Case, folder: Path) -> SingleVerdict:
        self.judged.append(case)
        return self.answer


def answering(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Answering:
    judge = Answering(**fields)
    monkeypatch.setattr(checks, "_judge", lambda name, options: judge)
    return judge


@pytest.mark.long
def test_a_planted_fault_shrinks_and_the_database_replays_it(
    session_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_ranks, "_pool", session_pool)
    tried: list[Case] = []

    @settings(
        database=InMemoryExampleDatabase(),
        deadline=None,
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @hypothesis.seed(1)
    @given(cases(ARTICLE, world_sizes=(1, 2, 3)))
    def judged(case: Case) -> None:
        tried.append(case)
        check(ARTICLE, case)

    with pytest.raises(CheckFailed, match=r"(?s)VIOLATED .*local gradient.* replay ") as failed:
        judged()
    smallest = tried[-1]
    assert smallest.mesh == (2,) and smallest.model.blocks == ()
    assert smallest.training == Training(steps=1)
    assert any(repr(smallest) in note for note in failed.value.__notes__)
    tried.clear()
    with pytest.raises(CheckFailed):
        judged()
    assert tried[0] == smallest


def test_a_failure_has_the_output_of_the_ranks_as_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, text="CRASHED MyFSDP", detail="Traceback of rank 1")
    with pytest.raises(CheckFailed, match="CRASHED MyFSDP") as failed:
        check("fsdp2", SMALL)
    assert failed.value.__notes__ == [failed.value.detail] == ["Traceback of rank 1"]


def test_a_case_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, unsupported="no mesh")
    with pytest.raises(Unsupported, match="no mesh"):
        check("fsdp2", SMALL)

    @settings(database=None, max_examples=20)
    @given(cases(world_sizes=(2,)))
    def judged(case: Case) -> None:
        check("fsdp2", case)

    # Nothing was checked, which is no success.
    with pytest.raises(FailedHealthCheck, match="filtering out a lot"):
        judged()


def test_settings_of_files_and_arguments_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    options = []
    judge = Answering()
    monkeypatch.setattr(checks, "_judge", lambda *given: options.append(given) or judge)
    given = {"obligations": ("gradient",), "seed": 3, "known_issues": ("none",)}
    monkeypatch.setattr(session.current(), "under", given)
    check("fsdp2", SMALL)
    check("fsdp2", SMALL, obligations="update", known_issues="mine.toml")
    assert [(name, dict(of)) for name, of in options] == [
        ("fsdp2", {"obligations": ("gradient",), "known_issues": ("none",)}),
        ("fsdp2", {"obligations": ("update",), "known_issues": ("mine.toml",)}),
    ]


@pytest.mark.parametrize(
    ("implementation", "case", "message"),
    [
        ("fsdp2", "a case", "case is 'a case'; needed is a Case, as zerocheck.strategies.cases"),
        (3, SMALL, r"got 3 \(int\); needed is a class, a function"),
        ("fsdp3", SMALL, r"unknown implementation 'fsdp3'; did you mean 'fsdp2'\?"),
    ],
)
def test_arguments_that_cannot_be(implementation: Any, case: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(implementation, case)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "hypotesis"}, r"unknown strategy 'hypotesis'; did you mean 'hypothesis'\?"),
        ({"strategy": "hypothesis", "seed": 1}, "seed is not for .*: use --hypothesis-seed"),
        ({"strategy": "hypothesis", "shrink": False}, "shrink is not for .*: use hypothesis.sett"),
    ],
)
def test_arguments_that_do_not_go_with_a_strategy(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        zerocheck.parametrize_with_checks(["fsdp2"], **arguments)


MODULE = """
import zerocheck

class MyFSDP:
    pass

class Tests:
    @zerocheck.parametrize_with_checks(
        [MyFSDP, "fsdp2"], world_sizes=(1, 2), strategy="hypothesis", obligations="gradient"
    )
    def test_sharding(self, tmp_path_factory, check):
        check()
"""

CONFTEST = """
import hypothesis
from zerocheck import strategies
from zerocheck.testing import checks
from zerocheck.case.capabilities import CAPABILITIES
from zerocheck.case.mesh import AXES
from zerocheck.protocol.replies import Description
from zerocheck.testing.single_case import SingleVerdict

hypothesis.settings.register_profile("few", max_examples=7)

class Judge:
    def __init__(self, name, options):
        assert dict(options) == {"obligations": ("gradient",)}
        self.name = name

    def verdict(self, case, folder):
        with open(f"drawn-{self.name.rpartition(':')[2]}", "a") as file:
            print(case, file=file)
        wrong = self.name == "fsdp2" and case.world_size == 2
        return SingleVerdict(text="VIOLATED it is wrong" if wrong else "", notes=("a note",))

# They start without ranks.
described = Description(restores=True, capabilities=CAPABILITIES, axes=AXES)
strategies._asked = lambda name, options: (described, strategies._supports_all)
checks._judge = Judge
"""


def test_a_test_of_hypothesis_for_each_implementation(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_mine=MODULE)
    pytester.makeconftest(CONFTEST)
    plugins = ("-p", "zerocheck.pytest_plugin", "-p", "_hypothesis_pytestplugin", "-v")
    few = ("--hypothesis-profile=few", "--hypothesis-seed=1")
    result = pytester.runpytest_subprocess(*plugins, *few, "--hypothesis-show-statistics")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_sharding?MyFSDP-hypothesis? PASSED*",
            "*test_sharding?fsdp2-hypothesis? FAILED*",
            "E   *CheckFailed: VIOLATED it is wrong",
            "E * Draw 1 (case): Case(*training=Training(steps=1)*",
            "*Tests::test_sharding?MyFSDP-hypothesis?:",
            "*7 passing*",
            "*%, a note",
        ]
    )

    path = pytester.path / "drawn-MyFSDP"
    drawn = path.read_text()
    path.unlink()
    pytester.runpytest_subprocess(*plugins, *few, "-k", "MyFSDP")
    assert len(drawn.splitlines()) == 7 and path.read_text() == drawn


def test_own_settings_stay_and_max_cases_count(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = answering(monkeypatch)
    monkeypatch.setattr(strategies, "_asked", lambda name, options: (EVERYTHING, supported))

    def test(check: Any) -> None:
        check()

    def count(test: Any, **given: Any) -> int:
        judge.judged.clear()
        made: Any = zerocheck.parametrize_with_checks(["fsdp2"], strategy="hypothesis", **given)(
            test
        )
        (parameter,) = made.pytestmark[0].args[1]
        made(check=parameter.values[0])
        return len(judge.judged)

    assert count(test, max_cases=5, world_sizes=(2,)) == 5
    assert {case.world_size for case in judge.judged} == {2}
    assert count(settings(max_examples=3, deadline=None, database=None)(test)) == 3
