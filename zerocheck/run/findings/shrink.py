"""Reduction of a failing case to the smallest one that fails in the same way, for replay.

It is not for naming: a small world makes causes coincide, so causes stay those that explain all
failing cases of the run. `case/reductions.py` lists the cases that are tried.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from ...case.reductions import left, simpler
from ...case.schema import Case
from ...case.shapes import parameter_elements
from ...protocol.verdicts import Obligation, Violation
from ..execute.rank_pool import RankPool
from ..execute.trial import Trial
from ..records.records import CaseFinished
from .bug import Bug, HeldCase, Parted, Shrunk
from .contrast import WrongCase
from .extent import Tried, extent, groups, not_searched, size
from .parting import better, parted, parts, variants

TRIES = 80
"""Runs for one finding. Of 39 findings of planted faults 38 took 2 to 24, and one took 60."""

RUN_TRIES = 600
"""For all findings of a run, the first ones first. Who has more findings than this shrinks starts
with those, and the rest keep the case that was drawn."""

HANG_TRIES = 20
"""What a run that hangs counts as: each waits for the patience of the watchdog."""

TRY_OPERATIONS = 1e9
"""Floating-point operations that count as one try more: about 0.1 s on one core."""

SECONDS = 1800.0
"""A guard against hours, for one finding. The bound is the count of tries, which is the same on
every machine, however busy: what a finding says must not depend on the clock."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a search, and cases that it must not try.

    tries: how many runs, a large one or one that hangs counting as several; kept: paths of fields
    that stay as they are, as the implementation fixes them; avoided: cases that are known to hang;
    listed: failures that are known issues, which are other bugs.
    """

    tries: float = TRIES
    kept: tuple[str, ...] = ()
    avoided: Callable[[Case], bool] = lambda case: False
    listed: Callable[[CaseFinished, Violation | None], bool] = lambda finished, violation: False


def paths(fixed: Mapping[str, object]) -> tuple[str, ...]:
    """Return `{"training": {"clip": None}, "mesh": [2]}` as `training.clip` and `mesh`."""
    return tuple(
        f"{section}.{name}" if name else section
        for section, fields in fixed.items()
        for name in (fields if isinstance(fields, Mapping) else ("",))
    )


def cost(case: Case) -> float:
    """Return the cost of running the case, in tries: 1 for one of the default size."""
    training, data = case.training, case.data
    positions = data.batch * data.length * training.microbatches * training.steps * case.world_size
    return 1.0 + 6.0 * parameter_elements(case.model) * positions / TRY_OPERATIONS


def worth(bug: Bug) -> bool:
    """Return True if the bug can be shrunk: it shows every time, and is not known already.

    One that shows sometimes would need many runs of each candidate, and a case that did not show
    it could still have it.
    """
    return bug.issue is None and bug.tries > 0 and bug.confirmed == bug.tries


def shrink(
    bug: Bug,
    ranks: RankPool,
    obligations: Collection[Obligation],
    limits: Limits,
    right: Iterable[Case] = (),
) -> Shrunk | None:
    """Find the smallest case and how far the bug reaches.

    right: cases of the run that hold, though its obligation could have failed in them. None if the
    smallest case does not show it in fresh rank processes.
    """
    return _Shrinking(bug, ranks, obligations, limits, right).shrunk()


class _Shrinking:
    def __init__(
        self,
        bug: Bug,
        ranks: RankPool,
        obligations: Collection[Obligation],
        limits: Limits,
        right: Iterable[Case],
    ) -> None:
        self.bug = bug
        self.ranks = ranks
        self.obligations = obligations
        self.limits = limits
        self.tries = 0
        self.spent = 0.0
        """Tries, by what they cost: see `cost`."""
        self.started = time.monotonic()
        self.wrong = list(bug.shown)
        self.right = list(right)

    def shrunk(self) -> Shrunk | None:
        case = self.bug.first.case
        search = simpler(case, kept=self.limits.kept)
        ended = False
        try:
            candidate = next(search)
            while self._may_go_on():
                failed = self._fails(candidate)
                if failed:
                    case = candidate
                candidate = search.send(failed)
        except StopIteration:
            ended = True
        finished = self._finished(case, fresh=True)
        shows, violation = self._same(finished)
        if not shows:
            return None
        needs: tuple[str, ...] = ()
        if ended:
            needed = left(case, kept=self.limits.kept)
            needs = groups(case, needed)
            from_world = self._from_world(case)
            tried = Tried(self.wrong, self.right)
            sentence = extent(case, needed, violation, from_world=from_world, tried=tried)
        else:
            sentence = not_searched(self.tries, case, violation)
        return Shrunk(
            finished=finished,
            violation=violation,
            size=size(case, violation),
            extent=sentence,
            groups=needs,
            tries=self.tries,
            spent=self.spent,
            seconds=time.monotonic() - self.started,
            parted=self._parted(case) if ended else None,
        )

    def _parted(self, case: Case) -> Parted | None:
        """Return what a variant says of a wrong gradient, if one shows it.

        Whatever its causes are: with one microbatch a bug may look like another one, which distinct
        numbers refute.
        """
        if not parts(self.bug):
            return None
        found: Parted | None = None
        for variant in variants(case, kept=self.limits.kept):
            if not self._may_go_on() or self.limits.avoided(variant):
                break
            self.tries += 1
            self.spent += cost(variant)
            violation = next(self._similar(self._finished(variant)), None)
            if violation is not None:
                found = better(found, parted(variant, violation))
                if found.violation.causes:
                    break
        return found

    def _similar(self, finished: CaseFinished) -> Iterator[Violation]:
        """Iterate over the violations that may be the bug's, known issues aside."""
        for violation in self.bug.similar(finished):
            if not self.limits.listed(finished, violation):
                yield violation

    def _may_go_on(self) -> bool:
        return self.spent < self.limits.tries and time.monotonic() - self.started < SECONDS

    def _fails(self, case: Case) -> bool:
        if self.limits.avoided(case):
            return False
        self.tries += 1
        finished = self._finished(case)
        self.spent += HANG_TRIES if finished.status == "hung" else cost(case)
        same, violation = self._same(finished)
        if same:
            self.wrong.append(WrongCase.of(case, violation))
        elif HeldCase.of(finished).could_show(self.bug):
            self.right.append(case)
        return same

    def _from_world(self, case: Case) -> bool:
        """Return True if one more rank fails too.

        Else the cause is not the number of ranks, but the sizes that it divides.
        """
        one_axis = case.axes.size("shard") == case.world_size
        if case.world_size < 3 or "mesh" in self.limits.kept or not one_axis:
            return True
        return self._fails(replace(case, mesh=(case.world_size + 1,)))

    def _finished(self, case: Case, *, fresh: bool = False) -> CaseFinished:
        first = self.bug.first
        crashed = self.bug.violation is None
        trial = Trial(
            self.ranks,
            first.implementation,
            case,
            fresh=fresh,
            trace=fresh and crashed,
            obligations=self.obligations,
        )
        outcome = trial.outcome()
        return outcome.record(first.number, first.implementation, case)

    def _same(self, finished: CaseFinished) -> tuple[bool, Violation | None]:
        """Return True if the case fails as the bug does, and the violation."""
        bug = self.bug
        if finished.status != bug.status:
            return False, None
        if bug.violation is None:
            same = finished.error == bug.first.error and (
                finished.status == "hung" or _wording(finished.title) == _wording(bug.first.title)
            )
            return same and not self.limits.listed(finished, None), None
        for violation in self._similar(finished):
            alike = violation.mild == bug.violation.mild
            if alike and _same_causes(violation.causes, bug.causes):
                return True, violation
        return False, None


def _same_causes(causes: Collection[str], named: Collection[str]) -> bool:
    """Return True if some cause explains both, or nothing explains either."""
    return bool(set(causes) & set(named)) or not (causes or named)


def _wording(title: str) -> str:
    """Return an error's message without numbers and names of parameters."""
    return " ".join(word for word in title.split() if not re.search(r"\d|\w\.\w", word))
