"""Causes of a gradient reduced over other ranks, or with misplaced elements."""

from __future__ import annotations

from . import gradient
from .registry import cause, family, registered, texts

_NAMES = ("pp", "replicate", "shard", "ep", "cp", "tp", "axis")
"""Axes of a drawn case, and any other one."""

GRADIENT_TIMES_AXIS = family(
    "gradient x {axis}",
    of=("gradient",),
    shows="The gradient is as many times too large as an axis of the mesh has ranks.",
    usual="What the ranks of that axis add up is not divided by their number, or is divided by the "
    "size of another axis.",
    attributed=r"every (local gradient|loss) counts \S+ times \((.* = )?(R|S|T|cp|ep|pp) = "
    "|sum .* not divided",
    axis=_NAMES,
)
GRADIENT_OVER_AXIS = family(
    "gradient / {axis}",
    of=("gradient",),
    shows="The gradient is as many times too small as an axis of the mesh has ranks.",
    usual="It is divided by the size of that axis twice, or as if its ranks read samples of their "
    "own.",
    attributed=r"every (local gradient|loss) counts \S+ times \((.* = )?1/(R|S|T|cp|ep|pp) = ",
    axis=_NAMES,
)
OF_AXES = (GRADIENT_TIMES_AXIS, GRADIENT_OVER_AXIS)
_TEMPLATES = {one.template for one in OF_AXES}
_ALIKE = {
    gradient.GRADIENT_TIMES_W,
    gradient.GRADIENT_OVER_W,
    gradient.GRADIENT_TIMES_ROOT_W,
    gradient.GRADIENT_OVER_ROOT_W,
    gradient.GRADIENT_TIMES_GA,
    gradient.GRADIENT_OVER_GA,
    gradient.GRADIENT_TIMES_W_TIMES_GA,
    gradient.GRADIENT_DOUBLED,
}
FACTORS = texts(one for one in registered() if one.text in _TEMPLATES | _ALIKE)
"""Causes of a gradient that is off by one factor, and so is "gradient scaled"."""
NOT_REDUCED_OVER_REPLICAS = cause(
    "not reduced over replicas",
    of=("gradient",),
    shows="Each replica has a gradient of its own.",
    usual="The reduction over the replicate axis is missing.",
    attributed=r"over the shard axis alone|own gradient alone, counted",
)
NOT_REDUCED_OVER_AN_AXIS = cause(
    "not reduced over an axis",
    of=("gradient",),
    shows="The gradients of the ranks along one axis of the mesh, added up or averaged, are right.",
    usual="What an axis replicates (norms under tensor parallelism, a router, all parameters under "
    "context parallelism) is reduced over the other axes only.",
)
NOT_REDUCED_OVER_SHARDS = cause(
    "not reduced over shards",
    of=("gradient",),
    shows="Each rank has the sum over its replicas alone.",
    usual="The reduction over the shard axis is missing.",
    attributed=r"over the replicate axis alone|own gradient alone, counted",
)
LAST_MICROBATCH_ONLY_OVER_REPLICAS = cause(
    "last microbatch only over replicas",
    of=("gradient",),
    shows="Only the last microbatch is reduced over the replicate axis.",
    usual="Earlier microbatches are reduced within the replica, and never sent to the others.",
    attributed=r"only microbatch.* is reduced|shard axis alone|gradient alone, counted",
)
DIVIDED_BY_THE_RANKS_OF_A_HOST = cause(
    "divided by the ranks of a host",
    of=("gradient",),
    shows="The sum over ranks is divided by the number of ranks on a host.",
    usual="LOCAL_WORLD_SIZE is taken for WORLD_SIZE.",
    attributed=r"/ranks of a host = |W = |times( \(.*\))? on ranks? .* times( \(.*\))? on ranks?",
)
REDUCED_WITHIN_EACH_HOST = cause(
    "reduced within each host",
    of=("gradient",),
    shows="Each host reduces the gradients of its own ranks.",
    usual="The process group has the ranks of one host.",
    attributed=r"reduced apart|own gradient alone, counted",
)
RANK_COUNTED_TWICE = cause(
    "rank counted twice",
    of=("gradient",),
    shows="The gradient of one rank is in the sum twice.",
    usual="A ring or tree reduction adds its first part again.",
    attributed=r"the local gradient of rank \d+ counts [24] times",
)
AVERAGED_OVER_USERS = cause(
    "averaged over users",
    of=("gradient",),
    shows="The mean is over the ranks that used the parameter, and not over all.",
    usual="The divisor counts the gradients that arrived.",
    attributed=r"every local gradient counts \S+ times",
)
REDUCED_IN_SMALLER_GROUPS = cause(
    "reduced in smaller groups",
    of=("gradient",),
    shows="Neighbouring ranks are reduced apart from the others.",
    usual="A process group is split into parts, and they are never joined.",
    attributed=r"reduced apart|own gradient alone, counted|axis alone",
)
RANKS_LEFT_OUT = cause(
    "ranks left out",
    of=("gradient",),
    tier=3,
    shows="Local gradients of some ranks are missing from the sum.",
    usual="A rank skips the collective, or contributes zeros where it has no gradient.",
    attributed=r"ranks? [\d, and]+( to \d+)? counts 0 times",
)
PART_NOT_REDUCED = cause(
    "part not reduced",
    of=("gradient",),
    tier=3,
    shows="Some elements are each rank's own, the others are reduced.",
    usual="A part of a bucket is outside of the collective.",
    attributed=r"\] is the rank's own gradient",
)
REDUCTION_NOT_WAITED_FOR = cause(
    "reduction not waited for",
    of=("gradient",),
    tier=3,
    shows="Some elements are from before the reduction, others from after it.",
    usual="The result of an asynchronous collective is read before it is waited for.",
    attributed=r"own gradient|each rank's own|not divided|gradient of the step before",
)
SHARDS_EXCHANGED = cause(
    "shards exchanged",
    of=("gradient", "loss"),
    shows="The shards of two ranks changed places.",
    usual="Ranks and offsets are in different orders.",
    attributed=r"holds the shard that rank|holds \S+\[\d+:\d+\]",
)
SHARD_OF_ANOTHER_RANK = cause(
    "shard of another rank",
    of=("gradient", "loss"),
    shows="Each rank has the shard of another one.",
    usual="An offset is computed from the wrong rank.",
    attributed=r"holds the shard that|holds \S+\[\d+:\d+\]",
)
SHIFTED = cause(
    "shifted",
    of=("gradient",),
    tier=2,
    shows="Elements stand some places away from their own in the flat buffer.",
    usual="An offset or a padding is wrong from one tensor on.",
    attributed=r"elements stand 1 place (later|earlier)",
)
TAIL_LEFT_OUT = cause(
    "tail left out",
    of=("gradient",),
    shows="The last elements of tensors are 0.",
    usual="They are taken for padding.",
    attributed=r"\d\] is 0|elements are 0",
)
REDUCED_TWICE = cause(
    "reduced twice",
    of=("gradient", "communication"),
    shows="What is reduced already is reduced over ranks again.",
    usual="A hook reduces a bucket, and the end of the step does so again.",
    attributed=r"the sum of all ranks' shards|counts \S+ times",
)
OFFSET_NOT_MOVED = cause(
    "offset not moved",
    of=("gradient",),
    shows="Tensors after one without a gradient stand too far ahead in the flat buffer.",
    usual="The offset is moved only by parameters that have a gradient.",
    attributed=r"elements stand \d+ places? (later|earlier)|holds \S+\[",
)
LEFT_OUT_AFTER_AN_UNUSED_ONE = cause(
    "left out after an unused one",
    of=("gradient",),
    shows="Tensors that follow one without a gradient are 0 on that rank.",
    usual="The loop that packs the buffer ends at the first missing gradient.",
    attributed=r"it is 0: no local gradient|counts? 0 times",
)
