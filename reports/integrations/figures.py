"""Print the tables of README.md: checks in trainers, their price, and bugs that begin with step 37.

    python reports/integrations/figures.py

It needs transformers, accelerate, Lightning, DeepSpeed and torchtitan, and runs the programs of
tests/field on two ranks.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parent.parent.parent
FIELD = ROOT / "tests" / "field"
TRAINERS = {
    "transformers": "transformers_trainer.py",
    "Lightning": "lightning_trainer.py",
    "accelerate": "accelerate_loop.py",
    "DeepSpeed": "engine_loop.py",
    "torchtitan": "titan_trainer.py",
}
FAULTS = ("doubled", "doubled on rank 1", "not reduced", "a gradient zeroed", "drift on rank 1")
LONG = ("--steps", "200", "--every", "10")
TIMES = 3


def said(trainer: str, *options: str) -> str:
    """What a training prints."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    path = f"{ROOT}:{ROOT / 'reference'}"
    done = subprocess.run(
        [*program, "--nproc-per-node", "2", str(FIELD / TRAINERS[trainer]), *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


def found(pattern: str, text: str) -> str:
    """The first group of a pattern, or "?"."""
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else "?"


def price(trainer: str) -> list[str]:
    """The row of a trainer: steps, verdict, seconds of the loop with and without checks."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    verdict = ""
    for _ in range(TIMES):
        for checked in (True, False):
            text = said(trainer, *LONG, *([] if checked else ["--unchecked"]))
            seconds[checked].append(float(found(r"^SECONDS (\S+)", text)))
            if checked:
                verdict = found(r"zerocheck: (.*?) \(", text)
    with_, without = statistics.median(seconds[True]), statistics.median(seconds[False])
    return [trainer, verdict, f"{without:.2f}", f"{with_:.2f}", f"{(with_ - without) / 20:.2f}"]


def bug(trainer: str, fault: str) -> list[str]:
    """The row of a bug that begins with step 37, with checks every 10 and the flight recorder."""
    options = ("--steps", "60", "--every", "10", "--recorder", "1GiB", "--begin", "37")
    text = said(trainer, *options, "--fault", fault)
    first = found(r"first step +(\d+) is the first wrong one", text)
    return [fault, trainer, first, found(r"^  cause +(.*?)(?: \(the cases.*)?$", text)]


if __name__ == "__main__":
    rows = [price(trainer) for trainer in TRAINERS]
    heads = ["trainer", "verdict", "s without", "s with", "s per checked step"]
    print(tabulate(rows, heads, "github"), end="\n\n")
    bugs = [bug(trainer, fault) for fault in FAULTS for trainer in TRAINERS]
    heads = ["bug", "trainer", "first wrong step", "cause"]
    print(tabulate(bugs, heads, "github"))
