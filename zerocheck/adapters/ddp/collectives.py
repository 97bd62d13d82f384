"""Collectives of torch's DistributedDataParallel.

Source: torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...case.schema import Case
from ...case.shapes import sometimes_used, uncalled, unfrozen
from ...protocol.layout import Phase
from ..shared.calls import SIZES, Calls, CollectivePrediction, dtype_of
from ..shared.trace import UnitEvent, is_of_case, or_none, trace

BROADCAST_BUCKET = 250 * 2**20
"""Bytes of states that are broadcast at once, by DDP's default."""


STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "step")


class BucketTensor(NamedTuple):
    """Tensor of a bucket: its shape, and its size in elements."""

    name: str
    shape: tuple[int, ...]
    elements: int
    dtype: str


Bucket = list[BucketTensor]


def bucket_tensor(name: str, tensor: torch.Tensor) -> BucketTensor:
    """Describe a tensor for its bucket."""
    return BucketTensor(name, tuple(tensor.shape), tensor.numel(), dtype_of(tensor))


def assigned(tensors: Sequence[BucketTensor], limit: int) -> tuple[list[Bucket], list[Bucket]]:
    """Assign tensors to buckets of one dtype, each full when it has `limit` bytes or more.

    Returns the full buckets, in the order in which they filled up, and the remaining ones, in the
    order in which their dtypes first occurred.
    """
    full: list[Bucket] = []
    rest: dict[str, Bucket] = {}
    for one in tensors:
        bucket = rest.setdefault(one.dtype, [])
        bucket.append(one)
        if sum(part.elements for part in bucket) * SIZES[one.dtype] >= limit:
            full.append(bucket)
            rest[one.dtype] = []
    return full, [bucket for bucket in rest.values() if bucket]


def _in_order(tensors: Sequence[BucketTensor], limit: int) -> list[Bucket]:
    """Return all of the buckets, ordered by their first tensor."""
    place = {one.name: index for index, one in enumerate(tensors)}
    full, rest = assigned(tensors, limit)
    return sorted([*full, *rest], key=lambda bucket: place[bucket[0].name])


class _Reducer:
    """One DDP wrapper, without tensors."""

    def __init__(self, model: nn.Module, case: Case, calls: Calls, learns: set[str]) -> None:
        sharding = case.sharding
        self.calls = calls
        self.states = [bucket_tensor(name, p) for name, p in model.named_parameters()]
        self.buffers = [bucket_tensor(name, b) for name, b in model.named_buffers()]
        self.states += self.buffers
        self.learns = [one for one in self.states if one.name in learns]
        self.limit = sharding.bucket * 4
        left_out = bool(uncalled(case.model) or sometimes_used(case.model))
        self.looks = (sharding.find_unused or left_out) and not sharding.static_graph
        """It looks for unused parameters in each iteration."""
        self.static = sharding.static_graph
        self.reductions = 0
        self.synchronizes = True
        self.arrived: list[str] | None = None
        first_limit = self.limit if self.looks else 1 << 63
        self.buckets = _in_order(self.learns, first_limit)[::-1]

    def made(self) -> None:
        """Add the constructor's calls, which compare shapes and broadcast rank 0's states."""
        self.calls.add("all_gather", self.calls.ranks, "int64")
        self.calls.add("broadcast", sum(2 * len(one.shape) for one in self.learns), "int64")
        self._send(self.states)

    def forward(self) -> bool:
        """Add the calls before a forward; return False where they are not known."""
        if self.arrived is not None:
            names = {one.name: one for one in self.learns}
            full, rest = assigned([names[name] for name in self.arrived], self.limit)
            if len(rest) > 1:
                return False  # torch keeps them in a hash map
            self.buckets = [*full, *rest]
            self.calls.add("broadcast", len(self.learns) + 1, "int32")
            self.calls.add("broadcast", len(self.buckets), "int32")
            self.arrived = None
        if self.synchronizes:
            self._send(self.buffers)
        return True

    def backward(self, events: Sequence[UnitEvent], *, last: bool) -> None:
        """Add the calls of a backward, if the loss has one; last: gradients are reduced."""
        self.synchronizes = last
        if not last or not any(event.what == "loss" and event.learns for event in events):
            return
        if self.static and not self.reductions:
            self.calls.add("all_reduce", len(self.learns), "int32")
        for bucket in self.buckets:
            self.calls.add("all_reduce", sum(one.elements for one in bucket), bucket[0].dtype)
        if self.looks:
            self.calls.add("all_reduce", len(self.learns), "int32")
        elif self.reductions == self.static:  # the first of a static graph is reduced at its end
            used = [event.name for event in events if event.what == "parameter"]
            self.arrived = used + [one.name for one in self.learns if one.name not in used]
        self.reductions += 1

    def _send(self, states: Sequence[BucketTensor]) -> None:
        for bucket in _in_order(states, BROADCAST_BUCKET):
            self.calls.add("broadcast", sum(one.elements for one in bucket), bucket[0].dtype)


def ddp(model: nn.Module, case: Case) -> CollectivePrediction | None:
    """Predict the calls of all steps: buckets are all-reduced in a fixed order.

    The buckets are made anew once it is known in which order gradients arrive, which the next
    forward tells the other ranks; a wrapper made anew after parameters were unfrozen begins again.

    None for another model than that of the case, and where two buckets of different dtypes are left
    over when they are made anew: torch keeps these in a hash map, whose order is no promise.
    """
    return ddp_calls(model, case, lambda _: iter(()))


@or_none
def ddp_calls(
    model: nn.Module, case: Case, after: Callable[[int], Iterator[tuple[int, str]]]
) -> CollectivePrediction | None:
    """Predict the calls of all steps. after(step): (elements, dtype) of broadcasts at its end."""
    if not is_of_case(model, case):
        return None
    calls, training = Calls(case), case.training
    late = training.unfreeze
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    reducer = _Reducer(model, case, calls, trained)
    events = trace(case, lambda _: (), step=training.first)
    for step in calls.steps:
        calls.at(step, "forward")
        if step == late:
            reducer = _Reducer(model, case, calls, trained | set(unfrozen(case)))
            reducer.made()
            events = trace(case, lambda _: (), step=step)
        for number in range(training.microbatches):
            calls.at(step, "forward")
            if not reducer.forward():
                return None
            calls.at(step, "backward")
            last = number == training.microbatches - 1
            reducer.backward(events, last=last or case.sharding.sync == "each")
        calls.at(step, "step")
        for phase in STEP_PHASES:
            calls.live.at(step, phase)
        for elements, dtype in after(step):
            calls.add("broadcast", elements, dtype)
    return calls.prediction(["gathered"])
