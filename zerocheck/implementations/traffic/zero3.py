"""What the textbook ZeRO-3 calls: its rules over the order of things in the bare model."""

from __future__ import annotations

from torch import nn

from ...case.schema import Case
from ...case.shapes import unfrozen
from ...contract.layout import Call
from ..textbook.bucket import of_one_dtype
from ..units import unit_modules
from .passage import ROOT, Event, is_of_case, or_none, passage
from .textbook import Flat, clipping, flat_of, scaling
from .writing import Calls


class _Unit:
    """What of a unit is gathered, what of it is reduced, and where it stands."""

    def __init__(self) -> None:
        self.gathers: list[Flat] = []
        self.reduces: list[tuple[Flat, bool]] = []  # whether it learns from the first step on
        self.gathered = False
        self.first_call = -1


class _Replay:
    """Zero3's state, without tensors."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.case = case
        self.calls = Calls(case)
        modules = unit_modules(model, case.sharding)
        names = {parameter: name for name, parameter in model.named_parameters()}
        parts = [[(names.pop(p), p) for p in module.parameters()] for module in modules]
        self.units = [self._unit(part) for part in parts]
        self.root = self._unit([(name, p) for p, name in names.items()])
        self.order: list[int] = []  # units of the calls of this forward
        self.expected: list[int] = []  # and of the forward before
        self.open: list[int] = []
        self.late = False

    def _unit(self, named: list[tuple[str, nn.Parameter]]) -> _Unit:
        later = unfrozen(self.case)
        unit = _Unit()
        for learns in (True, False):
            half = [pair for pair in named if pair[1].requires_grad == learns]
            for part in of_one_dtype(half):
                flat = flat_of(part, self.case.world_size)
                unit.gathers.append(flat)
                if learns or part[0][0] in later:
                    unit.reduces.append((flat, learns))
        return unit

    def microbatch(self, events: list[Event], step: int) -> None:
        """One forward and backward."""
        for unit in (*self.units, self.root):
            unit.gathered, unit.first_call = False, -1
        self.expected, self.order, self.open = self.order, [], []
        self.calls.at(step, "forward")
        for event in events:
            if event.what == "loss":
                self.calls.at(step, "backward")
            elif event.what == "enter":
                self._enter(event)
            elif event.what == "leave" and not event.again:
                self._leave(event)
            elif event.what == "output" and event.unit != ROOT:
                self._before_backward(event.number)
        for unit in (*self._closed(-1, []), self.root):
            self._reduce(unit)
            unit.gathered = False

    def _enter(self, event: Event) -> None:
        if event.unit == ROOT:
            self._gather(self.root)
            return
        unit = self.units[event.unit]
        self._gather(unit)
        if not event.again:
            number = len(self.order)
            if unit.first_call < 0:
                unit.first_call = number
            self.order.append(event.unit)
            self.open.append(number)
            for later in self._ahead(number):
                self._gather(later)

    def _leave(self, event: Event) -> None:
        if not self.case.sharding.reshard:
            return
        if event.unit == ROOT:
            for unit in self.units:
                unit.gathered = False
        elif self.units[event.unit] not in self._ahead(len(self.order) - 1):
            self.units[event.unit].gathered = False

    def _ahead(self, number: int) -> list[_Unit]:
        if self.expected[number : number + 1] != self.order[number:]:
            return []
        last = number + 1 + self.case.sharding.prefetch
        return [self.units[unit] for unit in self.expected[number + 1 : last]]

    def _before_backward(self, number: int) -> None:
        if not self.open or number > self.open[-1]:
            return
        first = max(0, number - self.case.sharding.prefetch)
        window = [self.units[unit] for unit in self.order[first : number + 1]][::-1]
        done = self._closed(number, window)
        for unit in window:
            self._gather(unit)
        for unit in done:
            self._reduce(unit)

    def _closed(self, number: int, keep: list[_Unit]) -> list[_Unit]:
        done = []
        while self.open and self.open[-1] > number:
            last = self.open.pop()
            unit = self.units[self.order[last]]
            over = last == unit.first_call
            if over:
                done.append(unit)
            if unit not in keep and (over or self.case.sharding.reshard):
                unit.gathered = False
        return done

    def _gather(self, unit: _Unit) -> None:
        if not unit.gathered:
            for flat in unit.gathers:
                self.calls.add("all_gather", *flat)
            unit.gathered = True

    def _reduce(self, unit: _Unit) -> None:
        for flat, learns in unit.reduces:
            if learns or self.late:
                self.calls.add("reduce_scatter", *flat)


@or_none
def zero3(model: nn.Module, case: Case) -> tuple[Call, ...] | None:
    """Units are gathered ahead once the order of a forward is known; each backward is reduced.

    None for another model than that of the case.
    """
    if not is_of_case(model, case):
        return None
    replay = _Replay(model, case)
    calls = replay.calls
    late = case.training.unfreeze
    events: dict[bool, list[Event]] = {}
    for step in calls.steps:
        replay.late = late is not None and step >= late
        if replay.late not in events:
            events[replay.late] = passage(
                case, lambda bare: unit_modules(bare, case.sharding), step=step, at_base=True
            )
        for _ in range(case.training.microbatches):
            replay.microbatch(events[replay.late], step)
        calls.at(step, "backward")
        scaling(calls, case)
        calls.at(step, "step")
        clipping(calls, case)
    return tuple(calls.done)
