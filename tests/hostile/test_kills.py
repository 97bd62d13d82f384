"""A run that is killed or interrupted at any moment leaves a whole journal, and nothing else."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from hostile.leftovers import Leftovers
from slices import sliced

from zerocheck.run.records.journal import read

INTERRUPTED = 130
WRITTEN_S = 5.0
"""The report is there so soon after a signal; later where the machine is busy: see `patience`."""
STAYING = ("zerocheck-cores-", "torchinductor_")
"""Slots of processors, which all runs of a user share, and torch's cache of compiled code."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RUN = [sys.executable, "-m", "zerocheck", "run", "zero1", "zero2", "--world-sizes", "2"]
CASES = ["--max-cases", "3"]


@dataclass(frozen=True)
class Kill:
    """Signals that a run gets, each so many seconds after the one before; seeded."""

    number: int

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """One of each in turn, and of every third run a second one."""
        first = SIGNALS[self.number % len(SIGNALS)]
        if self.number % 3 or first == signal.SIGKILL:
            return (first,)
        return first, self._drawn().choice(SIGNALS)

    def delays(self, length_s: float) -> tuple[float, ...]:
        """From the start of the run to its end, and a little further."""
        drawn = self._drawn()
        return (1.05 * length_s * drawn.random(), drawn.choice((0.0, 0.05, 0.5)))

    def _drawn(self) -> random.Random:
        return random.Random(f"kill {self.number}")


KILLS = sliced([Kill(number) for number in range(60)], [Kill(4)])


class Running:
    """A run of its own directory for temporary files, whose processes can be found again."""

    def __init__(self, folder: Path) -> None:
        self.left = Leftovers()
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.report = folder / "zerocheck-report"
        self.began = time.monotonic()
        environment = {**os.environ, **self.left.environment, "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [*RUN, *CASES], cwd=folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait(self) -> tuple[str, float]:
        """What it wrote, and the seconds until it ended."""
        began = time.monotonic()
        out, error = self.process.communicate(timeout=300)
        return out + error, time.monotonic() - began

    def assert_nothing_is_left(self) -> None:
        self.left.gone(10)
        assert not self.left.shared_memory(self.process.pid)
        names = [name for name in os.listdir(self.temporary) if not name.startswith(STAYING)]
        assert not names


@pytest.fixture(scope="module")
def length_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds that the run takes here and now, to its own end."""
    run = Running(tmp_path_factory.mktemp("whole"))
    try:
        message, _ = run.wait()
        assert run.process.returncode == 0, message
        run.assert_nothing_is_left()
        return time.monotonic() - run.began
    finally:
        run.left.kill()


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: str(kill.number))
def test_a_run_that_is_killed(length_s: float, tmp_path: Path, kill: Kill) -> None:
    run = Running(tmp_path)
    try:
        for number, delay in zip(kill.signals, kill.delays(length_s), strict=False):
            time.sleep(delay)
            run.process.send_signal(number)
        message, seconds = run.wait()
        assert "Traceback" not in message, message
        run.assert_nothing_is_left()
    finally:
        run.left.kill()
    assert_code(run.process.returncode, kill, message)
    assert_whole(run, message)
    if signal.SIGKILL not in kill.signals:
        assert seconds < WRITTEN_S * patience(), message


def patience() -> float:
    """How many times longer things take than on a machine with nothing else to do."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def assert_code(code: int, kill: Kill, message: str) -> None:
    """That of the run's own end, of an interrupted one, or of one that Python did not start yet."""
    before_start = {-int(number) for number in kill.signals}
    assert code in {0, INTERRUPTED} | before_start, f"{code} of {kill.signals}: {message}"


def assert_whole(run: Running, message: str) -> None:
    """Every line of the journal decodes, and reports can be made of it."""
    journal = run.report / "journal.ndjson"
    if not journal.exists():
        assert run.process.returncode, message
        left = [path.name for path in run.report.glob("*")] if run.report.exists() else []
        assert not left or run.process.returncode == -signal.SIGKILL, left
        return
    lines = journal.read_bytes().split(b"\n")
    assert lines[-1] == b""
    for line in lines[:-1]:
        msgspec.json.decode(line)
    if run.process.returncode == INTERRUPTED:
        assert (run.report / "report.md").exists(), message
        assert read(journal)[-1].outcome == "interrupted"  # type: ignore[union-attr]
    again = subprocess.run(
        [sys.executable, "-m", "zerocheck", "report", run.report, "--report-dir", "again"],
        cwd=run.report.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.returncode in (0, 1, INTERRUPTED), again.stdout + again.stderr
    assert "Traceback" not in again.stderr
    shutil.rmtree(run.report.parent / "again")
