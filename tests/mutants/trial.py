"""Tests of one mutant, in a forked process that has all of torch imported already.

A mutant lives in memory only: the module is compiled from the changed tree when a test imports it.
No file is written, so any number of mutants can be tried at once. The first failing test ends it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hypothesis
import pytest

OBSERVATIONS = "ZEROCHECK_TEST_OBSERVATIONS"
"""Where tests/judge/conftest.py keeps what ranks did. Ranks do not judge: no mutant changes it."""

Line = tuple[str, int]
"""Module and line."""


@dataclass
class Covered:
    """Seconds and lines that each test runs; imported: lines that an import runs."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, set[Line]] = field(default_factory=dict)
    imported: set[Line] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """What came of a mutant: the test that killed it, "" if none did."""

    killer: str
    tests: int
    seconds: float


class _Mutated(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds one module and compiles it from a tree."""

    def __init__(self, module: str, path: str, tree: ast.Module) -> None:
        super().__init__(module, path)
        self.tree = tree

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.tree, self.path, "exec", dont_inherit=True)


class _Recorder:
    """A pytest plugin: which lines each test runs, those of its fixtures included."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.covered = Covered()
        self._modules = frozenset(modules)
        self._now = self.covered.imported
        self._of_fixture: dict[tuple[str, str], set[Line]] = defaultdict(set)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_globals.get("__name__")
        if name not in self._modules:
            return None

        def local(frame: FrameType, event: str, argument: object) -> Any:
            self._now.add((name, frame.f_lineno))
            return local

        return local(frame, event, argument)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        outer = self._now
        self._now = self._of_fixture[fixturedef.baseid, fixturedef.argname]
        try:
            return (yield)
        finally:
            self._now = outer

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now = self.covered.lines.setdefault(item.nodeid, set())
        begun = time.perf_counter()
        try:
            return (yield)
        finally:
            self.covered.seconds[item.nodeid] = time.perf_counter() - begun
            self._now = self.covered.imported

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.covered.failed.append(report.nodeid)

    def pytest_sessionstart(self) -> None:
        sys.settrace(self._trace)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        sys.settrace(None)
        for item in session.items:
            lines = self.covered.lines.setdefault(item.nodeid, set())
            for base, name in self._of_fixture:
                if item.nodeid.startswith(base) and name in getattr(item, "fixturenames", ()):
                    lines |= self._of_fixture[base, name]


class _First:
    """A pytest plugin: the first test that fails, and how many were run."""

    def __init__(self) -> None:
        self.failed = ""
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call"
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (import)"


def _pytest(arguments: Sequence[str], plugin: object) -> int:
    hypothesis.settings.register_profile(
        "mutants", database=None, deadline=None, derandomize=True, max_examples=50
    )
    hypothesis.settings.load_profile("mutants")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"]
    return int(pytest.main([*options, *arguments], plugins=[plugin]))


def record(modules: Sequence[str], tests: Sequence[str], connection: Connection) -> None:
    """Run all tests on modules that were compiled from their unchanged trees."""
    for module in modules:
        path = source_of(module)
        sys.meta_path.insert(0, _Mutated(module, str(path), ast.parse(path.read_text())))
    recorder = _Recorder(modules)
    _pytest(tests, recorder)
    connection.send(recorder.covered)


def kill(module: str, tree: ast.Module, tests: Sequence[str], connection: Connection) -> None:
    """Run the tests in order until one fails."""
    sys.meta_path.insert(0, _Mutated(module, str(source_of(module)), tree))
    first = _First()
    code = 1
    try:
        code = _pytest(["-x", *tests], first)
    finally:
        failed = first.failed or ("" if code == 0 else f"pytest (exit code {code})")
        connection.send((failed, first.count))


def source_of(module: str) -> Path:
    """The file of a module that is not imported."""
    *package, name = module.split(".")
    found = importlib.util.find_spec(".".join(package))
    assert found is not None and found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations))) / f"{name}.py"


class Child:
    """A forked process that runs one of the functions above, with its output in a file."""

    def __init__(self, output: Path, function: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("fork")
        self.receiver, sender = context.Pipe(duplex=False)
        self.begun = time.monotonic()
        self.process = context.Process(
            target=_in_child, args=(output, function, (*arguments, sender))
        )
        self.process.start()
        sender.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def result(self) -> Any:
        """What it sent, or None if it died."""
        try:
            return self.receiver.recv()
        except EOFError:
            return None
        finally:
            self.end()

    def end(self) -> None:
        """End it, and what it started."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.receiver.close()


def _in_child(output: Path, function: Callable[..., None], arguments: Sequence[object]) -> None:
    os.setpgid(0, 0)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*arguments)
    # No thread or atexit function of what was tested may hold it up.
    sys.stdout.flush()
    os._exit(0)
