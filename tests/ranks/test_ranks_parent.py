"""However the parent ends, no rank outlives it."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil

HERE = os.path.dirname(__file__)
ROOT = os.path.dirname(os.path.dirname(HERE))

SCRIPT = f"""
import sys
sys.path[:0] = [{ROOT!r}, {HERE!r}]
from zerocheck.ranks import Pool
pool = Pool("ranks_targets:run")
pool.wait(pool.submit(2, b"put 10"))
print(pool.zygote_pid, *pool.rank_pids[2], flush=True)
try:
    pool.wait(pool.submit(2, b"{{job}}"))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    result = pool.wait(pool.submit(2, b"reduce"))
    print(result.outcome, flush=True)
"""


def start(job: str, directory: str) -> tuple[subprocess.Popen[str], list[int]]:
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(job=job)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": directory},
        start_new_session=True,
    )
    assert parent.stdout is not None
    return parent, [int(pid) for pid in parent.stdout.readline().split()]


def gone(pids: list[int], *, within_s: float = 4.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(map(psutil.pid_exists, pids)):
            return True
        time.sleep(0.02)
    return False


def test_a_killed_parent() -> None:
    with tempfile.TemporaryDirectory() as directory:
        parent, pids = start("burn 60", directory)
        time.sleep(0.2)
        if os.path.isdir("/dev/shm"):
            assert glob.glob(f"/dev/shm/zerocheck-ranks-{parent.pid}-*")
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert len(pids) == 3
        assert gone(pids)
        assert not glob.glob(f"{directory}/zerocheck-ranks-*")
        until = time.monotonic() + 2
        own = f"/dev/shm/zerocheck-ranks-{parent.pid}-*"
        while glob.glob(own) and time.monotonic() < until:
            time.sleep(0.05)
        assert not glob.glob(own)


def test_control_c_in_the_parent() -> None:
    """It loses the job under way; the pool works on, and is cleaned up at exit."""
    with tempfile.TemporaryDirectory() as directory:
        parent, pids = start("skip_one", directory)
        time.sleep(0.2)
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
        output, _ = parent.communicate(timeout=20)
        assert output.split() == ["interrupted", "finished"]
        assert parent.returncode == 0
        assert gone(pids)
        assert not glob.glob(f"{directory}/zerocheck-ranks-*")
