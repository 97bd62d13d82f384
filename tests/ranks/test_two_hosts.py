"""torchrun on two hosts with addresses of their own, which share neither loopback nor memory.

The hosts are network namespaces. Where they cannot be made, the tests are skipped with the reason;
where ZEROCHECK_HOSTS is "required", as in CI, that is a failure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import TwoHosts, Unavailable
from slices import sliced

from zerocheck.run.findings.case_file import read

LOCAL_RANK = "zerocheck.faults.replicas:LocalRankForRank"
DIFFERENT = "zerocheck.faults.article:ArticleStage2"
PATIENCE_S = 240
EACH = sliced(4, 2)
"""Ranks of a host. Each is a process that imports torch."""


@pytest.fixture
def two() -> Iterator[TwoHosts]:
    try:
        hosts = TwoHosts()
    except Unavailable as error:
        if os.environ.get("ZEROCHECK_HOSTS") == "required":
            pytest.fail(f"two hosts are required here and cannot be made: {error}")
        pytest.skip(f"two hosts cannot be made: {error}")
    yield hosts
    hosts.close()


def start(two: TwoHosts, tmp_path: Path, ranks: int, *arguments: str) -> list[Any]:
    """torchrun on both hosts, each in a directory of its own: a and b."""
    master = two.hosts[0]
    running = []
    for host, name in zip(two.hosts, "ab", strict=True):
        (tmp_path / name).mkdir(exist_ok=True)
        running.append(host.torchrun(ranks, arguments, master=master, cwd=tmp_path / name))
    return running


def answer(text: str) -> str:
    """Without what torchrun and c10d say."""
    return "\n".join(line for line in text.splitlines() if not re.match(r"\[?[WEI]\d{4} ", line))


def findings(directory: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((directory / "zerocheck-report" / "report.json").read_text())
    return {one["implementation"]: one for one in report["findings"]}


def test_ranks_on_two_hosts_and_a_slow_link(two: TwoHosts, tmp_path: Path) -> None:
    """One that is right, one that takes the local rank for the rank, and ranks that call different
    collectives. What is found is replayed on one machine."""
    two.slow_down("50mbit")
    names = ("fsdp2", LOCAL_RANK, DIFFERENT)
    options = ("--max-cases", "2", "--no-shrink", "--timeout", "6")
    here, there = start(two, tmp_path, EACH, "run", *names, *options)
    out, err = here.communicate(timeout=PATIENCE_S)
    other_out, other_err = there.communicate(timeout=PATIENCE_S)

    assert (here.returncode, there.returncode) == (1, 1), (out, err, other_err)
    assert answer(other_out) == "" and not (tmp_path / "b" / "zerocheck-report").exists()
    for message in (err, other_err):  # one exit code on all ranks, and none that was ended
        assert set(re.findall(r"exitcode  : (\S+)", message)) == {"1"}
    assert "zerocheck ends with exit code 1: see zerocheck-report/report.md" in err
    assert "6 cases" in out and f"on {2 * EACH} ranks" in out

    found = findings(tmp_path / "a")
    assert set(found) == {LOCAL_RANK, DIFFERENT}, out
    local = found[LOCAL_RANK]
    assert (local["obligation"], local["causes"]) == ("ownership", ["shard of the local rank"])
    different = found[DIFFERENT]
    assert (different["status"], different["causes"]) == ("hung", ["different collectives"])
    stood = re.findall(
        r"rank (\d) waited at .*, last collective (\w+\(\d+\) #\d+)", different["reason"]
    )
    assert [int(rank) for rank, _ in stood] == list(range(2 * EACH))
    assert len({collective for _, collective in stood}) > 1

    case_file = tmp_path / "a" / local["case_file"]
    assert read(case_file).case.hosts == (EACH,)
    command = [sys.executable, "-m", "zerocheck", "replay", str(case_file)]
    replayed = subprocess.run(
        [*command, "--implementation", LOCAL_RANK], capture_output=True, text=True, cwd=tmp_path
    )
    assert replayed.returncode == 1, replayed.stderr
    assert "reproduced bit for bit: violated again" in replayed.stdout


@pytest.mark.long
def test_a_host_dies_in_the_middle(two: TwoHosts, tmp_path: Path) -> None:
    """It ends soon with what was judged until then, and the implementation is not blamed."""
    here, _ = start(two, tmp_path, 1, "run", "fsdp2", "--seed", "3", "--no-shrink")
    journal = tmp_path / "a" / "zerocheck-report" / "journal.ndjson"
    until = time.monotonic() + PATIENCE_S
    while not (journal.exists() and journal.read_text().count('"case finished"') >= 3):
        assert time.monotonic() < until and here.poll() is None, here.communicate()
        time.sleep(0.05)
    two.hosts[1].die()
    died = time.monotonic()
    out, err = here.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - died < 90

    name = two.hosts[1].name
    assert f"rank 1 ({name}) gave no sign of life for 20 s, so this run ends here" in out
    assert re.search(r"ranks were lost after \d+ of \d+ cases", out)
    assert "exitcode  : 3" in err
    report = json.loads((tmp_path / "a" / "zerocheck-report" / "report.json").read_text())
    assert (report["exit_code"], report["run"]["outcome"]) == (3, "lost")
    judged = journal.read_text().count('"case finished"')
    assert report["run"]["cases"] == judged >= 3
    assert report["findings"] == []
    lost = read(tmp_path / "a" / "zerocheck-report" / "findings" / "ranks-lost.json")
    assert (lost.implementation, lost.case.hosts) == ("fsdp2", (1,))
