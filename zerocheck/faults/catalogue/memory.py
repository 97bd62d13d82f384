"""Faults of memory: the numbers are right, and only measurements show them."""

from __future__ import annotations

from ... import causes as bugs
from .fault import EVERY_STEP, fault

MEMORY = [
    fault(
        "memory:LeakByReference", "zero2", "persistent",
        "a list keeps one gradient of each step", "DS #3306, #3903; MG #6230",
        spares=EVERY_STEP,
    ),
    fault(
        "memory:StateReplicated", "zero1", "persistent",
        "every rank allocates the moments of whole buckets", "seen often",
        bugs.OPTIMIZER_STATE_REPLICATED, spares=EVERY_STEP,
    ),
    fault(
        "memory:GradientsNotReleased", "zero2", "persistent",
        "whole gradients stay after they were reduced", "seen often",
        bugs.WHOLE_GRADIENTS_KEPT, spares=EVERY_STEP,
    ),
    fault(
        "memory:NotResharded", "zero3", "persistent",
        "units stay gathered after the forward", "seen often", bugs.GATHERED_PARAMETERS_KEPT,
        spares=EVERY_STEP, features=("reshard", "wrap-layer"), without=("no-blocks",),
    ),
    fault(
        "memory:RootNotReleased", "zero3", "persistent",
        "the root stays gathered from one step to the next", "seen often",
        bugs.GATHERED_PARAMETERS_KEPT, spares=EVERY_STEP, features=("wrap-block",),
    ),
    fault(
        "memory:FrozenNotResharded", "zero3", "persistent",
        "what is frozen stays gathered", "PT #101982", bugs.GATHERED_PARAMETERS_KEPT,
        spares=EVERY_STEP, features=("frozen",),
    ),
    fault(
        "memory:CopyKept", "zero1", "persistent",
        "parameters are copied as master weights in the same dtype", "seen often",
        spares=EVERY_STEP,
    ),
    fault(
        "memory:AliveAfterClose", "zero1", "release",
        "a registry keeps the optimizer states of what was closed", "none known",
        bugs.ALIVE_AFTER_CLOSE, spares=EVERY_STEP,
    ),
    fault(
        "memory:CachedByParameter", "ddp", "release",
        "a cached function keeps the parameters that it was called with",
        "an lru_cache of DeepSpeed's stage 3", bugs.ALIVE_AFTER_CLOSE, spares=EVERY_STEP,
    ),
    fault(
        "window:CatBeforeFree", "zero3", "peak",
        "gradients are put together before they are freed", "FS #1186",
        bugs.COPIED_BEFORE_IT_IS_FREED, spares=EVERY_STEP, features=("wrap-block",),
    ),
    fault(
        "window:GatheredThenCopied", "zero3", "peak",
        "a unit is gathered into a buffer and copied to where it is used", "seen often",
        spares=EVERY_STEP, features=("wrap-block",),
    ),
    fault(
        "window:FreedAfterForward", "zero3", "peak",
        "units are released when the whole forward is over", "seen often",
        bugs.UNITS_NOT_FREED_BEFORE_THE_NEXT, spares=EVERY_STEP, features=("reshard", "wrap-layer"),
    ),
    fault(
        "window:FreedAfterBackward", "zero3", "peak",
        "units are released when the whole backward is over", "seen often",
        bugs.UNITS_NOT_FREED_BEFORE_THE_NEXT, spares=EVERY_STEP, features=("wrap-layer",),
    ),
    fault(
        "window:ReducedInOneGo", "zero3", "peak",
        "whole gradients stay until all reductions are over", "seen often",
        bugs.WHOLE_GRADIENTS_KEPT_WITHIN_THE_STEP, spares=EVERY_STEP, features=("wrap-layer",),
    ),
    fault(
        "window:BucketsInOneGo", "zero2", "peak",
        "buckets stay until all reductions are over", "seen often",
        bugs.WHOLE_GRADIENTS_KEPT_WITHIN_THE_STEP, spares=EVERY_STEP, features=("wrap-layer",),
    ),
]  # fmt: skip
