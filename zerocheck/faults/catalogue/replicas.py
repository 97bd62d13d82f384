"""Faults that only a mesh of two axes shows."""

from __future__ import annotations

from .fault import fault

REPLICAS = [
    fault(
        "replicas:NotOverReplicas", "zero3", "gradient",
        "gradients are never reduced over the replicate axis", "PT #154888; verl #7493",
        "not reduced over replicas", world=4, features=("two-axes",),
    ),
    fault(
        "replicas:NotOverReplicasWithAccumulation", "zero1", "gradient",
        "the reduction over replicas is put off while microbatches accumulate, and forgotten",
        "seen in review", "not reduced over replicas", world=4, microbatches=2,
        features=("two-axes",),
    ),
    fault(
        "replicas:LastMicrobatchOverReplicas", "zero2", "gradient",
        "only the last microbatch is reduced over replicas", "PT #125484",
        "last microbatch only over replicas", world=4, microbatches=3, features=("two-axes",),
    ),
    fault(
        "replicas:DividedByShardsOnly", "fsdp2", "gradient",
        "the divide factor is the size of the shard axis alone", "PT #155903",
        "gradient x R", world=4, features=("two-axes",),
    ),
    fault(
        "replicas:DividedByReplicasTwice", "zero3", "gradient",
        "the sum is divided by all ranks, and by the number of replicas again", "seen often",
        "gradient / R", world=4, features=("two-axes",),
    ),
    fault(
        "replicas:AxesExchanged", "zero1", "ownership",
        "the replicate axis is taken for the shard axis", "seen in review",
        "cut over the replicate axis", world=4, features=("two-axes",),
    ),
    fault(
        "replicas:CutOverAllRanks", "zero2", "ownership",
        "the model is cut over all ranks, as if the mesh had one axis", "FS #907",
        "cut over all ranks", world=4, features=("two-axes",),
    ),
    fault(
        "replicas:ReplicasStartApart", "zero3", "publish",
        "initial weights are not sent from one replica to the others", "PT #90465",
        "copies differ", world=4, features=("two-axes",), without=("mid-training",),
    ),
    fault(
        "replicas:LastReplicaMissesAStep", "zero1", "publish",
        "one replica does not publish what it updated", "MG #3140; DS PR#7707",
        "copies of the previous step", world=4, features=("two-axes", "several-steps"),
    ),
    fault(
        "replicas:NormOverReplicas", "zero2", "clip",
        "the norm counts each replica", "PT #88621",
        "norm x sqrt(R)", world=4, features=("two-axes", "clip"), without=("clip-inf",),
    ),
]  # fmt: skip
