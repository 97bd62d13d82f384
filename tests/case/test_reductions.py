"""Shrinking as a search, without ranks: a predicate stands for the failing run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from zerocheck.case.drawing import draw
from zerocheck.case.features import FEATURES, features
from zerocheck.case.reductions import left, simpler, value_at
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
from zerocheck.case.validity import check

Fails = Callable[[Case], bool]


def shrunk(case: Case, fails: Fails, *, kept: tuple[str, ...] = ()) -> tuple[Case, list[Case]]:
    """The smallest case, and all that were tried."""
    search = simpler(case, kept=kept)
    tried: list[Case] = []
    try:
        candidate = next(search)
        while True:
            tried.append(candidate)
            candidate = search.send(fails(candidate))
    except StopIteration as end:
        return end.value, tried


@cache
def drawn(world: int) -> list[tuple[Case, frozenset[str]]]:
    cases = draw(300, seed=7, world_sizes=(world,))
    return [(case, frozenset(features(case))) for case in cases]


def having(feature: str, *, world: int = 4) -> list[Case]:
    return [case for case, has in drawn(world) if feature in has]


def test_what_always_fails_ends_as_one_rank_one_step_and_all_defaults() -> None:
    for case in draw(40, seed=3, world_sizes=(1, 2, 5)):
        smallest, tried = shrunk(case, lambda c: True)
        assert smallest == Case(mesh=(1,), seed=case.seed, training=Training(steps=1))
        assert len(tried) <= 4
        assert left(smallest) == []


def test_candidates_are_valid_and_come_once() -> None:
    for case in draw(30, seed=5, world_sizes=(3,)):
        smallest, tried = shrunk(case, lambda c: len(features(c)) % 3 == 0)
        for candidate in tried:
            check(candidate)
        assert len(set(tried)) == len(tried)
        assert case not in tried
        check(smallest)


@pytest.mark.parametrize(
    "feature",
    [
        "world-3", "world-2", "stem-conv", "stem-embedding", "block-conv", "block-experts",
        "block-batch-norm", "heads", "relu", "no-bias", "residual", "dropout", "tied",
        "padding-idx", "module-twice", "unused", "side", "frozen", "checkpoint-dropout",
        "parameter-0d", "parameter-empty", "transposed", "uneven", "uneven-total", "loss-huge",
        "some-decay", "lr-large", "amsgrad", "schedule-warmup", "kernel-fused", "zeros",
        "step-256", "moments-tiny", "several-steps", "microbatches", "clip-inf", "clip-tight",
        "keep-gradients", "unfreeze", "loss-scale", "overflow", "overflow-alone", "masked",
        "delays", "wrap-whole", "keep-gathered", "bucket-small", "prefetch-several",
    ],
)  # fmt: skip
def test_a_fault_that_needs_one_feature_keeps_that_and_little_else(feature: str) -> None:
    present = FEATURES[feature].present
    world = 3 if feature == "world-3" else 2 if feature == "world-2" else 4
    case = having(feature, world=world)[0]
    smallest, tried = shrunk(case, present)
    assert present(smallest)
    assert len(tried) <= 80
    assert smallest.world_size <= 3
    assert len(smallest.model.blocks) <= 1
    # What is unfrozen later is so after a first step.
    assert smallest.training.steps <= {"several-steps": 3, "unfreeze": 2}.get(feature, 1)
    # Nothing can be taken back alone, and at most two fields are not at their simplest.
    remaining = left(smallest)
    assert all(not present(reset) for _, reset in remaining)
    assert len(remaining) <= 2, remaining


def test_two_needs_are_both_kept() -> None:
    case = next(c for c in having("microbatches", world=5) if c.model.blocks)
    smallest, _ = shrunk(
        case, lambda c: c.training.microbatches > 1 and c.world_size >= 3 and c.training.steps > 1
    )
    assert smallest == Case(mesh=(3,), seed=case.seed, training=Training(microbatches=2, steps=2))
    assert [path for path, _ in left(smallest)] == [
        "mesh",
        "training.steps",
        "training.microbatches",
    ]


def test_the_smallest_fails_and_no_single_cut_of_it_does() -> None:
    """Of any predicate: what is sent True for last is what is returned."""
    for case in draw(20, seed=9, world_sizes=(2, 3)):

        def fails(c: Case) -> bool:
            return len(features(c)) % 3 == 0

        smallest, _ = shrunk(case, fails)
        assert smallest == case or fails(smallest)
        again, tried = shrunk(smallest, fails)
        assert again == smallest
        assert not any(map(fails, tried))


def test_kept_fields_stay() -> None:
    case = Case(
        mesh=(4,),
        model=Model(stem="embedding", inputs=5, outputs=5, tied=True),
        data=Data(batch=3),
        training=Training(clip=0.5, microbatches=3),
    )
    kept = ("mesh", "model", "training.clip")
    smallest, tried = shrunk(case, lambda c: True, kept=kept)
    for candidate in tried:
        assert all(value_at(candidate, path) == value_at(case, path) for path in kept)
    assert smallest == Case(mesh=(4,), model=case.model, training=Training(clip=0.5, steps=1))
    assert left(smallest, kept=kept) == []


def test_calls_follow_the_blocks_that_stay() -> None:
    mlp, conv = Block(kind="mlp"), Block(kind="conv")
    case = Case(model=Model(blocks=(mlp, conv, mlp), calls=(0, 2, 1, 1)))
    smallest, _ = shrunk(case, lambda c: "module-twice" in features(c) and _has(c, "conv"))
    assert smallest.model.calls == (0, 0)
    assert smallest.model.blocks == (conv,)


def test_what_needs_what_is_gone_goes_with_it() -> None:
    case = Case(
        model=Model(
            stem="embedding",
            inputs=6,
            outputs=6,
            tied=True,
            padding_idx=5,
            blocks=(Block(kind="layer_norm"),),
            frozen=("*norm*",),
        ),
        optimizer=Optimizer(groups=(Group(pattern="*.bias", lr=0.1), Group())),
        start=Start(step=2, moments="typical", zeros=("*norm.weight",)),
    )
    smallest, tried = shrunk(case, lambda c: len(c.optimizer.groups) == 2)
    assert smallest.optimizer.groups == (Group(pattern="*.bias"), Group())
    assert smallest.model == Model()
    assert smallest.start == Start()
    assert [path for path, _ in left(smallest)] == ["optimizer.groups"]
    assert any(not c.model.blocks and not c.model.frozen for c in tried)


def test_what_another_field_needs_is_not_told_twice() -> None:
    """A tied head needs the embedding, and clipping by another norm needs clipping."""
    case = Case(
        mesh=(1,),
        model=Model(stem="embedding", outputs=8, tied=True),
        training=Training(clip=1.0, norm="inf", steps=1),
    )
    assert [path for path, _ in left(case)] == ["training.norm", "model.tied"]


def test_a_mesh_of_two_axes() -> None:
    smallest, _ = shrunk(Case(mesh=(2, 3)), lambda c: len(c.mesh) == 2 and c.mesh[1] > 1)
    assert smallest.mesh == (1, 2)
    # What does not need the second axis loses it, and what waits for it.
    case = Case(mesh=(2, 2), sharding=Sharding(sync="shards"), training=Training(microbatches=2))
    smallest, _ = shrunk(case, lambda c: c.world_size > 2)
    assert smallest.mesh == (3,) and smallest.sharding.sync == "last"
    smallest, _ = shrunk(case, lambda c: c.sharding.sync == "shards")
    assert smallest.mesh == (1, 1)


def _has(case: Case, kind: str) -> bool:
    return any(block.kind == kind for block in case.model.blocks)


def test_the_step_that_unfreezes_goes_down_with_the_steps() -> None:
    found = [case for case in having("unfreeze", world=3) if case.training.steps > 2]
    assert found
    for case in found:
        smallest, _ = shrunk(case, lambda c: c.training.unfreeze is not None)
        assert (smallest.training.steps, smallest.training.unfreeze) == (2, 1)
        later, _ = shrunk(case, lambda c, at=case.training.unfreeze: c.training.unfreeze == at)
        assert later.training.unfreeze == case.training.unfreeze
        assert later.training.steps == later.training.unfreeze + 1
