"""The flat partition tiles every parameter, whatever the sizes and the world."""

from __future__ import annotations

import math
import random

import pytest
import torch

from zerocheck.adapters.textbook.partition import ALIGNMENT, Partition, split
from zerocheck.case.shapes import leaves_a_rank_empty

SHAPES = [
    ("one", (1,)),
    ("scalar", ()),
    ("empty", (0, 3)),
    ("matrix", (5, 7)),
    ("wide", (16, 2)),
    ("odd", (3, 1, 11)),
]


@pytest.mark.parametrize("world_size", [*range(1, 18), 1000])
def test_pieces_tile_and_padding_is_the_rest(world_size: int) -> None:
    partition = Partition(SHAPES, world_size)
    assert partition.numel == world_size * partition.shard_size
    held = dict.fromkeys((name for name, _ in SHAPES), 0)
    covered = [0] * partition.numel
    for rank in range(world_size):
        mine = partition.shard(rank)
        for piece in partition.pieces(rank):
            assert piece.start == held[piece.name], "pieces are in rank order, with no gap"
            held[piece.name] = piece.stop
            for place in range(piece.inside.start, piece.inside.stop):
                assert 0 <= place < partition.shard_size
                covered[mine.start + place] += 1
    for gap in partition.padding(0, partition.numel):
        for place in range(gap.start, gap.stop):
            covered[place] += 1
    assert held == {name: math.prod(shape) for name, shape in SHAPES}
    assert set(covered) == {1}


def test_parameters_are_aligned_and_little_is_padded() -> None:
    partition = Partition(SHAPES, 3)
    assert all(offset % ALIGNMENT == 0 for offset in partition.offsets)
    used = sum(math.prod(shape) for _, shape in SHAPES)
    assert partition.numel < used + len(SHAPES) * ALIGNMENT + 3


def test_a_rank_may_own_padding_only_or_nothing() -> None:
    partition = Partition([("p", (3,))], 5)
    assert [len(partition.pieces(rank)) for rank in range(5)] == [1, 1, 1, 0, 0]
    assert partition.padding(4, 5) == [slice(4, 5)]
    assert Partition([], 3).numel == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 16])
@pytest.mark.parametrize(
    "shapes",
    [
        SHAPES,
        [("empty", (0, 3))],
        [("one", (7,)), ("empty", (2, 0))],
        [("empty", (0, 3)), ("also", (3, 0)), ("one", (33,))],
    ],
)
def test_a_parameter_without_elements_has_one_owner(
    world_size: int, shapes: list[tuple[str, tuple[int, ...]]]
) -> None:
    partition = Partition(shapes, world_size)
    owners = [
        (piece.name, rank)
        for rank in range(world_size)
        for piece in partition.pieces(rank)
        if 0 in piece.shape
    ]
    assert sorted(name for name, _ in owners) == sorted(n for n, shape in shapes if 0 in shape)


def test_split_opens_no_bucket_for_an_empty_tensor() -> None:
    assert split([10, 0, 0, 3], 6) == [[0, 1, 2], [3]]
    assert split([0, 10], 6) == [[0], [1]]


def test_split_is_greedy_and_cuts_no_tensor() -> None:
    assert split([3, 3, 3, 10, 1, 1], 6) == [[0, 1], [2], [3], [4, 5]]
    assert split([], 6) == []
    random.seed(1)
    for _ in range(100):
        sizes = [random.randrange(9) for _ in range(random.randrange(9))]
        buckets = split(sizes, 7)
        assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
        assert all(
            len(bucket) == 1 or sum(sizes[index] for index in bucket) <= 7 for bucket in buckets
        )


def test_a_rank_without_rows_is_one_that_chunk_gives_none() -> None:
    for rows in range(1, 30):
        for world_size in range(1, 20):
            chunks = torch.empty(rows).chunk(world_size)
            assert leaves_a_rank_empty(rows, world_size) == (len(chunks) < world_size)


MATRICES = [
    ("wide", (4, 30)),
    ("tall", (30, 4)),
    ("square", (8, 8)),
    ("row", (1, 5)),
    ("big", (9, 40)),
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 16])
def test_owners_have_whole_matrices(world_size: int) -> None:
    partition = Partition(MATRICES, world_size, whole=True)
    owners: dict[str, int] = {}
    covered = [0] * partition.numel
    for rank in range(world_size):
        mine = partition.shard(rank)
        for piece in partition.pieces(rank):
            assert (piece.start, piece.stop) == (0, math.prod(piece.shape))
            assert piece.name not in owners and piece.offset % ALIGNMENT == 0
            owners[piece.name] = rank
            for place in range(piece.inside.start, piece.inside.stop):
                covered[mine.start + place] += 1
    for gap in partition.padding(0, partition.numel):
        for place in range(gap.start, gap.stop):
            covered[place] += 1
    assert set(owners) == {name for name, _ in MATRICES} and set(covered) == {1}


def test_owners_share_the_work() -> None:
    partition = Partition(MATRICES, 2, whole=True)
    work = [
        sum(math.prod(piece.shape) * min(piece.shape) for piece in partition.pieces(rank))
        for rank in range(2)
    ]
    # The biggest matrix is 3240 of 4717, so that one rank has it alone.
    assert sorted(work) == [1477, 3240]
    assert Partition([], 3, whole=True).numel == 0
