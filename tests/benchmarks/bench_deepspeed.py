"""Cases per second of DeepSpeed's stages: zerocheck against DeepSpeed's own style of test.

DeepSpeed's packages hold no tests: DEEPSPEED_CHECKOUT names a checkout of its repository.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.bench_speed import PER_ROUND, ROUNDS, seconds_each
from benchmarks.measuring import Show, spread, table, warm_pool

CHECKOUT = os.environ.get("DEEPSPEED_CHECKOUT", "")
KINDS = [(size, stage) for size in (2, 4) for stage in (1, 3)]


@pytest.mark.skipif(not CHECKOUT, reason="DEEPSPEED_CHECKOUT names no checkout of DeepSpeed")
def test_deepspeed(show: Show, tmp_path: Path) -> None:
    """The rival's rounds, then zerocheck's: starting an engine takes the rival's ranks seconds."""
    theirs = _rival(tmp_path)
    ours: dict[tuple[int, int], list[float]] = defaultdict(list)
    seed = 0
    with warm_pool() as pool:
        for number in range(ROUNDS + 1):
            for size, stage in KINDS:
                seed += PER_ROUND  # no case twice
                seconds = seconds_each(pool, f"deepspeed{stage}", size, seed)
                if number:  # the first round warms
                    ours[size, stage].append(seconds)
    rows, totals = [], [0.0, 0.0, 0.0]
    for size, stage in KINDS:
        sides = theirs["Spawned", size, stage], theirs["Kept", size, stage], ours[size, stage]
        medians = [*map(statistics.median, sides)]
        totals = [total + median for total, median in zip(totals, medians, strict=True)]
        rows.append([f"stage {stage}, {size} ranks", *map(spread, sides), *_ratios(medians)])
    rows.append(["all four", *(f"{total:.2f}" for total in totals), *_ratios(totals)])
    headers = ["case", "spawned, s", "kept, s", "zerocheck, s", "spawned / zerocheck",
               "kept / zerocheck"]  # fmt: skip
    title = (
        f"One parity case of DeepSpeed, 5 AdamW steps; median (quartiles) of {ROUNDS} rounds. "
        "spawned, kept: DeepSpeed's DistributedTest, kept with reuse_dist_env"
    )
    show(table(title, headers, rows))
    assert totals[0] > totals[2]


def _ratios(seconds: list[float]) -> list[str]:
    return [f"{seconds[0] / seconds[2]:.1f}", f"{seconds[1] / seconds[2]:.1f}"]


def _rival(folder: Path) -> dict[tuple[str, int, int], list[float]]:
    """Seconds of each test by (kind, ranks, stage), without each class's first round.

    They run in a folder of their own: two conftest.py do not go together, and DeepSpeed's takes the
    DeepSpeed of its checkout before the installed one.
    """
    tests = folder / "checkout" / "tests"
    (tests / "unit").mkdir(parents=True)
    for name in ("conftest.py", "unit/__init__.py", "unit/common.py", "unit/util.py"):
        shutil.copy(Path(CHECKOUT) / "tests" / name, tests / name)
    shutil.copy(Path(__file__).with_name("rival_deepspeed.py"), folder)
    path = [str(folder), str(tests), *sys.path]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path), "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    arguments = ["-c", os.devnull, "--rootdir", str(folder), "-p", "conftest",
                 "-p", "no:zerocheck", "-p", "no:randomly"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "--junitxml=times.xml", "rival_deepspeed.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    seconds: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for test in ElementTree.parse(folder / "times.xml").iter("testcase"):
        name, kind = test.attrib["name"], test.attrib["classname"].rpartition(".Test")[2]
        stage, number = (int(one) for one in name.partition("[")[2].rstrip("]").split("-"))
        assert not [*test], ElementTree.tostring(test)
        if number:
            seconds[kind[:-1], int(kind[-1]), stage].append(float(test.attrib["time"]))
    return seconds
