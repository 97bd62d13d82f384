"""Runtime metrics of the timed cases of an implementation, by world size, and of checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from ...case.schema import Case
from ...case.shapes import parameter_bytes
from ...timing.pace import Pace, middle_of, patterns
from .records import CaseFinished


@dataclass
class Paces:
    """Timed cases of one implementation on one number of ranks.

    Figures are medians over cases, of those that have them; None where none has.
    """

    ranks: int
    cases: list[tuple[Case, Pace]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of timed steps over all cases."""
        return sum(pace.steps for _, pace in self.cases)

    def middle(self, of: Callable[[Pace], float | None]) -> float | None:
        """Return the median of a figure over cases."""
        return middle_of(of(pace) for _, pace in self.cases)

    def share(self, *kinds: str) -> float | None:
        """Return the share of the step that callers wait in collectives of these kinds."""

        def of(pace: Pace) -> float | None:
            if pace.waiting is None:
                return None
            return sum(kind.share or 0.0 for kind in pace.kinds if kind.kind in kinds)

        return self.middle(of)

    @property
    def bytes(self) -> float | None:
        """Bytes of the commonest collective with a tensor, the median over cases."""

        def of(pace: Pace) -> float | None:
            return max(((k.calls, k.bytes) for k in pace.kinds if k.bytes), default=(0.0, None))[1]

        return self.middle(of)

    @property
    def tokens_per_second(self) -> float | None:
        """Positions that all ranks together read per second, the median over cases."""
        return self.middle(
            lambda pace: pace.tokens / pace.seconds if pace.tokens and pace.seconds else None
        )

    @property
    def idle(self) -> float | None:
        """Idle share of the step, the mean over ranks and median over cases."""
        return self.middle(lambda pace: sum(pace.idle) / len(pace.idle) if pace.idle else None)

    @property
    def idle_of(self) -> tuple[float, ...]:
        """Idle share of each rank, the median over cases; empty where it is not known."""
        known = [pace.idle for _, pace in self.cases if pace.idle]
        return tuple(median(of) for of in zip(*known, strict=True))

    @property
    def gathered(self) -> float | None:
        """Size of the largest all-gather over the bytes of all parameters."""
        return middle_of(_gathered(case, pace) for case, pace in self.cases)

    @property
    def allocated(self) -> int | None:
        """Allocated bytes, the most of any case."""
        return max((p.allocated for _, p in self.cases if p.allocated is not None), default=None)

    @property
    def reserved(self) -> int | None:
        """Reserved bytes, the most of any case."""
        return max((p.reserved for _, p in self.cases if p.reserved is not None), default=None)


def _gathered(case: Case, pace: Pace) -> float | None:
    whole = sum(parameter_bytes(case.model).values())
    largest = [kind.largest for kind in pace.kinds if kind.kind == "all_gather"]
    return max(largest) / whole if largest and whole else None


@dataclass
class Metrics:
    """Runtime metrics of an implementation.

    paces: by world size; patterns: sentences, each from the first case that shows the pattern;
    shown: number of timed cases with it; broken: why cases could not be timed; peaks: bytes of each
    measured case, by world size; saves, loads: seconds.
    """

    paces: dict[int, Paces] = field(default_factory=dict)
    patterns: dict[str, str] = field(default_factory=dict)
    shown: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    peaks: dict[int, list[int]] = field(default_factory=dict)
    saves: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    def add(self, record: CaseFinished) -> None:
        """Count one case."""
        self.saves += record.save_seconds
        self.loads += record.load_seconds
        if record.peak_bytes is not None:
            self.peaks.setdefault(record.case.world_size, []).append(record.peak_bytes)
        pace = record.pace
        if pace is None:
            return
        if pace.broken:
            self.broken.append(pace.broken)
            return
        size = record.case.world_size
        self.paces.setdefault(size, Paces(size)).cases.append((record.case, pace))
        for sentence in patterns(record.case, pace):
            pattern = sentence.partition(":")[0]
            self.shown[pattern] += 1
            self.patterns.setdefault(pattern, sentence)

    @property
    def cases(self) -> int:
        """Number of timed cases."""
        return sum(len(one.cases) for one in self.paces.values())
