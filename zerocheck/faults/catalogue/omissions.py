"""Faults that leave something out, or do not restore a state."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

LEFT_OUT = [
    fault(
        "omissions:HooksLostOnMove", "ddp", "gradient",
        "a layer gets new parameters after DDP was made", "PT #104336", bugs.LOCAL_GRADIENT_ONLY,
        world=3, without=("tied", "frozen", "sometimes-used"),
    ),
    fault(
        "omissions:BucketsRecreated", "zero1", "update",
        "only the last bucket is updated", "MG 9a8420c90a", bugs.NEVER_UPDATED,
        features=("bucket-small",), without=("frozen", "unused"),
    ),
    fault(
        "omissions:ReusedModuleOverwrites", "zero1", "gradient",
        "of a module called twice the gradient of one call counts", "FS #780",
        # A GRU takes another kernel where its parameters do not learn: its loss differs first.
        features=("module-twice",), without=("frozen", "checkpoint", "block-recurrent"),
    ),
    fault(
        "omissions:LastTouchedOnly", "zero1", "gradient",
        "what the last microbatch did not use is not reduced", "PT #124193",
        features=("sometimes-used", "microbatches"), microbatches=2,
    ),
    fault(
        "omissions:TiedBeforeSync", "zero1", "gradient",
        "a tied weight is reduced before its gradients are added", "MG #844",
        features=("tied",), without=("frozen",),
    ),
    fault(
        "gradient:ExtraParallelDivisor", "zero1", "gradient",
        "gradients are divided by the size of another axis", "DS PR#5555", bugs.GRADIENT_SCALED,
        world=3,
    ),
    fault(
        "gradient:OwnershipUntested", "zero1", "gradient",
        "what a rank does not own is copied over what it owns", "DS PR#1841",
    ),
    fault(
        "accumulation:AccumulateGated", "zero1", "gradient",
        "accumulation depends on a setting that is not in step", "DS PR#7981",
        bugs.LAST_MICROBATCH_ONLY, microbatches=3,
    ),
    fault(
        "accumulation:ClearedTooEarly", "zero1", "gradient",
        "gradients of other buckets are cleared before they are reduced", "DS PR#1273",
        bugs.GRADIENT_ZERO, features=("bucket-small",),
    ),
    fault(
        "clipping:NormInHalf", "zero1", "clip",
        "the norm is computed in half precision", "FS #263", features=("clip-tight",),
    ),
]  # fmt: skip

RESTORING = [
    fault(
        "restoring:StepLostOnLoad", "zero1", "publish",
        "the step count begins anew", "DS PR#564, #5263", bugs.INITIAL_STATE,
        features=("mid-training",),
    ),
    fault(
        "restoring:NoGatherAfterLoad", "zero1", "publish",
        "loaded parameters are not sent to the other ranks", "MG #6920", bugs.COPIES_DIFFER,
        features=("mid-training",),
    ),
    fault(
        "restoring:StateStaleAfterLoad", "zero1", "publish",
        "the state is loaded into another optimizer than the one that steps", "MG #761",
        bugs.INITIAL_STATE, features=("mid-training", "moments-typical"),
    ),
]  # fmt: skip
