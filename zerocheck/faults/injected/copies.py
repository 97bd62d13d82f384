"""Faults in what ranks send each other of what they hold: gathered shards and broadcasts."""

from __future__ import annotations

from .call import Call
from .injection import Injection
from .reductions import keep_local, swap_for_last_step


class InGathers(Injection):
    """Changes all-gathers of numbers with a fraction."""

    acts_on = "all-gathers"

    def changes(self, call: Call) -> bool:
        return self.step >= 0 and call.kind == "all-gather" and call.floating


class GatherStale(InGathers):
    """What is gathered is what the same gather gave in the step before (MG #3140; DS PR#7707)."""

    def after(self, call: Call) -> None:
        swap_for_last_step(self, call)


class GatherSwapped(InGathers):
    """The shards of the first and the last rank change places (DS PR#318)."""

    def after(self, call: Call) -> None:
        for pieces in call.pieces():
            first = pieces[0].clone()
            pieces[0].copy_(pieces[-1])
            pieces[-1].copy_(first)


class GatherRounded(InGathers):
    """Shards travel in bf16 though they are fp32 (PT #104770)."""

    def before(self, call: Call) -> None:
        call.give(lambda mine: mine.bfloat16().to(mine.dtype))


class BroadcastLost(Injection):
    """A broadcast does not arrive: each rank keeps what it had (PT #178569)."""

    acts_on = "broadcasts of numbers with a fraction"

    def changes(self, call: Call) -> bool:
        return self.step >= 0 and call.kind == "broadcast" and call.floating

    def after(self, call: Call) -> None:
        keep_local(call)
