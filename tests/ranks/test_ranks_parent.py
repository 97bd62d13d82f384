"""However the parent ends, no rank outlives it."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

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


IMPORTING = f"""
import sys, time
sys.path[:0] = [{ROOT!r}, {HERE!r}]
from zerocheck.ranks.spawner import Spawner
spawner = Spawner("ranks_targets:run", scratch=[], log=sys.argv[1], warm=["endless_import"])
print(spawner.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.long
def test_a_parent_that_dies_while_the_zygote_imports(tmp_path: Path) -> None:
    (tmp_path / "endless_import.py").write_text("import time\nwhile True: time.sleep(0.1)\n")
    parent = subprocess.Popen(
        [sys.executable, "-c", IMPORTING, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert parent.stdout is not None
    zygote = int(parent.stdout.readline())
    time.sleep(1.0)
    assert psutil.pid_exists(zygote)
    parent.kill()
    parent.wait()
    assert gone([zygote], within_s=60.0)  # an import in C++ is not interrupted


CLOSING = f"""
import pathlib, sys, time
sys.path[:0] = [{ROOT!r}, {HERE!r}]
from zerocheck.ranks.spawner import Spawner
spawner = Spawner("ranks_targets:run", scratch=[], log=sys.argv[1], warm=["importing_child"])
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.05)
began = time.monotonic()
spawner.close()
print(spawner.pid, time.monotonic() - began)
"""


def test_a_zygote_that_imports_is_not_waited_for_at_the_end(tmp_path: Path) -> None:
    """It has no ranks yet; what its imports started ends with it."""
    child = tmp_path / "child"
    (tmp_path / "importing_child.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r} + '.new', 'w').write(str(child.pid))\n"
        f"os.rename({str(child)!r} + '.new', {str(child)!r})\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", CLOSING, str(tmp_path / "log"), str(child)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=60,
        check=True,
    )
    zygote, seconds = done.stdout.split()
    assert float(seconds) < 2.0
    assert gone([int(zygote), int(child.read_text())])


@pytest.mark.long
def test_a_zygote_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    """Time counts only while it does nothing: on a loaded machine it waits for a processor."""
    (tmp_path / "slow_import.py").write_text(
        "import time\nend = time.process_time() + 4\nwhile time.process_time() < end: pass\n"
    )
    message = waited_for(tmp_path, "slow_import")
    assert "ready" in message


@pytest.mark.long
def test_a_zygote_that_does_nothing_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "stuck_import.py").write_text("import time\ntime.sleep(60)\n")
    message = waited_for(tmp_path, "stuck_import")
    assert "no answer for 2 s, in which it did nothing" in message


WAITING = f"""
import sys
sys.path[:0] = [{ROOT!r}, {HERE!r}]
from zerocheck.errors import HarnessError
from zerocheck.ranks import spawner
spawner.START_TIMEOUT_S = 2.0
made = spawner.Spawner("ranks_targets:run", scratch=[], log=sys.argv[1], warm=[sys.argv[2]])
try:
    made.wait_until_ready()
    print("ready")
except HarnessError as error:
    print(error)
made.close()
"""


def waited_for(tmp_path: Path, module: str) -> str:
    """What comes of a zygote that imports the module, and is given 2 s of doing nothing."""
    done = subprocess.run(
        [sys.executable, "-c", WAITING, str(tmp_path / "log"), module],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=120,
        check=True,
    )
    return done.stdout
