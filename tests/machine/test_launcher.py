"""What a launcher says in the environment, and what it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from zerocheck.errors import UsageError
from zerocheck.machine import launcher
from zerocheck.run.plan.options import RunOptions, check_timeout, choose_ranks

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "GLOO_SOCKET_IFNAME", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


def under_torchrun(monkeypatch: pytest.MonkeyPatch, **other: str) -> None:
    for name, value in (TORCHRUN | other).items():
        monkeypatch.setenv(name, value)


def test_the_kind_of_ranks_is_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_ranks(None) == "processes" and launcher.is_rank_0()
    under_torchrun(monkeypatch)
    assert choose_ranks(None) == "torchrun" and not launcher.is_rank_0()
    assert choose_ranks("processes") == "processes"
    monkeypatch.setenv("RANK", "0")
    assert launcher.is_rank_0()
    # A rank of the pool has some of it, and was not started by a launcher.
    monkeypatch.delenv("MASTER_PORT")
    assert choose_ranks(None) == "processes"
    with pytest.raises(UsageError, match="MASTER_PORT not set: start this with `torchrun"):
        launcher.check_environment()
    with pytest.raises(UsageError, match="did you mean 'torchrun'"):
        choose_ranks("torchrunn")


def test_the_host_is_that_of_the_launcher_or_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.host_number() == os.uname().nodename
    monkeypatch.setenv("GROUP_RANK", "5")
    assert launcher.host_number() == "5"


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, "lo"),
        # Others could not reach it: left to gloo.
        ({}, None),
        ({"GLOO_SOCKET_IFNAME": "mine"}, "mine"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, None),
    ],
)
def test_gloo_uses_the_interface_of_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, str], chosen: str | None
) -> None:
    under_torchrun(monkeypatch, **other)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    launcher.choose_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen


def test_the_launchers_table_says_what_came_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "error.json"
    launcher.report_exit(1, "nobody asked")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    launcher.report_exit(0, "all is well")
    assert not path.exists()
    launcher.report_exit(1, "2 findings")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert abs(failure.timestamp - time.time()) < 60
    assert json.loads(path.read_text())["message"]["message"] == "2 findings"
    assert failure.message["extraInfo"]["py_callstack"] == "2 findings"  # type: ignore[index]


ENDED_WHILE_IT_WRITES = """
import json, os
from zerocheck.machine import launcher
def half(message, file):
    file.write('{"message"')
    file.flush()
    os._exit(1)
json.dump = half
launcher.report_exit(1, "2 findings")
"""


def test_a_rank_that_is_ended_leaves_no_half_entry(tmp_path: Path) -> None:
    """The launcher reads what is there, and fails on JSON that has no end."""
    path = tmp_path / "error.json"
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    ended = subprocess.run([sys.executable, "-c", ENDED_WHILE_IT_WRITES], env=environment)
    assert ended.returncode == 1
    assert not path.exists()


def test_rank_0_is_the_root_cause_also_where_another_rank_is_found_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.9)
    failures = {}
    for rank, expected in ((1, launcher.SEE_RANK_0), (0, "2 findings")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        launcher.report_exit(1, expected)
        failures[rank] = ProcessFailure(rank, 1, 1, str(tmp_path / f"{rank}.json"))
    assert ChildFailedError("run", failures).get_first_failure()[0] == 0


STOPPED = """
import os, signal, sys
from zerocheck.errors import RanksLost
from zerocheck.machine import signals
from zerocheck.machine.launcher import INTERRUPTS, leave_at_once
signals.StopSignals(INTERRUPTS).__enter__()
try:
    try:
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    except BaseException:
        pass  # as user code may
    signals.check()
except RanksLost as lost:
    print(lost)
except KeyboardInterrupt:
    print("Ctrl-C")
signals.ignore()
os.kill(os.getpid(), signal.SIGTERM)  # the report is being written
print("written", flush=True)
leave_at_once(3)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("name", "expected"), [("SIGTERM", "the launcher ended"), ("SIGINT", "Ctrl")]
)
def test_a_signal_ends_the_run_and_not_the_report(name: str, expected: str) -> None:
    command = [sys.executable, "-c", STOPPED, name]
    run = subprocess.run(command, capture_output=True, text=True)
    assert expected in run.stdout and "written" in run.stdout and run.returncode == 3


def test_seconds_that_collectives_may_take() -> None:
    check_timeout(5)
    for wrong in (0.5, 1e9, float("nan")):
        with pytest.raises(UsageError, match=r"--timeout .* is out of range"):
            check_timeout(wrong)
    with pytest.raises(UsageError, match="--timeout"):
        RunOptions(timeout=0)
