"""Attribution of one rank's memory: every allocated byte, by category and holder.

At the end of each phase two things are known: the addresses that are given out, by the allocator's
events, and which of them Python objects hold (`holders.py`). A storage is of the category of the
best claim that was ever made to it while it was alive: a buffer that is shown as a gradient in the
first step was one when it was built too. What Python never held is explained by where it was
allocated:

    activation   within a forward: autograd holds it in C++, or its graph does
    bucket       of a size that DDP's reducer says its buckets have, or the size of its map of used
                 parameters, outside of any operator of the forward, and there between steps

Memory of a collective's backend, which was allocated within the collective and is neither its
argument nor its result, is given back when the collective is over, on a thread that is not
followed. So it counts until the end of the phase, and not there. Anything else is `unexplained`,
and there must be none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..compat_memory import Allocation
from ..protocol.layout import Category, Line, Phase
from ..protocol.measurements import HARNESS, LOCAL, UNEXPLAINED, Held
from .holders import Claim, Claims

MARK = "zerocheck: "
"""How our marks among the allocator's events begin."""
GONE = f"{MARK}gone "
"""Address of memory that is freed now, whether the allocator reports it or not."""
USED = f"{MARK}used "
"""Before the use and the address of what a collective gathers into or reduces from."""
LOOKING, LOOKED = f"{MARK}looking", f"{MARK}looked"
"""Between them, what is allocated is the harness's own."""


MAKING_BUCKETS = (
    ("aten::empty",),
    ("aten::zeros", "aten::empty"),
    ("DistributedDataParallel.forward", "aten::empty"),
)
"""Operators under which DDP's reducer allocates: where it is made, and where it makes its buckets
again, before the second forward."""
UNTOLD = ("on a GPU",)
"""Operators of an allocation on a GPU: the history of its allocator does not tell them."""
BACKEND = ("c10d::", "gloo:")
"""How operators begin within which a backend allocates what is its own."""


class PhaseEnd(NamedTuple):
    """End of a phase."""

    step: int
    phase: Phase

    @property
    def mark(self) -> str:
        """Name of the place among the allocator's events."""
        return f"{MARK}{self.step} {self.phase}"


@dataclass(eq=False)
class TrackedAllocation:
    """One allocation, from when it is allocated until it is freed.

    born: the phase in which it was; claims: of all ends of phases at which it was alive; stays:
    whether it was alive between two steps; use: what a collective used it for; ends: how many ends
    of phases it was alive at.
    """

    address: int
    bytes: int
    operators: tuple[str, ...]
    born: PhaseEnd
    claims: list[Claim] = field(default_factory=list)
    stays: bool = False
    use: Category | None = None
    ends: int = 0

    @property
    def backend(self) -> bool:
        """True if a backend allocated it for itself, within a collective."""
        return any(name.startswith(BACKEND) for name in self.operators)

    @property
    def best(self) -> Claim | None:
        """Best claim to the block."""
        return min(self.claims, key=lambda claim: claim.rank, default=None)


class AllocationChange(NamedTuple):
    """Allocation (more > 0) or release of a block, in the phase that ends at `place`.

    ours: while the harness looks at what is held.
    """

    place: PhaseEnd
    block: TrackedAllocation
    more: int
    ours: bool


class Attribution:
    """Memory attribution, built from all events of a run and the claims at each mark.

    changes: what was given out and taken back, in its order.
    """

    def __init__(
        self, events: list[str | Allocation], looked: dict[PhaseEnd, Claims], buckets: Counter[int]
    ) -> None:
        """Build it. looked: objects that Python held at the end of each phase, in their order.

        buckets: bytes that DDP reports its reducer to hold.
        """
        self._buckets = buckets
        self._at: dict[PhaseEnd, list[TrackedAllocation]] = {}
        self.changes: list[AllocationChange] = []
        marks = {place.mark: place for place in looked}
        alive: dict[int, TrackedAllocation] = {}
        places = iter(looked)
        now = next(places)
        ours = False

        def gone(address: int) -> None:
            block = alive.pop(address, None)
            if block is not None:
                self.changes.append(AllocationChange(now, block, -block.bytes, ours))

        for event in events:
            if isinstance(event, Allocation):
                if event.bytes > 0:
                    block = TrackedAllocation(event.address, event.bytes, event.operators, now)
                    alive[event.address] = block
                    self.changes.append(AllocationChange(now, block, block.bytes, ours))
                else:
                    gone(event.address)
            elif event.startswith(GONE):
                gone(int(event.removeprefix(GONE)))
            elif event.startswith(USED):
                use, address = event.removeprefix(USED).split()
                if int(address) in alive:
                    alive[int(address)].use = "gathered" if use == "gathered" else "bucket"
            elif event in (LOOKING, LOOKED):
                ours = event == LOOKING
            else:
                self._look(marks[event], alive, looked[marks[event]])
                now = next(places, now)

    def _look(self, place: PhaseEnd, alive: dict[int, TrackedAllocation], claims: Claims) -> None:
        for block in list(alive.values()):
            block.ends += 1
            block.stays |= place.phase in ("built", "step")
            if block.address in claims:
                block.claims.append(claims[block.address])
            elif not block.claims and block.backend:
                del alive[block.address]
                self.changes.append(AllocationChange(place, block, -block.bytes, True))
        self._at[place] = list(alive.values())

    @property
    def places(self) -> Iterable[PhaseEnd]:
        """Ends of phases, in their order."""
        return self._at

    @property
    def blocks(self) -> Iterator[TrackedAllocation]:
        """All blocks that were ever allocated."""
        return (change.block for change in self.changes if change.more > 0)

    def lines(self) -> Iterator[Line]:
        """Iterate over the bytes held at the end of each phase, by category and holder."""
        for place, blocks in self._at.items():
            held: defaultdict[tuple[Category, str], int] = defaultdict(int)
            for block in blocks:
                held[self.explained(block)] += block.bytes
            for (category, holder), count in held.items():
                yield Line(place.phase, place.step, category, count, holder)

    def held(self, place: PhaseEnd) -> Iterator[Held]:
        """Iterate over the allocations of the implementation at the end of a phase."""
        for block in self._at[place]:
            category, holder = self.explained(block)
            if holder != HARNESS and not holder.startswith(LOCAL):
                claim = block.best
                yield Held(category, block.bytes, holder, claim is not None and claim.rank == 0)

    def explained(self, block: TrackedAllocation) -> tuple[Category, str]:
        """Return category and holder of a block that was alive at the end of a phase."""
        claim = block.best
        if claim is not None:
            return claim.category, claim.holder
        operators = block.operators
        made_so = operators in MAKING_BUCKETS or operators == UNTOLD
        if block.stays and made_so and block.bytes in self._buckets:
            return "bucket", "a reducer of DDP"
        if block.born.phase == "forward":
            return "activation", operators[0] if operators else "a number"
        return "other", " in ".join((UNEXPLAINED, *operators[-1:]))
