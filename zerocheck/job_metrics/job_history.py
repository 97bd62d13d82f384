"""History of a job on rank 0: its last figures, the patterns that they show, and its summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from .failure_patterns import JobFigures, failure_patterns
from .records import (
    CheckpointTime,
    JobRecord,
    ModelSize,
    OutOfMemory,
    SeenPattern,
    StepSeconds,
    TimedStep,
)
from .timed_step import middle_of

KEPT = 100
"""Last steps that a median is of."""


class JobHistory:
    """Figures of the last steps, and what was seen in them."""

    def __init__(self, size: ModelSize) -> None:
        self._size = size
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._between: deque[float] = deque(maxlen=KEPT)
        self._timed: deque[TimedStep] = deque(maxlen=KEPT)
        self._saves: list[CheckpointTime] = []
        self._loads: list[CheckpointTime] = []
        self._oom: list[OutOfMemory] = []
        self._patterns: dict[str, str] = {}
        self._start = time.monotonic()

    def add(self, record: JobRecord) -> Iterator[SeenPattern]:
        """Add a record; yield the patterns that are seen for the first time."""
        if isinstance(record, StepSeconds):
            if not record.measured:
                self._seconds.append(record.seconds)
            if record.between is not None:
                self._between.append(record.between)
            return
        if isinstance(record, TimedStep):
            self._timed.append(record)
        elif isinstance(record, CheckpointTime):
            (self._saves if record.what == "save" else self._loads).append(record)
        elif isinstance(record, OutOfMemory):
            self._oom.append(record)
        figures = JobFigures(
            self._size, tuple(self._timed), self._saves, time.monotonic() - self._start
        )
        for name, text in failure_patterns(figures):
            if name not in self._patterns:
                yield SeenPattern(record.step, name, text)
            self._patterns[name] = text

    @property
    def period(self) -> float | None:
        """Seconds from one step to the next, the median of the last ones."""
        if not self._seconds:
            return None
        return median(self._seconds) + (median(self._between) if self._between else 0.0)

    def lines(self) -> list[str]:
        """Return few lines on the job."""
        found = [self._of_steps(), self._of_collectives()]
        found += [self._of_checkpoints("save", self._saves)]
        found += [self._of_checkpoints("load", self._loads)]
        found += [f"  {name}: {text}" for name, text in self._patterns.items()]
        found += [f"  {oom_text(one)}" for one in self._oom]
        return [line for line in found if line]

    def _of_steps(self) -> str:
        if not self._seconds:
            return ""
        step = median(self._seconds)
        line = f"  a step takes {step:.3g} s"
        between = median(self._between) if self._between else 0.0
        tokens = self._timed[-1].tokens if self._timed else 0
        if tokens:
            line += f", {tokens / (step + between):,.0f} tokens a second"
        if between >= 0.01 * step:
            line += f"; {between / (step + between):.0%} of the time is between steps"
        return line

    def _of_collectives(self) -> str:
        if not self._timed:
            return ""

        def share(of: Callable[[TimedStep], float | None]) -> str:
            value = middle_of(of(one) for one in self._timed)
            return "not seen" if value is None else f"{value:.0%}"

        last = self._timed[-1].collectives
        if not last:
            return "  no collectives"
        kinds = ", ".join(
            f"{kind.kind} {share(lambda one, name=kind.kind: _share(one, name))}"  # type: ignore[misc]
            for kind in last
        )
        eager = "; of steps without torch.compile" if self._size.compiled else ""
        return (
            f"  waited in collectives {share(lambda one: one.waited)} of a step ({kinds}), "
            f"while all ranks are there {share(lambda one: one.link)}; "
            f"hidden {share(lambda one: one.overlap)} of their time "
            f"({len(self._timed)} timed step{'s' if len(self._timed) != 1 else ''}{eager})"
        )

    def _of_checkpoints(self, what: str, found: Sequence[CheckpointTime]) -> str:
        if not found:
            return ""
        seconds = median(one.seconds for one in found)
        return f"  {len(found)} {what}{'s' if len(found) != 1 else ''}, {seconds:.3g} s (median)"


def oom_text(record: OutOfMemory) -> str:
    """Say where a rank ran out of memory."""
    module = f" in {record.module}" if record.module else ""
    where = {"elsewhere": ""}.get(record.phase, f", in the {record.phase}{module}")
    place = f", at {record.place}" if record.place else ""
    return f"rank {record.rank} ran out of memory in step {record.step}{where}{place}"


def _share(step: TimedStep, kind: str) -> float | None:
    return next((one.waited for one in step.collectives if one.kind == kind), None)
