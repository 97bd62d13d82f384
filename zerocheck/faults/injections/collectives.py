"""Faults to inject: in sums of gradients and norms, in gathers and broadcasts, and in waiting."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import causes as bugs
from ..fault import fault
from .call import CollectiveCall
from .injection import Injection


class Nothing(Injection):
    """Every collective is intercepted and waited for, and nothing is changed.

    No fault: the control, which shows that what is found is found because of the fault.
    """

    def changes(self, call: CollectiveCall) -> bool:
        return True

    def before(self, call: CollectiveCall) -> None:
        call.give(lambda mine: mine)


class InGradients(Injection):
    """Base of faults in sums over ranks until the gradient is reduced, 0-d tensors excepted.

    What is summed later are norms, and what is 0-d is a norm, a loss or a flag.
    """

    acts_on = "sums of gradients"

    def changes(self, call: CollectiveCall) -> bool:
        before = self.step >= 0 and not self.moment
        return before and call.sums and not call.of_scalars


@fault(bugs.GRADIENT_TIMES_W, source="PT #162338", world=3)
class AverageBecomesSum(InGradients):
    """The average over ranks is a sum."""

    def after(self, call: CollectiveCall) -> None:
        for one in call.got:
            one.mul_(call.world_size)


@fault(bugs.GRADIENT_OVER_W, source="verl-SpeCo PR#29", world=3)
class DoubleAverage(InGradients):
    """The average over ranks is divided by W once more."""

    def after(self, call: CollectiveCall) -> None:
        for one in call.got:
            one.div_(call.world_size)


@fault(bugs.LOCAL_GRADIENT_ONLY, source="PT #60118", world=3)
class FirstStepLocal(InGradients):
    """The first step is not reduced."""

    def changes(self, call: CollectiveCall) -> bool:
        return self.step == 0 and super().changes(call)

    def after(self, call: CollectiveCall) -> None:
        keep_local(call)


@fault(bugs.LOCAL_GRADIENT_ONLY, source="PT #187732; MG #599", world=3)
class EveryThirdLocal(InGradients):
    """Every third reduction is lost: the local gradient stays."""

    calls = 0

    def after(self, call: CollectiveCall) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            keep_local(call)


@fault(bugs.RANKS_LEFT_OUT, source="seen often", world=3)
class RankLeftOut(InGradients):
    """The last rank contributes zeros: its samples do not count."""

    def before(self, call: CollectiveCall) -> None:
        if call.rank == call.world_size - 1:
            call.give(lambda mine: mine.zero_())


@fault(bugs.RANK_COUNTED_TWICE, source="seen often", world=3)
class RankCountedTwice(InGradients):
    """The first rank's gradient is in the sum twice."""

    def before(self, call: CollectiveCall) -> None:
        if call.rank == 0:
            call.give(lambda mine: mine.mul_(2))


@fault(bugs.REDUCED_IN_SMALLER_GROUPS, source="DS PR#6546, #5618; TT #1551", world=3)
class HalfGroup(InGradients):
    """Each half of the group averages by itself."""

    def before(self, call: CollectiveCall) -> None:
        gathered = call.everyone(call.given)
        ranks = [rank for rank in range(call.world_size) if half(rank, call) == half(None, call)]
        theirs = [call.local_of([one[rank] for one in gathered]) for rank in ranks]
        factor = (1.0 if call.averages else float(call.world_size)) / len(ranks)
        self.kept["half"] = [
            torch.stack(parts).sum(0) * factor for parts in zip(*theirs, strict=True)
        ]

    def after(self, call: CollectiveCall) -> None:
        for one, mine in zip(call.got, self.kept.pop("half"), strict=True):
            one.copy_(mine.view_as(one))


@fault(bugs.SHARD_OF_ANOTHER_RANK, source="DS PR#7601", world=3, attributed=r"holds the shard that")
class NeighboursShard(InGradients):
    """Each rank gets the reduced shard of the next one."""

    acts_on = "reduce-scatter of gradients"

    def changes(self, call: CollectiveCall) -> bool:
        return call.kind == "reduce-scatter" and super().changes(call)

    def after(self, call: CollectiveCall) -> None:
        for one, theirs in zip(call.got, call.everyone(call.got), strict=True):
            one.copy_(theirs[(call.rank + 1) % call.world_size])


@fault(bugs.PART_NOT_REDUCED, source="FS #907", world=3, attributed=r"is the rank's own gradient")
class LastElementLocal(InGradients):
    """The last element of each bucket is not reduced: a length is one too short.

    Of those that any rank has a gradient of: the end may be padding.
    """

    def after(self, call: CollectiveCall) -> None:
        for one, mine in zip(call.got, call.local, strict=True):
            moved = (one != mine.view_as(one)).view(-1).nonzero()
            if len(moved):
                one.view(-1)[moved[-1]] = mine.view(-1)[moved[-1]]


@fault(bugs.GRADIENT_OF_THE_PREVIOUS_STEP, source="DS PR#7805")
class ReductionStale(InGradients):
    """A reduction returns its buffer's previous content: the last step's result."""

    def after(self, call: CollectiveCall) -> None:
        swap_for_last_step(self, call)


@fault(bugs.REDUCED_IN(format="bf16"), source="PT #104770; DS PR#5170")
class ReducedInBf16(InGradients):
    """Gradients are sent in bf16 though they are fp32."""

    def before(self, call: CollectiveCall) -> None:
        call.give(lambda mine: mine.bfloat16().to(mine.dtype))


@fault(bugs.RESULT_ROUNDED_TO(format="bf16"), source="DS PR#8056")
class ResultRounded(InGradients):
    """Gradients are summed in fp32, and the result is copied through a buffer in bf16."""

    def after(self, call: CollectiveCall) -> None:
        for one in call.got:
            one.copy_(one.bfloat16())


@fault(bugs.SIGN_BEFORE_THE_REDUCTION, source="seen often")
class SignedBeforeReduced(InGradients):
    """The sign of each rank's gradient is sent, where that of the reduced one is wanted."""

    def before(self, call: CollectiveCall) -> None:
        call.give(lambda mine: mine.sign())


@fault(bugs.LOCAL_NORM, source="RLinf PR#1542", features=("clip-tight",), without=("loss-scale",))
class NormLocal(Injection):
    """The norm is not reduced: each rank clips by its own shard's norm."""

    acts_on = "reduction of a norm"

    def changes(self, call: CollectiveCall) -> bool:
        return self.moment == "reduced" and call.kind == "all-reduce" and call.floating

    def after(self, call: CollectiveCall) -> None:
        keep_local(call)


def keep_local(call: CollectiveCall) -> None:
    """Restore the tensors that this rank would hold had nothing been reduced."""
    for one, mine in zip(call.got, call.local, strict=True):
        one.copy_(mine.view_as(one))


def swap_for_last_step(injection: Injection, call: CollectiveCall) -> None:
    """Exchange the result for that of the same call in the last step, if there was one.

    The same call: the one with the same place in its step, and with results of the same shapes.
    """
    key = (injection.number, tuple(tuple(one.shape) for one in call.got))
    now = [one.clone() for one in call.got]
    before = injection.kept.get(key, now)
    injection.kept[key] = now
    for one, held in zip(call.got, before, strict=True):
        one.copy_(held)


def half(rank: int | None, call: CollectiveCall) -> int:
    """Return the half of the group that a rank is in: 0 or 1. None: this rank."""
    place = call.rank if rank is None else rank
    return place * 2 // call.world_size


class InGathers(Injection):
    """Base of faults in all-gathers of floating-point numbers."""

    acts_on = "all-gathers"

    def changes(self, call: CollectiveCall) -> bool:
        return self.step >= 0 and call.kind == "all-gather" and call.floating


@fault(bugs.PARAMETERS_OF_THE_PREVIOUS_STEP, source="MG #3140; DS PR#7707")
class GatherStale(InGathers):
    """An all-gather returns its result of the previous step."""

    def after(self, call: CollectiveCall) -> None:
        swap_for_last_step(self, call)


@fault(bugs.SHARDS_EXCHANGED, obligation="loss", source="DS PR#318")
class GatherSwapped(InGathers):
    """The first and the last rank's shards are exchanged."""

    def after(self, call: CollectiveCall) -> None:
        for pieces in call.pieces():
            first = pieces[0].clone()
            pieces[0].copy_(pieces[-1])
            pieces[-1].copy_(first)


@fault(bugs.COPIES_ROUNDED_TO_BF16, obligation="loss", source="PT #104770")
class GatherRounded(InGathers):
    """Shards are sent in bf16 though they are fp32."""

    def before(self, call: CollectiveCall) -> None:
        call.give(lambda mine: mine.bfloat16().to(mine.dtype))


@fault(
    bugs.BUFFERS_LOCAL, source="PT #178569; LlamaFactory #10820",
    features=("block-batch-norm", "several-steps"), world=3,
)  # fmt: skip
class BroadcastLost(Injection):
    """A broadcast does not arrive: each rank keeps its tensor."""

    acts_on = "broadcasts of numbers with a fraction"

    def changes(self, call: CollectiveCall) -> bool:
        return self.step >= 0 and call.kind == "broadcast" and call.floating

    def after(self, call: CollectiveCall) -> None:
        keep_local(call)


PATIENCE_S = 1e-3
"""Seconds until a wait gives up. Ranks that are in step need less, delayed ones more."""


@fault(
    obligation="gradient", source="DS PR#5606", features=("delays",), sometimes=0.5,
    attributed=r"own gradient|each rank's own|not reduced|not divided",
)  # fmt: skip
class WaitTimesOut(InGradients):
    """A wait for a reduction gives up after a millisecond, unnoticed.

    The caller reads its local gradient; the result arrives later, perhaps too late.
    """

    acts_on = "sums of gradients that are waited for by a Work"

    def __init__(self) -> None:
        super().__init__()
        self._late: list[threading.Thread] = []

    def changes(self, call: CollectiveCall) -> bool:
        return not call.functional and super().changes(call)

    def around(self, call: CollectiveCall) -> Any:
        local = [one.clone() for one in call.local_of(call.given)]
        first, into = call.first, call.aside()
        for one, mine in zip(into, local, strict=True):
            one.copy_(mine.view_as(one))
        over = threading.Event()
        thread = threading.Thread(target=_arrive, args=(call, call.start(), into, over))
        thread.start()
        self._late.append(thread)
        over.wait(PATIENCE_S)
        return call.done(first)

    def end(self) -> None:
        for thread in self._late:
            thread.join()
        self._late.clear()


def _arrive(
    call: CollectiveCall, result: Any, into: Sequence[Tensor], over: threading.Event
) -> None:
    """Wait for the call, and store its result where the caller reads it, if that still exists."""
    call.finish(result)
    with torch.no_grad():
        for one, got in zip(into, call.got, strict=True):
            if one.untyped_storage().nbytes():
                one.copy_(got)
    over.set()
