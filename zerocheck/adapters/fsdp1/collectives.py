"""Collectives of torch's FSDP1: its rules, replayed on the trace of the bare model.

Source: torch/distributed/fsdp (`_runtime_utils`, `_exec_order_utils`, `_flat_param`) of torch 2.13.

When a flat parameter is reduced: the parameters that a module computes with are views of it, made
when the unit is gathered. Autograd runs nodes in the reverse of the order in which they were made.
The node of these views, and with it the reduction, therefore comes before the backward of whatever
was computed before the unit was gathered: with prefetching, before the unit that gathered it was
entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from ...case.schema import Case
from ...case.shapes import call_order, learning
from ..shared.calls import SIZES, Calls, CollectivePrediction, dtype_of
from ..shared.trace import ROOT, UnitEvent, is_of_case, or_none, trace, traces
from ..shared.units import members
from .layout import flat_bytes
from .refusals import wrapped_units

FULL_SHARD = ShardingStrategy.FULL_SHARD
SHARD_GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
NO_SHARD = ShardingStrategy.NO_SHARD

State = Literal["idle", "forward", "before backward", "after backward"]

UNMADE = (-1, 0)
"""Of a flat parameter whose views are not made yet; else (event, number within the forward)."""


class _Handle:
    """Flat parameter with FSDP1's bookkeeping of it."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], case: Case) -> None:
        self.names = [name for name, _ in named]
        self.dtype = dtype_of(named[0][1])
        sizes = {name: parameter.numel() for name, parameter in named}
        ranks, aligned = case.axes.size("shard"), case.sharding.use_orig_params
        flat = flat_bytes(sizes, SIZES[self.dtype], ranks, shards=True, aligned=aligned)
        self.elements, self.padded = flat.total, flat.chunk * ranks
        self.state: State = "idle"
        self.whole = False
        self.local = True  # the flat parameter is the shard, and not the whole
        self.skipped = False  # its views are still those of the whole
        self.prefetched = False
        self.for_forward = False  # must be gathered before its next forward, backward
        self.for_backward = False
        self.ran = False
        self.entered: int | None = None  # place in the order of the first forward
        self.left: int | None = None  # place in the order of this forward
        self.watched = False
        self.missing: set[str] = set()
        self.made = UNMADE


class _Fsdp1Replay:
    """States of all handles, without tensors."""

    def __init__(self, model: nn.Module, case: Case, strategy: ShardingStrategy) -> None:
        self.case = case
        self.strategy = strategy if case.axes.size("shard") > 1 else NO_SHARD
        self.calls = Calls(case)
        self.live = self.calls.live
        units = wrapped_units(model, case.sharding)
        paths = {module: path for path, module in model.named_modules()}
        parameters = dict(model.named_parameters())
        handles = {
            path: _Handle([(name, parameters[name]) for name in names], case)
            for path, names in members(model, units).items()
        }
        self.units = [handles[paths[unit]] for unit in units]
        self.root: _Handle | None = handles.get("")
        self.all = list(handles.values())
        self.ahead = case.sharding.prefetch > 0
        self.behind = case.sharding.backward_prefetch
        self.entered: list[_Handle] = []
        self.left: list[_Handle] = []
        self.iterations = 0
        self.learns: set[str] = set()
        self.now = self.views = 0
        self.reduces = True

    def microbatch(
        self, events: Sequence[UnitEvent], step: int, *, reduces: bool, last: bool
    ) -> None:
        """Replay one forward and backward."""
        self.reduces = reduces
        used = {event.name for event in events if event.what == "parameter"}
        for one in self.all:
            one.missing = used & set(one.names)
        self.complete: list[_Handle] = []
        left_at: dict[tuple[int, int], int] = {}
        # A frozen unit has a hook on its inputs, those of its first call, which come last.
        over = {event.unit: place for place, event in enumerate(events) if event.what == "inputs"}
        backward = begun = False
        self.calls.at(step, "forward")
        for now, event in enumerate(self.calls.follow(events, last=last)):
            self.now = now
            handle: _Handle | None = self.root
            if event.unit != ROOT:
                handle = self.units[event.unit]
            if event.again and not events[self.now - 1].again:
                # What follows the block's last unit is run backward before any of its units, and
                # asks for what the block is run again for.
                units = {one.unit for one in takewhile(lambda one: one.again, events[self.now :])}
                self._complete(made_after=max(left_at[key] for key in left_at if key[0] in units))
            match event.what:
                case "enter":
                    if event.unit == ROOT and self.ahead:
                        for one in self.all:
                            one.for_forward, one.prefetched = True, False
                    if handle is not None:
                        self._enter(handle, again=backward)
                case "leave":
                    left_at.setdefault((event.unit, event.number), self.now)
                    if handle is not None:
                        self._leave(handle, learns=event.learns)
                case "loss":
                    backward = True
                case "output":
                    begun = True
                    self._complete(made_after=left_at[event.unit, event.number])
                    if handle is not None:
                        self._before_backward(handle)
                case "inputs":
                    if handle is not None and handle.watched and self.now == over[event.unit]:
                        handle.watched = False
                        handle.state = "after backward"
                        self._reshard_in_backward(handle)
                case "parameter":
                    self._arrived(event.name)
        if begun:
            self._complete(made_after=-1)
            self._end()

    def _enter(self, handle: _Handle, *, again: bool) -> None:
        if handle.state == "before backward":
            return
        if not self.iterations and handle.entered is None:
            handle.entered = len(self.entered)
            self.entered.append(handle)
        handle.state = "forward"
        if not handle.prefetched:
            self._gather(handle)
        handle.for_forward = False
        if self.ahead and handle.entered is not None:
            following = self.entered[handle.entered + 1 : handle.entered + 2]
            for other in following:
                if other.for_forward and not other.prefetched:
                    self._gather(other)
                    other.prefetched = True
        if not again and not self._learns(handle):
            handle.watched = True

    def _leave(self, handle: _Handle, *, learns: bool) -> None:
        if handle.state == "before backward":
            return
        if not handle.left:  # torch asks for its truth, and the first place is 0
            handle.left = len(self.left)
        self.left.append(handle)
        self._reshard(handle, free=self.strategy == FULL_SHARD and handle is not self.root)
        handle.for_backward, handle.ran = learns, False
        handle.state = "idle"

    def _before_backward(self, handle: _Handle) -> None:
        if handle.ran:
            return
        handle.state = "before backward"
        if handle.for_backward and not handle.prefetched:
            self._gather(handle)
        handle.for_backward = False
        if self.behind == "pre":
            self._gather_behind(handle)
        handle.ran = True

    def _gather_behind(self, handle: _Handle) -> None:
        if not handle.left:
            return
        other = self.left[handle.left - 1]
        if other.for_backward and not other.prefetched:
            self._gather(other)
            other.prefetched = True

    def _arrived(self, name: str) -> None:
        for handle in self.all:
            if name in handle.missing:
                handle.missing.discard(name)
                if not handle.missing:
                    self.complete.append(handle)

    def _complete(self, *, made_after: int) -> None:
        """Finish handles whose gradients are complete and whose views are newer than an event."""
        for handle in sorted(self.complete, key=lambda one: one.made, reverse=True):
            if handle.made[0] > made_after:
                self.complete.remove(handle)
                self._after_backward(handle)

    def _after_backward(self, handle: _Handle) -> None:
        handle.state = "after backward"
        self._reshard_in_backward(handle)
        if not self.reduces:
            return
        if self.strategy == NO_SHARD:
            self.calls.add("all_reduce", handle.elements, handle.dtype)
        else:
            self.calls.add("reduce_scatter", handle.padded, handle.dtype)
            if self.case.axes.has("replicate"):
                self.calls.over_replicas(handle.padded // self.calls.ranks, handle.dtype)

    def _reshard_in_backward(self, handle: _Handle) -> None:
        self._reshard(handle, free=self._frees())
        if self.behind == "post":
            self._gather_behind(handle)

    def _frees(self) -> bool:
        return self.strategy == FULL_SHARD or (self.strategy == SHARD_GRAD_OP and self.reduces)

    def _end(self) -> None:
        self.iterations += 1
        self.left.clear()
        for handle in self.all:
            if not handle.local or handle.skipped:
                self._reshard(handle, free=self._frees())
            handle.watched = handle.ran = handle.for_backward = handle.prefetched = False
            handle.left, handle.made = None, UNMADE
            handle.state = "idle"

    def _gather(self, handle: _Handle) -> None:
        handle.local = False
        if handle.made == UNMADE:
            self.views += 1
            handle.made = self.now, self.views
        if self.strategy != NO_SHARD and not handle.whole:
            handle.whole = True
            self.live.hold("gathered", handle, handle.padded * SIZES[handle.dtype])
            self.calls.add("all_gather", handle.padded, handle.dtype)

    def _reshard(self, handle: _Handle, *, free: bool) -> None:
        kept = self.strategy == SHARD_GRAD_OP and handle.state == "forward"
        handle.skipped = kept and self.case.sharding.use_orig_params
        handle.local, handle.prefetched = True, False
        if free:
            handle.whole = False
            self.live.free("gathered", handle)

    def _learns(self, handle: _Handle) -> bool:
        return any(name in self.learns for name in handle.names)


def _recomputed_twice(case: Case) -> bool:
    order = call_order(case.model)
    return any(
        block.checkpoint and order.count(place) > 1 for place, block in enumerate(case.model.blocks)
    )


@or_none
def fsdp1(model: nn.Module, case: Case, strategy: ShardingStrategy) -> CollectivePrediction | None:
    """Predict the calls of all steps, with FULL_SHARD, SHARD_GRAD_OP or NO_SHARD.

    SHARD_GRAD_OP keeps for the backward what was gathered in the forward. NO_SHARD, which torch
    takes for one rank too, all-reduces flat gradients and gathers nothing. None for another model
    than that of the case, and where a block with activation checkpointing is called more than once:
    its units are gathered again between reductions, in an order that is not worked out here.
    """
    if not is_of_case(model, case) or _recomputed_twice(case):
        return None
    replay = _Fsdp1Replay(model, case, strategy)
    calls, training = replay.calls, case.training
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def go(step: int) -> list[UnitEvent]:
        return trace(
            case,
            lambda bare: wrapped_units(bare, case.sharding),
            step=step,
            watched=True,
            flat=lambda bare: members(bare, wrapped_units(bare, case.sharding)).values(),
        )

    for step, late, events in traces(case, calls.steps, go):
        replay.learns = set(learning(case)) if late else trained
        for number in range(training.microbatches):
            last = number == training.microbatches - 1
            reduces = last or case.sharding.sync != "last"
            replay.microbatch(events, step, reduces=reduces, last=last)
        if training.loss_scale is not None:
            calls.add("all_reduce", 1, "float32")
        calls.at(step, "step")
        calls.live.at(step, "step")
        if training.clip is not None and replay.strategy != NO_SHARD:
            calls.add("all_reduce", 1, "float32")
    return calls.prediction(["gathered"])
