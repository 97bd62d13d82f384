"""Faults in gathered shards and in broadcasts."""

from __future__ import annotations

from .call import CollectiveCall
from .injection import Injection
from .reductions import keep_local, swap_for_last_step


class InGathers(Injection):
    """Base of faults in all-gathers of floating-point numbers."""

    acts_on = "all-gathers"

    def changes(self, call: CollectiveCall) -> bool:
        return self.step >= 0 and call.kind == "all-gather" and call.floating


class GatherStale(InGathers):
    """An all-gather returns its result of the previous step (MG #3140; DS PR#7707)."""

    def after(self, call: CollectiveCall) -> None:
        swap_for_last_step(self, call)


class GatherSwapped(InGathers):
    """The first and the last rank's shards are exchanged (DS PR#318)."""

    def after(self, call: CollectiveCall) -> None:
        for pieces in call.pieces():
            first = pieces[0].clone()
            pieces[0].copy_(pieces[-1])
            pieces[-1].copy_(first)


class GatherRounded(InGathers):
    """Shards are sent in bf16 though they are fp32 (PT #104770)."""

    def before(self, call: CollectiveCall) -> None:
        call.give(lambda mine: mine.bfloat16().to(mine.dtype))


class BroadcastLost(Injection):
    """A broadcast does not arrive: each rank keeps its tensor (PT #178569)."""

    acts_on = "broadcasts of numbers with a fraction"

    def changes(self, call: CollectiveCall) -> bool:
        return self.step >= 0 and call.kind == "broadcast" and call.floating

    def after(self, call: CollectiveCall) -> None:
        keep_local(call)
