"""Faults that only SGD has, or shows."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

SGD = [
    fault(
        "sgd:SgdDecayTwice", "zero1", "update",
        "SGD adds weight decay to the gradient, and the trainer shrinks the parameter too",
        "seen often", bugs.WEIGHT_DECAY_TWICE,
        features=("momentum",),
    ),
    fault(
        "sgd:DecayDecoupled", "zero1", "update",
        "SGD decays as AdamW does, outside of the momentum", "seen often",
        bugs.DECOUPLED_INSTEAD_OF_L2,
        features=("momentum",),
    ),
    fault(
        "sgd:SgdDecayMissing", "zero1", "update",
        "SGD has no weight decay", "seen often", bugs.WEIGHT_DECAY_MISSING,
        features=("momentum",),
    ),
    fault(
        "sgd:NesterovDropped", "zero1", "update",
        "the form of Nesterov is left out", "none known", bugs.NESTEROV_LEFT_OUT,
        features=("nesterov",),
    ),
    fault(
        "sgd:NesterovUnasked", "zero1", "update",
        "the form of Nesterov is used unasked", "none known", bugs.NESTEROV_ADDED,
        features=("momentum",), without=("nesterov",),
    ),
    fault(
        "sgd:Dampening", "zero1", "update",
        "the momentum buffer is a moving average", "seen often", bugs.GRADIENT_DAMPENED,
        features=("momentum",),
    ),
    fault(
        "sgd:RateInTheMomentum", "zero1", "update",
        "the learning rate is in the momentum buffer", "seen often",
        bugs.LEARNING_RATE_IN_THE_MOMENTUM,
        features=("momentum",),
    ),
    fault(
        "sgd:MomentumIgnored", "zero1", "update",
        "the momentum buffer is kept and not used", "none known", bugs.MOMENTUM_LEFT_OUT,
        features=("momentum",),
    ),
    fault(
        "sgd:MomentumForgotten", "zero1", "update",
        "the momentum buffer is lost in each step", "seen often", bugs.MOMENTS_RESET,
        features=("momentum",),
    ),
    fault(
        "sgd:SumForTheOptimizer", "zero1", "update",
        "SGD is given the sum over ranks, and not the mean", "seen often", bugs.GRADIENT_TIMES_W,
        world=3,
        features=("momentum",),
    ),
    fault(
        "sgd:MomentumOfLocalGradients", "ddp", "update",
        "each rank has momentum of its own gradients", "none known", bugs.LOCAL_GRADIENT_ONLY,
        world=3,
        features=("momentum",), without=("clip",),
    ),
]  # fmt: skip

MOMENTUM_OF_CHECKPOINTS = [
    fault(
        "sgd:MomentumLost", "zero1", "roundtrip",
        "the momentum buffer is not restored", "seen often", bugs.MOMENTS_LOST,
        features=("momentum",),
    ),
    fault(
        "sgd:MomentumOfAnotherParameter", "zero1", "roundtrip",
        "momentum buffers change places between parameters", "none known", bugs.TENSORS_EXCHANGED,
        features=("momentum",),
    ),
]  # fmt: skip
