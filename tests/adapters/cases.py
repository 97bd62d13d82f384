"""Cases built by hand, one for each thing that sharding can get wrong."""

from __future__ import annotations

from typing import Any

import msgspec

from zerocheck.case.schema import (
    Block,
    Case,
    Data,
    Group,
    Model,
    Optimizer,
    Sharding,
    Start,
    Training,
)

MLP = Model(
    inputs=7,
    width=5,
    blocks=(Block(kind="mlp", hidden=13), Block(kind="mlp", hidden=3, residual=True)),
    outputs=3,
)
GROUPS = (
    Group(pattern="*.bias", lr=3e-3, weight_decay=0.0, beta1=0.8),
    Group(pattern="blocks.*", lr=1e-2, weight_decay=0.1, beta2=0.99),
    Group(pattern="*", lr=1e-3, eps=1e-6),
)
MIXED = Model(
    inputs=6,
    width=6,
    blocks=(
        Block(kind="attention", heads=2, dropout=0.2, residual=True),
        Block(kind="conv"),
        Block(kind="batch_norm"),
        Block(kind="layer_norm"),
        Block(kind="group_norm", heads=3),
        Block(kind="rms_norm"),
    ),
    outputs=2,
)
TWICE = msgspec.structs.replace(MLP, calls=(0, 1, 0, 0, 1))
TIED = Model(
    stem="embedding",
    inputs=11,
    outputs=11,
    width=4,
    tied=True,
    padding_idx=0,
    blocks=(Block(kind="mlp", hidden=6),),
)
EXPERTS = Model(
    inputs=4,
    width=6,
    side=True,
    blocks=(
        Block(kind="experts", hidden=5, experts=3, residual=True),
        Block(kind="recurrent"),
        Block(kind="experts", hidden=3, experts=4, bias=False, checkpoint=True),
    ),
    outputs=3,
)
SHAPES = Model(
    inputs=4,
    width=6,
    blocks=(
        Block(kind="mlp", hidden=5, gain=True, transposed=True),
        Block(kind="attention", heads=2, empty=True),
        Block(kind="layer_norm", empty=True, gain=True, checkpoint=True),
    ),
    outputs=3,
)
CHECKPOINTED = Model(
    inputs=4,
    width=6,
    blocks=(
        Block(kind="mlp", hidden=5, dropout=0.3, checkpoint=True),
        Block(kind="attention", heads=2, residual=True, dropout=0.2, checkpoint=True),
        Block(kind="batch_norm", checkpoint=True),
    ),
    calls=(0, 1, 2, 0),
    outputs=3,
)
FROZEN = msgspec.structs.replace(MLP, frozen=("blocks.0.*", "*.down.bias", "stem.weight"))


def _case(model: Model = MLP, **given: Any) -> Case:
    given.setdefault("training", Training(steps=3))
    given.setdefault("data", Data(batch=2, length=3))
    return Case(seed=5, model=model, **given)


CASES: dict[str, Case] = {
    "plain": _case(),
    "groups": _case(optimizer=Optimizer(groups=GROUPS, schedule="warmup")),
    "amsgrad": _case(optimizer=Optimizer(amsgrad=True, maximize=True, kernel="for-loop")),
    "fused": _case(optimizer=Optimizer(groups=GROUPS, kernel="fused")),
    "microbatches": _case(training=Training(steps=2, microbatches=3)),
    "keep_grad": _case(training=Training(steps=2, microbatches=2, set_to_none=False)),
    "clip": _case(training=Training(steps=2, clip=0.05)),
    "clip_inactive": _case(training=Training(steps=2, clip=1e6, microbatches=3)),
    "clip_inf": _case(training=Training(steps=2, clip=0.01, norm="inf")),
    "tiny_clip": _case(data=Data(loss_factor=1e-26), training=Training(steps=2, clip=1e-26)),
    "restore": _case(start=Start(step=255, moments="typical"), optimizer=Optimizer(amsgrad=True)),
    "restore_fused": _case(
        start=Start(step=2, moments="huge", zeros=("*.bias",)), optimizer=Optimizer(kernel="fused")
    ),
    "mixed": _case(MIXED, training=Training(steps=2, microbatches=2)),
    "twice": _case(TWICE, training=Training(steps=3, microbatches=2)),
    "twice_one": _case(TWICE),
    "tied": _case(TIED),
    "frozen": _case(FROZEN, training=Training(steps=2, microbatches=2, clip=0.1)),
    "unused": _case(
        msgspec.structs.replace(MLP, unused=True), training=Training(steps=2, microbatches=2)
    ),
    "experts": _case(EXPERTS, training=Training(steps=3, microbatches=2, clip=0.1)),
    "experts_one": _case(EXPERTS, data=Data(batch=1, length=2)),
    "shapes": _case(SHAPES, training=Training(steps=2, microbatches=2, clip=0.1)),
    "shapes_inf": _case(SHAPES, training=Training(steps=2, clip=0.01, norm="inf")),
    "checkpointed": _case(CHECKPOINTED, training=Training(steps=2, microbatches=2)),
    "all_frozen": _case(msgspec.structs.replace(MLP, frozen=("*",)), training=Training(clip=1.0)),
    "one_wide": _case(Model(inputs=1, width=1, outputs=1)),
}
"""Name to case; `mesh` and `sharding` are set by `on`."""

SHARDINGS: dict[str, Sharding] = {
    "block": Sharding(wrap="block"),
    "layer": Sharding(wrap="layer", prefetch=2, bucket=16),
    "whole": Sharding(wrap="whole", bucket=40),
    "block_kept": Sharding(wrap="block", reshard=False, prefetch=0, bucket=1),
    "layer_alone": Sharding(wrap="layer", prefetch=0, bucket=64),
    "layer_kept": Sharding(wrap="layer", reshard=False, prefetch=8),
    "size": Sharding(wrap="size", bucket=30, backward_prefetch="none", prefetch=0),
    "views": Sharding(bucket=40, bucket_view=True, find_unused=True, static_graph=False),
    "each": Sharding(wrap="layer", sync="each", backward_prefetch="post", prefetch=2, bucket=16),
    "first": Sharding(optimizer_first=True, sync="each", bucket=64),
    "offloaded": Sharding(wrap="block", offload="pageable"),
    "flat": Sharding(wrap="block", use_orig_params=False, backward_prefetch="post", sync="each"),
}


def on(case: Case, world_size: int, sharding: str) -> Case:
    """The case on so many ranks, with a named sharding."""
    return msgspec.structs.replace(case, mesh=(world_size,), sharding=SHARDINGS[sharding])
