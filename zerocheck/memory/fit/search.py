"""Search for the fewest ranks of each choice: simulated where a formula does not exclude it.

A choice that fits on N ranks is taken to fit on more: its shards only shrink. So the fewest ranks
are known once N fits and the next smaller number does not, by simulation or by a lower bound. There
are two bounds: the formula, and the optimizer step that was simulated with the same implementation
and ranks, which works on the same shards whatever the units and checkpointing are.
`exhaustive` simulates everything instead, and must give the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...errors import UsageError
from ...models.parts import block_list
from ..analyse import SimulatedRank, reserved_of, run
from ..collectives import StepTraffic
from ..experts import expert_parameters
from ..result import HostMemory
from ..setup import AxisSizes, Setup
from ..source import ModelSource
from ..timeline import HeldBytes
from ..verdict import Reserved, room
from .bounds import ModelBytes, lower_bound, model_bytes
from .choices import Choice, Restriction, choices

MOST_RANKS = 1024
"""Bound of the search where the user gives none."""


UpdateKey = tuple[str, int, AxisSizes, int, str]


def numbers_of_ranks(most: int) -> tuple[int, ...]:
    """Return the powers of two up to `most`, and `most`."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, most)


@dataclass(frozen=True, slots=True)
class SimulatedPoint:
    """Simulated choice on a number of ranks.

    update: the peak within an optimizer step, None where it takes nothing of the device; host: what
    offloaded shards take of the host.
    """

    peak: HeldBytes
    update: HeldBytes | None
    traffic: StepTraffic
    host: HostMemory | None


@dataclass(frozen=True, slots=True)
class Fewest:
    """Result for one choice.

    ranks: the fewest on which it fits, or None; needs: bytes on the most ranks, by what they are,
    where it does not fit; simulated: they are from a simulation, else from the formula.
    """

    choice: Choice
    ranks: int | None
    needs: dict[str, int]
    simulated: bool


class FitSearch:
    """Search of one model and one limit. Every simulation is kept."""

    def __init__(
        self,
        base: Setup,
        given: ModelSource,
        limit: int,
        ranks: Sequence[int],
        *,
        given_ranks: bool = False,
        exact: bool = False,
        notify: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.base, self.given, self.ranks = base, given, tuple(ranks)
        self.limit, self._room = limit, room(limit)
        self.given_ranks, self.exact, self.notify = given_ranks, exact, notify
        whole = given.build()
        found = block_list(whole)
        self.blocks = len(found[1]) if found else 0
        self.model: ModelBytes = model_bytes(whole)
        self.experts = len(expert_parameters(whole)) > 0
        self._parts: dict[AxisSizes, list[ModelBytes]] = {}
        """Sizes of the parts of the ranks that are simulated, by all but the replicas."""
        self.points: dict[tuple[Choice, int], SimulatedPoint] = {}
        self.by_formula: set[tuple[Choice, int]] = set()
        self.by_update: set[tuple[Choice, int]] = set()
        self.too_large: dict[Choice, int] = {}
        """Most ranks on which what is reserved for a choice is known not to fit."""
        self._beyond: dict[tuple[str, bool, str], int] = {}
        """Bytes of a peak beyond the formula, of the last simulation with the same resharding."""
        self._updates: dict[UpdateKey, HeldBytes] = {}
        """Peaks of the optimizer step, by all that it depends on."""

    def all_choices(self, restriction: Restriction) -> list[Choice]:
        """Return the choices that this model has."""
        ranks = self.ranks[-1] if self.given_ranks else 0
        own = self.given.samples(self.base).own
        blocks = self.blocks > 0
        return list(choices(self.base, restriction, blocks=blocks, ranks=ranks, own=own))

    def fewest(self, restriction: Restriction, *, exhaustive: bool = False) -> list[Fewest]:
        """Return the fewest ranks of every choice that no better one replaces.

        A choice with more recomputation, smaller units or smaller microbatches than another one is
        of use on fewer ranks only, and is not simulated elsewhere.
        """
        found: list[Fewest] = []
        for choice in self.all_choices(restriction):
            better = [one for one in found if one.choice.replaces(choice)]
            below = min((one.ranks for one in better if one.ranks is not None), default=None)
            every = [ranks for ranks in self.ranks if choice.runs_on(ranks)]
            tried = [ranks for ranks in every if below is None or ranks < below]
            if not every:
                continue
            if exhaustive:
                one = self._by_all(choice, every)
                if below is not None and (one.ranks is None or one.ranks >= below):
                    continue
            elif not tried:
                continue
            else:
                one = self._by_few(choice, tried)
                if below is not None and one.ranks is None:
                    continue
            found.append(one)
        return found

    def point(self, choice: Choice, ranks: int) -> SimulatedPoint:
        """Simulate a choice on a number of ranks.

        From the second microbatch on each is as the one before, so that more than two are not
        simulated: the collectives of the second are repeated. Of a pipeline all are.
        """
        key = choice, ranks
        if key not in self.points:
            setup = choice.setup(self.base, ranks)
            many = setup.microbatches
            two = self._simulated(self._of_two(setup))
            traffic = two.traffic
            if many > 2 and setup.pipeline_parallel == 1:
                one = self._simulated(replace(setup, microbatches=1)).traffic
                traffic = traffic.plus(many - 2, traffic.plus(-1, one))
            host = None if two.host is None else two.host.memory
            self.points[key] = SimulatedPoint(two.timeline.peak(), _update(two), traffic, host)
        return self.points[key]

    def reserved(self, choice: Choice, ranks: int) -> tuple[Reserved | None, str]:
        """Return what the caching allocator of a GPU would take, or None and the reason.

        All blocks are simulated for that, and two microbatches, as for the peak.
        """
        setup = choice.setup(self.base, ranks)
        two = self._of_two(setup)
        return reserved_of(two, self._simulated(two, exact=True))

    def _of_two(self, setup: Setup) -> Setup:
        few = setup.microbatches if setup.pipeline_parallel > 1 else min(setup.microbatches, 2)
        return replace(setup, microbatches=few)

    def _simulated(self, setup: Setup, *, exact: bool = False) -> SimulatedRank:
        return run(setup, self.given, exact=exact or self.exact, notify=self.notify)

    def bound(self, choice: Choice, ranks: int) -> dict[str, int]:
        """Return the lower bound of a peak."""
        setup = choice.setup(self.base, ranks)
        axes = setup.axes._replace(replicas=1)
        if axes not in self._parts:
            self._parts[axes] = [
                model_bytes(self.given.part(replace(setup, rank=rank)), axes.expert_parallel)
                for rank in setup.counted
            ]
        bounds = [lower_bound(setup, part) for part in self._parts[axes]]
        return max(bounds, key=lambda one: sum(one.values()))

    def _by_all(self, choice: Choice, ranks: Sequence[int]) -> Fewest:
        fitting = [one for one in ranks if self._fits(choice, one)]
        if fitting:
            return Fewest(choice, min(fitting), {}, simulated=True)
        return self._unfit(choice, ranks[-1])

    def _by_few(self, choice: Choice, ranks: Sequence[int]) -> Fewest:
        """Start where the bound and the rest of a similar choice's peak fit, and close in."""
        left = [one for one in ranks if not self._excluded(choice, one)]
        if not left:
            return self._unfit(choice, ranks[-1])
        below, fitting = -1, len(left)  # places: does not fit, fits
        while fitting - below > 1:
            place = min(max(self._guess(choice, left), below + 1), fitting - 1)
            if self._excluded(choice, left[place]) or not self._fits(choice, left[place]):
                below = place
            else:
                fitting = place
        if fitting == len(left):
            return self._unfit(choice, left[-1])
        return Fewest(choice, left[fitting], {}, simulated=True)

    def _excluded(self, choice: Choice, ranks: int) -> bool:
        """Exclude a point by its lower bounds: the formula, and the optimizer step."""
        if sum(self.bound(choice, ranks).values()) > self._room:
            self.by_formula.add((choice, ranks))
            return True
        update = self._updates.get(_update_key(choice, ranks))
        if update is not None and update.total > self._room:
            self.by_update.add((choice, ranks))
            return True
        return False

    def _guess(self, choice: Choice, ranks: Sequence[int]) -> int:
        """Return the place of the fewest ranks where the bound and the last rest fit."""
        beyond = self._beyond.get(_similar(choice), 0)
        for place, one in enumerate(ranks):
            if sum(self.bound(choice, one).values()) + beyond <= self._room:
                return place
        return len(ranks) - 1

    def _fits(self, choice: Choice, ranks: int) -> bool:
        point = self.point(choice, ranks)
        rest = point.peak.total - sum(self.bound(choice, ranks).values())
        self._beyond[_similar(choice)] = rest
        if point.update is not None:
            self._updates[_update_key(choice, ranks)] = point.update
        too_large = ranks <= self.too_large.get(choice, 0)
        return point.peak.total <= self._room and not too_large

    def _unfit(self, choice: Choice, ranks: int) -> Fewest:
        if (choice, ranks) in self.points:
            return Fewest(choice, None, _by_name(self.point(choice, ranks).peak), simulated=True)
        if (choice, ranks) in self.by_update:
            update = self._updates[_update_key(choice, ranks)]
            return Fewest(choice, None, _by_name(update), simulated=True)
        return Fewest(choice, None, self.bound(choice, ranks), simulated=False)


def _update_key(choice: Choice, ranks: int) -> UpdateKey:
    # The inputs of a microbatch are held.
    return choice.implementation, choice.microbatches, choice.axes, ranks, choice.offload


def _similar(choice: Choice) -> tuple[str, bool, str]:
    return choice.implementation, choice.reshard, choice.offload


def _update(simulated: SimulatedRank) -> HeldBytes | None:
    peaks = simulated.timeline.peaks().items()
    held = [one for (_, phase, _), one in peaks if phase == "step"]
    return max(held, key=lambda one: one.total, default=None)


def _by_name(held: HeldBytes) -> dict[str, int]:
    return {str(category): size for category, size in held.bytes.items()}


def check_fit(base: Setup) -> None:
    """Raise UsageError for options that a search cannot use."""
    base.check()
    if base.rank:
        raise UsageError(
            f"--rank {base.rank}: --fit counts rank 0, which no rank holds more than; "
            "leave --rank out"
        )
