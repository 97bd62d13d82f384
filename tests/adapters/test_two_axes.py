"""What is built in on meshes of two axes: right in every obligation, bytes and calls included."""

from __future__ import annotations

from math import prod

import pytest

from zerocheck.adapters.fsdp1.adapter import Fsdp1
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.case.schema import (
    Block,
    Case,
    Mesh,
    Model,
    Sharding,
    SyncKind,
    Training,
    TrainingSegment,
)
from zerocheck.contract.implementation import Implementation
from zerocheck.drive.rank import load
from zerocheck.models.network import build_model
from zerocheck.protocol.layout import Call
from zerocheck.protocol.verdicts import EQUIVALENCE, MEMORY, RESUME
from zerocheck.ranks.pool import Pool

from .holding import holds

# stem.weight (4, 3), stem.bias (4,), head.weight (3, 4), head.bias (3,), and 4 of the block's.
MODEL = Model(inputs=3, width=4, blocks=(Block(kind="mlp", hidden=5),), outputs=3)
CLIPPED = Training(steps=2, microbatches=2, clip=0.01)


@pytest.mark.every(9)
@pytest.mark.parametrize(
    ("name", "mesh", "sync", "answer"),
    [
        ("zero1", (2, 3), "last", True),
        ("zero2", (3, 2), "last", True),
        ("zero3", (2, 3), "last", True),
        ("zero2", (1, 3), "last", True),
        ("fsdp2", (2, 3), "last", True),
        ("fsdp2", (3, 2), "shards", False),
        ("fsdp2", (3, 1), "last", True),
        ("fsdp1", (2, 2), "last", True),
        ("fsdp1-grad-op", (2, 2), "each", True),
    ],
)
def test_all_holds(pool: Pool, name: str, mesh: Mesh, sync: SyncKind, answer: bool) -> None:
    """told: the layout tells of bytes; it does not where sums wait for the last microbatch."""
    case = Case(mesh=mesh, model=MODEL, training=CLIPPED, sharding=Sharding(sync=sync))
    judgement = holds(pool, name, case, (*EQUIVALENCE, *MEMORY))
    for obligation in (*EQUIVALENCE, "communication"):
        wanted = "not exercised" if obligation == "buffers" else "holds"
        assert judgement.statuses[obligation] == wanted, obligation
    layout = load(name).layout(build_model(case), case, prod(mesh) - 1)
    assert layout is not None and bool(layout.lines) is answer


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "save", "load_on"),
    [("zero3", (2, 2), (3,)), ("fsdp2", (2, 2), (1, 3)), ("fsdp1", (2, 2), (2,))],
)
def test_checkpoints_go_from_mesh_to_mesh(pool: Pool, name: str, save: Mesh, load_on: Mesh) -> None:
    case = Case(mesh=save, model=MODEL, resume=(TrainingSegment(mesh=load_on),))
    assert holds(pool, name, case, (*EQUIVALENCE, *RESUME)).statuses["roundtrip"] == "holds"


def test_fsdp1_refuses_what_torch_has_not_and_takes_what_it_gets_wrong() -> None:
    case = Case(mesh=(2, 2), sharding=Sharding(sync="shards"), training=Training(microbatches=2))
    assert "no deferred reduction" in (Fsdp1.supports(case) or "")
    sharded = Case(resume=(TrainingSegment(mesh=(2, 2)),), sharding=Sharding(checkpoint="sharded"))
    assert Fsdp1.supports(sharded) is None


def _bytes(kind: type[Implementation], case: Case, rank: int) -> dict[str, int]:
    layout = kind.layout(build_model(case), case, rank)
    assert layout is not None
    return {
        one.category: one.bytes
        for one in layout.lines
        if (one.step, one.phase) == (0, "step") and one.bytes
    }


@pytest.mark.parametrize("kind", [Zero1, Zero2, Zero3, Fsdp1, Fsdp2])
def test_a_replica_holds_what_its_ranks_would_hold_alone(kind: type[Implementation]) -> None:
    """Rank 2 r + s of (3, 2) as rank s of (2,): replicas share nothing."""
    alone, replicated = Case(mesh=(2,), model=MODEL), Case(mesh=(3, 2), model=MODEL)
    for rank in range(6):
        assert _bytes(kind, replicated, rank) == _bytes(kind, alone, rank % 2)


def _calls(kind: type[Implementation], case: Case) -> list[Call]:
    layout = kind.layout(build_model(case), case, 0)
    assert layout is not None and layout.calls is not None
    return [call for call in layout.calls if call.step == 0]


@pytest.mark.parametrize("kind", [Zero1, Zero2, Zero3, Fsdp1, Fsdp2])
def test_the_replicate_axis_adds_one_all_reduce_of_each_shard(kind: type[Implementation]) -> None:
    alone, replicated = Case(mesh=(2,), model=MODEL), Case(mesh=(3, 2), model=MODEL)
    calls = _calls(kind, replicated)
    within = [call for call in calls if call.ranks == 2]
    over = [call for call in calls if call.ranks == 3]
    assert within == _calls(kind, alone) and len(within) + len(over) == len(calls)
    scattered = [call.bytes for call in within if call.kind == "reduce_scatter"]
    assert {call.kind for call in over} == {"all_reduce"}
    assert [2 * call.bytes for call in over] == scattered


def test_only_the_last_microbatch_goes_over_the_replicas() -> None:
    training = Training(microbatches=3)
    counted = {}
    for sync in ("last", "each", "shards"):
        case = Case(mesh=(3, 2), model=MODEL, training=training, sharding=Sharding(sync=sync))
        calls = _calls(Fsdp2, case)
        counted[sync] = (
            sum(call.kind == "reduce_scatter" for call in calls),
            sum(call.ranks == 3 for call in calls),
        )
    units = counted["last"][0]
    assert counted == {
        "last": (units, units),
        "each": (3 * units, 3 * units),
        "shards": (3 * units, units),
    }
