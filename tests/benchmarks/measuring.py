"""What the benchmarks share: a pool of their own, cases of the quick profile, tables."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import torch
from tabulate import tabulate

from zerocheck.protocol.jobs import TakeSteps
from zerocheck.ranks.cores import Cores
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.outcome import judged
from zerocheck.run.execute.rank_pool import TARGET
from zerocheck.run.execute.rank_requests import describe, refusals
from zerocheck.run.execute.trial import Trial
from zerocheck.run.findings.issue_matcher import KnownIssueMatcher
from zerocheck.run.known_issues.releases import Releases
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.plan.plan import Plan, PlannedCase
from zerocheck.run.records.records import Outcome


@contextlib.contextmanager
def warm_pool(target: str = TARGET) -> Iterator[Pool]:
    """A pool that does not queue behind other runs on the machine: times are taken here."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Pool(target, cores=Cores(directory=directory), patience_s=30.0) as pool,
    ):
        pool.wait_until_ready()
        yield pool


def planned(pool: Pool, options: RunOptions) -> list[PlannedCase]:
    """The cases that `zerocheck run` with these options would have, in its order.

    Those that a known issue covers are left out: they end early.
    """
    described = {name: describe(pool, name) for name in options.implementations}
    cases = Plan(options, described, partial(refusals, pool)).cases
    known = KnownIssueMatcher(options, Releases({"torch": torch.__version__})).issues
    return [
        item
        for item in cases
        if not any(
            issue.implementation == item.implementation and issue.covers(item.case)
            for issue in known
        )
    ]


def observed(pool: Pool, item: PlannedCase) -> tuple[float, Outcome]:
    """Seconds from submission to verdict, and the verdict on all obligations."""
    started = time.perf_counter()
    outcome = Trial(pool, item.implementation, item.case).outcome()
    return time.perf_counter() - started, outcome


def statuses_of(pool: Pool, items: Sequence[PlannedCase]) -> Iterator[str]:
    """Each case's status; as in a run, the ranks do the next one while one is judged.

    AssertionError for a case that neither holds nor is unsupported.
    """
    waiting: Trial | None = None
    for item in (*items, None):
        result = None if waiting is None else waiting.result()
        upcoming = None if item is None else Trial(pool, item.implementation, item.case)
        if waiting is not None and result is not None:
            outcome = judged(waiting.case, result)
            assert outcome.status in ("holds", "unsupported"), (waiting.case, outcome)
            yield outcome.status
        waiting = upcoming


def bare(pool: Pool, item: PlannedCase) -> tuple[float, float]:
    """Seconds that the same steps take as a user's loop takes them: in all, and in the ranks."""
    job = TakeSteps(item.implementation, item.case)
    started = time.perf_counter()
    payload = msgspec.msgpack.encode(job)
    result = pool.wait(pool.submit(item.case.world_size, payload, hosts=item.case.hosts))
    took = time.perf_counter() - started
    result.release()
    assert result.outcome == "finished", result.summary()
    return took, result.duration_s


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """The median with the quartiles around it."""
    low, middle, high = quartiles(values)
    return " ".join(
        (f"{middle * scale:.{digits}f}", f"({low * scale:.{digits}f} to {high * scale:.{digits}f})")
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A title and a table in plain text."""
    aligned = ["left", *["right"] * (len(headers) - 1)]
    body = tabulate(rows, headers, tablefmt="simple", colalign=aligned, disable_numparse=True)
    return f"\n{title}\n\n{body}\n"


Show = Callable[[str], None]
