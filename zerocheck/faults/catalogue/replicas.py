"""Faults that only a mesh of two axes shows."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

REPLICAS = [
    fault(
        "replicas:NotOverReplicas", "zero3", "gradient",
        "gradients are never reduced over the replicate axis", "PT #154888; verl #7493",
        bugs.NOT_REDUCED_OVER_REPLICAS, world=4, features=("two-axes",),
    ),
    fault(
        "replicas:NotOverReplicasWithAccumulation", "zero1", "gradient",
        "the reduction over replicas is put off while microbatches accumulate, and forgotten",
        "seen in review", bugs.NOT_REDUCED_OVER_REPLICAS, world=4, microbatches=2,
        features=("two-axes",),
    ),
    fault(
        "replicas:LastMicrobatchOverReplicas", "zero2", "gradient",
        "only the last microbatch is reduced over replicas", "PT #125484",
        bugs.LAST_MICROBATCH_ONLY_OVER_REPLICAS, world=4, microbatches=3, features=("two-axes",),
    ),
    fault(
        "replicas:DividedByShardsOnly", "fsdp2", "gradient",
        "the divide factor is the size of the shard axis alone", "PT #155903",
        bugs.GRADIENT_TIMES_R, world=4, features=("two-axes",),
    ),
    fault(
        "replicas:DividedByReplicasTwice", "zero3", "gradient",
        "the sum is divided by all ranks, and by the number of replicas again", "seen often",
        bugs.GRADIENT_OVER_R, world=4, features=("two-axes",),
    ),
    fault(
        "replicas:AxesExchanged", "zero1", "ownership",
        "the replicate axis is taken for the shard axis", "seen in review",
        bugs.CUT_OVER_THE_REPLICATE_AXIS, world=4, features=("two-axes",),
    ),
    fault(
        "replicas:CutOverAllRanks", "zero2", "ownership",
        "the model is cut over all ranks, as if the mesh had one axis", "FS #907",
        bugs.CUT_OVER_ALL_RANKS, world=4, features=("two-axes",),
    ),
    fault(
        "replicas:ReplicasStartApart", "zero3", "publish",
        "initial weights are not sent from one replica to the others", "PT #90465",
        bugs.COPIES_DIFFER, world=4, features=("two-axes",), without=("mid-training",),
    ),
    fault(
        "replicas:LastReplicaMissesAStep", "zero1", "publish",
        "one replica does not publish what it updated", "MG #3140; DS PR#7707",
        bugs.COPIES_OF_THE_PREVIOUS_STEP, world=4, features=("two-axes", "several-steps"),
    ),
    fault(
        "replicas:NormOverReplicas", "zero2", "clip",
        "the norm counts each replica", "PT #88621",
        bugs.NORM_TIMES_ROOT_R, world=4, features=("two-axes", "clip"), without=("clip-inf",),
    ),
]  # fmt: skip
