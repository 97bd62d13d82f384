"""Runs share the processors of a machine, whatever becomes of one of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerocheck.ranks.cores import Cores

HOLDS = (
    "import sys, os; sys.path.insert(0, os.getcwd())\n"
    "from zerocheck.ranks.cores import Cores\n"
    "print(Cores(slots=1, directory={!r}).try_hold(), flush=True)\n"
    "input()"
)


def test_slots_are_shared_between_claims(tmp_path: Path) -> None:
    first, second, third = (Cores(slots=2, directory=str(tmp_path)) for _ in range(3))
    assert first.try_hold() and first.try_hold() and second.try_hold()
    assert not third.try_hold()
    first.release()
    assert third.try_hold()
    second.release()
    third.release()


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
    code = HOLDS.format(str(tmp_path))
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    mine = Cores(slots=1, directory=str(tmp_path))
    assert not mine.try_hold()
    holder.kill()
    holder.communicate()
    assert mine.try_hold()
    mine.release()


def test_patience_ends(tmp_path: Path) -> None:
    first = Cores(slots=1, directory=str(tmp_path))
    second = Cores(slots=1, directory=str(tmp_path), patience_s=0.05)
    first.hold()
    second.hold()
    assert second.held
    second.release()
    first.release()


def test_a_long_holder_passes_on_if_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerocheck.ranks.cores.QUANTUM_S", 0.0)
    first, second = (Cores(slots=1, directory=str(tmp_path)) for _ in range(2))
    first.hold()
    assert not first.should_pass_on()
    assert not second.try_hold()
    assert first.should_pass_on()
    first.release()
    second.hold()
    assert not second.should_pass_on()
    second.release()


def test_a_stopped_holder_is_passed_by(tmp_path: Path) -> None:
    """By one at a time; it has its slot again when it goes on."""
    code = HOLDS.format(str(tmp_path))
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "True\n"
        mine, other = (Cores(slots=1, directory=str(tmp_path)) for _ in range(2))
        assert not mine.try_hold()
        holder.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 5
        while not mine.try_hold():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert not other.try_hold()
        mine.release()
        holder.send_signal(signal.SIGCONT)
        while other.try_hold():
            other.release()
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        holder.kill()
        holder.communicate()
