"""Meshes of two axes: who holds what, what replicas must agree on, and what a wrong axis is called.

The observations are of 2 x 2 ranks: rank 2 r + s is in replica r and has place s on the shard axis.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from observing import Observed
from small import held, layout, state

from zerocheck.case.mesh import mesh_of
from zerocheck.case.schema import Block, Case, Model, Sharding, Training
from zerocheck.floating_point import Enclosure
from zerocheck.judge import bounds
from zerocheck.judge.assemble import Observation, RoleState
from zerocheck.judge.clipping import elements_of
from zerocheck.judge.compare import compare
from zerocheck.judge.ownership import Ownership
from zerocheck.protocol.observations import Entry, RankObservation, Recorded
from zerocheck.protocol.verdicts import Violation

Observe = Callable[[str, Case], Observed]

CASE = Case(
    mesh=(2, 2),
    model=Model(inputs=3, width=4, blocks=(Block(kind="mlp", hidden=5),), outputs=3),
    training=Training(steps=2, microbatches=2, clip=0.01),
    sharding=Sharding(wrap="block"),
)


def _all(*ranges: tuple[int, int]) -> Violation | None:
    """What is said of a parameter `b` of which rank r holds the range r; all else is on all."""
    seen = []
    for start, stop in ranges:
        entries = [Entry(p.name, p.shape, 0, p.stop - p.start) for p in layout().places]
        entries = [entry for entry in entries if entry.name != "b"]
        manifest = (*entries, Entry("b", (2, 2), start, stop))
        record = Recorded(0, "state", "parameter", 0, 0, 0, "float32")
        seen.append(RankObservation(manifests=(manifest,), records=(record,)))
    mesh = mesh_of((len(ranges) // 2, 2))
    observation = Observation(layout(), seen, lambda rank, record: torch.empty(0), mesh=mesh)
    return Ownership(observation).check(0, "state")


def test_replicas_hold_the_same_parts() -> None:
    low, high = (0, 2), (2, 4)
    assert _all(low, high, low, high) is None
    assert _all(low, high, low, high, low, high) is None
    assert _all((0, 4), (0, 4), (0, 4), (0, 4)) is None


@pytest.mark.parametrize(
    ("ranges", "cause", "message"),
    [
        (
            ((0, 2), (0, 2), (2, 4), (2, 4)),
            "cut over the replicate axis",
            "rank 2 holds elements 2 to 3, and rank 0, which has the same place on the shard axis, "
            "holds elements 0 to 1; they must be replicas",
        ),
        (((0, 1), (1, 2), (2, 3), (3, 4)), "cut over all ranks", "rank 2 holds elements 2 to 2"),
        (((0, 2), (2, 4), (2, 4), (0, 2)), "replicas hold other parts", "elements 2 to 3"),
        (((0, 2), (2, 4), (0, 0), (0, 0)), "replicas hold other parts", "rank 2 holds nothing"),
    ],
)
def test_replicas_that_hold_other_parts(ranges: tuple, cause: str, message: str) -> None:
    violation = _all(*ranges)
    assert violation is not None and violation.obligation == "ownership"
    assert message in violation.explanation
    assert violation.causes == (cause,)


def _copies(*parts: list[float]) -> RoleState:
    """Ranks 0 and 1 hold one copy of 8 elements, ranks 2 and 3 another."""
    one = held(*parts, ranges=(range(4), range(4, 8)) * 2)
    return RoleState(one.whole, one.parts, one.plans, one.manifests, mesh_of((2, 2)))


def test_a_replica_is_put_together_from_its_own_ranks() -> None:
    first, second = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
    same = _copies(first, second, first, second)
    assert all(same.as_of(rank) is same.whole for rank in range(4))
    other = _copies(first, second, first, [5.0, 6.0, 7.0, 9.0])
    assert other.as_of(0) is other.whole and other.as_of(1) is other.whole
    for rank in (2, 3):
        assert other.as_of(rank).tolist() == [*first, 5.0, 6.0, 7.0, 9.0]
        assert elements_of(other, rank).tolist() == [*first, 5.0, 6.0, 7.0, 9.0]
    assert state(first * 2).per_rank[0].tolist() == first * 2


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2), (3, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("first", [0, 1])
def test_the_bound_encloses_both_orders_and_both_divisions(
    mesh: tuple[int, int], first: int
) -> None:
    """Reduce over one axis, then over the other; divide after each, or once by all ranks."""
    replicas, shards = mesh
    world = replicas * shards
    parts = torch.randn(*mesh, 1 << 14, generator=torch.Generator().manual_seed(world))
    wide = parts.double()
    for accumulate in ("local", "reduce_each", "reduce_shards"):
        roundings = bounds.gradient_roundings(
            world_size=world,
            microbatches=1,
            average="mean",
            divide="loss",
            accumulate=accumulate,
            mesh=mesh_of(mesh),
        )
        exact, absolute = wide.sum((0, 1)) / world, wide.abs().sum((0, 1)) / world
        enclosure = bounds.gradient(exact, absolute, roundings)
        once, twice = parts, parts
        for axis in (first, 0):
            size = once.shape[axis]
            once, twice = _summed(once, axis), _summed(twice, axis) * torch.tensor(1 / size)
        for reduced in (once / world, once * torch.tensor(1 / world), twice):
            assert compare(reduced, enclosure)[1] is None


def _summed(parts: torch.Tensor, axis: int) -> torch.Tensor:
    """One rank after the other, in fp32."""
    ranks = list(parts.unbind(axis))
    total = ranks[0]
    for part in ranks[1:]:
        total = total + part
    return total


def test_an_axis_that_is_not_divided_by_is_outside() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    roundings = bounds.gradient_roundings(
        world_size=9,
        microbatches=2,
        average="mean",
        divide="loss",
        accumulate="local",
        mesh=mesh_of((3, 3)),
    )
    assert roundings == 8 + 1 + 2 + 2
    enclosure = bounds.gradient(exact, exact, roundings)
    assert compare(torch.full((4,), 3.0), enclosure)[1] is not None
    assert compare(torch.full((4,), 1.0), Enclosure(exact, enclosure.bound))[1] is None


@pytest.fixture(scope="module")
def seen(observe: Observe) -> Observed:
    return observe("zero3", CASE)


def test_it_holds(seen: Observed) -> None:
    judgement = seen.judge()
    assert not judgement.violations
    assert judgement.statuses["clip"] == judgement.statuses["publish"] == "holds"


def _changed(seen: Observed, role: str, point: str, ranks: tuple[int, ...]) -> Violation:
    """The first violation if one element of `stem.weight` is another one on these ranks."""
    places = seen.places(role, point, 0, "stem.weight")
    mine = [data for (rank, _), (_, data) in zip(_owners(seen, role, point), places, strict=True)
            if rank in ranks]  # fmt: skip
    kept = [data.clone() for data in mine]
    for data in mine:
        data[0] += 0.5
    try:
        violations = seen.judge().violations
    finally:
        for data, before in zip(mine, kept, strict=True):
            data.copy_(before)
    assert mine and violations
    return violations[0]


def _owners(seen: Observed, role: str, point: str) -> list[tuple[int, str]]:
    """(rank, name) of each shard of `stem.weight` that has elements, as `Observed.places` goes."""
    return [
        (rank, entry.name)
        for rank, record in seen.records(role, point, 0)
        for entry in seen.seen[rank].manifests[record.manifest]
        if entry.name == "stem.weight" and entry.stop > entry.start
    ]


def test_replicas_of_a_shard_agree_bit_for_bit(seen: Observed) -> None:
    for role in ("parameter", "exp_avg"):
        violation = _changed(seen, role, "state", (2, 3))
        assert violation.obligation == "publish" and set(violation.ranks) <= {2, 3}
        assert violation.role == role and violation.tensors == ("stem.weight",)


def test_a_gradient_of_one_replica_is_not_that_of_all(seen: Observed) -> None:
    violation = _changed(seen, "gradient", "reduced", (2, 3))
    assert violation.obligation == "gradient" and set(violation.ranks) <= {2, 3}
    assert violation.tensors == ("stem.weight",)


def test_a_sum_of_the_shard_axis_that_is_divided_by_the_ranks_of_a_host(observe: Observe) -> None:
    """A host of 4 ranks has ranks of both replicas, and the second replica has two hosts."""
    training = msgspec.structs.replace(CASE.training, steps=1, clip=None)
    case = msgspec.structs.replace(CASE, mesh=(2, 3), hosts=(4,), training=training)
    observed = observe("zero1", case)
    for rank, record in observed.records("gradient", "reduced", 0):
        observed.tensors[rank, record].mul_(3 / (4 if rank < 4 else 2))
    first = observed.judge().violations[0]
    assert first.causes == ("divided by the ranks of a host",), first.explanation
    assert first.explanation == (
        "the sum over the shard axis is divided by the number of ranks on a host (4, 2; "
        "LOCAL_WORLD_SIZE), and not by 3"
    )
