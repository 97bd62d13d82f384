"""Memory measurement of one rank during its steps: the current phase, and the bytes held in it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from ..case.measurement import settled
from ..case.schema import Case
from ..compat_memory import Allocation, AllocatorLog, ReducerBuffers, users_of
from ..contract.implementation import Implementation, Moment, Step
from ..machine.devices import CPU
from ..models.network import build_model
from ..protocol.layout import ALLOCATED, Call, Category, Layout, Peak, Phase, Term, works
from ..protocol.measurements import HARNESS, LOCAL, Exposed, Measured
from .attribution import (
    GONE,
    LOOKED,
    LOOKING,
    MARK,
    USED,
    AllocationChange,
    Attribution,
    PhaseEnd,
    TrackedAllocation,
)
from .collective_release import CollectiveRelease
from .collective_storages import CollectiveStorages
from .collective_trace import CallTrace
from .gpu_memory import DeviceLog
from .holders import Claims, exposed_shards, fresh_objects, object_claims, reducers, shard_claims

ALIKE = 2
"""Steps, at least, that must not grow, after the first that ends with all there is to have."""


def measured_end(case: Case) -> int:
    """Return the index after the last measured step, late enough to detect growth."""
    return max(case.training.steps, settled(case) + 1 + ALIKE)


class MemoryMeasurement:
    """Measurement of one rank through its steps.

    step, part: where it is now; part is the phase that comes to its end next. What is recorded of a
    collective is in this phase of this step.
    """

    def __init__(
        self, implementation: type[Implementation], case: Case, rank: int, device: torch.device
    ) -> None:
        self.case = case
        self.first, self.end = case.training.first, measured_end(case)
        self.step = self.first - 1
        self.part: Phase = "built"
        self.layout: Layout | None = implementation.layout(build_model(case), case, rank)
        self.stage = implementation.stage
        self._stays_gathered: tuple[str, ...] = ()
        self._settled = settled(case)
        self._exposed: list[Exposed] = []
        self._losses = 0
        self._taking = False
        self._subject: Implementation | None = None
        self._samples: list[object] = []
        self._looked: dict[PhaseEnd, Claims] = {}
        self._events: list[str | Allocation] = []
        self._reducers: Counter[int] = Counter()
        self._log = AllocatorLog() if device.type == CPU else DeviceLog(device)
        self._releases = CollectiveRelease(lambda address: self._log.mark(f"{GONE}{address}"))
        self._calls = CallTrace(self._within)
        self._storages = CollectiveStorages(lambda use, at: self._log.mark(f"{USED}{use} {at}"))

    @contextmanager
    def watching(self) -> Iterator[MemoryMeasurement]:
        """Account for all allocations within the context."""
        with fresh_objects():
            self._end = _caller()
            self._log.start()
            try:
                with self._releases, self._calls, self._storages:
                    yield self
            finally:
                self._events = self._log.stop(MARK)

    def built(self, subject: Implementation) -> None:
        """Note that the implementation is built, and restored if the case starts with a state."""
        self._subject = subject
        self.stage = subject.stage
        self._stays_gathered = tuple(subject.stays_gathered)
        self._over(next_part="forward", shows=True)

    def begun(self, index: int, step: Step) -> None:
        """Note that a step is about to be taken."""
        self.step, self.part, self._losses = index, "forward", 0
        self._samples = [(one.inputs, one.target) for one in step.microbatches]
        self._log.mark(LOOKED)
        self._taking = True

    def entered(self) -> None:
        """Note that a forward begins."""
        self.part = "forward"

    def on_loss(self, number: int, loss: torch.Tensor) -> None:
        """Note that a forward is over."""
        self._losses += 1
        if self._losses == self.case.training.microbatches:
            self._over(next_part="backward")
        else:
            self.part = "backward"

    def reached(self, moment: Moment) -> None:
        """Note that gradients are reduced, or clipped."""
        if moment == "reduced":
            self._over(next_part="step", shows=True)

    def taken(self) -> None:
        """Note that `train_step` has returned."""
        self._taking = False
        self.part = "step"
        self._samples.clear()
        self._over(next_part="closed" if self.step == self.end - 1 else "forward", shows=True)
        if self.step == self.end - 1:
            self._subject = None

    def closed(self) -> None:
        """Note that `close` has returned, and that the implementation is released."""
        self._over(next_part="closed")

    def result(self) -> Measured:
        """Return all measurements."""
        attribution = Attribution(self._events, self._looked, self._reducers)
        pools = self._log.pools if isinstance(self._log, DeviceLog) else []
        return Measured(
            lines=tuple(attribution.lines()),
            peaks=() if pools else tuple(peaks(attribution)),
            pools=tuple(pools),
            layout=self.layout,
            calls=tuple(self._calls_of(step) for step in range(self.first, self.end)),
            steps=self.end - self.first,
            stage=self.stage,
            stays_gathered=self._stays_gathered,
            exposed=tuple(self._exposed),
            held=tuple(attribution.held(PhaseEnd(self._settled, "step"))),
        )

    def _within(self) -> tuple[int, Phase] | None:
        """Return the phase of the current step, or None outside of `train_step`."""
        return (self.step, self.part) if self._taking else None

    def _calls_of(self, step: int) -> tuple[Call, ...]:
        return tuple(call for call in self._calls.calls if call.step == step)

    def _over(self, *, next_part: Phase, shows: bool = False) -> None:
        """End the phase. shows: the contract lets the implementation be asked for shards."""
        taking, self._taking = self._taking, False
        self._log.mark(LOOKING)
        place = PhaseEnd(self.step, self.part)
        claims = object_claims(self._subject, self._samples, _caller(), self._end)
        if shows and self._subject is not None:
            claims |= shard_claims(self._subject)
            if self.step == self._settled:
                self._exposed += exposed_shards(self._subject, self.part)
        living = reducers()
        self._reducers |= living.buckets + living.maps
        self._releases.settle(lambda one: has_a_holder(one, claims, living))
        self._looked[place] = claims
        if isinstance(self._log, DeviceLog):
            self._log.over(place, claims)
        self._log.mark(place.mark)
        if taking:
            self._log.mark(LOOKED)
        self.part = next_part
        self._taking = taking


def has_a_holder(storage: torch.UntypedStorage, claims: Claims, living: ReducerBuffers) -> bool:
    """Return True if Python or a reducer of DDP holds the storage, so that no thread frees it.

    living: what reducers hold that are alive. One that is gone holds nothing, and a thread may
    still have what was its own. A bucket has views, one for each of its parameters; what has its
    size and has none is another's, such as the flat tensor of a broadcast of all parameters.
    """
    size = storage.nbytes()
    if not size or storage.data_ptr() in claims or size in living.maps:
        return True
    return size in living.buckets and users_of(storage) > WITHOUT_VIEWS


def _caller() -> FrameType:
    """Return the frame of the caller of the method that calls this."""
    return sys._getframe(2)


WITHOUT_VIEWS = 2
"""Users of a storage that a thread has in one tensor, and `CollectiveRelease` too."""


STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "step")


def peaks(attribution: Attribution) -> Iterator[Peak]:
    """Iterate over the peaks of forward, backward and step of each step, in their order.

    Every block is known by its attribution at the end of some phase, where it was there then, else
    by the collective that used it. What is left is temporary (`other`): operators' own memory, and
    gradients that are on their way. Not counted is what a backend allocates within a collective,
    since nothing reports when it is freed; the harness's samples; and all that is allocated while
    the harness looks at what is held.
    """
    terms = {id(block): _term(attribution, block) for block in attribution.blocks}
    changes: dict[PhaseEnd, list[AllocationChange]] = {place: [] for place in attribution.places}
    for change in attribution.changes:
        changes[change.place].append(change)
    held: Counter[Category] = Counter()
    working: Counter[Category] = Counter()
    for place, of_phase in changes.items():
        most = held.copy()
        highest: Counter[Term] = Counter()
        highest.update(working)
        highest["working"] = working.total()
        for _, block, more, ours in of_phase:
            term = terms[id(block)]
            if term is None:
                continue
            held[term] += more
            if works(term, block.bytes):
                working[term] += more
            if more < 0 or ours:
                continue
            highest[term] = max(highest[term], working[term])
            instants: list[Term] = ["working"]
            if term in ALLOCATED and works(term, block.bytes):
                instants.append(ALLOCATED[term])
            for one in instants:
                highest[one] = max(highest[one], working.total())
            if held.total() > most.total():
                most = held.copy()
        if place.phase in STEP_PHASES:
            yield Peak(place.phase, place.step, dict(+most), dict(+highest))


def _term(attribution: Attribution, block: TrackedAllocation) -> Category | None:
    """Return the category of a block, or None for one that is not counted."""
    claim = block.best
    if claim is not None and claim.holder == HARNESS:
        return None
    local = claim is not None and claim.holder.startswith(LOCAL)
    if claim is not None and not local and (claim.rank < 2 or block.stays):
        return claim.category
    if block.use is not None:
        return block.use
    if block.backend:
        return None
    if local or not block.ends:
        return "other"
    return attribution.explained(block)[0]
