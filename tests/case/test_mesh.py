"""Meshes with named axes."""

from __future__ import annotations

from itertools import product

import pytest

from zerocheck.case.mesh import AXES, SPLITS, Axis, Mesh, mesh_of
from zerocheck.case.schema import Case, Sharding, TrainingSegment
from zerocheck.case.traits import meshes


def mesh(**sizes: int) -> Mesh:
    return Mesh(tuple(Axis(name, size, SPLITS[name]) for name, size in sizes.items()))  # type: ignore[index, arg-type]


THREE = mesh(replicate=2, shard=3, tp=2)


def test_three_axes() -> None:
    assert THREE.names == ("replicate", "shard", "tp")
    assert THREE.sizes == (2, 3, 2) and THREE.world_size == 12
    places = [tuple(THREE.coordinate(rank, name) for name in THREE.names) for rank in range(12)]
    assert places == list(product(range(2), range(3), range(2)))  # as init_device_mesh places them
    assert THREE.group(9, "replicate") == (3, 9)
    assert THREE.group(9, "shard") == (7, 9, 11)
    assert THREE.group(9, "tp") == (8, 9)
    assert THREE.groups("shard") == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))


@pytest.mark.parametrize("name", AXES)
def test_groups_of_an_axis_have_each_rank_once_at_its_coordinate(name: str) -> None:
    groups = THREE.groups(name)  # type: ignore[arg-type]
    assert sorted(rank for group in groups for rank in group) == list(range(12))
    for group in groups:
        for place, rank in enumerate(group):
            assert THREE.coordinate(rank, name) == place  # type: ignore[arg-type]
            assert THREE.group(rank, name) == group  # type: ignore[arg-type]


def test_what_axes_split() -> None:
    assert THREE.parts("batch") == THREE.data_parallel_size == 6
    assert THREE.parts("parameters") == 6 and THREE.parts("activations") == 2
    assert [THREE.data_parallel_rank(rank) for rank in range(12)] == [
        index for index in range(6) for _ in range(2)
    ]


def test_an_axis_that_is_not_there_has_size_1() -> None:
    one = mesh(shard=3)
    assert not one.has("replicate") and one.size("replicate") == 1
    assert one.coordinate(2, "replicate") == 0 and one.group(2, "replicate") == (2,)
    assert one.groups("tp") == ((0,), (1,), (2,))
    alone = mesh(replicate=1, shard=3)
    assert alone.has("replicate") and alone.size("replicate") == 1


def test_what_no_mesh_has() -> None:
    with pytest.raises(ValueError, match=r"'shard' has size 0"):
        mesh(shard=0)
    with pytest.raises(ValueError, match="one or more"):
        Mesh(())
    shard = Axis("shard", 2, SPLITS["shard"])
    with pytest.raises(ValueError, match="once each"):
        Mesh((shard, shard))
    for rank in (-1, 12):
        with pytest.raises(ValueError, match=f"rank {rank} of a mesh of 12"):
            THREE.group(rank, "tp")
        with pytest.raises(ValueError, match=f"rank {rank}"):
            THREE.data_parallel_rank(rank)


@pytest.mark.parametrize(
    ("sizes", "tensor_parallel", "expected"),
    [
        ((4,), 1, {"shard": 4}),
        ((2, 4), 1, {"replicate": 2, "shard": 4}),
        ((1, 3), 1, {"replicate": 1, "shard": 3}),
        ((6,), 2, {"shard": 3, "tp": 2}),
        ((2,), 2, {"shard": 1, "tp": 2}),
        ((2, 4), 2, {"replicate": 2, "shard": 2, "tp": 2}),
    ],
)
def test_the_mesh_of_a_case(
    sizes: tuple[int, ...], tensor_parallel: int, expected: dict[str, int]
) -> None:
    case = Case(mesh=sizes, sharding=Sharding(tensor_parallel=tensor_parallel))
    assert case.axes == mesh(**expected) and case.axes.world_size == case.world_size
    assert case.axes is mesh_of(sizes, case.sharding.inner)  # it is made once


def test_a_pipeline_is_outermost_and_parts_of_sequences_are_within_experts() -> None:
    sharding = Sharding(pipeline_parallel=2, expert_parallel=2, context_parallel=2)
    axes = Case(mesh=(16,), sharding=sharding).axes
    assert axes == mesh(pp=2, shard=2, ep=2, cp=2)
    assert axes.data_parallel_size == 4  # along shard and ep, ranks read samples of their own
    first_stage = [axes.data_parallel_rank(rank) for rank in range(8)]
    assert first_stage == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [axes.data_parallel_rank(rank) for rank in range(8, 16)] == first_stage


def test_a_size_that_tensor_parallelism_does_not_divide() -> None:
    case = Case(mesh=(3,), sharding=Sharding(tensor_parallel=2))
    assert case.world_size == 3
    with pytest.raises(ValueError, match="do not divide 3"):
        _ = case.axes


def test_each_segment_has_a_mesh() -> None:
    case = Case(
        mesh=(4,),
        sharding=Sharding(tensor_parallel=2),
        resume=(TrainingSegment(mesh=(2,)), TrainingSegment(mesh=(6,))),
    )
    assert [one.sizes for one in meshes(case)] == [(2, 2), (1, 2), (3, 2)]
