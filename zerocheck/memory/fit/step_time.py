"""Step time on paper: compute of each unit against the bytes of its collectives. No measurement.

Two things are busy: the compute of a rank, and its link, which sends one collective after the
other. Compute takes the operations of the forward (`operations.py`) over the given speed, and twice
that in the backward (two products for each of the forward), once more where it is checkpointed.

    FSDP2, ZeRO-3   the next unit is gathered while one computes, in both directions; the root (what
                    is in no unit) is gathered first and stays; a unit's gradients are reduced after
                    its backward, while others compute. Source: PyTorch, `fully_shard` (implicit
                    prefetching); Zhao et al. 2023, "PyTorch FSDP", section 3.3.
    DDP, ZeRO-2     gradients of a block are reduced after its backward, while others compute (Li et
                    al. 2020, "PyTorch Distributed", section 3.2); ZeRO-2 gathers after its update
    ZeRO-1          gradients are reduced after the backward, and parameters gathered after the
                    update: nothing is hidden

Left out: latency of a collective, the optimizer's arithmetic, kernels that are slower than the
given speed, and memory traffic. So it is the least, and ranks choices; it predicts no throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ...adapters.shared.units import unit_modules
from ...models.parts import show_blocks
from ..collectives import StepTraffic
from ..operations import ForwardOperations
from ..setup import Setup
from .result import PaperTime, Speeds

Issued = tuple[Literal["gather", "reduce"], int]
"""Collective of a unit by its number, -1 for the root."""
ROOT_UNIT = -1


@dataclass(frozen=True, slots=True)
class PaperUnit:
    """Unit in one microbatch, in seconds: forward, gathers before both, reduction afterwards."""

    forward: float
    gather: float
    gather_again: float
    reduce: float


class PaperSchedule:
    """Compute and link of one step, filled from front to back."""

    def __init__(self, *, again: bool) -> None:
        self.again = again
        self.now = self.link_free = self.compute = self.link = 0.0
        self.issued: list[Issued] = []

    def microbatch(self, root: PaperUnit, units: Sequence[PaperUnit]) -> None:
        """Add a forward and a backward: gathered units, each with the next one under way."""
        self.now = max(self.now, self._send(("gather", ROOT_UNIT), root.gather))
        begun = self.now
        for number, unit in enumerate(units):
            arrived = self._send(("gather", number), unit.gather, begun)
            begun = max(self.now, arrived)
            self._compute(begun, unit.forward)
        self._compute(self.now, root.forward)
        last = len(units) - 1
        if units:
            arrived = self._send(("gather", last), units[last].gather_again)
        else:
            arrived = self.now = max(self.now, self._send(("gather", -1), root.gather_again))
        self._compute(self.now, 2 * root.forward)
        for number in range(last, -1, -1):
            unit = units[number]
            begun = max(self.now, arrived)
            if number:
                arrived = self._send(("gather", number - 1), units[number - 1].gather_again, begun)
            self._compute(begun, (3 if self.again else 2) * unit.forward)
            self._send(("reduce", number), unit.reduce)
        self._send(("reduce", ROOT_UNIT), root.reduce)

    def exposed(self, seconds: float) -> None:
        """Add communication after all compute."""
        self.now = max(self.now, self.link_free) + seconds
        self.link_free = self.now
        self.link += seconds

    def time(self) -> PaperTime:
        """Return the times; the step ends with its last collective."""
        end = max(self.now, self.link_free)
        return PaperTime(step=end, compute=self.compute, link=self.link, exposed=end - self.compute)

    def _compute(self, begin: float, seconds: float) -> None:
        self.now = begin + seconds
        self.compute += seconds

    def _send(self, what: Issued, seconds: float, begin: float | None = None) -> float:
        if not seconds:
            return self.now
        self.issued.append(what)
        self.link_free = max(self.link_free, self.now if begin is None else begin) + seconds
        self.link += seconds
        return self.link_free


def paper_schedule(
    setup: Setup,
    model: nn.Module,
    operations: ForwardOperations,
    traffic: StepTraffic,
    speeds: Speeds,
) -> PaperSchedule | None:
    """Lay out a step on paper; None for an implementation of which no stage is known.

    model: on the meta device; traffic: of a step as simulated, divided among units by their
    parameters, so that the bytes of all units are those of the simulation.
    """
    stage = setup.stage
    if stage is None:
        return None
    show_blocks(model)
    found = unit_modules(model, setup.case(len(operations.blocks)).sharding)
    paths = {module: f"{type(model).__name__}.{path}" for path, module in model.named_modules()}
    sizes = [sum(p.numel() for p in module.parameters()) for module in found]
    work = [operations.modules.get(paths[module], 0) for module in found]
    outside = sum(p.numel() for p in model.parameters()) - sum(sizes)
    seconds = {key: float(sent) / speeds.link for key, sent in traffic.parts.items()}
    before = _of(seconds, "all-gather", "forward")
    again = _of(seconds, "all-gather", "backward")
    reduced = _of(seconds, "reduce-scatter", "backward") + _of(seconds, "all-reduce", "backward")
    after = sum(seconds.values()) - before - again - reduced
    if stage == 1:
        after, reduced = after + reduced, 0.0
    parts = setup.microbatches
    schedule = PaperSchedule(again=setup.checkpoint)
    for number in range(parts):
        reducing = reduced / parts if stage >= 2 else reduced * (number == parts - 1)
        inside, everywhere = sum(sizes), sum(sizes) + outside
        units = [
            PaperUnit(
                operations_of / speeds.operations,
                before / parts * size / everywhere,
                again / parts * size / inside,
                reducing * size / everywhere,
            )
            for size, operations_of in zip(sizes, work, strict=True)
        ]
        rest = operations.total - sum(work)
        share = outside / everywhere if everywhere else 0.0
        root = PaperUnit(
            rest / speeds.operations,
            before / parts * share,
            0.0 if units else again / parts,
            reducing * share,
        )
        schedule.microbatch(root, units)
    schedule.exposed(after)
    return schedule


def _of(seconds: dict[tuple[str, str], float], kind: str, phase: str) -> float:
    return seconds.get((phase, kind), 0.0)
