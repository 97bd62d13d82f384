"""Cases per second: zerocheck, all obligations judged, against PyTorch's own style of test."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks.measuring import Show, spread, statuses_of, table, warm_pool

from zerocheck.case.schema import Block, Case, Data, Model, Sharding, Training
from zerocheck.ranks.pool import Pool
from zerocheck.run.plan.plan import PlannedCase

ROUNDS = 5
PER_ROUND = 10
"""Cases of zerocheck's in each round, one behind the other as in a run; their mean counts."""
TARGET_RATIO = 30.0
KINDS = {f"Parity{size}.test_{name}": (name, size) for size in (2, 4) for name in ("ddp", "fsdp2")}


def one_case(world_size: int, seed: int) -> Case:
    """The rival's MLP as nearly as a case can say it: 7-13-13-3, its middle layer a convolution of
    kernel 1, which is a Linear.

    As many layers as the rival's 7-13-5-3, each a unit of its own too; 328 parameters, not 192.
    """
    return Case(
        mesh=(world_size,),
        seed=seed,
        model=Model(inputs=7, width=13, blocks=(Block(kind="conv", kernel=1),), outputs=3),
        data=Data(batch=4, length=1),
        training=Training(steps=5),
        sharding=Sharding(wrap="layer"),
    )


def seconds_each(pool: Pool, name: str, world_size: int, seed: int) -> float:
    """Return the seconds of one of `PER_ROUND` cases, which all hold. seed: of the first."""
    cases = [PlannedCase(name, one_case(world_size, seed + i)) for i in range(PER_ROUND)]
    started = time.perf_counter()
    assert set(statuses_of(pool, cases)) == {"holds"}
    return (time.perf_counter() - started) / PER_ROUND


def rival(module: str, rounds: int) -> dict[str, list[float]]:
    """Seconds per test; the runner and its imports are not counted."""
    here = os.path.dirname(os.path.dirname(__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.timed", f"benchmarks.{module}", str(rounds)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seconds: dict[str, list[float]] = json.loads(done.stdout)
    return seconds


def test_speed(show: Show) -> None:
    """Rounds alternate, so that whatever else the machine does meets both."""
    ours: dict[str, list[float]] = {kind: [] for kind in KINDS}
    spawned: dict[str, list[float]] = {kind: [] for kind in KINDS}
    seed = 0
    with warm_pool() as pool:
        for number in range(ROUNDS + 1):
            for kind, (name, size) in KINDS.items():
                seed += PER_ROUND  # no case twice
                seconds = seconds_each(pool, name, size, seed)
                if number:  # the first round warms both
                    ours[kind].append(seconds)
            for kind, seconds_ in rival("rival_spawn", 1).items():
                if number:
                    spawned[kind] += seconds_
    kept = {kind: seconds[1:] for kind, seconds in rival("rival_kept", ROUNDS + 1).items()}
    rows = []
    for kind, (name, size) in KINDS.items():
        ratio = statistics.median(spawned[kind]) / statistics.median(ours[kind])
        rows.append(
            [
                f"{name}, {size} ranks",
                spread(spawned[kind]),
                spread(kept[kind]),
                spread(ours[kind], digits=3),
                f"{1 / statistics.median(ours[kind]):.1f}",
                f"{ratio:.0f}",
                f"{statistics.median(kept[kind]) / statistics.median(ours[kind]):.1f}",
            ]
        )
    headers = ["case", "spawned, s", "kept, s", "zerocheck, s", "zerocheck, cases/s",
               "spawned / zerocheck", "kept / zerocheck"]  # fmt: skip
    totals = [sum(statistics.median(times) for times in side.values())
              for side in (spawned, kept, ours)]  # fmt: skip
    rows.append(
        ["all four", f"{totals[0]:.2f}", f"{totals[1]:.2f}", f"{totals[2]:.3f}",
         f"{len(KINDS) / totals[2]:.1f}", f"{totals[0] / totals[2]:.0f}",
         f"{totals[1] / totals[2]:.1f}"]
    )  # fmt: skip
    show(
        table(
            "One parity case, 5 AdamW steps; median (quartiles) of "
            f"{ROUNDS} rounds. spawned, kept: PyTorch's MultiProcessTestCase and "
            "MultiProcContinuousTest",
            headers,
            rows,
        )
    )
    assert totals[0] / totals[2] >= TARGET_RATIO
