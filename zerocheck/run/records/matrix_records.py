"""Records of the kill matrix: one per line of its journal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from ...case.schema import Case
from ...case.segments import segments_of
from ...protocol.verdicts import Obligation
from .records import Environment

FORMAT: Literal[2] = 2

ATTRIBUTED: tuple[Obligation, ...] = ("gradient", "update", "publish", "roundtrip", "export")
"""Obligations whose violations are attributed without a list of causes."""


class FaultsStarted(msgspec.Struct, frozen=True, kw_only=True, tag="faults started"):
    """First line of the journal.

    faults: names, in the order of the catalogue; implementation: that they are injected into, or
    empty for the parents of the catalogue; started: seconds since the epoch.
    """

    environment: Environment
    faults: tuple[str, ...]
    profile: str
    seed: int
    world_sizes: tuple[int, ...]
    obligations: tuple[Obligation, ...]
    started: float
    implementation: str = ""
    max_cases: int | None = None
    format: Literal[2] = FORMAT


class FaultTried(msgspec.Struct, frozen=True, kw_only=True, tag="fault tried"):
    """Row of the matrix.

    where: the faulty implementation; expected, true_causes: what the catalogue says it must be
    flagged as, an obligation or None for a crash or hang, and the cause; caught_by: an obligation,
    "crashed" or "hung", or empty if it escaped; cases: place (1-based) in the plan of the case that
    caught it, so unsupported ones count, or the number of all cases if it escaped; unsupported: how
    many of these were refused while they were built; parents: how many of these the parent failed
    too, which are not counted as caught; seconds: running and judging them; failing: cases that the
    causes were intersected over; causes: those of the first finding, other_causes: of the others;
    findings: how many the failing cases gave; attributions: of each failing case, "" where nothing
    fits; rubric: regular expression that the right attribution matches, "" for none; case: the one
    that caught it.
    """

    fault: str
    where: str
    parent: str
    summary: str
    source: str
    expected: str | None
    true_causes: tuple[str, ...]
    caught_by: str = ""
    title: str = ""
    cases: int = 0
    unsupported: int = 0
    parents: int = 0
    seconds: float = 0.0
    failing: int = 0
    causes: tuple[str, ...] = ()
    other_causes: tuple[str, ...] = ()
    findings: int = 0
    attributions: tuple[str, ...] = ()
    parted: str = ""
    """Attribution of a case whose numbers tell causes apart, "" for none."""
    diagnosis: float | None = None
    """Seconds that the judge took longer for the first failing case than for its parent's."""
    rubric: str = ""
    case: Case | None = None

    @property
    def caught(self) -> bool:
        """True if some case failed that the parent did not fail."""
        return bool(self.caught_by)

    @property
    def named(self) -> bool | None:
        """True if the first finding names the true causes, maybe with others.

        None if the catalogue names none, or the fault was not caught.
        """
        if not self.true_causes or not self.caught:
            return None
        return self._among(self.causes)

    @property
    def named_by_any(self) -> bool | None:
        """True if some finding names the true causes. Of a crash in some cases none is to be seen.

        None as for `named`.
        """
        return None if self.named is None else self._among((*self.causes, *self.other_causes))

    def _among(self, causes: Iterable[str]) -> bool:
        """Return True if these name the true causes, maybe with more after a comma."""
        found = {*causes, *(cause.partition(", ")[0] for cause in causes)}
        return found.issuperset(self.true_causes)

    @property
    def attributed(self) -> bool | None:
        """True if all that attribution says, of any failing case, is the right thing.

        It may be silent on some: of a parameter of one element nothing is to be known. None if
        there is no rubric for it, or the fault was not caught.
        """
        if not self.caught or self.expected not in ATTRIBUTED:
            return None
        said = [one for one in (*self.attributions, self.parted) if one and self.rubric]
        return bool(said) and all(re.search(self.rubric, one) for one in said)

    @property
    def attributed_always(self) -> bool:
        """True if attribution is right, and silent on no failing case."""
        return bool(self.attributed) and all(self.attributions)

    @property
    def named_alone(self) -> bool:
        """True if the true causes are named and nothing else is."""
        return bool(self.named) and set(self.causes) == set(self.true_causes)


class FaultShrunk(msgspec.Struct, frozen=True, kw_only=True, tag="fault shrunk"):
    """Smallest case that shows a fault.

    case: it, or None if no small case failed in fresh rank processes; size: in words; extent: how
    far the fault reaches, one sentence; tries: cases that were run; seconds: what they took.
    """

    fault: str
    case: Case | None = None
    size: str = ""
    extent: str = ""
    tries: int = 0
    seconds: float = 0.0

    @property
    def ranks(self) -> int:
        """Number of ranks in the largest training segment."""
        return (
            0
            if self.case is None
            else max(segment.world_size for segment in segments_of(self.case))
        )


class FaultsFinished(msgspec.Struct, frozen=True, kw_only=True, tag="faults finished"):
    """Last line. seconds: of the whole matrix; exit_code: of the command line."""

    outcome: Literal["done", "interrupted"]
    exit_code: int
    seconds: float


MatrixRecord = FaultsStarted | FaultTried | FaultShrunk | FaultsFinished
