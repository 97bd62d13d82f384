"""zerocheck in pytest: one test per implementation and obligation."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from .errors import UsageError
from .judge.verdict import EQUIVALENCE, Obligation
from .pytest_plugin import known_issues as configured
from .pytest_plugin import report_directory
from .report.known import known_text, stale_text
from .report.text import cell_text, finding_text
from .run.options import RunOptions
from .run.records import Record
from .run.tally import FAILING, Tally, why_nothing


class CheckFailed(AssertionError):
    """An obligation does not hold. The message is the finding, with the command to replay it."""


class SharedRun:
    """A run of one implementation that starts when its first check is called."""

    def __init__(self, label: str, given: dict[str, Any]) -> None:
        RunOptions(**given)  # what cannot be used is said when tests are collected
        digest = hashlib.sha256(repr(sorted(given.items())).encode()).hexdigest()[:8]
        self.label = label
        self.key = f"{re.sub(r'[^A-Za-z0-9_-]', '-', label)}-{digest}"
        self._given = given
        self._result: Tally | Exception | None = None

    def result(self) -> Tally:
        """The counts of the run. A second call does not run it again, even after an error."""
        if self._result is None:
            try:
                self._result = self._run()
            except Exception as error:
                self._result = error
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def _run(self) -> Tally:
        from .report.write import write_reports
        from .run import engine
        from .run.environment import untested
        from .run.journal import Journal

        if untested():
            warnings.warn(untested(), stacklevel=2)
        directory = report_directory(self.key)
        collected = _Collected()
        with Journal(directory / "journal.ndjson") as journal:
            options = RunOptions(report_dir=directory, **self._given)
            engine.run(options, (journal, collected))
        write_reports(collected.records, directory)
        return collected.tally


class _Collected:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.tally = Tally()

    def handle(self, record: Record) -> None:
        self.records.append(record)
        self.tally.add(record)


class Check:
    """One obligation of one implementation. Call it in the test."""

    def __init__(self, run: SharedRun, obligation: Obligation) -> None:
        self.run = run
        self.obligation = obligation

    def __call__(self) -> None:
        """Raise CheckFailed if the obligation does not hold, or skip if no case exercised it.

        It is expected to fail (xfail) where nothing but listed known issues failed; a stale one of
        those raises CheckFailed.
        """
        __tracebackhide__ = True
        counted = self.run.result()
        (implementation,) = counted.implementations.values()
        if counted.started is not None and self.obligation in counted.started.without:
            pytest.skip(f"{self.obligation}: {counted.started.without[self.obligation]}")
        cell = implementation.cells[self.obligation]
        if cell.status in FAILING:
            findings = counted.findings_of(implementation.name, self.obligation)
            told = [f"{self.obligation}: {cell_text(cell)}", *map(finding_text, findings)]
            raise CheckFailed("\n".join(told))
        stale = stale_text(counted, implementation.name, self.obligation)
        if stale:
            raise CheckFailed(stale)
        if implementation.nothing_checked:
            raise CheckFailed(f"nothing was checked: {why_nothing(implementation)}")
        if cell.status == "known":
            said = known_text(counted, implementation.name, self.obligation)
            pytest.xfail(f"{self.obligation}: {cell_text(cell)}: {said}")
        if not cell.checked:
            cases = sum(cell.counts.values())
            pytest.skip(f"{self.obligation}: not exercised in {cases} cases; raise max_cases")

    def __repr__(self) -> str:
        return f"<check of {self.obligation} for {self.run.label}>"


def parametrize_with_checks(
    implementations: Sequence[str | type | Callable[..., Any]],
    *,
    profile: str = "quick",
    world_sizes: Sequence[int] = (1, 2, 3),
    max_cases: int | None = 30,
    seed: int = 0,
    known_issues: str | Sequence[str] | None = None,
    shrink: bool = True,
    model: str | None = None,
) -> pytest.MarkDecorator:
    """Decorate `def test_sharding(check): check()` to run every check of the implementations.

    implementations: classes or build functions at the top of a module, or names as on the command
    line; known_issues: files of known issues, or "none", as on the command line; left out, those of
    the ini option zerocheck_known_issues; shrink: look for the smallest case of each finding;
    model: your own in every case, `path/to/file.py:factory`, as `--model`. Raises UsageError for
    what cannot be used.

        @zerocheck.parametrize_with_checks([MyFSDP, "fsdp2"])
        def test_sharding(check):
            check()
    """
    if not implementations:
        raise UsageError("parametrize_with_checks needs at least one implementation")
    if isinstance(implementations, str):
        raise UsageError(f"parametrize_with_checks takes a list: [{implementations!r}]")
    if known_issues is None:
        known_issues = configured()
    files = (known_issues,) if isinstance(known_issues, str) else tuple(known_issues)
    parameters = []
    for given in implementations:
        name = given if isinstance(given, str) else importable_name(given)
        label = name.rpartition(":")[2]
        run = SharedRun(
            label,
            {
                "implementations": (name,),
                "profile": profile,
                "world_sizes": tuple(world_sizes),
                "max_cases": max_cases,
                "seed": seed,
                "known_issues": files,
                "shrink": shrink,
                "model": model,
            },
        )
        for obligation in EQUIVALENCE:
            parameters.append(pytest.param(Check(run, obligation), id=f"{label}-{obligation}"))
    return pytest.mark.parametrize("check", parameters)


def importable_name(given: object) -> str:
    """`package.module:Name` or `path/to/file.py:Name`, by which rank processes import `given`.

    Raises UsageError for what they could not find there.
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
    """Whether `module` lies in a package that Python finds by name, and its file within it."""
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
