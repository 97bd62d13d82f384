"""The commands under torchrun, on one host: who speaks, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAULT = "zerocheck.faults.gradient:AverageBecomesSum"
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    # pytest's own processes may ignore Ctrl-C, which children would take over.
    return subprocess.Popen(
        [*COMMAND, "-m", "zerocheck", *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def exit_codes(err: str) -> list[str]:
    """Of all ranks, from the table of torchrun."""
    return re.findall(r"exitcode  : (\S+)", err)


@pytest.mark.long
def test_wrong_usage_is_said_once(tmp_path: Path) -> None:
    out, err = start(tmp_path, "run", "fsdp3").communicate(timeout=120)
    assert err.count("error: unknown implementation 'fsdp3'; did you mean 'fsdp2'?") == 1, err
    # The launcher ends a rank that still starts when rank 0 leaves: that one has no word to say.
    codes = exit_codes(err)
    assert len(codes) == 2 and "2" in codes and set(codes) <= {"2", "-15"} and out == "", err
    assert err.count("traceback : unknown implementation 'fsdp3'") == codes.count("2")


def test_a_run_and_its_replay(tmp_path: Path) -> None:
    running = start(tmp_path, "run", FAULT, "--max-cases", "1", "--no-shrink")
    out, err = running.communicate(timeout=240)
    assert running.returncode == 1 and exit_codes(err) == ["1", "1"], err
    assert len(re.findall("^VIOLATED", out, re.MULTILINE)) == 2  # at once, and at the end
    assert "1 case planned for" in out and "on 2 ranks" in out
    report = json.loads((tmp_path / "zerocheck-report" / "report.json").read_text())
    assert report["exit_code"] == 1
    case_file = report["findings"][0]["case_file"]
    replay = start(tmp_path, "replay", case_file, "--implementation", FAULT)
    out, err = replay.communicate(timeout=240)
    assert "reproduced bit for bit: violated again" in out and exit_codes(err) == ["1", "1"]
    assert "Root Cause" in err and "reproduced bit for bit" in err.partition("Root Cause")[2]


@pytest.mark.long
def test_control_c(tmp_path: Path) -> None:
    running = start(tmp_path, "run", "fsdp2", "--max-cases", "300")
    journal = tmp_path / "zerocheck-report" / "journal.ndjson"
    until = time.monotonic() + 240
    while not (journal.exists() and journal.read_text().count('"case finished"') >= 2):
        assert time.monotonic() < until and running.poll() is None, running.communicate()
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert re.search(r"interrupted after \d+ of \d+ cases", out), err
    report = json.loads((tmp_path / "zerocheck-report" / "report.json").read_text())
    assert (report["exit_code"], report["run"]["outcome"]) == (130, "interrupted")
    assert "zerocheck itself failed" not in err
