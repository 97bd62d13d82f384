"""Verdicts on the obligations of a case, as they are judged one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..protocol.observations import RankObservation
from ..protocol.verdicts import Judgement, Obligation, Tier, Violation, statuses_of
from .assemble import Observation
from .digest import digest_of
from .local import Passes
from .obligation import Checked
from .rank_device import check_repeats
from .shares import shares
from .vacuity import Vacuity
from .words import Refuted


class Verdicts:
    """Obligations that were exercised, the first violation of each, and its share of the bound.

    tier: "state only" once a gradient was not shown; vacuity: what could have failed.
    """

    def __init__(self, observations: Sequence[RankObservation], *, brief: bool = False) -> None:
        """Start without findings. brief: a violation raises Refuted."""
        self._brief = brief
        self.exercised: set[Obligation] = set()
        self.shares: dict[Obligation, float] = {}
        self.violations: dict[Obligation, Violation] = {}
        self.further: list[Violation] = []
        """Violations after the first of their obligation."""
        self.tier: Tier = "full"
        self.vacuity = Vacuity(observations)
        self._taken: tuple[Passes, Callable[[], Passes]] | None = None

    def taken(self, passes: Passes, again: Callable[[], Passes]) -> None:
        """Register a computation, to be repeated before a violation counts.

        Needed on a device whose kernels may not repeat.
        """
        self._taken = passes, again

    def hidden_gradient(self) -> None:
        """Record that a gradient was not exposed."""
        if self.tier == "full":
            self.tier = "state only"

    def note(self, obligation: Obligation, share: float, violation: Violation | None) -> None:
        """Record the check of an obligation. share: of the bound that was used.

        Raises what `check_repeats` does, if bits do not repeat.
        """
        if violation is not None and self._brief:
            raise Refuted
        self.exercised.add(obligation)
        if violation is not None and self._taken is not None:
            check_repeats(*self._taken)
        if violation is not None:
            if self.violations.setdefault(obligation, violation) is not violation:
                self.further.append(violation)
        else:
            self.shares[obligation] = max(self.shares.get(obligation, 0.0), share)

    def add(self, obligation: Obligation, checked: Checked) -> None:
        """Record a result of an obligation's check; a violation names its own obligation."""
        violation = checked.violation
        self.note(
            obligation if violation is None else violation.obligation, checked.share, violation
        )

    def judgement(
        self, observation: Observation, *, estimated: Collection[Obligation], digest: bool
    ) -> Judgement:
        """Return the verdict on every obligation of a step, violations in the order of steps.

        estimated: obligations whose bound is, where they were exercised. With `digest`, or if
        anything is violated, the hash of all that was observed is taken.
        """
        statuses = statuses_of(self.violations, self.exercised)
        return Judgement(
            statuses=statuses,
            share=self.shares,
            violations=tuple(sorted(self.violations.values(), key=lambda v: v.step)),
            further=tuple(self.further),
            tier=self.tier,
            digest=digest_of(observation) if digest or self.violations else "",
            semantics=observation.ranks[0].declaration.semantics,
            estimated=tuple(one for one in statuses if one in estimated),
            shares=shares(observation),
            stage=observation.ranks[0].declaration.stage,
            vacuous=self.vacuity.among(o for o, status in statuses.items() if status == "holds"),
        )
