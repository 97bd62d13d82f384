"""Features of the data, the optimizer, the start, and how a step is taken."""

from __future__ import annotations

from ..schema import Case, OptimizerKind
from ..shapes import draws_random
from .row import Present, table


def _any_group(name: str, *values: float) -> Present:
    return lambda case: any(getattr(group, name) in values for group in case.optimizer.groups)


def _scaled_clip(case: Case) -> float:
    """Return the maximum norm over the loss factor; drawn models have norms of 0.1 to 10 of it."""
    return (case.training.clip or 0.0) / case.data.loss_factor


def _some_decay(case: Case) -> bool:
    decays = [group.weight_decay > 0 for group in case.optimizer.groups]
    return any(decays) and not all(decays)


DATA = table(
    ("batch-of-one", "one sample per microbatch", lambda c: c.data.batch == 1),
    ("length-of-one", "one position per sample", lambda c: c.data.length == 1),
    ("loss-tiny", "loss times 1e-4 or less", lambda c: c.data.loss_factor <= 1e-4),
    ("loss-huge", "loss times 1e3 or more", lambda c: c.data.loss_factor >= 1e3),
    (
        "masked",
        "another number of tokens in every microbatch",
        lambda c: c.data.masked and c.axes.data_parallel_size > 1,
    ),
    (
        "carried-rng",
        "dropout with random numbers that each rank carries on",
        lambda c: c.data.rng == "carried" and draws_random(c.model),
    ),
    (
        "past-wrapper",
        "a loss that calls the module past its wrapper too",
        lambda c: c.data.past_wrapper,
    ),
    dimension="data",
)


OPTIMIZER = table(
    ("groups", "several parameter groups", lambda c: len(c.optimizer.groups) > 1),
    ("some-decay", "groups with and without weight decay", _some_decay),
    ("no-decay", "a group without weight decay", _any_group("weight_decay", 0.0)),
    (
        "lr-large",
        "learning rate 1e-2 or more",
        lambda c: any(group.lr >= 1e-2 for group in c.optimizer.groups),
    ),
    (
        "lr-small",
        "learning rate 1e-4 or less",
        lambda c: any(group.lr <= 1e-4 for group in c.optimizer.groups),
    ),
    ("eps-1e-3", "eps 1e-3", _any_group("eps", 1e-3)),
    ("eps-1e-6", "eps 1e-6", _any_group("eps", 1e-6)),
    ("beta2-0.9999", "beta2 0.9999", _any_group("beta2", 0.9999)),
    ("beta2-0.95", "beta2 0.95", _any_group("beta2", 0.95)),
    ("amsgrad", "AMSGrad", lambda c: c.optimizer.amsgrad),
    ("sgd", "SGD in place of AdamW", lambda c: c.optimizer.kind == "sgd"),
    (
        "momentum",
        "SGD with momentum",
        lambda c: c.optimizer.kind == "sgd" and c.optimizer.momentum > 0,
    ),
    (
        "nesterov",
        "SGD in the form of Nesterov",
        lambda c: c.optimizer.kind == "sgd" and c.optimizer.nesterov,
    ),
    ("muon", "Muon for matrices", lambda c: c.optimizer.kind == "muon"),
    (
        "muon-plain",
        "Muon without the form of Nesterov",
        lambda c: c.optimizer.kind == "muon" and not c.optimizer.nesterov,
    ),
    (
        "muon-rms",
        "Muon with learning rates that match AdamW's",
        lambda c: c.optimizer.adjustment == "match_rms_adamw",
    ),
    (
        "muon-everywhere",
        "Muon for the matrices of stem and head too",
        lambda c: c.optimizer.kind == "muon" and not c.optimizer.fallback,
    ),
    (
        "other-optimizer",
        "another optimizer of torch",
        lambda c: c.optimizer.kind not in ("adamw", "sgd", "muon"),
    ),
    ("maximize", "maximize", lambda c: c.optimizer.maximize),
    ("schedule-warmup", "warm-up schedule", lambda c: c.optimizer.schedule == "warmup"),
    ("schedule-cosine", "cosine schedule", lambda c: c.optimizer.schedule == "cosine"),
    (
        "kernel-foreach",
        "foreach kernel of the optimizer",
        lambda c: c.optimizer.kernel == "foreach",
    ),
    (
        "kernel-for-loop",
        "for-loop kernel of the optimizer",
        lambda c: c.optimizer.kernel == "for-loop",
    ),
    ("kernel-fused", "fused kernel of the optimizer", lambda c: c.optimizer.kernel == "fused"),
    dimension="optimizer",
)


_OF_ADAM = ("other-optimizer", "eps-1e-3", "eps-1e-6", "beta2-0.9999", "beta2-0.95", "maximize")

OF_OPTIMIZERS: dict[OptimizerKind, tuple[str, ...]] = {
    "adamw": ("eps-1e-3", "eps-1e-6", "beta2-0.9999", "beta2-0.95", "amsgrad", "maximize"),
    "sgd": ("sgd", "momentum", "nesterov", "maximize"),
    "muon": (
        *("muon", "muon-plain", "muon-rms", "muon-everywhere"),
        *("eps-1e-3", "eps-1e-6", "beta2-0.9999", "beta2-0.95"),
    ),
    "adam": (*_OF_ADAM, "amsgrad"),
    "nadam": _OF_ADAM,
    "radam": _OF_ADAM,
    "adamax": _OF_ADAM,
    "adagrad": ("other-optimizer", "eps-1e-3", "eps-1e-6", "maximize"),
    "adadelta": _OF_ADAM,
    "rmsprop": _OF_ADAM,
    "rprop": ("other-optimizer", "maximize"),
    "asgd": ("other-optimizer", "maximize"),
    "adafactor": ("other-optimizer", "eps-1e-3", "eps-1e-6", "maximize"),
    "user": ("other-optimizer", "maximize"),
}
"""Features that cases with this optimizer have, and not those with every other."""


START = table(
    ("zeros", "parameters that start at 0", lambda c: bool(c.start.zeros)),
    ("mid-training", "start in mid-training", lambda c: c.start.step > 0),
    ("step-1", "start after step 1", lambda c: c.start.step == 1),
    ("step-2", "start after step 2", lambda c: c.start.step == 2),
    ("step-255", "start after step 255", lambda c: c.start.step == 255),
    ("step-256", "start after step 256", lambda c: c.start.step == 256),
    ("step-10000", "start after step 10000", lambda c: c.start.step == 10_000),
    (
        "moments-zero",
        "start in mid-training with moments 0",
        lambda c: c.start.step > 0 and c.start.moments == "zero",
    ),
    ("moments-typical", "start with typical moments", lambda c: c.start.moments == "typical"),
    ("moments-tiny", "start with tiny moments", lambda c: c.start.moments == "tiny"),
    ("moments-huge", "start with huge moments", lambda c: c.start.moments == "huge"),
    dimension="start",
)


TRAINING = table(
    ("single-step", "one step", lambda c: c.training.steps == 1),
    ("several-steps", "3 steps or more", lambda c: c.training.steps >= 3),
    ("microbatches", "several microbatches", lambda c: c.training.microbatches > 1),
    ("clip", "gradient clipping", lambda c: c.training.clip is not None),
    (
        "clip-inf",
        "clipping by the largest element",
        lambda c: c.training.clip is not None and c.training.norm == "inf",
    ),
    ("clip-tight", "maximum norm far below the gradient's", lambda c: 0 < _scaled_clip(c) <= 0.01),
    ("clip-loose", "maximum norm far above the gradient's", lambda c: _scaled_clip(c) >= 100),
    ("keep-gradients", "zero_grad(set_to_none=False)", lambda c: not c.training.set_to_none),
    ("unfreeze", "parameters unfrozen later", lambda c: c.training.unfreeze is not None),
    ("loss-scale", "dynamic loss scaling", lambda c: c.training.loss_scale is not None),
    ("overflow", "a step skipped for overflow", lambda c: c.training.overflow is not None),
    (
        "overflow-alone",
        "an overflow in one element of one gradient, on one rank",
        lambda c: c.training.overflow_in is not None,
    ),
    ("compute-bf16", "forward and backward in bf16", lambda c: c.precision.compute == "bf16"),
    ("compute-fp16", "forward and backward in fp16", lambda c: c.precision.compute == "fp16"),
    ("reduce-narrow", "gradients reduced in bf16 or fp16", lambda c: c.precision.reduce != "fp32"),
    (
        "reduce-narrower",
        "gradients of fp32 reduced in bf16 or fp16",
        lambda c: c.precision.compute == "fp32" and c.precision.reduce != "fp32",
    ),
    (
        "reduce-wide",
        "gradients of a narrow compute reduced in fp32",
        lambda c: c.precision.compute != "fp32" and c.precision.reduce == "fp32",
    ),
    ("compile", "a model that torch.compile compiles", lambda c: c.training.compile != "none"),
    (
        "compile-aot",
        "a model compiled through AOTAutograd",
        lambda c: c.training.compile in ("aot_eager", "inductor"),
    ),
    (
        "compile-inductor",
        "a model compiled by inductor",
        lambda c: c.training.compile == "inductor",
    ),
    dimension="training",
)
