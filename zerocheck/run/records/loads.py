"""Results of the loads of resumed cases, by the world sizes that saved and loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...case.schema import Case
from ...case.segments import only_loads, segments_of
from ...protocol.verdicts import Gave, Obligation, Status
from .records import CaseFinished

Pair = tuple[int, int]
"""(world size that saved, world size that loaded)"""


class _Load(NamedTuple):
    """Load of a checkpoint.

    kind: `killed` or a DamageKind if it only tried such a checkpoint, else "".
    """

    pair: Pair
    status: Status
    kind: str = ""
    gave: Gave | None = None


@dataclass
class DamagedLoads:
    """Loads of checkpoints killed or damaged in one way: verdicts, and the state loaded."""

    verdicts: Counter[Status] = field(default_factory=Counter)
    gave: Counter[Gave] = field(default_factory=Counter)


@dataclass
class Loads:
    """All loads of one or several implementations.

    pairs: verdicts of the loads of whole checkpoints, and of the steps after them; tried: of the
    others, by `killed` or the kind of damage. A case that is refused or breaks counts once, for the
    load that it did not come past.
    """

    pairs: dict[Pair, Counter[Status]] = field(default_factory=dict)
    tried: dict[str, DamagedLoads] = field(default_factory=dict)

    def add(self, record: CaseFinished, asked: Collection[Obligation]) -> None:
        """Count the loads of one case, as far as the obligations asked for are of them."""
        for load in _loads(record):
            if not _obligations(load.kind) & set(asked):
                continue
            if load.kind:
                tried = self.tried.setdefault(load.kind, DamagedLoads())
                tried.verdicts[load.status] += 1
                if load.gave is not None:
                    tried.gave[load.gave] += 1
            else:
                self.pairs.setdefault(load.pair, Counter())[load.status] += 1

    @property
    def saved(self) -> list[int]:
        """World sizes that saved, in order."""
        return sorted({pair[0] for pair in self.pairs})

    @property
    def loaded(self) -> list[int]:
        """World sizes that loaded, in order."""
        return sorted({pair[1] for pair in self.pairs})


def sum_loads(some: Iterable[Loads]) -> Loads:
    """Merge the loads of several implementations."""
    whole = Loads()
    for loads in some:
        for pair, verdicts in loads.pairs.items():
            whole.pairs.setdefault(pair, Counter()).update(verdicts)
        for kind, tried in loads.tried.items():
            into = whole.tried.setdefault(kind, DamagedLoads())
            into.verdicts.update(tried.verdicts)
            into.gave.update(tried.gave)
    return whole


def _loads(record: CaseFinished) -> Iterator[_Load]:
    case = record.case
    if not case.resume:
        return
    if record.judgement is None:
        broken: Status = "known" if record.known else record.status
        number = max(1, min(record.begun, len(case.resume)))
        tries = record.begun > len(case.resume)
        yield _Load(_pair(case, number), broken, _kind(case, number) if tries else "")
        return
    for load in record.judgement.loads:
        status: Status = "holds"
        if load.violated:
            status = "known" if set(load.violated) <= set(record.known) else "violated"
        kind = _kind(case, load.segment) if load.gave is not None else ""
        yield _Load(_pair(case, load.segment), status, kind, load.gave)


def _obligations(kind: str) -> set[Obligation]:
    """Return the obligations that a load can violate."""
    if not kind:
        return {"roundtrip", "continuation"}
    return {"durability" if kind == "killed" else "damage"}


def _pair(case: Case, number: int) -> Pair:
    segments = segments_of(case)
    return segments[number - 1].world_size, segments[number].world_size


def _kind(case: Case, number: int) -> str:
    if not only_loads(case, number):
        return ""
    last = case.resume[number - 1]
    return "killed" if last.killed is not None else last.damage
