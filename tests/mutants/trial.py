"""Tests of mutants inside of pytest: what was collected is forked, changed, and run, per mutant.

A mutant lives in the memory of its process only: functions are given the code of the changed tree,
wherever they were imported to, and constants of the module are replaced wherever they are bound.
No file is written, so any number of mutants can be tried at once, and none imports torch anew. The
first failing test ends it. Tests are run by pytest's own protocol, with their fixtures.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
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
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest

NOT_TRIED = "not tried"

Line = tuple[str, int]
"""Module and line."""


@dataclass
class Covered:
    """Seconds and lines of each test, those of its fixtures included."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, set[Line]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def source_of(module: str) -> Path:
    """The file of a module."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin)


def change(name: str, tree: ast.Module) -> None:
    """Let an imported module be as if it had been imported from this tree.

    Not for what a class statement makes outside of its functions. RuntimeError if nothing changed.
    """
    module = importlib.import_module(name)
    code = compile(tree, str(module.__file__), "exec", dont_inherit=True)
    new = ModuleType(name)
    new.__dict__.update({key: module.__dict__[key] for key in ("__file__", "__package__")})
    exec(code, new.__dict__)
    changed = 0
    old_functions, new_functions = _functions(module), _functions(new)
    for qualified, function in old_functions.items():
        other = new_functions[qualified]
        if function.__code__ != other.__code__:
            function.__code__ = other.__code__
            changed += 1
        if (function.__defaults__, function.__kwdefaults__) != (
            other.__defaults__,
            other.__kwdefaults__,
        ):
            function.__defaults__ = other.__defaults__
            function.__kwdefaults__ = other.__kwdefaults__
            changed += 1
    for key, value in list(vars(module).items()):
        if isinstance(value, int | float | dict) and not key.startswith("__"):
            other_value = vars(new)[key]
            if value != other_value:
                _rebind(value, other_value)
                changed += 1
    if not changed:
        raise RuntimeError(f"{name}: nothing is changed")


def _functions(module: ModuleType) -> dict[str, FunctionType]:
    """Every function of the module and of its classes, without what decorates it."""
    found: dict[str, FunctionType] = {}

    def add(value: object) -> None:
        if isinstance(value, property):
            add(value.fget)
        elif isinstance(value, functools.cached_property):
            add(value.func)
        elif isinstance(value, staticmethod | classmethod):
            add(value.__func__)
        elif isinstance(value, FunctionType):
            value = inspect.unwrap(value)
            assert isinstance(value, FunctionType)
            if value.__globals__ is module.__dict__ and "<" not in value.__code__.co_filename:
                found[value.__qualname__] = value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for one in vars(value).values():
                add(one)

    for value in list(vars(module).values()):
        add(value)
    return found


def _rebind(old: object, new: object) -> None:
    """Every module of ours that has bound the old object binds the new one."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("zerocheck", "zerocheck_reference"):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)


class _Tracer:
    """Which lines of some modules are run by what."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.now: set[Line] = set()
        self._modules = frozenset(modules)

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_globals.get("__name__")
        if name not in self._modules:
            return None

        def local(frame: FrameType, event: str, argument: object) -> Any:
            self.now.add((name, frame.f_lineno))
            return local

        return local(frame, event, argument)


class _Fixtures:
    """A pytest plugin: the lines that each fixture runs, for every test that uses it."""

    def __init__(self, tracer: _Tracer) -> None:
        self.tracer = tracer
        self.lines: dict[tuple[str, str], set[Line]] = defaultdict(set)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        outer = self.tracer.now
        self.tracer.now = self.lines[fixturedef.baseid, fixturedef.argname]
        try:
            return (yield)
        finally:
            self.tracer.now = outer

    def of(self, item: pytest.Item) -> set[Line]:
        """Lines of the fixtures of a test."""
        names = getattr(item, "fixturenames", ())
        return set().union(
            *(
                lines
                for (base, name), lines in self.lines.items()
                if item.nodeid.startswith(base) and name in names
            )
        )


class _Failures:
    """A pytest plugin: tests that failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def record(items: Sequence[pytest.Item], modules: Sequence[str], connection: Connection) -> None:
    """Run all tests on modules that are not changed."""
    covered = Covered()
    tracer = _Tracer(modules)
    fixtures, failures = _Fixtures(tracer), _Failures()
    for plugin in (fixtures, failures):
        items[0].config.pluginmanager.register(plugin)
    sys.settrace(tracer)
    for position, item in enumerate(items):
        tracer.now = covered.lines.setdefault(item.nodeid, set())
        begun = time.perf_counter()
        _run(items, position)
        covered.seconds[item.nodeid] = time.perf_counter() - begun
    sys.settrace(None)
    for item in items:
        covered.lines[item.nodeid] |= fixtures.of(item)
    covered.failed = failures.failed
    connection.send(covered)


def kill(
    items: Sequence[pytest.Item], module: str, tree: ast.Module, connection: Connection
) -> None:
    """Run the tests in order until one fails."""
    failures = _Failures()
    items[0].config.pluginmanager.register(failures)
    try:
        change(module, tree)
    except RuntimeError as error:
        connection.send((f"{NOT_TRIED}: {error}", 0))
        return
    for position in range(len(items)):
        _run(items, position)
        if failures.failed:
            break
    connection.send((next(iter(failures.failed), ""), position + 1))


def _run(items: Sequence[pytest.Item], position: int) -> None:
    following = items[position + 1] if position + 1 < len(items) else None
    item = items[position]
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


class Child:
    """A forked process that runs one of the functions above, with its output in a file."""

    def __init__(self, output: Path, function: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("fork")
        self.output = output
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
    os._exit(0)
