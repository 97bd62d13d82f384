"""A signal ends a command once, wherever it strikes, and never its report."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from zerocheck.machine import signals
from zerocheck.machine.signals import StopSignals


def strike(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)
    sum(range(1000))  # Python runs handlers between instructions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_where_it_strikes(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals(), pytest.raises(KeyboardInterrupt):
        strike(number)
    assert signal.getsignal(number) == before


def test_an_error_that_was_lost_is_raised_again() -> None:
    with StopSignals():
        with contextlib.suppress(BaseException):  # as a finalizer does
            strike()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signals.check()
        signals.ignore()
        signals.check()


def test_a_finalizer_does_not_lose_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finalized:
        def __del__(self) -> None:
            strike()

    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: lost.append(found.exc_type))
    with StopSignals():
        Finalized()
        assert lost == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            signals.check()


def test_later_signals_do_nothing() -> None:
    with StopSignals():
        with pytest.raises(KeyboardInterrupt):
            strike()
        strike()
        strike(signal.SIGINT)


def test_a_block_that_must_not_be_left_half_done() -> None:
    done = []

    def hold() -> None:
        with signals.deferred():
            with signals.deferred():
                strike()
                done.append("inner")
            done.append("outer")
        done.append("after")

    with StopSignals(), pytest.raises(KeyboardInterrupt):
        hold()
    assert done == ["inner", "outer"]


def test_an_error_of_a_block_comes_first() -> None:
    def fail() -> None:
        with signals.deferred():
            strike()
            raise ValueError("its own")

    with StopSignals():
        with pytest.raises(ValueError, match="its own"):
            fail()
        with pytest.raises(KeyboardInterrupt):
            signals.check()


def test_without_handlers_nothing_is_delayed() -> None:
    signals.check()
    signals.ignore()
    with signals.deferred(), pytest.raises(KeyboardInterrupt):
        strike(signal.SIGINT)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            strike(signal.SIGHUP)
            signals.check()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_innermost_is_in_force() -> None:
    with StopSignals():
        with StopSignals({signal.SIGTERM: SystemError}), pytest.raises(SystemError):
            strike()
        signals.check()
        with pytest.raises(KeyboardInterrupt):
            strike()


def test_another_thread_installs_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


INTERRUPTED_EXEC = """
import os, signal, sys
from zerocheck import cli
def interrupted(*_):
    exec("import os, signal; os.kill(os.getpid(), signal.SIGINT); sum(range(1000))")
cli.list_.callback = interrupted
sys.argv = ["zerocheck", "list"]
cli.main()
"""


def test_an_interrupt_inside_exec_has_the_exit_code_of_others(tmp_path: Path) -> None:
    """`python -m` ends by SIGINT where an interrupt once left `exec`, though it was caught."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_EXEC)
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() == "error: interrupted"
