"""Faults in gathered shards and in broadcasts."""

from __future__ import annotations

from ... import causes as bugs
from ..fault import injected
from .call import CollectiveCall
from .injection import Injection
from .reductions import keep_local, swap_for_last_step


class InGathers(Injection):
    """Base of faults in all-gathers of floating-point numbers."""

    acts_on = "all-gathers"

    def changes(self, call: CollectiveCall) -> bool:
        return self.step >= 0 and call.kind == "all-gather" and call.floating


@injected("publish", bugs.PARAMETERS_OF_THE_PREVIOUS_STEP, source="MG #3140; DS PR#7707")
class GatherStale(InGathers):
    """An all-gather returns its result of the previous step."""

    def after(self, call: CollectiveCall) -> None:
        swap_for_last_step(self, call)


@injected("loss", bugs.SHARDS_EXCHANGED, source="DS PR#318")
class GatherSwapped(InGathers):
    """The first and the last rank's shards are exchanged."""

    def after(self, call: CollectiveCall) -> None:
        for pieces in call.pieces():
            first = pieces[0].clone()
            pieces[0].copy_(pieces[-1])
            pieces[-1].copy_(first)


@injected("loss", bugs.COPIES_ROUNDED_TO_BF16, source="PT #104770")
class GatherRounded(InGathers):
    """Shards are sent in bf16 though they are fp32."""

    def before(self, call: CollectiveCall) -> None:
        call.give(lambda mine: mine.bfloat16().to(mine.dtype))


@injected(
    "buffers", bugs.BUFFERS_LOCAL, source="PT #178569; LlamaFactory #10820",
    features=("block-batch-norm", "several-steps"), world=3,
)  # fmt: skip
class BroadcastLost(Injection):
    """A broadcast does not arrive: each rank keeps its tensor."""

    acts_on = "broadcasts of numbers with a fraction"

    def changes(self, call: CollectiveCall) -> bool:
        return self.step >= 0 and call.kind == "broadcast" and call.floating

    def after(self, call: CollectiveCall) -> None:
        keep_local(call)
