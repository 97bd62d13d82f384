"""Faults of memory: the numbers are right, and only what is measured shows them."""

from __future__ import annotations

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
        "optimizer state replicated", spares=EVERY_STEP,
    ),
    fault(
        "memory:GradientsNotReleased", "zero2", "persistent",
        "whole gradients stay after they were reduced", "seen often",
        "whole gradients kept", spares=EVERY_STEP,
    ),
    fault(
        "memory:NotResharded", "zero3", "persistent",
        "units stay gathered after the forward", "seen often", "gathered parameters kept",
        spares=EVERY_STEP, features=("reshard", "wrap-layer"), without=("no-blocks",),
    ),
    fault(
        "memory:RootNotReleased", "zero3", "persistent",
        "the root stays gathered from one step to the next", "seen often",
        "gathered parameters kept", spares=EVERY_STEP, features=("wrap-block",),
    ),
    fault(
        "memory:FrozenNotResharded", "zero3", "persistent",
        "what is frozen stays gathered", "PT #101982", "gathered parameters kept",
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
        "alive after close", spares=EVERY_STEP,
    ),
    fault(
        "memory:CachedByParameter", "ddp", "release",
        "a cached function keeps the parameters that it was called with",
        "an lru_cache of DeepSpeed's stage 3", "alive after close", spares=EVERY_STEP,
    ),
]  # fmt: skip
