"""Causes of a wrong gradient norm, or of a wrongly clipped gradient."""

from __future__ import annotations

from .registry import cause

NORM_TIMES_ROOT_R = cause(
    "norm x sqrt(R)",
    of=("clip",),
    says="it is sqrt({replicas}) times too large: each of the {replicas} replicas was counted",
    shows="The norm is sqrt(R) times too large on R replicas.",
    usual="The squares of every replica are summed.",
)
NORM_TIMES_ROOT_W = cause(
    "norm x sqrt(W)",
    of=("clip",),
    says="it is sqrt({world}) times too large: what ranks hold alike was counted once for "
    "each of the {world} ranks",
    shows="The norm is sqrt(W) times too large.",
    usual="Squares of gradients that all ranks hold alike are summed over ranks.",
)
NORM_OVER_ROOT_W = cause(
    "norm / sqrt(W)",
    of=("clip",),
    shows="The norm is sqrt(W) times too small.",
    usual="Squares are averaged over ranks and not summed.",
)
NORM_TIMES_W = cause(
    "norm x W",
    of=("clip",),
    shows="The norm is W times too large.",
    usual="Norms of what all ranks hold alike are added up.",
)
LOCAL_NORM = cause(
    "local norm",
    of=("clip",),
    says="it is the norm of {part} alone",
    shows="The norm is that of the rank's own shard, or of the ranks at one place along an axis.",
    usual="The norm is not reduced over ranks.",
)
SUM_OF_LOCAL_NORMS = cause(
    "sum of local norms",
    of=("clip",),
    says="it is the sum of the norms of {parts}, not the root of the sum of their squares",
    shows="The norm is the sum of the norms of the shards.",
    usual="Norms are summed in place of their squares.",
)
MEAN_OF_LOCAL_NORMS = cause(
    "mean of local norms",
    of=("clip",),
    says="it is the mean of the norms of {parts}",
    shows="The norm is the mean of the norms of the shards.",
    usual="A logger's average is used as the norm.",
)
LARGEST_LOCAL_NORM = cause(
    "largest local norm",
    of=("clip",),
    says="it is the largest of the norms of {parts}",
    shows="The norm is the largest one of a shard.",
    usual="The reduction for the infinity norm is used for every norm.",
)
COPIES_IN_THE_NORM = cause(
    "copies in the norm",
    of=("clip",),
    says="what {several} hold alike is counted once for each of them",
    shows="The norm counts the gradients that several ranks hold alike once for each rank.",
    usual="Squares are summed over all ranks, though some parameters are replicated over one axis, "
    "such as norms under tensor parallelism.",
)
ANOTHER_NORM = cause(
    "another norm",
    of=("clip",),
    says="it is the norm for another p",
    shows="The norm is that for another p.",
    usual="The order of the norm is not passed on.",
)
NORM_WITHOUT_ROOT = cause(
    "norm without root",
    of=("clip",),
    shows="The norm is the sum of the squares.",
    usual="The root is not taken.",
)
NORM_OF_NOTHING = cause(
    "norm of nothing",
    of=("clip",),
    says="no gradient was read",
    shows="The norm is 0.",
    usual="Gradients are read from an attribute that does not exist, and none is found.",
)
NORM_OF_ONE_DTYPE = cause(
    "norm of one dtype",
    of=("clip",),
    says="it is the norm of the gradients of one dtype, the others are left out",
    shows="The norm leaves out the gradients of all dtypes but one.",
    usual="Gradients are grouped by dtype, and one group is used.",
)
NORM_BEFORE_UNSCALING = cause(
    "norm before unscaling",
    of=("clip",),
    says="it is that of the gradient before it was divided by the loss scale",
    shows="The norm is larger by the loss scale.",
    usual="The gradient is clipped before the loss scale is divided out.",
)
NORM_OF_ANOTHER_STEP = cause(
    "norm of another step",
    of=("clip",),
    says="it is the norm of the step before",
    shows="The norm is that of an earlier step.",
    usual="It is cached, or a buffer of it is not cleared.",
)
NORM_WITHOUT_SOME_PARAMETERS = cause(
    "norm without some parameters",
    of=("clip",),
    tier=2,
    shows="The norm is that of all parameters but one, a module or some modules of a list.",
    usual="Only parameters that were used in this step are counted, though others have a "
    "gradient too.",
)
NOT_CLIPPED = cause(
    "not clipped",
    of=("clip",),
    shows="The gradient is what it was before clipping.",
    usual="Clipping is off by a flag, or clips a copy.",
)
COEFFICIENT_ABOVE_1 = cause(
    "coefficient above 1",
    of=("clip",),
    shows="A small gradient was scaled up to the maximum norm.",
    usual="The coefficient is not bounded by 1.",
)
CLIPPED_TWICE = cause(
    "clipped twice",
    of=("clip",),
    shows="The gradient was multiplied by the coefficient twice.",
    usual="The library and the trainer both clip.",
)
COEFFICIENT_INVERTED = cause(
    "coefficient inverted",
    of=("clip",),
    shows="The gradient was multiplied by the inverse of the coefficient.",
    usual="Norm and maximum changed places.",
)
CHANGED_AFTER_CLIPPING = cause(
    "changed after clipping",
    of=("clip",),
    shows="The optimizer is given another gradient than the clipped one, in a step that `attach` "
    "checks.",
    usual="Code between clipping and the optimizer's step scales the gradient, or adds to it.",
)
CLIPPED_BEFORE_UNSCALING = cause(
    "clipped before unscaling",
    of=("clip",),
    shows="The clipped gradient is divided by the loss scale afterwards, in a step that `attach` "
    "checks.",
    usual="scaler.unscale_(optimizer) is not called before the gradient is clipped.",
)
CLIPPED_IN_PARTS = cause(
    "clipped in parts",
    of=("clip",),
    shows="Sets of parameters are clipped apart, each by its own norm.",
    usual="Each optimizer, mesh, or dtype clips its own parameters.",
)
CLIPPED_BY_THE_LOCAL_NORM = cause(
    "clipped by the local norm",
    of=("clip",),
    shows="The gradient was multiplied by the coefficient of the rank's own norm.",
    usual="The total norm is reported, and the local one is used.",
)
