"""Flight recorder: the steps since the last one that was judged, in a ring on disk.

Each rank writes its own files, each step a bundle that `zerocheck replay` judges too, so a job that
dies leaves its last steps behind. Where a checked step is wrong, the ranks judge the steps that all
of them kept, the oldest first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch.distributed.tensor import DTensor

from ..contract.semantics import Semantics
from ..errors import UsageError
from ..protocol.verdicts import Judgement
from ..sizes import binary, parse_size
from . import bundle as bundles
from .record.ranks import AllRanks
from .record.step_record import Clip, Observed
from .verdict.exchange import Verdict

NOT_KEPT = "the recorder cannot keep what the model was called with"


def recorder_bytes(given: str | int | None) -> int | None:
    """Return the bytes of `recorder=`. Raises UsageError for what is no size."""
    if given is None or (type(given) is int and given > 0):
        return given
    if not isinstance(given, str):
        raise UsageError(f"recorder is {given!r} (allowed: a size such as '2GiB', bytes, or None)")
    return parse_size(given)


@dataclass(frozen=True)
class _KeptStep:
    """Step on disk: its bytes, and its clips and norms as they are in `Observed`, still sharded."""

    size: int
    clips: tuple[Clip, ...]
    norms: dict[int, DTensor]


class FlightRecorder:
    """Steps of one rank on disk, the oldest dropped where they take more than `limit` bytes."""

    def __init__(self, place: Path, limit: int, semantics: Semantics) -> None:
        self.place, self.limit = place, limit
        self._semantics = semantics
        self._kept: dict[int, _KeptStep] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the steps that are kept, in order."""
        return tuple(self._kept)

    def keep(self, observed: Observed) -> None:
        """Write a step. Raises UsageError for one that is larger than the ring, and OSError.

        A norm that is still sharded is not on disk: to reduce it takes all ranks, which meet in
        checked steps only.
        """
        summary = observed.summary
        whole = tuple(c for n, c in enumerate(summary.clips) if n not in observed.norms)
        place = self._of(summary.number)
        written = replace(observed, summary=msgspec.structs.replace(summary, clips=whole))
        bundles.write_rank(place, written)
        if summary.rank == 0:
            bundles.write_head(place, observed, None, self._semantics)
        size = sum(one.stat().st_size for one in place.iterdir())
        self._kept[summary.number] = _KeptStep(size, summary.clips, observed.norms)
        while sum(one.size for one in self._kept.values()) > self.limit:
            self._drop(next(iter(self._kept)))
        if not self._kept:
            raise UsageError(f"a step takes {binary(size)}, and recorder= {binary(self.limit)}")

    def read(self, number: int, rank: int, world_size: int) -> Observed:
        """Read a step as it was observed."""
        observed = bundles.read_rank(self._of(number), rank, world_size)
        kept, summary = self._kept[number], observed.summary
        lost = summary.forwards and not observed.forwards
        summary = msgspec.structs.replace(
            summary, clips=kept.clips, unjudged=summary.unjudged or (NOT_KEPT if lost else "")
        )
        return replace(observed, summary=summary, norms=kept.norms)

    def forget(self) -> None:
        """Drop all steps."""
        for number in self.numbers:
            self._drop(number)

    def _of(self, number: int) -> Path:
        return self.place / f"step-{number}"

    def _drop(self, number: int) -> None:
        del self._kept[number]
        shutil.rmtree(self._of(number), ignore_errors=True)


def open_recorder(
    directory: Path, limit: int, semantics: Semantics, ranks: AllRanks
) -> FlightRecorder:
    """Make the recorder of this rank, in a folder that no earlier job used.

    Every rank calls this.
    """
    place = ""
    if ranks.rank == 0:
        place = str(bundles.free_place(directory / "recorder"))
    place = os.fsdecode(ranks.broadcast(os.fsencode(place)))
    Path(place).mkdir(parents=True, exist_ok=True)
    return FlightRecorder(Path(place), limit, semantics)


MOST_JUDGED = 16
"""Kept steps that are all judged, up to the first wrong one; of more they are halved."""


@dataclass(frozen=True)
class Trace:
    """First wrong step among those that every rank kept.

    kept: their numbers; judged: how many of them; held: those of them that hold; wrong: None where
    none is.
    """

    kept: tuple[int, ...]
    judged: int
    held: tuple[int, ...]
    wrong: tuple[Observed, Judgement] | None


def trace(
    recorder: FlightRecorder | None,
    ranks: AllRanks,
    judge: Callable[[Observed], tuple[Observed, Verdict]],
) -> Trace:
    """Judge the steps that every rank kept, for the first wrong one. Every rank calls this.

    recorder: None on a rank whose disk failed, which keeps none.
    Up to MOST_JUDGED from the oldest on. More are halved, as if all steps after the first wrong one
    were wrong: what is found is wrong then, and the step before it holds.
    """
    mine = msgspec.msgpack.encode(() if recorder is None else recorder.numbers)
    every = [set(msgspec.msgpack.decode(one, type=list[int])) for one in ranks.gather(mine)]
    common = sorted(set.intersection(*every)) if every else []
    common = msgspec.msgpack.decode(ranks.broadcast(msgspec.msgpack.encode(common)), type=list[int])
    found, held, judged = None, [], 0
    low, high = 0, len(common)  # steps before `low` hold, that at `high` is wrong
    while low < high and recorder is not None:
        at = low if len(common) <= MOST_JUDGED else (low + high) // 2
        observed, verdict = judge(recorder.read(common[at], ranks.rank, ranks.size))
        judged += 1
        if verdict.judgement.violations:
            high, found = at, (observed, verdict.judgement)
        else:
            low = at + 1
            held.append(common[at])
    return Trace(tuple(common), judged, tuple(sorted(held)), found)
