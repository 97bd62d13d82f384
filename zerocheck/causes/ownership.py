"""Causes of shards that do not tile the tensors."""

from __future__ import annotations

from .registry import cause

SHARDS_OVERLAP = cause(
    "shards overlap",
    of=("ownership",),
    says="elements belong to two ranks",
    shows="Elements belong to two ranks.",
    usual="The end of a shard is rounded up, and the next one starts before it.",
)
TWICE_ON_ONE_RANK = cause(
    "twice on one rank",
    of=("ownership",),
    says="one rank has the same elements twice",
    shows="One rank has the same elements twice.",
    usual="A tensor is in two groups or two buffers.",
)
SAME_SHARD_ON_EVERY_RANK = cause(
    "same shard on every rank",
    of=("ownership",),
    says="every rank holds the same part of each tensor, as if it were one and the same rank",
    shows="Every rank holds the same part of each tensor.",
    usual="The rank is taken from another group, or is 0 everywhere.",
)
SHARD_OF_THE_LOCAL_RANK = cause(
    "shard of the local rank",
    of=("ownership",),
    says="each rank holds what belongs to the rank whose number is its own on its host: the "
    "local rank was taken for the rank",
    shows="Each rank holds the shard of the rank whose number it has on its host.",
    usual="LOCAL_RANK is taken for RANK.",
)
REMAINDER_DROPPED = cause(
    "remainder dropped",
    of=("ownership",),
    says="of every tensor the last n mod W elements are left out",
    shows="The last n mod W elements of every tensor are held by no rank.",
    usual="The size of a shard is rounded down.",
)
RANK_LEFT_OUT = cause(
    "rank left out",
    of=("ownership",),
    says="what is missing belongs to a rank that shows nothing",
    shows="The missing elements belong to a rank that shows nothing.",
    usual="A rank's shard is not exposed or not made.",
)
PADDED_SHAPE = cause(
    "padded shape",
    of=("ownership",),
    says="dim 0 is rounded up to a multiple of W: the padding is counted",
    shows="Dim 0 is rounded up to a multiple of W.",
    usual="The padded shape is taken for that of the tensor.",
)
ANOTHER_SHAPE = cause(
    "another shape",
    of=("ownership",),
    tier=2,
    shows="A global shape is not that of the model.",
    usual="The shape of a shard or of a flat buffer is given for it.",
)
EMPTY_PARAMETER_LEFT_OUT = cause(
    "empty parameter left out",
    of=("ownership",),
    says="it has no elements, but it is a parameter",
    shows="A parameter without elements is missing.",
    usual="Parameters without elements are filtered out.",
)
PARAMETER_LEFT_OUT = cause(
    "parameter left out",
    of=("ownership",),
    says="no rank has it",
    shows="No rank has a parameter.",
    usual="It is in no unit or group.",
)
UNTIED = cause(
    "untied",
    of=("ownership",),
    says="it is an alias of a tied parameter, which has become a parameter of its own",
    shows="An alias of a tied parameter has become a parameter of its own.",
    usual="Tied weights are wrapped in different units.",
)
STATE_OF_A_FROZEN_PARAMETER = cause(
    "state of a frozen parameter",
    of=("ownership",),
    says="an optimizer has it",
    shows="An optimizer has state of a frozen parameter.",
    usual="All parameters of the flat buffer get state.",
)
UNKNOWN_NAME = cause(
    "unknown name",
    of=("ownership", "export"),
    shows="A tensor has a name that the model does not know.",
    usual="A prefix of a wrapper is left in the name.",
)
CUT_OVER_THE_REPLICATE_AXIS = cause(
    "cut over the replicate axis",
    of=("ownership",),
    says="ranks of one replica hold the same: it is sharded over the replicate axis, and "
    "replicated over the shard axis",
    shows="Tensors are cut over the replicate axis and replicated over the shard axis.",
    usual="The axes of the mesh are exchanged.",
)
CUT_OVER_ALL_RANKS = cause(
    "cut over all ranks",
    of=("ownership",),
    says="every rank holds other elements: it is sharded over all ranks, and not over the "
    "shard axis alone",
    shows="Tensors are cut over all ranks, and not over the shard axis alone.",
    usual="The default process group is used in place of that of the shard axis.",
)
REPLICAS_HOLD_OTHER_PARTS = cause(
    "replicas hold other parts",
    of=("ownership",),
    tier=2,
    shows="Replicas hold different parts of tensors.",
    usual="Each replica partitions in its own way.",
)
NOT_SHARDED = cause(
    "not sharded",
    of=("ownership",),
    shows="Every rank holds every tensor whole, though the placement is declared sharded.",
    usual="The wrapper fell back to plain data parallelism.",
)
LEFT_GATHERED = cause(
    "left gathered",
    of=("ownership",),
    shows="After a step every rank holds all parameters, though its optimizer has shards of them.",
    usual="Resharding after the backward is turned off, and not on again for the last microbatch.",
)
