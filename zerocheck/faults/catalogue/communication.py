"""Faults in communication. The numbers are right, so that only `communication` detects them."""

from __future__ import annotations

from .fault import fault

COMMUNICATION = [
    fault(
        "communication:OneCollectivePerParameter", "ddp", "communication",
        "buckets count as full from the first parameter on", "DS #7418",
        "one collective per parameter", features=("find-unused",),
        without=("bucket-small", "parameter-empty", "static-graph"),
    ),
    fault(
        "communication:AllReduceForReduceScatter", "zero2", "communication",
        "buckets are all-reduced, and all but the own shard is thrown away", "DS #4946",
        "all_reduce in place of reduce_scatter",
    ),
    fault(
        "communication:AllReduceForReduceScatterOfUnits", "zero3", "communication",
        "units are all-reduced, and all but the own shard is thrown away", "DS #4946",
        "all_reduce in place of reduce_scatter",
    ),
    fault(
        "communication:GatheredTwice", "zero2", "communication",
        "updated parameters are gathered twice", "seen often", "gathered twice",
    ),
    fault(
        "communication:ReducedWithEachMicrobatch", "zero1", "communication",
        "gradients are reduced with each microbatch, not with the last one", "seen often",
        "reduced with each microbatch", microbatches=2,
    ),
    fault(
        "communication:SentInFp32", "zero1", "communication",
        "gradients in bf16 are sent in fp32", "seen often", "sent in float32",
        features=("mixed-dtypes",),
    ),
    fault(
        "communication:BarrierInEachStep", "zero2", "communication",
        "ranks wait for each other at the end of each step", "seen often", "called once more",
    ),
]  # fmt: skip
