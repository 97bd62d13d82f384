"""Which layers are sharded, who reads what, and that drawn cases with tp can be run."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from msgspec.structs import replace

from zerocheck.case.drawing import draw
from zerocheck.case.fitting import fit, fit_axes
from zerocheck.case.resume import draw_resumed
from zerocheck.case.schema import Block, Case, Data, Model, Sharding, Training, TrainingSegment
from zerocheck.case.segments import samples_read
from zerocheck.case.tensor_parallel import plan_of, sharded_dim
from zerocheck.case.traits import estimated
from zerocheck.case.validity import check
from zerocheck.errors import UsageError
from zerocheck.models.batches import batch, carried_seed, overflows, weight

MODEL = Model(
    stem="embedding",
    inputs=7,
    width=4,
    outputs=3,
    blocks=(
        Block(kind="mlp", hidden=6),
        Block(kind="mlp", hidden=5),
        Block(kind="attention"),
        Block(kind="layer_norm"),
        Block(kind="experts"),
    ),
    side=True,
    unused=True,
)


def of(count: int, mesh: tuple[int, ...] = (4,), **fields: object) -> Case:
    return replace(Case(mesh=mesh, sharding=Sharding(tensor_parallel=count)), **fields)


def test_layers_that_always_run_are_cut_where_every_rank_gets_a_part() -> None:
    assert plan_of(MODEL, 2) == {
        "stem": "vocabulary",
        "blocks.0.up": "column",
        "blocks.0.down": "row",
        "blocks.1.up": "gathered",
        "blocks.1.down": "split",
        "blocks.2.qkv": "gathered",
        "blocks.2.out": "split",
        "head": "gathered",
    }
    of_four = plan_of(MODEL, 4)
    assert "head" not in of_four, "3 rows on 4 ranks leave one with nothing"
    assert "blocks.0.up" not in of_four, "6 rows on 4 ranks are 2 + 2 + 2 + 0"
    assert plan_of(MODEL, 1) == {}


def test_a_bias_is_cut_with_the_rows_and_replicated_with_the_columns() -> None:
    plan = plan_of(MODEL, 2)
    assert [sharded_dim(plan, f"blocks.0.{name}") for name in ("up.weight", "up.bias")] == [0, 0]
    assert [sharded_dim(plan, f"blocks.0.{name}") for name in ("down.weight", "down.bias")] == [
        1,
        None,
    ]
    assert sharded_dim(plan, "blocks.3.norm.weight") is None


def test_a_tied_head_is_cut_as_the_embedding_is() -> None:
    tied = Model(stem="embedding", inputs=6, width=4, outputs=6, tied=True)
    assert plan_of(tied, 2) == {"stem": "vocabulary", "head": "gathered"}
    assert plan_of(replace(tied, inputs=1, outputs=1), 2) == {}


def test_ranks_that_cut_the_same_layers_read_the_same() -> None:
    case = of(2, model=MODEL, data=Data(masked=True), training=Training(loss_scale=2.0, overflow=0))
    mesh = case.axes
    assert mesh.data_parallel_size == 2
    assert [mesh.data_parallel_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    alone = replace(case, mesh=(2,), sharding=Sharding())
    for rank in range(4):
        own = batch(case, step=1, rank=rank, microbatch=0)
        same = batch(alone, step=1, rank=rank // 2, microbatch=0)
        assert own.seed == same.seed and torch.equal(own.target, same.target)
        assert all(map(torch.equal, own.inputs, same.inputs))
        assert weight(case, step=1, rank=rank, microbatch=0) == weight(
            alone, step=1, rank=rank // 2, microbatch=0
        )
        assert carried_seed(case, rank) == carried_seed(alone, rank // 2)
        assert overflows(case, step=0, rank=rank, microbatch=0) == overflows(
            alone, step=0, rank=rank // 2, microbatch=0
        )
    weights = [weight(case, step=1, rank=rank, microbatch=0) for rank in range(4)]
    assert sum(weights) == pytest.approx(4)
    assert samples_read(case, 3) == samples_read(alone, 3)


def test_bounds_are_estimated() -> None:
    assert estimated(of(2)) and not estimated(of(1))
    assert estimated(Case(training=Training(compile="eager")))


@pytest.mark.parametrize(
    ("case", "where"),
    [
        (of(2, (3,)), "mesh is [3]"),
        (of(2, (2, 2)), "mesh is [2, 2]"),
        (
            of(2, resume=(TrainingSegment(mesh=(4,)), TrainingSegment(mesh=(5,)))),
            "resume[1].mesh is [5]",
        ),
    ],
)
def test_a_mesh_that_tensor_parallelism_does_not_fit_is_refused(case: Case, where: str) -> None:
    with pytest.raises(UsageError) as error:
        check(case)
    assert str(error.value) == (
        f"sharding.tensor_parallel is 2 and {where}; allowed: a mesh of one axis, whose size it "
        "divides"
    )
    check(fit_axes(case))
    assert fit_axes(case).sharding.tensor_parallel == 1
    check(fit(replace(case, resume=())))
    assert fit_axes(of(2)) == of(2)


def test_it_is_drawn_by_the_seed_and_changes_nothing_else() -> None:
    training = {"overflow_in": None}  # drawn where layers are whole
    fixed = {"training": training, "sharding": {"tensor_parallel": 1}}
    drawn = draw(400, seed=5, world_sizes=(4,), fixed={"training": training})
    plain = draw(400, seed=5, world_sizes=(4,), fixed=fixed)
    counts = Counter(case.sharding.tensor_parallel for case in drawn)
    assert set(counts) == {1, 2, 4} and counts[1] > 300
    for case, other in zip(drawn, plain, strict=True):
        check(case)
        assert replace(case, sharding=replace(case.sharding, tensor_parallel=1)) == other


def test_resumed_cases_have_it_where_all_segments_can() -> None:
    fixed = {"sharding": {"tensor_parallel": 2}}
    cases = draw_resumed(24, seed=1, world_sizes=(2, 4, 6), fixed=fixed, replicates=True)
    for case in cases:
        check(case)
    assert {case.sharding.tensor_parallel for case in cases} == {1, 2}
