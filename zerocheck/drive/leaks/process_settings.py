"""Settings of the process and of Python that apply to all its code."""

from __future__ import annotations

import contextlib
import gc
import locale
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

from .settings import GlobalSetting

_LIMITS = ("AS", "CPU", "FSIZE", "NOFILE", "STACK")
"""But for DATA, which ranks/memory_bound.py sets for each job."""
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
_NO_FILES = ("socket:", "anon_inode:", "pipe:")
_ENDING_S = 1.0
"""Threads that have done their work may still wait for a processor to end."""


def settings() -> Iterator[GlobalSetting]:
    """Iterate over the settings of a process that are compared after each job."""
    yield GlobalSetting("working directory", _directory, os.chdir)
    yield GlobalSetting("umask", _umask, os.umask)
    for module, name, lasting in _HOOKS:
        put = partial(setattr, module, name)
        yield GlobalSetting(
            f"{module.__name__}.{name}", partial(getattr, module, name), put, lasting=lasting
        )
    for name in ("meta_path", "path_hooks"):
        listed = getattr(sys, name)
        put_all = partial(_fill, listed)
        yield GlobalSetting(f"sys.{name}", listed.copy, put_all, lasting=True)
    yield GlobalSetting("sys.path", _Path(), partial(_fill, sys.path), lasting=True)
    yield GlobalSetting("filters of warnings", _filters, _set_filters, lasting=True)
    yield GlobalSetting("signal handlers", _handlers, _set_handlers, lasting=True)
    yield GlobalSetting(
        "blocked signals", _blocked, partial(signal.pthread_sigmask, signal.SIG_SETMASK)
    )
    yield GlobalSetting("an alarm set", _alarm, _set_alarm)
    yield GlobalSetting("trace function", sys.gettrace, sys.settrace)
    yield GlobalSetting("profile function", sys.getprofile, sys.setprofile)
    yield GlobalSetting(
        "recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, lasting=True
    )
    yield GlobalSetting("switch interval", sys.getswitchinterval, sys.setswitchinterval)
    yield GlobalSetting("garbage collection", gc.isenabled, _collect)
    yield GlobalSetting("thresholds of garbage collection", gc.get_threshold, _set_threshold)
    yield GlobalSetting(
        "callbacks of garbage collection",
        gc.callbacks.copy,
        partial(_fill, gc.callbacks),
        lasting=True,
    )
    yield GlobalSetting("timeout of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout)
    locale_of_all = partial(locale.setlocale, locale.LC_ALL)
    yield GlobalSetting("locale", locale_of_all, locale_of_all)
    for name in _LIMITS:
        limit = getattr(resource, f"RLIMIT_{name}")
        yield GlobalSetting(
            f"limit {name} of resources",
            partial(resource.getrlimit, limit),
            partial(resource.setrlimit, limit),
        )
    if hasattr(os, "sched_getaffinity"):
        yield GlobalSetting(
            "processors to run on",
            lambda: sorted(os.sched_getaffinity(0)),
            lambda value: os.sched_setaffinity(0, value),
        )
    yield GlobalSetting(
        "priority",
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda value: os.setpriority(os.PRIO_PROCESS, 0, value),
    )
    yield GlobalSetting("standard output elsewhere", partial(_file, 1))
    yield GlobalSetting("standard error elsewhere", partial(_file, 2))
    yield GlobalSetting(
        "threads running", _Growing(_threads, ending_s=_ENDING_S), quantity=True, lasting=True
    )
    children = f"/proc/self/task/{os.getpid()}/children"
    if os.path.exists(children):
        counts = _Growing(partial(_words_in, children))
        yield GlobalSetting("processes running", counts, quantity=True, lasting=True)
    if os.path.isdir("/proc/self/fd"):
        files = _Growing(_files, spare=_FILES)
        yield GlobalSetting("files open", files, quantity=True, lasting=True)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield GlobalSetting("errors of numpy", numpy.geterr, lambda value: numpy.seterr(**value))


class _Growing:
    """Count that has changed only if it exceeds the first one by more than `spare`."""

    def __init__(self, count: Any, *, spare: int = 0, ending_s: float = 0.0) -> None:
        """ending_s: for how long what is more may go on ending."""
        self._count = count
        self._ending_s = ending_s
        self._clean: int = count()
        self._first = self._clean + spare

    def __call__(self) -> int:
        until = time.monotonic() + self._ending_s
        while (now := self._now()) > self._first:
            if time.monotonic() > until:
                return now
            time.sleep(0.01)  # what is about to end may wait for a processor
        return self._clean

    def _now(self) -> int:
        now: int = self._count()
        return now


class _Path:
    """The first entries of `sys.path`, as many as there were: further ones change no import that
    worked, and libraries add some where they are used first."""

    def __init__(self) -> None:
        self._count = len(sys.path)

    def __call__(self) -> list[str]:
        return sys.path[: self._count]


def _files() -> int:
    """Number of open files; what process groups open as they come and go is none."""
    names = os.listdir("/proc/self/fd")
    if len(names) <= _FILES:
        return 0
    count = 0
    for name in names:
        with contextlib.suppress(OSError):
            count += not os.readlink(f"/proc/self/fd/{name}").startswith(_NO_FILES)
    return count


def _threads() -> int:
    """Number of threads that Python started; others it only got to know by a callback.

    The monitor of tqdm, which its first progress bar starts, is none either.
    """
    foreign: Any = vars(threading)["_DummyThread"]
    return sum(
        not isinstance(thread, foreign) and not type(thread).__module__.startswith("tqdm.")
        for thread in threading.enumerate()
    )


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


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _words_in(path: str) -> int:
    with open(path) as file:
        return len(file.read().split())
