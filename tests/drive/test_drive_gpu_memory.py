"""The ledger of a GPU, from what its allocator says: snapshots in the format of torch, by hand."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from zerocheck.case.schema import Case
from zerocheck.compat_memory import Allocation, LastOfNccl, Snapshot
from zerocheck.drive import gpu_memory
from zerocheck.drive.attribution import MARK, Attribution, PhaseEnd
from zerocheck.drive.gpu_memory import DeviceLog, changes, events_of, pool_of
from zerocheck.drive.holders import Claim, Claims
from zerocheck.judge.obligations import peak, persistent
from zerocheck.protocol.layout import Layout, Line
from zerocheck.protocol.measurements import UNEXPLAINED, CudaPool, Measured

BUILT, FORWARD, BACKWARD = PhaseEnd(-1, "built"), PhaseEnd(0, "forward"), PhaseEnd(0, "backward")


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    """As torch.cuda.memory._snapshot()["device_traces"][0] has them."""
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 7,
            "frames": []}  # fmt: skip


def block(address: int, asked: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    """As the blocks of torch.cuda.memory_snapshot()."""
    return {"address": address, "size": size, "requested_size": asked, "state": state,
            "frames": []}  # fmt: skip


def segment(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"device": 0, "address": blocks[0]["address"], "total_size": 2 << 20, "stream": 0,
            "segment_type": "small", "blocks": list(blocks)}  # fmt: skip


def snapshot(trace: list[dict[str, Any]], *blocks: dict[str, Any], other: int = 0) -> Snapshot:
    """other: bytes that are handed out and are in no block of these."""
    held = sum(one["size"] for one in blocks if one["state"] == "active_allocated")
    segments = [segment(*blocks)] if blocks else []
    return Snapshot(trace, segments, held + other, 2 << 20, (2 << 20) - held)


class History:
    """Stands for AllocatorHistory: gives one snapshot after the other."""

    def __init__(self, *snapshots: Snapshot) -> None:
        self.left = list(snapshots)

    def start(self) -> None:
        return None

    def taken(self) -> Snapshot:
        return self.left.pop(0)

    def stop(self) -> None:
        assert not self.left


BEFORE = snapshot([], block(512, 100, 512))
"""What was there already: 100 bytes of somebody else's."""


def logged(
    monkeypatch: pytest.MonkeyPatch, claims: list[Claims], *snapshots: Snapshot
) -> tuple[Attribution, list[CudaPool]]:
    """The ledger of a run that ends phase after phase as the snapshots say."""
    places = [BUILT, FORWARD, BACKWARD][: len(snapshots)]
    monkeypatch.setattr(gpu_memory, "AllocatorHistory", lambda _: History(BEFORE, *snapshots))
    log = DeviceLog(torch.device("cuda", 0))
    log.start()
    for place, held in zip(places, claims, strict=True):
        log.mark("nothing is noted of this")
        log.over(place, held)
    looked = dict(zip(places, claims, strict=True))
    return Attribution(log.stop(MARK), looked, Counter({400: 1})), log.pools


def test_every_group_of_nccl_makes_one_more_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the tensors of its last one until then; other backends do not."""
    asked: list[str] = []
    groups = SimpleNamespace(pg_map={"whole": 0, "on the cpu": 0, "axis": 0})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_world", groups)
    config = {"on the cpu": "cpu:gloo"}
    monkeypatch.setattr(dist, "get_backend_config", lambda one: config.get(one, "cuda:nccl"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: asked.append(group))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append("waited"))
    last = LastOfNccl(torch.device("cpu"))
    assert not asked
    last.let_go()
    assert asked == ["whole", "axis", "waited"]


PARAMETER, GRADIENT = Claim(0, "parameter", "w"), Claim(0, "gradient", "w")


def test_memory_is_counted_as_it_was_asked_for_and_rounding_stands_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, pools = logged(
        monkeypatch,
        [{1024: PARAMETER}, {1024: PARAMETER}],
        snapshot([entry("alloc", 1024, 40)], block(512, 100, 512), block(1024, 40, 512)),
        snapshot(
            [entry("alloc", 1536, 513), entry("alloc", 4096, 8), entry("free_requested", 4096, 8),
             entry("free_completed", 4096, 8), entry("segment_alloc", 1 << 20, 2 << 20)],
            block(512, 100, 512), block(1024, 40, 512), block(1536, 513, 1024),
            block(4096, 8, 512, "inactive"),
        ),
    )  # fmt: skip
    assert [*ledger.lines()] == [
        Line("built", -1, "parameter", 40, "w"),
        Line("forward", 0, "parameter", 40, "w"),
        Line("forward", 0, "activation", 513, "on a GPU"),
    ]
    assert [(one.asked, one.rounding, one.allocated, one.unexplained) for one in pools] == [
        (40, 472, 512, 0),
        (553, 983, 1536, 0),
    ]
    assert pools[0].reserved == 2 << 20 and pools[0].inactive == (2 << 20) - 1024


def test_what_was_there_before_may_be_freed_by_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's watchdog frees what an earlier case gave to it; that is no loss of this one."""
    _, pools = logged(
        monkeypatch,
        [{1024: PARAMETER}],
        snapshot(
            [entry("alloc", 1024, 40), entry("free_requested", 512, 100)],
            block(512, 100, 512, "inactive"), block(1024, 40, 512),
        ),
    )  # fmt: skip
    assert [(one.allocated, one.unexplained) for one in pools] == [(512, 0)]


def test_an_address_that_is_used_again_is_another_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caching allocator hands the memory of a gradient out to an activation."""
    again = [entry("free_requested", 1024, 40), entry("alloc", 1024, 40)]
    ledger, _ = logged(
        monkeypatch,
        [{1024: GRADIENT}, {}],
        snapshot([entry("alloc", 1024, 40)], block(1024, 40, 512)),
        snapshot(again, block(1024, 40, 512)),
    )
    assert [line.category for line in ledger.lines()] == ["gradient", "activation"]


def test_what_waits_for_a_stream_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """`memory_allocated` does not count it, though it cannot be used yet."""
    ledger, pools = logged(
        monkeypatch,
        [{}],
        snapshot(
            [entry("alloc", 1024, 40), entry("free_requested", 1024, 40)],
            block(512, 100, 512), block(1024, 40, 512, "active_awaiting_free"),
        ),
    )  # fmt: skip
    assert not [*ledger.lines()] and pools[0].unexplained == 0


def test_a_bucket_of_ddp_and_what_nobody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are held in C++; the reducer says the size of the one."""
    ledger, _ = logged(
        monkeypatch,
        [{}],
        snapshot(
            [entry("alloc", 1024, 400), entry("alloc", 2048, 44)],
            block(1024, 400, 512), block(2048, 44, 512),
        ),
    )  # fmt: skip
    assert [(line.category, line.bytes, line.holder) for line in ledger.lines()] == [
        ("bucket", 400, "a reducer of DDP"),
        ("other", 44, f"{UNEXPLAINED} in on a GPU"),
    ]


def test_what_is_on_the_cpu_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.zeros(())
    where = step.untyped_storage().data_ptr()
    claims: list[Claims] = [{where: Claim(0, "optimizer", "w")}, {}]
    ledger, pools = logged(monkeypatch, claims, BEFORE, BEFORE)
    assert [*ledger.lines()] == [Line("built", -1, "optimizer", 4, "w")]
    assert [one.asked for one in pools] == [0, 0]


def test_changes() -> None:
    before, now = {1: 4, 2: 8, 3: 4}, {1: 4, 2: 16, 4: 4}
    events = [(one.address, one.bytes) for one in changes(before, now)]
    assert events == [(2, -8), (3, -4), (2, 16), (4, 4)]
    assert all(isinstance(one, Allocation) for one in changes(before, now))


@pytest.mark.parametrize("asked", [1, 511, 512, 513, 2**20, 2**20 + 1])
def test_rounding_is_what_the_allocator_gave_beyond_what_was_asked(asked: int) -> None:
    size = -(-asked // 512) * 512
    now = snapshot([entry("alloc", 0, asked)], block(0, asked, size))
    pool = pool_of(BUILT, now, 0, {0: asked})
    assert (pool.asked, pool.rounding, pool.unexplained) == (asked, size - asked, 0)
    assert [one.bytes for one in events_of(now.trace)] == [asked]


def measured(*pools: CudaPool, lines: tuple[Line, ...] = ()) -> Measured:
    answer = Layout(lines=(Line("built", -1, "parameter", 40), Line("built", -1, "bucket", 7)))
    return Measured(lines=lines, pools=pools, layout=answer, steps=1)


RIGHT = CudaPool(-1, "built", 40, 472, 512, 2 << 20, 0)
HELD = (Line("built", -1, "parameter", 40, "w"),)


def test_an_account_that_does_not_close_is_seen() -> None:
    case = Case(mesh=(2,))
    for off in (512, -512):
        wrong = msgspec.structs.replace(RIGHT, allocated=512 + off)
        ranks = [measured(RIGHT, lines=HELD), measured(wrong, lines=HELD)]
        violation = persistent.check(case, ranks).violation
        assert violation is not None and violation.ranks == (1,)
        assert violation.causes == ("the ledger does not close",)
        assert "torch.cuda.memory_allocated" in violation.explanation


def test_of_the_layout_what_waits_for_no_stream_is_compared() -> None:
    case = Case(mesh=(2,))
    assert persistent.check(case, [measured(RIGHT, lines=HELD)] * 2).violation is None
    more = (Line("built", -1, "parameter", 44, "w"),)
    violation = persistent.check(case, [measured(RIGHT, lines=more)] * 2).violation
    assert violation is not None and violation.role == "parameter"
    on_cpu = [msgspec.structs.replace(measured(lines=HELD))] * 2
    violation = persistent.check(case, on_cpu).violation
    assert violation is not None and violation.role == "bucket"  # there it is exact
    assert not peak.check(case, [measured(RIGHT, lines=HELD)] * 2).exercised
