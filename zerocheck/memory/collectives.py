"""Bytes that one rank sends in a collective, by the algorithms of a ring. Imports no torch.

Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009: each rank sends (N - 1)/N of the whole tensor in a reduce-scatter and in an all-gather, and an
all-reduce is both. That is the least that any algorithm can send, so links of a tree send no less.
For large N it is Psi each, as in section 7 of the ZeRO paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

CollectiveKind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send"
]


def collective_kind(operator: str) -> CollectiveKind | None:
    """Return the kind of an operator of c10d, or None if it moves no tensor."""
    library, _, name = operator.partition(".")
    if library.strip("_") not in ("c10d", "c10d_functional"):
        return None
    plain = name.replace("_", "")
    kinds: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
    return next((kind for kind in kinds if kind.replace("-", "") in plain), None)


def sent_bytes(kind: CollectiveKind, size: int, ranks: int) -> Fraction:
    """Return the bytes that a rank sends. size: bytes of the whole tensor."""
    share = Fraction(ranks - 1, ranks)
    if kind in ("broadcast", "send"):
        return Fraction(size if ranks > 1 else 0)
    return size * share * (2 if kind == "all-reduce" else 1)


PhaseAndKind = tuple[str, str]


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Collectives of one step of one rank.

    parts: bytes over the link of the rank, by phase and kind; calls: number of collectives.
    """

    parts: Mapping[PhaseAndKind, Fraction]
    calls: int

    @property
    def sent(self) -> Fraction:
        """Bytes over the link of the rank."""
        return sum(self.parts.values(), Fraction(0))

    def plus(self, times: int, other: StepTraffic) -> StepTraffic:
        """Return this and so many times the other; times may be negative."""
        keys = dict.fromkeys((*self.parts, *other.parts))
        none = Fraction(0)
        parts = {
            key: self.parts.get(key, none) + times * other.parts.get(key, none) for key in keys
        }
        return StepTraffic(parts, self.calls + times * other.calls)


def step_traffic(sent: Iterable[tuple[PhaseAndKind, Fraction]]) -> StepTraffic:
    """Add up the collectives of one step."""
    parts: dict[PhaseAndKind, Fraction] = {}
    calls = 0
    for key, size in sent:
        parts[key] = parts.get(key, Fraction(0)) + size
        calls += 1
    return StepTraffic(parts, calls)


def with_more_blocks(given: Sequence[StepTraffic], blocks: int) -> StepTraffic | None:
    """Extrapolate from three models, each with one block more, to `blocks` more than the first has.

    None if the bytes or the calls do not grow by a constant.
    """
    few, more, most = given
    one = more.plus(-1, few)
    return few.plus(blocks, one) if most.plus(-1, more) == one else None
