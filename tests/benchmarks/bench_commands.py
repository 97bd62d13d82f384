"""What commands take, from their start to the report: wall and processor time."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.measuring import Show, spread, table
from documents import example

ROUNDS = 3
COMMANDS = {
    "one case of ddp": ["run", "ddp", "--max-cases", "1", "--obligations", "gradient"],
    "all built-in ones": ["run"],
    "a user's function": ["run", "my_sharding.py:my_fsdp"],
}
SLOWEST_S = 60.0
"""Of all built-in ones, on two idle cores."""


def test_commands(show: Show, tmp_path: Path) -> None:
    """Each in turn; the processor time is that of all processes."""
    (tmp_path / "my_sharding.py").write_text(example("my_sharding.py"))
    wall: dict[str, list[float]] = defaultdict(list)
    worked: dict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            where = ["--report-dir", str(tmp_path / f"{number}-{name}")]
            before, started = _processor_s(), time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "zerocheck", *arguments, *where],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            wall[name].append(time.perf_counter() - started)
            worked[name].append(_processor_s() - before)
    rows = [[name, spread(wall[name]), spread(worked[name])] for name in COMMANDS]
    title = f"From the command to the report; median (quartiles) of {ROUNDS} rounds"
    show(table(title, ["zerocheck run", "wall, s", "processor, s"], rows))
    assert statistics.median(wall["all built-in ones"]) <= SLOWEST_S


def _processor_s() -> float:
    """Return the processor time of all processes that ended, in user and kernel mode."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
