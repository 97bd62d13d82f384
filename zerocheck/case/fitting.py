"""Changes to a case so that its parts fit one another.

`fit` removes options that a case no longer supports after something was taken from it. `parted`
gives a drawn case a model that the inner axes of its mesh can split: sequences of whole parts with
heads for every rank (cp), a layer for every stage (pp), experts for every rank (ep). Random numbers
are left out, since a part draws others than the whole.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..machine.hosts import counts, spelled
from .mesh import INNER, fits
from .schema import Block, BlockKind, Case, Model, Optimizer, Training
from .shapes import matching, overflowing, parameter_shapes, trainable
from .traits import can_pass_wrapper, estimated
from .values import CLIPS

_OPTIONS_OF: dict[str, tuple[BlockKind, ...]] = {
    "hidden": ("mlp", "experts"),
    "experts": ("experts",),
    "heads": ("attention", "group_norm"),
    "kernel": ("conv",),
    "activation": ("mlp", "experts"),
}
"""Options of blocks that other kinds ignore."""

_DEFAULTS = {name: getattr(Block(kind="mlp"), name) for name in _OPTIONS_OF}
_replace = msgspec.structs.replace


def fit(case: Case) -> Case:
    """Return the case without the options that need parts it no longer has."""
    model = _fitting_model(case.model)
    data, start, training = case.data, case.start, case.training
    if model.stem != "embedding":
        data = _replace(data, masked=False)
    names = list(parameter_shapes(model))
    start = _replace(
        start,
        moments=start.moments if start.step else "zero",
        zeros=tuple(pattern for pattern in start.zeros if matching(names, (pattern,))),
    )
    if training.clip is None:
        training = _replace(training, norm="2")
    last = training.steps - 1
    if not model.frozen or not last:
        training = _replace(training, unfreeze=None)
    elif training.unfreeze is not None:
        training = _replace(training, unfreeze=min(training.unfreeze, last))
    if training.loss_scale is None:
        training = _replace(training, overflow=None)
    elif training.overflow is not None:
        training = _replace(training, overflow=min(training.overflow, last))
    case = fit_axes(case)
    training = _fitting_overflow(training, model, planted=not estimated(case))
    data = _replace(data, past_wrapper=data.past_wrapper and can_pass_wrapper(case))
    sharding = case.sharding
    if sharding.sync == "shards" and not case.axes.has("replicate"):
        sharding = _replace(sharding, sync="last")
    hosts = case.hosts
    if not case.resume:  # else they are those of other numbers of ranks too
        hosts = spelled(counts(hosts, case.world_size))
    return _replace(
        case,
        hosts=hosts,
        model=model,
        data=data,
        start=start,
        training=training,
        sharding=sharding,
        optimizer=_fitting_options(_fitting_groups(case.optimizer, model)),
    )


def _fitting_overflow(training: Training, model: Model, *, planted: bool) -> Training:
    """Return the training with an overflow in a gradient that the model has, or in none alone."""
    if training.overflow_in is None:
        return training
    names = overflowing(model)
    if training.overflow is None or not planted or not names:
        return _replace(training, overflow_in=None)
    return training if training.overflow_in in names else _replace(training, overflow_in=names[0])


def fit_axes(case: Case) -> Case:
    """Remove inner axes where a mesh of the case, or of a segment, does not allow them."""
    sizes = (case.mesh, *(segment.mesh for segment in case.resume))
    if all(fits(one, case.sharding.inner) for one in sizes):
        return case
    sharding = _replace(case.sharding, **dict.fromkeys(INNER.values(), 1))
    return _replace(case, sharding=sharding)


def _fitting_model(model: Model) -> Model:
    if model.stem != "embedding":
        model = _replace(model, tied=False, padding_idx=None)
    if model.tied:
        model = _replace(model, outputs=model.inputs)
    if model.padding_idx is not None and model.padding_idx >= model.inputs:
        model = _replace(model, padding_idx=0)
    if model.calls == tuple(range(len(model.blocks))):
        model = _replace(model, calls=None)
    model = _replace(model, blocks=tuple(_fitting_block(b, model.width) for b in model.blocks))
    names = list(parameter_shapes(model))
    frozen = tuple(pattern for pattern in model.frozen if matching(names, (pattern,)))
    return _replace(model, frozen=frozen)


def _fitting_block(block: Block, width: int) -> Block:
    ignored = [name for name, kinds in _OPTIONS_OF.items() if block.kind not in kinds]
    if width % block.heads:
        ignored.append("heads")
    if any(getattr(block, name) != _DEFAULTS[name] for name in ignored):
        block = _replace(block, **{name: _DEFAULTS[name] for name in ignored})
    return block


def _fitting_groups(optimizer: Optimizer, model: Model) -> Optimizer:
    """Remove the groups that no parameter is in."""
    names: Sequence[str] = trainable(model)
    kept = []
    for group in optimizer.groups:
        taken = set(matching(names, (group.pattern,)))
        if taken:
            kept.append(group)
        names = [name for name in names if name not in taken]
    return _replace(optimizer, groups=tuple(kept)) if kept else optimizer


def _fitting_options(optimizer: Optimizer) -> Optimizer:
    """Remove the form of Nesterov where there is no momentum."""
    return optimizer if optimizer.momentum else _replace(optimizer, nesterov=False)


_BY_TOKEN: Mapping[BlockKind, BlockKind] = {
    "conv": "attention",
    "recurrent": "attention",
    "batch_norm": "layer_norm",
    "group_norm": "rms_norm",
}
"""Kinds of blocks that mix positions without a known exchange, and what is drawn for them."""

PARTED = frozenset(
    f"{section}.{name}"
    for section, names in {
        "model": ("stem", "width", "outputs", "blocks", "calls", "tied", "unused", "side"),
        "data": ("length", "masked"),
        "training": ("microbatches",),
    }.items()
    for name in names
)
"""Paths of the fields that it changes."""


def parted(case: Case, fixed: Mapping[str, Any]) -> Case:
    """Return the case with a model and data that its axes can split; tp, if it is drawn often.

    fixed: fields that are not drawn, by path; with one of those above among them, and for the
    user's own model, nothing changes.
    """
    tensors, sequences, experts, stages = case.sharding.inner
    tensors = tensors if fixed.get("sharding.tensor_parallel") == "often" else 1
    several = tensors * sequences * experts * stages > 1
    if not several or case.model.user is not None or not PARTED.isdisjoint(fixed):
        return case
    model, data, training = case.model, case.data, case.training
    # Parts of a rank: mostly several, whose order counts.
    each = 1 + (random.Random(f"parts {case.seed}").random() < 2 / 3)
    parts = tensors * sequences
    changes: dict[str, Any] = {"side": False, "width": _multiple(model.width, parts * each)}
    # Bounds are estimated in fp32.
    blocks = [_replace(block, dropout=0.0, dtype="fp32") for block in model.blocks]
    if parts > 1:
        blocks = [_replace(b, kind=_BY_TOKEN.get(b.kind, b.kind)) for b in blocks]
        changes["stem"] = "dense" if model.stem == "conv" else model.stem
        changes["outputs"] = _multiple(model.outputs, tensors)
    needed: dict[BlockKind, int] = {"attention": sequences, "experts": experts, "rms_norm": tensors}
    new = [kind for kind, ranks in needed.items() if ranks > 1]
    blocks += [Block(kind=kind) for kind in new if all(b.kind != kind for b in blocks)]
    if len(blocks) > len(model.blocks) or experts > 1:
        changes["calls"] = None
    if parts > 1:
        blocks = [_split(block, changes["width"], parts, parts * each) for block in blocks]
        data = _replace(data, length=_multiple(data.length, 2 * parts))  # zigzag has 2 parts
    if experts > 1:
        count = experts * min(each, max(1, 16 // experts))
        blocks = [_replace(b, experts=count) for b in blocks]
    if stages > 1:  # the order of forwards and recomputations is the schedule's
        blocks = [_replace(b, checkpoint=b.checkpoint and b.kind != "batch_norm") for b in blocks]
        blocks += [Block(kind="mlp")] * (stages * each - 2 - len(blocks))
        changes |= {"calls": None, "tied": False, "unused": False}
        data = _replace(data, masked=False)
        count = _multiple(training.microbatches, stages)
        # Mostly no number of ranks along an axis: else nobody could tell one from the other.
        count += stages * (count in case.axes.sizes and case.seed % 4 > 0)
        training = _replace(training, microbatches=count)
    # The norm is over all axes: of the other cases, one in two clips.
    if training.clip is None and case.seed % 2 and "training.clip" not in fixed:
        training = _replace(training, clip=CLIPS[1] * data.loss_factor)
    model = _replace(model, blocks=tuple(blocks), **changes)
    return _replace(case, model=model, data=data, training=training)


def _split(block: Block, width: int, ranks: int, heads: int) -> Block:
    """Return a block whose heads, and hidden width, are divided by a number of ranks.

    heads: how many of them are best; they divide the width.
    """
    most = [n for n in range(ranks, width + 1, ranks) if width % n == 0]
    heads = min(most, key=lambda n: abs(n - heads)) if block.kind == "attention" else 1
    return _replace(block, heads=heads, hidden=_multiple(block.hidden, ranks), kernel=3)


def _multiple(count: int, of: int) -> int:
    """Return the smallest multiple of `of` that is not below `count`."""
    return -(-count // of) * of
