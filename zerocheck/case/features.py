"""Every dimension of a case as named features: the rows of the coverage table, and --feature."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import prod

from ..errors import unknown
from .hosts import counts
from .schema import Block, Case, Leg
from .shapes import (
    call_order,
    draws_random,
    empties,
    frozen_names,
    parameter_shapes,
    scalars,
    sometimes_used,
    trainable,
    transposed,
    uncalled,
)

Present = Callable[[Case], bool]


@dataclass(frozen=True)
class Feature:
    """A property of cases: `present(case)`. Features of one dimension stand together.

    field: the field of `case.sharding` that it tells of, which an implementation may ignore.
    """

    name: str
    title: str
    dimension: str
    present: Present
    field: str | None = None


def features(case: Case) -> tuple[str, ...]:
    """Names of the features that the case has, in the order of the table."""
    return tuple(name for name, feature in FEATURES.items() if feature.present(case))


def found_by_looking(name: str) -> bool:
    """Whether a feature of the user's own model is written down when it is looked at.

    Others of models follow from its parameters.
    """
    return FEATURES[name].dimension == "model" and name not in _OF_PARAMETERS


def feature(name: str) -> Feature:
    """The feature of that name. Raises UsageError with the nearest one."""
    if name not in FEATURES:
        raise unknown("feature", name, FEATURES)
    return FEATURES[name]


def _any_block(present: Callable[[Block], bool]) -> Present:
    return lambda case: any(present(block) for block in case.model.blocks)


def _any_group(name: str, *values: float) -> Present:
    return lambda case: any(getattr(group, name) in values for group in case.optimizer.groups)


def _lengths(case: Case) -> list[int]:
    """Size of the first dim of each trainable parameter with elements, the one that is sharded."""
    shapes = parameter_shapes(case.model)
    return [shapes[name][0] for name in trainable(case.model) if shapes[name] and all(shapes[name])]


def _uneven_total(case: Case) -> bool:
    shapes = parameter_shapes(case.model)
    return sum(prod(shapes[name]) for name in trainable(case.model)) % case.world_size != 0


def _scaled_clip(case: Case) -> float:
    """Maximum norm in units of the loss; gradients of drawn models are at 0.1 to 10 of it."""
    return (case.training.clip or 0.0) / case.data.loss_factor


def _damaged(case: Case, kind: str) -> bool:
    return any(leg.damage == kind for leg in case.resume)


def _sizes(case: Case) -> list[tuple[int, int]]:
    """World sizes that save and load each checkpoint."""
    sizes = [case.world_size, *(prod(leg.mesh) for leg in case.resume)]
    return list(pairwise(sizes))


def _on_hosts(case: Case) -> tuple[int, ...]:
    """Ranks on each host."""
    return counts(case.hosts, case.world_size)


def _twice(case: Case) -> bool:
    calls = call_order(case.model)
    return len(set(calls)) < len(calls)


def _some_decay(case: Case) -> bool:
    decays = [group.weight_decay > 0 for group in case.optimizer.groups]
    return any(decays) and not all(decays)


def _table(
    *rows: tuple[str, str, Present] | tuple[str, str, Present, str], dimension: str
) -> list[Feature]:
    return [Feature(row[0], row[1], dimension, *row[2:]) for row in rows]


_WORLD = _table(
    ("world-1", "one rank", lambda c: c.world_size == 1),
    ("world-2", "2 ranks", lambda c: c.world_size == 2),
    ("world-3", "3 ranks", lambda c: c.world_size == 3),
    ("world-4", "4 ranks", lambda c: c.world_size == 4),
    ("world-5-8", "5 to 8 ranks", lambda c: 5 <= c.world_size <= 8),
    ("world-9-up", "9 ranks or more", lambda c: c.world_size >= 9),
    (
        "dims-below-world",
        "a parameter with a first dim smaller than the world",
        lambda c: min(_lengths(c), default=c.world_size) < c.world_size,
    ),
    (
        "uneven",
        "a parameter whose first dim the world does not divide",
        lambda c: any(length % c.world_size for length in _lengths(c)),
    ),
    ("uneven-total", "the world does not divide the number of elements", _uneven_total),
    ("hosts", "several hosts", lambda c: len(_on_hosts(c)) > 1),
    (
        "hosts-uneven",
        "hosts with different numbers of ranks",
        lambda c: len(set(_on_hosts(c))) > 1,
    ),
    dimension="world",
)

_MODEL = _table(
    ("stem-dense", "linear stem", lambda c: c.model.stem == "dense"),
    ("stem-conv", "convolution stem", lambda c: c.model.stem == "conv"),
    ("stem-embedding", "embedding stem", lambda c: c.model.stem == "embedding"),
    ("no-blocks", "stem and head only", lambda c: not c.model.blocks),
    ("block-mlp", "MLP block", _any_block(lambda b: b.kind == "mlp")),
    ("block-attention", "attention block", _any_block(lambda b: b.kind == "attention")),
    ("block-conv", "convolution block", _any_block(lambda b: b.kind == "conv")),
    ("block-recurrent", "GRU block", _any_block(lambda b: b.kind == "recurrent")),
    (
        "block-experts",
        "mixture of experts with routing by token",
        _any_block(lambda b: b.kind == "experts"),
    ),
    ("block-layer-norm", "layer norm", _any_block(lambda b: b.kind == "layer_norm")),
    ("block-rms-norm", "RMS norm", _any_block(lambda b: b.kind == "rms_norm")),
    ("block-group-norm", "group norm", _any_block(lambda b: b.kind == "group_norm")),
    ("block-batch-norm", "batch norm with buffers", _any_block(lambda b: b.kind == "batch_norm")),
    (
        "relu",
        "ReLU, gradients of exactly 0",
        _any_block(lambda b: b.kind in ("mlp", "experts") and b.activation == "relu"),
    ),
    (
        "heads",
        "several attention heads",
        _any_block(lambda b: b.kind == "attention" and b.heads > 1),
    ),
    ("no-bias", "a block without bias", _any_block(lambda b: not b.bias)),
    ("residual", "residual connection", _any_block(lambda b: b.residual)),
    ("dropout", "dropout", _any_block(lambda b: b.dropout > 0)),
    ("head-without-bias", "head without bias", lambda c: not c.model.head_bias),
    ("tied", "head tied to the embedding", lambda c: c.model.tied),
    ("padding-idx", "embedding with a padding row", lambda c: c.model.padding_idx is not None),
    ("module-twice", "a module used twice", _twice),
    ("mixed-dtypes", "a block with bf16 parameters", _any_block(lambda b: b.dtype == "bf16")),
    ("unused", "parameters that no forward uses", lambda c: bool(uncalled(c.model))),
    (
        "sometimes-used",
        "parameters that some ranks use and others do not",
        lambda c: bool(sometimes_used(c.model)),
    ),
    ("side", "an input that only some microbatches have", lambda c: c.model.side),
    ("frozen", "frozen parameters", lambda c: bool(frozen_names(c.model))),
    ("checkpoint", "activation checkpointing", _any_block(lambda b: b.checkpoint)),
    (
        "checkpoint-dropout",
        "dropout inside a checkpoint",
        _any_block(lambda b: b.checkpoint and b.dropout > 0),
    ),
    ("parameter-0d", "a 0-d parameter", lambda c: bool(scalars(c.model))),
    ("parameter-empty", "parameters without elements", lambda c: bool(empties(c.model))),
    ("transposed", "matrices stored transposed", lambda c: bool(transposed(c.model))),
    dimension="model",
)

_OF_PARAMETERS = frozenset(
    ("unused", "sometimes-used", "frozen", "parameter-0d", "parameter-empty", "transposed")
)
"""Features of models that follow from names, shapes and uses of parameters."""


def _or_of_user(row: Feature) -> Feature:
    """The same; of the user's own model, whether it was found when that was looked at."""

    def present(case: Case) -> bool:
        user = case.model.user
        return row.present(case) if user is None else row.name in user.features

    return row if row.name in _OF_PARAMETERS else replace(row, present=present)


_MODEL = [_or_of_user(row) for row in _MODEL]

_DATA = _table(
    ("batch-of-one", "one sample per microbatch", lambda c: c.data.batch == 1),
    ("length-of-one", "one position per sample", lambda c: c.data.length == 1),
    ("loss-tiny", "loss times 1e-4 or less", lambda c: c.data.loss_factor <= 1e-4),
    ("loss-huge", "loss times 1e3 or more", lambda c: c.data.loss_factor >= 1e3),
    ("masked", "another number of tokens in every microbatch", lambda c: c.data.masked),
    (
        "carried-rng",
        "dropout with random numbers that each rank carries on",
        lambda c: c.data.rng == "carried" and draws_random(c.model),
    ),
    dimension="data",
)

_OPTIMIZER = _table(
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
    ("maximize", "maximize", lambda c: c.optimizer.maximize),
    ("schedule-warmup", "warm-up schedule", lambda c: c.optimizer.schedule == "warmup"),
    ("schedule-cosine", "cosine schedule", lambda c: c.optimizer.schedule == "cosine"),
    ("kernel-foreach", "foreach AdamW", lambda c: c.optimizer.kernel == "foreach"),
    ("kernel-for-loop", "for-loop AdamW", lambda c: c.optimizer.kernel == "for-loop"),
    ("kernel-fused", "fused AdamW", lambda c: c.optimizer.kernel == "fused"),
    dimension="optimizer",
)

_START = _table(
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

_TRAINING = _table(
    ("single-step", "one step", lambda c: c.training.steps == 1),
    ("several-steps", "3 steps or more", lambda c: c.training.steps >= 3),
    ("microbatches", "several microbatches", lambda c: c.training.microbatches > 1),
    ("clip", "gradient clipping", lambda c: c.training.clip is not None),
    (
        "clip-inf",
        "clipping by the largest element",
        lambda c: c.training.clip is not None and c.training.norm == "inf",
    ),
    (
        "clip-tight",
        "maximum norm far below the gradient's",
        lambda c: 0 < _scaled_clip(c) <= 0.01,
    ),
    ("clip-loose", "maximum norm far above the gradient's", lambda c: _scaled_clip(c) >= 100),
    ("keep-gradients", "zero_grad(set_to_none=False)", lambda c: not c.training.set_to_none),
    ("unfreeze", "parameters unfrozen later", lambda c: c.training.unfreeze is not None),
    ("loss-scale", "dynamic loss scaling", lambda c: c.training.loss_scale is not None),
    ("overflow", "a step skipped for overflow", lambda c: c.training.overflow is not None),
    dimension="training",
)

_SHARDING = _table(
    ("wrap-whole", "the model is one unit", lambda c: c.sharding.wrap == "whole", "wrap"),
    ("wrap-block", "each block is a unit", lambda c: c.sharding.wrap == "block", "wrap"),
    ("wrap-layer", "each layer is a unit", lambda c: c.sharding.wrap == "layer", "wrap"),
    ("wrap-size", "units by their size", lambda c: c.sharding.wrap == "size", "wrap"),
    ("reshard", "parameters released after the forward", lambda c: c.sharding.reshard, "reshard"),
    (
        "keep-gathered",
        "parameters kept until the backward",
        lambda c: not c.sharding.reshard,
        "reshard",
    ),
    (
        "bucket-small",
        "buckets of 256 elements or less",
        lambda c: c.sharding.bucket <= 256,
        "bucket",
    ),
    ("prefetch-none", "no prefetching", lambda c: c.sharding.prefetch == 0, "prefetch"),
    (
        "prefetch-several",
        "several units prefetched",
        lambda c: c.sharding.prefetch >= 2,
        "prefetch",
    ),
    (
        "backward-prefetch-post",
        "the next unit gathered after the gradients of this one",
        lambda c: c.sharding.backward_prefetch == "post",
        "backward_prefetch",
    ),
    (
        "backward-prefetch-none",
        "no unit gathered ahead in the backward",
        lambda c: c.sharding.backward_prefetch == "none",
        "backward_prefetch",
    ),
    (
        "sync-each",
        "gradients reduced with each of several microbatches",
        lambda c: c.sharding.sync == "each" and c.training.microbatches > 1,
        "sync",
    ),
    (
        "flat-parameters",
        "the optimizer sees flat parameters",
        lambda c: not c.sharding.use_orig_params,
        "use_orig_params",
    ),
    (
        "bucket-view",
        "gradients or parameters are views of buckets",
        lambda c: c.sharding.bucket_view,
        "bucket_view",
    ),
    (
        "find-unused",
        "unused parameters are looked for",
        lambda c: c.sharding.find_unused,
        "find_unused",
    ),
    (
        "static-graph",
        "the graph is said to be static",
        lambda c: c.sharding.static_graph,
        "static_graph",
    ),
    (
        "optimizer-first",
        "the optimizer is made before the model is wrapped",
        lambda c: c.sharding.optimizer_first,
        "optimizer_first",
    ),
    dimension="sharding",
)

_RESUME = _table(
    ("resume", "a checkpoint saved and loaded", lambda c: bool(c.resume)),
    ("resume-more", "loaded on more ranks", lambda c: any(b > a for a, b in _sizes(c))),
    ("resume-fewer", "loaded on fewer ranks", lambda c: any(b < a for a, b in _sizes(c))),
    ("resume-same", "loaded on as many ranks", lambda c: any(b == a for a, b in _sizes(c))),
    ("resume-alone", "loaded on one rank", lambda c: any(b == 1 for _, b in _sizes(c))),
    ("resume-many", "saved on more than ten ranks", lambda c: any(a > 10 for a, _ in _sizes(c))),
    ("resume-twice", "two checkpoints in a row", lambda c: len(c.resume) > 1),
    ("resume-over", "saved over an older checkpoint", lambda c: any(x.over for x in c.resume)),
    (
        "resume-background",
        "a step is taken while the checkpoint is written",
        lambda c: any(x.background for x in c.resume),
    ),
    ("resume-killed", "a writer is killed", lambda c: any(x.killed is not None for x in c.resume)),
    ("resume-flip", "a bit is flipped in a checkpoint", lambda c: _damaged(c, "flip")),
    ("resume-truncate", "a file is cut short", lambda c: _damaged(c, "truncate")),
    ("resume-remove", "a file is missing", lambda c: _damaged(c, "remove")),
    ("resume-mix", "a file is that of another checkpoint", lambda c: _damaged(c, "mix")),
    ("resume-into", "loaded into another stage", lambda c: any(x.into for x in c.resume)),
    (
        "checkpoint-full",
        "the checkpoint is one file of whole tensors",
        lambda c: bool(c.resume) and c.sharding.checkpoint == "full",
        "checkpoint",
    ),
    (
        "checkpoint-sharded",
        "the checkpoint is of FSDP1's own sharded state-dict type",
        lambda c: bool(c.resume) and c.sharding.checkpoint == "sharded",
        "checkpoint",
    ),
    dimension="resume",
)

_DISTURBANCE = _table(
    ("delays", "ranks delayed at random", lambda c: c.disturbance.delay > 0),
    dimension="disturbance",
)

FEATURES: dict[str, Feature] = {
    row.name: row
    for row in chain(
        _WORLD,
        _MODEL,
        _DATA,
        _OPTIMIZER,
        _START,
        _TRAINING,
        _SHARDING,
        _RESUME,
        _DISTURBANCE,
    )
}
"""Name -> feature, in the order of the coverage table."""

OF_STEPS = tuple(name for name, row in FEATURES.items() if row.dimension != "resume")
"""Names of the features that cases without checkpoints have."""

OF_RESUME = tuple(name for name, row in FEATURES.items() if row.dimension == "resume")
"""Names of those that only cases with checkpoints have."""

BASIC = "basic"
GROUPS = (BASIC, *dict.fromkeys(row.dimension for row in FEATURES.values()))
"""What tests are grouped by: what needs no feature, then each dimension of features."""

_PLAIN = frozenset(features(Case()))
_PLAIN_RESUMED = frozenset(features(Case(resume=(Leg(),))))


def groups(case: Case, ignored: Collection[str] = ()) -> frozenset[str]:
    """GROUPS that the case says something of: BASIC, and where it departs from the default.

    ignored: features of options that the implementation does not obey. The default of a resumed
    case saves and loads on 2 ranks.
    """
    plain = _PLAIN_RESUMED if case.resume else _PLAIN
    departs = (name for name in features(case) if name not in plain and name not in ignored)
    return frozenset((BASIC, *(FEATURES[name].dimension for name in departs)))
