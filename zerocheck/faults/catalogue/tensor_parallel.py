"""Faults that only tensor parallelism shows."""

from __future__ import annotations

from .fault import fault

TENSOR_PARALLEL = [
    fault(
        "tensor_parallel:ReplicatedSummedOverTp", "fsdp2", "gradient",
        "gradients of what all ranks of the tp axis hold are summed over it", "seen often",
        "gradient x T", world=4, features=("tensor-parallel",),
    ),
    fault(
        "tensor_parallel:StridedTakenForPlain", "fsdp2", "publish",
        "what is cut and then sharded is read as sharded and then cut", "PT #129206",
        "pieces in the order of a plain shard", world=4, features=("tensor-parallel",),
        without=("tensor-parallel-alone",),
    ),
    fault(
        "tensor_parallel:BiasOnEveryRank", "fsdp2", "loss",
        "each rank adds the whole bias of a row-wise layer to its partial sum", "seen often",
        "bias of each tensor-parallel rank", world=2, features=("tensor-parallel",),
    ),
    fault(
        "tensor_parallel:DividedByAllRanks", "fsdp2", "gradient",
        "the mean is taken over all ranks, and not over the data-parallel ones", "seen often",
        "gradient / T", world=4, features=("tensor-parallel",),
    ),
]  # fmt: skip
