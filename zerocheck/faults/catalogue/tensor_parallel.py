"""Faults that only tensor parallelism shows."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

TENSOR_PARALLEL = [
    fault(
        "tensor_parallel:ReplicatedSummedOverTp", "fsdp2", "gradient",
        "gradients of what all ranks of the tp axis hold are summed over it", "seen often",
        bugs.GRADIENT_TIMES_T, world=4, features=("tensor-parallel",),
    ),
    fault(
        "tensor_parallel:StridedTakenForPlain", "fsdp2", "publish",
        "what is cut and then sharded is read as sharded and then cut", "PT #129206",
        bugs.PIECES_IN_THE_ORDER_OF_A_PLAIN_SHARD, world=4, features=("tensor-parallel",),
        without=("tensor-parallel-alone",),
    ),
    fault(
        "tensor_parallel:BiasOnEveryRank", "fsdp2", "loss",
        "each rank adds the whole bias of a row-wise layer to its partial sum", "seen often",
        bugs.BIAS_OF_EACH_TENSOR_PARALLEL_RANK, world=2, features=("tensor-parallel",),
    ),
    fault(
        "tensor_parallel:DividedByAllRanks", "fsdp2", "gradient",
        "the mean is taken over all ranks, and not over the data-parallel ones", "seen often",
        bugs.GRADIENT_OVER_T, world=4, features=("tensor-parallel",),
    ),
]  # fmt: skip
