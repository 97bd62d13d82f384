"""Whatever ends a run from outside, the report is written and the exit code is that of Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slices import sliced

INTERRUPTED = 130
RUN = [sys.executable, "-m", "zerocheck", "run", "zero2", "--world-sizes", "2", "--max-cases"]


@pytest.mark.parametrize("number", [signal.SIGTERM, *sliced([signal.SIGHUP, signal.SIGINT], [])])
def test_a_signal_ends_a_run_with_its_report(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [*RUN, "400"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        journal = finished_case(tmp_path)
        run.send_signal(number)
        out, error = run.communicate(timeout=120)
    assert run.returncode == INTERRUPTED, out + error
    assert "interrupted" in error
    assert "did not finish" in (journal.parent / "report.md").read_text()


@pytest.mark.parametrize("later_s", [0.0, *sliced([0.2, 0.6, 1.2], [])])
def test_a_signal_while_torch_is_imported(tmp_path: Path, later_s: float) -> None:
    """An import that is broken off ends the process by a signal of its own, and without a word."""
    with subprocess.Popen(
        [*RUN, "4"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        maps, ends = Path(f"/proc/{run.pid}/maps"), time.monotonic() + 60
        while "libtorch" not in maps.read_text() and time.monotonic() < ends:
            time.sleep(0.005)
        time.sleep(later_s)
        run.send_signal(signal.SIGTERM)
        out, error = run.communicate(timeout=120)
    assert run.returncode == INTERRUPTED, out + error
    assert "interrupted" in error and "Traceback" not in error


@pytest.mark.long
def test_the_process_that_starts_ranks_is_stopped(tmp_path: Path) -> None:
    """Nobody continues it: the run ends, and says what is stopped."""
    with subprocess.Popen(
        [*RUN, "400", "--world-sizes", "2,3,4,5"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        finished_case(tmp_path)
        starters = [pid for pid in children_of(run.pid) if children_of(pid)]
        for pid in starters:
            os.kill(pid, signal.SIGSTOP)
        out, error = run.communicate(timeout=180)
    assert starters and run.returncode == 2, out + error
    assert "stopped" in error and "Traceback" not in error


def finished_case(folder: Path) -> Path:
    """Wait until a run in this folder has finished a case; return its journal."""
    journal = folder / "zerocheck-report" / "journal.ndjson"
    ends = time.monotonic() + 120
    while time.monotonic() < ends and not (
        journal.exists() and b'"case finished"' in journal.read_bytes()
    ):
        time.sleep(0.05)
    return journal


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, thread.read_text().split())
    return found


@pytest.mark.long
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """`zerocheck run | head -1` had the exit code of a finding."""
    with subprocess.Popen(
        [*RUN, "4"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline()
        run.stdout.close()
        error = run.stderr.read()
        assert run.wait(timeout=120) == INTERRUPTED, error
    assert "Traceback" not in error
    assert (tmp_path / "zerocheck-report" / "journal.ndjson").stat().st_size


def test_a_list_that_nobody_reads(tmp_path: Path) -> None:
    listed = subprocess.run(
        f"{sys.executable} -m zerocheck list | head -1",
        shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert listed.returncode == 0 and not listed.stderr
