"""Consequences of a wrong step: its first wrong step is found, kept, printed, and raised."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..contract.semantics import Semantics
from ..errors import Violated
from ..foreign_text import copyable, one_line
from ..protocol.verdicts import Judgement
from . import bundle as bundles
from .record.ranks import AllRanks, Stopped, attempt
from .record.step_record import Observed
from .recorder import FlightRecorder, trace
from .summary import CheckedSteps
from .text import fingerprint, first_of, say, traced_text, untraced_text, violated_text
from .verdict.exchange import Verdict

OnViolation = Literal["raise", "warn"]

Judge = Callable[[Observed], tuple[Observed, Verdict]]
"""Judges a step with all ranks; returns it with its norms reduced."""


@dataclass
class WrongSteps:
    """Wrong steps of a run. known: fingerprints of what was printed; summary: where they count."""

    directory: Path
    semantics: Semantics
    on_violation: OnViolation
    summary: CheckedSteps
    known: set[str] = field(default_factory=set)

    def handle(
        self,
        observed: Observed,
        judgement: Judgement,
        ranks: AllRanks,
        *,
        before: int,
        records: bool,
        recorder: FlightRecorder | None,
        judge: Judge,
    ) -> None:
        """Find the first wrong step, write its bundle and print it; what is known only counts.

        before: the last step that was checked before; records: True if a recorder is asked for,
        equal on all ranks. Raises Violated if that is wanted.
        """
        checked, what, note, place = observed.summary.number, observed.summary.what, "", ""
        marks = {fingerprint(what, violation) for violation in judgement.violations}
        new = bool(marks - self.known)
        if new:
            note = untraced_text(before, checked)
            if records:
                alone = not self.known
                observed, judgement, note = _traced(
                    observed, judgement, ranks, before, recorder, judge, alone=alone
                )
            place = self._written(observed, judgement, ranks)
            marks |= {fingerprint(what, violation) for violation in judgement.violations}
        number = observed.summary.number
        self.known |= marks
        self.summary.add_findings(sorted(marks), number, judgement)
        if ranks.rank == 0 and new:
            say("\n".join(filter(None, (violated_text(what, judgement, place), note))))
        found = f" (found at step {checked})" if checked != number else ""
        where = f"; {copyable(('zerocheck', 'replay', place))}" if place else ""
        self._raise(f"step {number}: ", judgement, found, where)

    def handle_without_bundle(
        self, what: str, place: str, number: int, judgement: Judgement, ranks: AllRanks
    ) -> None:
        """Print what is wrong in a load or in the samples, and raise Violated if that is wanted.

        place: where, for the message; number: of the step.
        """
        marks = {fingerprint(what, one) for one in (*judgement.violations, *judgement.further)}
        new = bool(marks - self.known)
        self.known |= marks
        self.summary.add_findings(sorted(marks), number, judgement)
        if ranks.rank == 0 and new:
            others = [f"  and also    {one_line(one.explanation)}" for one in judgement.further]
            say("\n".join([violated_text(what, judgement, ""), *others]))
        self._raise(f"{place}: ", judgement)

    def _raise(self, begin: str, judgement: Judgement, found: str = "", where: str = "") -> None:
        if self.on_violation == "raise":
            first = first_of(judgement)
            message = f"{begin}{first.obligation}: {first.explanation}{found}"
            raise Violated(one_line(message) + where)

    def _written(self, observed: Observed, judgement: Judgement, ranks: AllRanks) -> str:
        """Write the bundle and return its folder; empty if a rank cannot, which is printed."""
        number = observed.summary.number

        def write() -> str:
            place = ""
            if ranks.rank == 0:
                place = str(bundles.free_place(self.directory / f"step-{number}"))
            place = os.fsdecode(ranks.broadcast(os.fsencode(place)))
            bundles.write(Path(place), observed, judgement, self.semantics, ranks)
            return place

        try:
            return attempt(ranks, write)
        except Stopped as stopped:
            if ranks.rank in (0, stopped.problem.rank):
                text = f"zerocheck: step {number} cannot be kept for `zerocheck replay`: "
                say(one_line(f"{text}{stopped} (rank {stopped.problem.rank})"))
            return ""


def _traced(
    observed: Observed,
    judgement: Judgement,
    ranks: AllRanks,
    before: int,
    recorder: FlightRecorder | None,
    judge: Judge,
    *,
    alone: bool,
) -> tuple[Observed, Judgement, str]:
    """Return the first wrong step that is known, its judgement, and how it was found.

    alone: no earlier finding.
    """
    checked = observed.summary.number
    try:
        found = attempt(ranks, lambda: trace(recorder, ranks, judge))
    except Stopped as stopped:
        if ranks.rank in (0, stopped.problem.rank):
            say(one_line(f"zerocheck: the recorded steps cannot be judged: {stopped}"))
        return observed, judgement, untraced_text(before, checked)
    first, verdict = found.wrong or (observed, judgement)
    return first, verdict, traced_text(before, found, first.summary.number, checked, alone=alone)
