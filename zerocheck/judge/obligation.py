"""Interface of an obligation: a name, what must have been observed, and a check that yields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ..case.schema import Case
from ..protocol.measurements import Measured
from ..protocol.observations import Point
from ..protocol.verdicts import TITLES, Obligation, Violation

C = TypeVar("C", contravariant=True)


class Checked(NamedTuple):
    """Result of one check of an obligation."""

    share: float = 0.0
    """Part of the bound that was used."""
    violation: Violation | None = None
    """Violation, mostly of the obligation that was checked: see `publish.stale`."""
    exercised: bool = True
    """False of a measurement that exercised nothing: its check yields exactly one result. The check
    of a step yields nothing instead."""
    vacuous: bool = False
    """True if it holds since nothing could fail. Of a measurement only: vacuity.py decides on
    those of a step."""


class Measurements(NamedTuple):
    """Context of the obligations of memory: what each rank measured in a case."""

    case: Case
    ranks: Sequence[Measured]


@dataclass(frozen=True)
class ObligationCheck(Generic[C]):
    """Obligation and its check. C: its context, StepContext or Measurements."""

    name: Obligation
    check: Callable[[C], Iterable[Checked]]
    """Yields the results of what was exercised, in the order in which they count."""
    needs: frozenset[Point] = frozenset()
    """Points that must have been observed, with shards that tile their tensors."""

    @property
    def title(self) -> str:
        """One sentence: what must hold."""
        return TITLES[self.name]
