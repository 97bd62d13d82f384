"""The distribution of cases: complete, distinct, repeatable, valid, small."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from hashlib import sha256
from itertools import chain, pairwise
from typing import Any

import pytest

from zerocheck.case.codec import encode
from zerocheck.case.drawing import draw
from zerocheck.case.features import FEATURES, OF_AXIS, OF_OPTIMIZERS, OF_STEPS, feature, features
from zerocheck.case.mesh import INNER, AxisName
from zerocheck.case.schema import Block, Model
from zerocheck.case.shapes import parameter_elements, parameter_shapes, trainable
from zerocheck.case.validity import check
from zerocheck.errors import UsageError

WORLDS = (1, 2, 3, 4, 5, 8, 16)
DRAWN = draw(700, seed=0, world_sizes=WORLDS)
MESHES = ((2, 2), (2, 3), (1, 3), (3, 1))


def test_exactly_that_many_distinct_and_valid() -> None:
    assert len(DRAWN) == len(set(DRAWN)) == len({encode(case) for case in DRAWN}) == 700
    for case in DRAWN:
        check(case)
        assert case.world_size in WORLDS
    assert draw(0, seed=0, world_sizes=(2,)) == []


ASKED_FOR = {
    "compile-inductor",
    "compute-fp16",
    *chain(*(OF_AXIS[axis] for axis in INNER if axis != "tp")),
    *(set(chain(*OF_OPTIMIZERS.values())) - set(OF_OPTIMIZERS["adamw"])),
}
"""Features that only those get who ask for them, or who handle them."""


@pytest.mark.parametrize("axis", ["cp", "ep", "pp", "tp"])
def test_most_cases_have_an_axis_that_is_handled_and_a_model_that_it_splits(axis: AxisName) -> None:
    fixed = {"sharding": {INNER[axis]: "often"}}
    cases = draw(200, seed=3, world_sizes=(1, 2, 3, 4, 8), fixed=fixed)
    having = [case for case in cases if case.axes.has(axis)]
    assert len(having) >= 90  # one world size in five has one rank
    assert {case.axes.size(axis) for case in having} == {2, 3, 4, 8}
    for case in having:
        model, blocks, parts = case.model, case.model.blocks, case.axes.size(axis)
        assert not any(one.dropout for one in blocks)
        if axis == "cp":
            assert case.data.length % (2 * parts) == 0
            assert all(one.heads % parts == 0 for one in blocks if one.kind == "attention")
            assert {one.kind for one in blocks}.isdisjoint(("conv", "recurrent", "batch_norm"))
        elif axis == "ep":
            counts = [one.experts for one in blocks if one.kind == "experts"]
            assert counts and not any(count % parts for count in counts)
        elif axis == "tp":
            assert {one.kind for one in blocks} & {"layer_norm", "rms_norm"}
            assert model.width % parts == model.outputs % parts == case.data.length % parts == 0
        else:
            assert len(blocks) + 2 >= parts and case.training.microbatches % parts == 0


def test_every_feature_occurs() -> None:
    replicated = draw(100, seed=0, world_sizes=(), meshes=MESHES)
    counts = Counter(name for case in (*DRAWN, *replicated) for name in features(case))
    assert set(counts) == set(OF_STEPS) - ASKED_FOR
    # Even rows for every rank of two axes are rare: a run draws them on purpose (draws.APART).
    assert counts.pop("tensor-parallel-strided") >= 2
    assert min(counts.values()) >= 10, counts.most_common()[-5:]


def test_a_replicate_axis_changes_no_other_case() -> None:
    both = draw(300, seed=0, world_sizes=(2,), meshes=MESHES)
    assert {case.mesh for case in both} == {(2,), *MESHES}
    for case in both:
        check(case)
        assert ("two-axes" in features(case)) == (len(case.mesh) == 2)
    assert {case.mesh for case in DRAWN} == {(size,) for size in WORLDS}
    syncs = Counter((len(case.mesh), case.sharding.sync) for case in both)
    assert set(syncs) == {(1, "last"), (1, "each"), (2, "last"), (2, "each"), (2, "shards")}
    assert (
        draw(40, seed=1, world_sizes=(), meshes=MESHES)
        == draw(90, seed=1, world_sizes=(), meshes=MESHES)[:40]
    )


def test_every_feature_occurs_for_each_world_size() -> None:
    for size in (2, 3):
        counts = {
            name for case in draw(500, seed=1, world_sizes=(size,)) for name in features(case)
        }
        left = set(OF_STEPS) - counts - {*OF_AXIS["replicate"], "tensor-parallel-strided"}
        left -= ASKED_FOR
        # Two hosts of two ranks have one each.
        assert left <= {"hosts-uneven"} | {name for name in left if name.startswith("world-")}
        assert size == 2 or "hosts-uneven" not in left


def test_cases_are_small() -> None:
    sizes = sorted(parameter_elements(case.model) for case in DRAWN)
    assert sizes[len(sizes) // 2] < 1000
    assert sizes[int(0.9 * len(sizes))] < 3000
    assert 2.0 < sum(case.training.steps for case in DRAWN) / len(DRAWN) < 3.0


def test_blind_spots_stay_open() -> None:
    for case in DRAWN:
        for group in case.optimizer.groups:
            assert group.weight_decay == 0 or group.lr * group.weight_decay >= 1e-5
        names = list(parameter_shapes(case.model))
        assert trainable(case.model)
        assert len(case.model.blocks) <= 4
        assert names


def test_no_group_is_empty() -> None:
    from zerocheck.contract.groups import group_of

    for case in DRAWN:
        used = {group_of(case, name) for name in trainable(case.model)}
        assert used == set(range(len(case.optimizer.groups)))


def test_the_first_is_the_simplest() -> None:
    case = DRAWN[0]
    assert case.mesh == (1,)
    assert case.model.blocks == ()
    assert case.training.steps == 1
    assert len(features(case)) < 15


def test_same_seed_same_cases_in_another_process() -> None:
    # Neither the hash seed nor the modules around may matter.
    script = (
        "from hashlib import sha256\n"
        "from zerocheck.case.drawing import draw\n"
        "from zerocheck.case.codec import encode\n"
        f"cases = draw(700, seed=0, world_sizes={WORLDS})\n"
        "print(sha256(b''.join(map(encode, cases))).hexdigest())\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == sha256(b"".join(map(encode, DRAWN))).hexdigest()
    assert draw(20, seed=1, world_sizes=WORLDS) != draw(20, seed=2, world_sizes=WORLDS)


def test_a_longer_drawing_begins_with_the_shorter() -> None:
    assert draw(30, seed=3, world_sizes=WORLDS) == draw(60, seed=3, world_sizes=WORLDS)[:30]


@pytest.mark.parametrize(
    "fixed",
    [
        {"training": {"clip": None, "microbatches": 2}},
        {"model": {"tied": True}},
        {"model": {"tied": True, "outputs": 9}},
        {"model": {"padding_idx": 3}},
        {"model": {"stem": "embedding", "outputs": 3}},
        {"model": Model(stem="conv", blocks=(Block(kind="attention", heads=2),))},
        {"model": {"blocks": [{"kind": "batch_norm"}]}},
        {"model": {"unused": True, "width": 6}, "data": {"batch": 1, "length": 1}},
        {"optimizer": {"groups": [{"lr": 0.5}], "kernel": "fused"}},
        {"start": {"moments": "huge"}},
        {"sharding": {"wrap": "whole"}, "disturbance": {"delay": 2.0}, "seed": 5},
        {"mesh": [2, 2]},
    ],
)
def test_fixed_fields_hold(fixed: dict[str, Any]) -> None:
    from zerocheck.case.codec import merged

    for case in draw(40, seed=0, world_sizes=(2, 3), fixed=fixed):
        check(case)
        assert merged(case, fixed, source="fixed") == case


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"trainnig": {}}, "fixed fields: the case has no field 'trainnig'; did you mean"),
        ({"model": {"width": 0}}, "fixed fields: model.width is 0; allowed"),
        ({"model": {"frozen": ["*"]}}, "leave only 0 of 3 cases in .* no trainable parameter"),
        ({"model": {"tied": True, "stem": "dense"}}, "model.tied needs the stem 'embedding'"),
    ],
)
def test_fixed_fields_that_cannot_be(fixed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        draw(3, seed=0, world_sizes=(2,), fixed=fixed)


@pytest.mark.parametrize("sizes", [(), (0,), (2, -1)])
def test_world_sizes_that_cannot_be(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"world sizes .*; allowed: one or more integers >= 1"):
        draw(1, seed=0, world_sizes=sizes)


def test_feature_table() -> None:
    for name, row in FEATURES.items():
        assert row.name == name
        assert name == name.lower().replace("_", "-").replace(" ", "-")
        assert row.title
        assert row.dimension
    dimensions = [row.dimension for row in FEATURES.values()]
    assert len(set(dimensions)) == 1 + sum(a != b for a, b in pairwise(dimensions))
    assert feature("tied").present(DRAWN[0]) is False
    with pytest.raises(UsageError, match=r"unknown feature 'tyed'; did you mean 'tied'\?"):
        feature("tyed")


def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.perf_counter()
    draw(300, seed=9, world_sizes=WORLDS)
    drawing = (time.perf_counter() - begin) / 300
    begin = time.perf_counter()
    for case in DRAWN:
        check(case)
    checking = (time.perf_counter() - begin) / len(DRAWN)
    with capsys.disabled():
        print(f"\n  draw {drawing * 1e3:.2f} ms a case, check {checking * 1e6:.0f} us a case")
