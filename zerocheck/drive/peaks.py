"""Peak memory of one rank within each phase, and its composition.

Every block is known by its attribution at the end of some phase, where it was there then, else by
the collective that used it. What is left is temporary (`other`):
operators' own memory, and gradients that are on their way. Not counted is what a backend allocates
within a collective, since nothing reports when it is freed; the harness's samples; and all that
is allocated while the harness looks at what is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..contract.layout import ALLOCATED, Category, Peak, Phase, Term, works
from ..protocol.measurements import HARNESS, LOCAL
from .attribution import AllocationChange, Attribution, PhaseEnd, TrackedAllocation

STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "step")


def peaks(attribution: Attribution) -> Iterator[Peak]:
    """Iterate over the peaks of forward, backward and step of each step, in their order."""
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
