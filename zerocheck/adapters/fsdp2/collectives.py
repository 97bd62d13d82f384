"""Collectives of torch's FSDP2: its rules, replayed on the trace of the bare model.

Source: torch/distributed/fsdp/_fully_shard (`_fsdp_state`, `_fsdp_param_group`) of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Literal

from torch import nn

from ...case.schema import Case
from ...case.shapes import learning, sometimes_used
from ...case.traits import reduced_precision
from ...models.blocks import DTYPES
from ..shared.calls import SIZES, Calls, CollectivePrediction, dtype_name, dtype_of
from ..shared.live_memory import terms_of
from ..shared.sync import deferred
from ..shared.trace import ROOT, UnitEvent, is_of_case, or_none, trace, traces
from ..shared.units import in_order_of_calls, unit_modules
from .layout import waiting

State = Literal["idle", "forward", "before backward", "after backward"]


class _Group:
    """Unit's parameters with FSDP2's bookkeeping of them."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], ranks: int) -> None:
        self.padded: dict[str, int] = {}
        """Elements of each parameter, with its dim 0 padded to a multiple of the ranks."""
        self.dtypes: dict[str, str] = {}
        self.uneven: set[str] = set()
        """Parameters that are padded, and their gradients copied to be."""
        for name, parameter in named:
            rows, rest = parameter.shape[0], prod(parameter.shape[1:])
            self.padded[name] = -(-rows // ranks) * ranks * rest
            self.dtypes[name] = dtype_of(parameter)
            if rows % ranks:
                self.uneven.add(name)
        self.state: State = "idle"  # of the module
        self.group: State = "idle"  # of its parameters
        self.whole = False
        self.pending = False  # gathered ahead, not used yet
        self.ever = False  # has been whole
        self.reshards = True  # after the forward
        self.places: list[int] = []  # in the order of forwards that are over
        self.gradients: set[str] = set()
        self.ahead: list[_Group] = []
        self.behind: list[_Group] = []
        self.sent: int | None = None
        """Number of the all-gather that it waits for."""
        self.sum: int | None = None
        """What was all-reduced over replicas: it is kept until the unit reduces again, or the
        backward is over."""

    def bytes(self, names: Iterable[str]) -> int:
        """Bytes of some of the unit's parameters, padded."""
        return sum(self.padded[name] * SIZES[self.dtypes[name]] for name in names)


class _Fsdp2Replay:
    """States of all units, without tensors."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.case, self.ranks = case, case.axes.size("shard")
        self.calls = Calls(case)
        self.live = self.calls.live
        self.gathers = self.reductions = 0
        self.kept: int | None = None
        """Number of the all-gather of the forward whose memory is let go of after the next one."""
        modules = unit_modules(model, case.sharding)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.units = [
            _Group([(names.pop(p), p) for p in module.parameters()], self.ranks)
            for module in modules
        ]
        self.root = _Group([(name, p) for p, name in names.items()], self.ranks)
        self.root.reshards = False
        for unit in self.units:
            unit.reshards = case.sharding.reshard
        of_module = dict(zip(modules, self.units, strict=True))
        ordered = [of_module[module] for module in in_order_of_calls(model, modules, case)]
        prefetch = case.sharding.prefetch
        for index, unit in enumerate(ordered if prefetch else []):
            unit.ahead = ordered[index + 1 : index + 1 + prefetch]
            unit.behind = ordered[:index][::-1][:prefetch]
        # Root first, then as modules are registered.
        self.all = [self.root, *(of_module[one] for one in model.modules() if one in of_module)]
        self.order: list[_Group] = []
        self.entered: _Group | None = None  # the one that counts as root of this forward
        self.learns: set[str] = set()
        self.zeros = bool(sometimes_used(case.model))
        self.compute = self.reduction = None
        if reduced_precision(case):
            self.compute = dtype_name(DTYPES[case.precision.compute])
            self.reduction = dtype_name(DTYPES[case.precision.reduce])
        self.reduces = self.over_replicas = True
        self.held: dict[str, str] = {}
        """Parameters that have a sharded gradient, with its dtype."""

    def microbatch(
        self, events: Sequence[UnitEvent], step: int, *, reduces: bool, last: bool
    ) -> None:
        """Replay one forward and backward."""
        self.reduces = reduces
        self.over_replicas = last or not deferred(self.case)
        self.calls.at(step, "forward")
        begun = False
        for event in self.calls.follow(events, last=last):
            unit = self.root if event.unit == ROOT else self.units[event.unit]
            match event.what:
                case "enter":
                    self._enter(unit)
                case "leave":
                    self._leave(unit, again=event.again)
                case "output":
                    begun = True
                    self._before_backward(unit)
                case "inputs":
                    self._after_backward(unit)
                case "parameter":
                    self._holder(event.name).gradients.add(event.name)
                    self.live.gradient(event.name, event.bytes)
        if begun:
            self._end()

    def _holder(self, name: str) -> _Group:
        return next(unit for unit in self.all if name in unit.padded)

    def _enter(self, unit: _Group) -> None:
        if unit.state == "before backward":
            if not unit.whole:
                self._gather(unit)
                self._use(unit)
            return
        first = unit.state != "forward"
        unit.state = "forward"
        if first and self.entered is None:
            self.entered = unit
        unit.group = "forward"
        self._gather(unit)
        self._use(unit)
        if first:
            for other in unit.ahead:
                self._gather(other)

    def _leave(self, unit: _Group, *, again: bool) -> None:
        if unit.state == "before backward":
            return
        if not again:
            if unit.reshards:
                self._reshard(unit)
            unit.places.append(len(self.order))
            self.order.append(unit)
        unit.group = unit.state = "idle"
        if self.entered is unit:
            self.entered = None
            self._let_go()

    def _before_backward(self, unit: _Group) -> None:
        unit.state = "before backward"
        if unit.padded and unit.group != "before backward":
            unit.group = "before backward"
            self._gather(unit)
            self._use(unit)
            if not unit.behind and unit.places:
                place = unit.places.pop()
                if place > 0:
                    self._gather(self.order[place - 1])
        for other in unit.behind:
            self._gather(other)

    def _after_backward(self, unit: _Group) -> None:
        unit.group = "after backward"
        if not self.reduces:
            self._reshard(unit)
            return
        names = list(unit.gradients)
        if self.zeros and unit.ever:
            names = [name for name in unit.padded if name in self.learns]
        unit.gradients.clear()
        self._reshard(unit)
        self._reduce(unit, names)
        self.held.update((name, unit.dtypes[name]) for name in names)
        elements = sum(unit.padded[name] for name in names)
        if names and self.ranks > 1:
            self.calls.add("reduce_scatter", elements, self.reduction or unit.dtypes[names[0]])
        if names and self.case.axes.has("replicate") and self.over_replicas:
            dtype = self.reduction or unit.dtypes[names[0]]
            self.calls.over_replicas(elements // self.ranks, dtype)

    def _end(self) -> None:
        self.entered = None
        for unit in self.all:
            if unit.group != "after backward":
                self._after_backward(unit)
            self._forget_sum(unit)
            unit.group = unit.state = "idle"
            if unit.pending:
                self.live.free("gathered", unit.sent)
            unit.pending = False
            unit.places.clear()
        self.order.clear()
        self._landed()

    def _reshard(self, unit: _Group) -> None:
        unit.whole = False
        for name in unit.padded:
            self.live.free("gathered", name)

    def _let_go(self) -> None:
        self.live.free("gathered", self.kept)
        self.kept = None

    def _landed(self) -> None:
        for key in self.live.keys("bucket"):
            if isinstance(key, int) and key > 0:
                self.live.free("bucket", key)

    def _forget_sum(self, unit: _Group) -> None:
        self.live.free("bucket", unit.sum)
        unit.sum = None

    def _reduce(self, unit: _Group, names: Sequence[str]) -> None:
        """Copy a unit's gradients into one padded buffer, free them, and reduce.

        Copies are made where gradients are uneven. The result becomes the gradient of the shards,
        or is added to it.
        """
        self._landed()
        if not names:
            return
        self._forget_sum(unit)
        self.reductions += 1
        number = self.reductions
        size = unit.bytes(names)
        self.live.hold("bucket", number, size)
        copies = [name for name in names if name in unit.uneven]
        for name in copies:
            self.live.hold("other", (number, name), unit.bytes([name]))
        for name in copies:
            self.live.free("other", (number, name))
        for name in names:
            self.live.free("other", name)
        if all(name in self.held for name in names):
            self.live.hold("bucket", -number, size // self.ranks)
            unit.sum = -number
            if not self.case.axes.has("replicate"):
                self._forget_sum(unit)
        else:
            self.live.hold("gradient", number, size // self.ranks)

    def cleared(self) -> None:
        """Discard all gradients, as zero_grad(set_to_none=True) does."""
        self.held.clear()
        for key in self.live.keys("gradient"):
            self.live.free("gradient", key)

    def _gather(self, unit: _Group) -> None:
        if unit.pending or unit.whole or not unit.padded:
            return
        unit.pending = True
        if self.ranks == 1:
            return
        self.gathers += 1
        unit.sent = self.gathers
        self.live.hold("gathered", unit.sent, unit.bytes(unit.padded))
        elements = sum(unit.padded.values())
        dtypes = set(unit.dtypes.values())
        if len(dtypes) == 1:
            self.calls.add("all_gather", elements, self.compute or dtypes.pop())
            return
        # Of several dtypes it sends bytes.
        size = sum(count * SIZES[unit.dtypes[name]] for name, count in unit.padded.items())
        self.calls.add("all_gather", size, "uint8")

    def _use(self, unit: _Group) -> None:
        if not unit.pending:
            return
        unit.pending, unit.whole, unit.ever = False, True, True
        for name in unit.padded:
            self.live.hold("gathered", name, unit.bytes([name]))
        if unit.group == "forward":
            # torch lets go of it before it copies, but for a local variable.
            self._let_go()
            self.kept = unit.sent
        else:
            self.live.free("gathered", unit.sent)


@or_none
def fsdp2(model: nn.Module, case: Case) -> CollectivePrediction | None:
    """Predict the calls of all steps. None for another model than that of the case.

    None too for an optimizer of the user's that needs whole parameters: of a DTensor it calls
    collectives of its own.
    """
    user = case.optimizer.user
    if not is_of_case(model, case) or (user is not None and not user.elementwise):
        return None
    replay = _Fsdp2Replay(model, case)
    calls, training = replay.calls, case.training
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def go(step: int) -> list[UnitEvent]:
        return trace(case, lambda bare: unit_modules(bare, case.sharding), step=step, marked=True)

    for step, late, events in traces(case, calls.steps, go):
        replay.learns = set(learning(case)) if late else trained
        if training.set_to_none:
            replay.cleared()
        for number in range(training.microbatches):
            last = number == training.microbatches - 1
            reduces = last or case.sharding.sync != "last"
            replay.microbatch(events, step, reduces=reduces, last=last)
        calls.live.at(step, "step")
        if replay.ranks > 1:
            _scale(calls, case, replay.held)
            _clip(calls, case, replay.held)
    known = not (sometimes_used(case.model) or case.sharding.optimizer_first or waiting(case))
    if (
        replay.ranks == 1 or not known or reduced_precision(case)
    ):  # the trace through the model is in fp32
        return CollectivePrediction(tuple(calls.done))
    adds = training.microbatches > 1 or not training.set_to_none
    return calls.prediction(terms_of(case, adds=adds))


def _scale(calls: Calls, case: Case, held: Mapping[str, str]) -> None:
    """Add the calls of the scaler, which agrees on an overflow for each dtype of gradients."""
    if case.training.loss_scale is not None:
        for _ in set(held.values()):
            calls.add("all_reduce", 1, "float32")


def _clip(calls: Calls, case: Case, held: Mapping[str, str]) -> None:
    """Add the calls of clip_grad_norm_, which takes each parameter's norm, then that of them all.

    The norms of one 2-norm are reduced before they are added up. The one inf-norm is reduced where
    it is used: for the factor, and to be returned.
    """
    if case.training.clip is None or not held:
        return
    calls.at(calls.step, "step")
    dtype = "float32" if "float32" in held.values() else "bfloat16"
    if case.training.norm == "2":
        calls.add("all_reduce", len(held), dtype)
    else:
        calls.add("all_reduce", 1, dtype)
        calls.add("all_reduce", 1, dtype)
