"""zerocheck in pytest: one test per implementation, obligation and group of features."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from . import pytest_plugin
from .catalogue import is_config
from .errors import UsageError
from .protocol.verdicts import Obligation
from .report.checks import TestOutcome, coverage_outcome, groups_of, outcome_of
from .run.settings import as_options
from .run.tally import Tally
from .shared_run import SharedRun


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
        counted = pytest_plugin.result_of(self.run)
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


def parametrize_with_checks(
    implementations: Sequence[str | type | Callable[..., Any]],
    *,
    profile: str | None = None,
    world_sizes: Sequence[int] | None = None,
    max_cases: int | None = None,
    seed: int | None = None,
    obligations: str | Sequence[str] | None = None,
    known_issues: str | Sequence[str] | None = None,
    shrink: bool | None = None,
    model: str | None = None,
) -> pytest.MarkDecorator:
    """Decorate `def test_sharding(check): check()` to run every check of the implementations.

    implementations: classes or build functions at the top of a module, or names as on the command
    line. The others are the options of `zerocheck run`, with the same defaults, so the same seed
    has the same verdicts; obligations: names, or sets of them such as "resume"; known_issues: files
    of known issues, or "none"; model: your own in every case, `path/to/file.py:factory`, as
    `--model`. Missing settings are taken from pytest's ini file, then from `[tool.zerocheck]` in
    pyproject.toml; `pytest --zerocheck-NAME` is taken before all of them. Raises UsageError for
    what cannot be used.

        @zerocheck.parametrize_with_checks([MyFSDP, "fsdp2"], profile="ci")
        def test_sharding(check):
            check()

    Tests are called `MyFSDP-gradient-sharding`, for each obligation and group of features: `-k
    gradient-sharding` takes what sharding options do to gradients, `-k gradient` all of gradients.
    A bug fails the tests of what it needs, and those of `basic` if it needs no feature.
    `MyFSDP-coverage` says whether the run exercised what its profile promises. The tests of one
    implementation share one run, on several workers too.
    """
    if not implementations:
        raise UsageError("parametrize_with_checks needs at least one implementation")
    if isinstance(implementations, str):
        raise UsageError(f"parametrize_with_checks takes a list: [{implementations!r}]")
    given = {
        "profile": profile,
        "world_sizes": None if world_sizes is None else tuple(world_sizes),
        "max_cases": max_cases,
        "seed": seed,
        "obligations": _names(obligations),
        "known_issues": (known_issues,) if isinstance(known_issues, str) else _listed(known_issues),
        "shrink": shrink,
        "model": model,
    }
    settings = pytest_plugin.settings({k: v for k, v in given.items() if v is not None})
    options = as_options(settings)
    checks: list[Check] = []
    for one in implementations:
        name = one if isinstance(one, str) else importable_name(one)
        label = Path(name).name if is_config(name) else name.rpartition(":")[2]
        run = SharedRun(label, {**options, "implementations": (name,)})
        for obligation in run.obligations:
            checks += [Check(run, obligation, group) for group in groups_of(obligation)]
        checks.append(CoverageCheck(run))
    return pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in checks])


def _names(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Names with commas between, or a list of them."""
    return _listed(given.split(",") if isinstance(given, str) else given)


def _listed(given: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(given)


def importable_name(given: object) -> str:
    """Return the name by which rank processes import `given`.

    `package.module:Name` or `path/to/file.py:Name`. Raises UsageError for an object that they could
    not find there.
    """
    if not (inspect.isclass(given) or inspect.isfunction(given)):
        raise UsageError(
            f"{given!r} is a {type(given).__name__}; needed is a class, a function "
            "build(model, case, mesh), or a name such as 'fsdp2'"
        )
    qualified, module = given.__qualname__, sys.modules.get(given.__module__)
    if not qualified.isidentifier() or getattr(module, qualified, None) is not given:
        raise UsageError(
            f"{qualified} is not at the top of its module {given.__module__}, so rank processes "
            "cannot import it; define it there under that name"
        )
    file = getattr(module, "__file__", None)
    if file is None:
        raise UsageError(f"{qualified} is in no file, so rank processes cannot import it")
    if _in_package(given.__module__, Path(file)):
        return f"{given.__module__}:{qualified}"
    path = Path(file).resolve()
    here = Path.cwd().resolve()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{qualified}"


def _in_package(module: str, file: Path) -> bool:
    """Return True if `module` is in a package that Python finds by name, and its file within it."""
    top, dot, _ = module.partition(".")
    if not dot:
        return False
    spec = PathFinder.find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        return False
    return any(
        file.resolve().is_relative_to(Path(folder).resolve())
        for folder in spec.submodule_search_locations
    )
