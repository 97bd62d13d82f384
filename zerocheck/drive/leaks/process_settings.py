"""Settings of the process and of Python that apply to all its code."""

from __future__ import annotations

import gc
import locale
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

from .settings import Setting

_LIMITS = ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "STACK")
_HOOKS: tuple[tuple[ModuleType, str, bool], ...] = (
    (sys, "excepthook", True),
    (sys, "unraisablehook", True),
    (sys, "displayhook", True),
    (threading, "excepthook", True),
    (sys, "stdin", False),
    (sys, "stdout", False),
    (sys, "stderr", False),
)
"""Module, attribute, and whether what an import changes stays."""
_SIGNALS = tuple(sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
_FILES = 64
"""More open files than before are too many: those of process groups come and go."""


def settings() -> Iterator[Setting]:
    """Iterate over the settings of a process that are compared after each job."""
    yield Setting("working directory", _directory, os.chdir)
    yield Setting("umask", _umask, os.umask)
    for module, name, lasting in _HOOKS:
        put = partial(setattr, module, name)
        yield Setting(
            f"{module.__name__}.{name}", partial(getattr, module, name), put, lasting=lasting
        )
    for name in ("path", "meta_path", "path_hooks"):
        listed = getattr(sys, name)
        put_all = partial(_fill, listed)
        yield Setting(f"sys.{name}", partial(_copy, listed), put_all, lasting=True)
    yield Setting("filters of warnings", _filters, _set_filters, lasting=True)
    yield Setting("signal handlers", _handlers, _set_handlers, lasting=True)
    yield Setting("blocked signals", _blocked, partial(signal.pthread_sigmask, signal.SIG_SETMASK))
    yield Setting("an alarm set", _alarm, _set_alarm)
    yield Setting("trace function", sys.gettrace, sys.settrace)
    yield Setting("profile function", sys.getprofile, sys.setprofile)
    yield Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, lasting=True)
    yield Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval)
    yield Setting("garbage collection", gc.isenabled, _collect)
    yield Setting("thresholds of garbage collection", gc.get_threshold, _set_threshold)
    yield Setting(
        "callbacks of garbage collection",
        partial(_copy, gc.callbacks),
        partial(_fill, gc.callbacks),
        lasting=True,
    )
    yield Setting("timeout of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout)
    yield Setting("locale", partial(locale.setlocale, locale.LC_ALL), _set_locale)
    for name in _LIMITS:
        limit = getattr(resource, f"RLIMIT_{name}")
        yield Setting(
            f"limit {name} of resources",
            partial(resource.getrlimit, limit),
            partial(resource.setrlimit, limit),
        )
    if hasattr(os, "sched_getaffinity"):
        yield Setting(
            "processors to run on",
            lambda: sorted(os.sched_getaffinity(0)),
            lambda value: os.sched_setaffinity(0, value),
        )
    yield Setting(
        "priority",
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda value: os.setpriority(os.PRIO_PROCESS, 0, value),
    )
    yield Setting("standard output elsewhere", partial(_file, 1))
    yield Setting("standard error elsewhere", partial(_file, 2))
    yield Setting("threads running", _Growing(threading.active_count), quantity=True, lasting=True)
    children = f"/proc/self/task/{os.getpid()}/children"
    if os.path.exists(children):
        counts = _Growing(partial(_words_in, children))
        yield Setting("processes running", counts, quantity=True, lasting=True)
    if os.path.isdir("/proc/self/fd"):
        files = _Growing(lambda: len(os.listdir("/proc/self/fd")), spare=_FILES)
        yield Setting("files open", files, quantity=True, lasting=True)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield Setting("errors of numpy", numpy.geterr, lambda value: numpy.seterr(**value))


class _Growing:
    """Count that has changed only if it exceeds the first one by more than `spare`."""

    def __init__(self, count: Any, *, spare: int = 0) -> None:
        self._count = count
        self._first = count() + spare
        self._clean = count()

    def __call__(self) -> int:
        now: int = self._count()
        return now if now > self._first else self._clean


def _copy(listed: list[Any]) -> list[Any]:
    return listed[:]


def _fill(listed: list[Any], value: list[Any]) -> None:
    listed[:] = value


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _umask() -> int:
    before = os.umask(0o77)
    os.umask(before)
    return before


def _filters() -> list[Any]:
    return list(warnings.filters)


def _set_filters(value: list[Any]) -> None:
    filters: Any = warnings.filters
    filters[:] = value
    vars(warnings)["_filters_mutated"]()  # or what was decided by the others would still hold


def _handlers() -> list[Any]:
    return list(map(signal.getsignal, _SIGNALS))


def _set_handlers(value: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, value, strict=True):
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _blocked() -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _alarm() -> bool:
    return any(signal.getitimer(which)[0] > 0 for which in (signal.ITIMER_REAL, signal.ITIMER_PROF))


def _set_alarm(value: bool) -> None:
    for which in (signal.ITIMER_REAL, signal.ITIMER_PROF):
        signal.setitimer(which, 0)


def _collect(value: bool) -> None:
    (gc.enable if value else gc.disable)()


def _set_threshold(value: tuple[int, int, int]) -> None:
    gc.set_threshold(*value)


def _set_locale(value: str) -> None:
    locale.setlocale(locale.LC_ALL, value)


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _words_in(path: str) -> int:
    with open(path) as file:
        return len(file.read().split())
