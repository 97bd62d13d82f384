"""Tests of the obligations of implementations, and of single cases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pytest

from ..case.schema import Case
from ..catalogue import is_config
from ..errors import Unsupported, UsageError, unknown
from ..protocol.verdicts import Obligation
from ..report.checks import TestOutcome, coverage_outcome, groups_of, outcome_of
from ..run.plan.options import RunOptions
from ..run.plan.settings import as_options, of_python
from ..run.records.tally import Tally
from ..user_code import Nameable, importable_name
from . import session
from .shared_run import SharedRun

if TYPE_CHECKING:
    from hypothesis.strategies import DataObject, SearchStrategy

    from .single_case import SingleCaseJudge

Test = TypeVar("Test", bound=Callable[..., Any])
STRATEGIES = ("seeded", "hypothesis")


class CheckFailed(AssertionError):
    """An obligation does not hold. The message is the finding, with the command to replay it.

    detail: tracebacks, stacks and output of ranks that crashed or hung.
    """

    def __init__(self, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.detail = detail


class Check:
    """One obligation and group of features of one implementation. Call it in the test."""

    def __init__(self, run: SharedRun, obligation: Obligation, group: str) -> None:
        self.run = run
        self.obligation = obligation
        self.group = group

    def __call__(self) -> None:
        """Raise CheckFailed if the obligation does not hold, or skip if no case exercised it.

        It is expected to fail (xfail) where nothing but listed known issues failed; a stale one of
        those raises CheckFailed.
        """
        __tracebackhide__ = True
        counted = session.result_of(self.run)
        (name,) = counted.implementations
        outcome = self._outcome(counted, name)
        match outcome.outcome:
            case "failed":
                raise CheckFailed(outcome.text, outcome.detail)
            case "known":
                pytest.xfail(outcome.text)
            case "skipped":
                pytest.skip(outcome.text)

    def _outcome(self, counted: Tally, name: str) -> TestOutcome:
        return outcome_of(counted, name, self.obligation, self.group)

    @property
    def id(self) -> str:
        """Name of the test: `MyFSDP-gradient-sharding`."""
        return f"{self.run.label}-{self.obligation}-{self.group}"

    def __repr__(self) -> str:
        return f"<check {self.id}>"


class CoverageCheck(Check):
    """Check that a run exercised what its profile promises. Call it in the test."""

    def __init__(self, run: SharedRun) -> None:
        self.run = run

    def _outcome(self, counted: Tally, name: str) -> TestOutcome:
        return coverage_outcome(counted, name)

    @property
    def id(self) -> str:
        """Name of the test: `MyFSDP-coverage`."""
        return f"{self.run.label}-coverage"


class CaseCheck:
    """One implementation in a test of hypothesis. Call it in the test, to judge the drawn case."""

    def __init__(
        self, name: str, strategy: SearchStrategy[Case], options: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.strategy = strategy
        self._options = options
        self._case: Case | None = None

    def draw(self, data: DataObject) -> None:
        """Draw the case that the next call judges."""
        self.strategy.validate()  # ranks start here, and not while hypothesis takes the time
        self._case = data.draw(self.strategy, label="case")

    def __call__(self) -> None:
        """Raise CheckFailed if an obligation does not hold."""
        __tracebackhide__ = True
        assert self._case is not None
        _check(self.name, self._case, self._options)

    @property
    def id(self) -> str:
        """Name of the test: `MyFSDP-hypothesis`."""
        return f"{_label(self.name)}-hypothesis"

    def __repr__(self) -> str:
        return f"<check {self.id}>"


def check(
    implementation: Nameable,
    case: Case,
    *,
    obligations: str | Sequence[str] | None = None,
    known_issues: str | Sequence[str] | None = None,
) -> None:
    """Run one case on rank processes, and raise CheckFailed if an obligation does not hold.

        @hypothesis.settings(deadline=None)
        @hypothesis.given(zerocheck.strategies.cases(MyFSDP))
        def test_sharding(case):
            zerocheck.testing.check(MyFSDP, case)

    The message is the finding, with the command to replay it. Known issues do not fail it. The rank
    processes are kept for the next call. obligations, known_issues: as of
    `parametrize_with_checks`, and taken from the same files where they are missing.

    A case that the implementation does not support is rejected in a test of hypothesis; elsewhere
    Unsupported is raised. Raises UsageError for arguments that cannot be used.
    """
    __tracebackhide__ = True
    if not isinstance(case, Case):
        raise UsageError(f"case is {case!r}; needed is a Case, as zerocheck.strategies.cases draws")
    given = of_python({"obligations": obligations, "known_issues": known_issues})
    _check(importable_name(implementation), case, session.settings(given))


def _check(name: str, case: Case, settings: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    import hypothesis

    options = as_options({key: settings[key] for key in _OF_A_CASE if key in settings})
    judge = _judge(name, tuple(options.items()))
    verdict = judge.verdict(case, session.case_folder())
    inside = hypothesis.currently_in_test_context()
    if verdict.unsupported:
        if not inside:
            raise Unsupported(verdict.unsupported)
        hypothesis.event(f"unsupported: {verdict.unsupported}")
        hypothesis.reject()
    for note in verdict.notes if inside else ():
        hypothesis.event(note)
    if verdict.text:
        error = CheckFailed(verdict.text, verdict.detail)
        if verdict.detail:
            error.add_note(verdict.detail)
        raise error


_OF_A_CASE = ("obligations", "known_issues")
"""Settings that a single case has."""


@functools.cache
def _judge(name: str, options: tuple[tuple[str, Any], ...]) -> SingleCaseJudge:
    from .single_case import SingleCaseJudge

    return SingleCaseJudge(RunOptions(implementations=(name,), **dict(options)))


def parametrize_with_checks(
    implementations: Sequence[Nameable],
    *,
    profile: str | None = None,
    world_sizes: Sequence[int] | None = None,
    max_cases: int | None = None,
    seed: int | None = None,
    obligations: str | Sequence[str] | None = None,
    known_issues: str | Sequence[str] | None = None,
    shrink: bool | None = None,
    model: str | None = None,
    optimizer: str | None = None,
    strategy: Literal["seeded", "hypothesis"] = "seeded",
) -> Callable[[Test], Test]:
    """Decorate `def test_sharding(check): check()` to run every check of the implementations.

    implementations: classes or build functions at the top of a module, or names as on the command
    line. The others are the options of `zerocheck run`, with the same defaults, so the same seed
    has the same verdicts; obligations: names, or sets of them such as "resume"; known_issues: files
    of known issues, or "none"; model: your own in every case, `path/to/file.py:factory`, as
    `--model`; optimizer: of every case, "sgd" or `path/to/file.py:Class`. Missing settings are
    taken from pytest's ini file, then from `[tool.zerocheck]` in pyproject.toml; `pytest
    --zerocheck-NAME` is taken before all of them. Raises UsageError for what cannot be used.

        @zerocheck.parametrize_with_checks([MyFSDP, "fsdp2"], profile="ci")
        def test_sharding(check):
            check()

    Tests are called `MyFSDP-gradient-sharding`, for each obligation and group of features: `-k
    gradient-sharding` takes what sharding options do to gradients, `-k gradient` all of gradients.
    A bug fails the tests of what it needs, and those of `basic` if it needs no feature.
    `MyFSDP-coverage` says whether the run exercised what its profile promises. The tests of one
    implementation share one run, on several workers too.

    strategy: "hypothesis" makes one test of hypothesis for each implementation instead,
    `MyFSDP-hypothesis`, which calls the function for each drawn case. max_cases is then its
    max_examples; the seed is that of `--hypothesis-seed`.
    """
    if not implementations:
        raise UsageError("parametrize_with_checks needs at least one implementation")
    if isinstance(implementations, str):
        raise UsageError(f"parametrize_with_checks takes a list: [{implementations!r}]")
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    given = of_python(
        {
            "profile": profile,
            "world_sizes": world_sizes,
            "max_cases": max_cases,
            "seed": seed,
            "obligations": obligations,
            "known_issues": known_issues,
            "shrink": shrink,
            "optimizer": optimizer,
        }
    )
    if model is not None:
        given["model"] = model
    settings = session.settings(given)
    options = as_options(settings)
    if strategy == "hypothesis":
        return _tests_of_hypothesis(
            [importable_name(one) for one in implementations], given, settings
        )
    checks: list[Check] = []
    for one in implementations:
        name = importable_name(one)
        run = SharedRun(_label(name), {**options, "implementations": (name,)})
        for obligation in run.obligations:
            checks += [Check(run, obligation, group) for group in groups_of(obligation)]
        checks.append(CoverageCheck(run))
    return pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in checks])


def _tests_of_hypothesis(
    names: Sequence[str], given: Mapping[str, Any], settings: Mapping[str, Any]
) -> Callable[[Test], Test]:
    """Return a decorator that makes a test of hypothesis of a function with the argument `check`.

    given: arguments of `parametrize_with_checks`; settings: these and those of files.
    """
    import hypothesis
    from hypothesis.strategies import data

    from ..strategies import cases

    for name, instead in (("seed", "--hypothesis-seed"), ("shrink", "hypothesis.settings")):
        if name in given:
            raise UsageError(f"{name} is not for strategy='hypothesis': use {instead}")
    sizes = RunOptions(**{k: settings[k] for k in ("profile", "world_sizes") if k in settings})
    checks = [
        CaseCheck(
            name,
            cases(
                name,
                world_sizes=sizes.world_sizes,
                model=given.get("model"),
                optimizer=settings.get("optimizer"),
            ),
            settings,
        )
        for name in names
    ]

    def decorated(test: Test) -> Test:
        before = inspect.signature(test)

        @functools.wraps(test)
        def drawing(*args: Any, drawn: DataObject, **others: Any) -> Any:
            before.bind(*args, **others).arguments["check"].draw(drawn)
            return test(*args, **others)

        drawn = inspect.Parameter("drawn", inspect.Parameter.KEYWORD_ONLY)
        drawing.__signature__ = before.replace(  # type: ignore[attr-defined]
            parameters=[*before.parameters.values(), drawn]
        )
        limits = {"max_examples": given["max_cases"]} if "max_cases" in given else {}
        made: Any = drawing
        # A user's own settings, below this decorator, stay.
        if limits or not hasattr(test, "_hypothesis_internal_settings_applied"):
            slow = (hypothesis.HealthCheck.too_slow,)  # ranks wait for processors
            made = hypothesis.settings(deadline=None, suppress_health_check=slow, **limits)(drawing)
        made = hypothesis.given(drawn=data())(made)
        parameters = [pytest.param(one, id=one.id) for one in checks]
        marked: Test = pytest.mark.parametrize("check", parameters)(made)
        return marked

    return decorated


def _label(name: str) -> str:
    return Path(name).name if is_config(name) else name.rpartition(":")[2]
