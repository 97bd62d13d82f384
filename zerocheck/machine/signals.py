"""Signals that end a command: each raises where it strikes, and again where zerocheck waits."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

INTERRUPTS: Mapping[int, Callable[[], BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: KeyboardInterrupt,
    signal.SIGHUP: KeyboardInterrupt,
}
"""Signals that end a command as Ctrl-C does, with its report, and the errors that they raise."""

_PR_SET_PDEATHSIG = 1

_installed: list[StopSignals] = []


def die_with(parent: int) -> None:
    """Have this process killed when its parent is over, and end it if that is so already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


class StopSignals:
    """Handlers of the signals that ask a command to end.

    The first signal raises its error at once, and `check` raises it again until `ignore`: Python
    drops an error inside a finalizer, and user code may catch it. Later signals do nothing, since
    the report is still to be written. The innermost of several that are installed is in force.
    """

    def __init__(self, errors: Mapping[int, Callable[[], BaseException]] = INTERRUPTS) -> None:
        """Prepare the handlers; `errors` makes the error of each signal."""
        self._errors = errors
        self._error: BaseException | None = None
        self._ignoring = False
        self._holds = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        """Install the handlers; a signal that the caller ignores (nohup) stays ignored.

        Python allows handlers in the main thread only: elsewhere nothing is installed.
        """
        if threading.current_thread() is threading.main_thread():
            for number in self._errors:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._strike)
        _installed.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Put the handlers back that were there before."""
        _installed.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _strike(self, number: int, _frame: FrameType | None) -> None:
        if self._error is not None or self._ignoring:
            return
        self._error = self._errors[number]()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None and not self._ignoring and not self._holds:
            raise self._error


def check() -> None:
    """Raise the error of a signal that came earlier, unless `ignore` was called since."""
    for active in _installed[-1:]:
        active._raise()


def ignore() -> None:
    """Let signals do nothing from here on: the command has its result, or ends by a signal."""
    for active in _installed[-1:]:
        active._ignoring = True


@contextmanager
def deferred() -> Iterator[None]:
    """Delay signals until the end of a block that must not be left half done."""
    active = _installed[-1] if _installed else None
    if active is None:
        yield
        return
    active._holds += 1
    try:
        yield
    finally:
        active._holds -= 1
    active._raise()
