"""The model of the caching allocator does what that of an H100 and an H200 did, block by block."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slices import sliced

from zerocheck.memory.caching_allocator import MIB, SMALL_SEGMENT, CachingAllocator, DeviceBlock
from zerocheck.memory.reserved import reserved
from zerocheck.memory.setup import Setup
from zerocheck.memory.simulate import simulate
from zerocheck.memory.source import source

RECORDED = Path(__file__).parent / "recorded_on_a_gpu"
NAMES = sorted(path.stem for path in RECORDED.glob("*.json"))
ALLOCATED, FREED, SEGMENT = 0, 2, 3


@cache
def facts(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


def events(name: str) -> list[tuple[int, int, int, int]]:
    """(action, size, address, stream), as tests/gpu/record_allocator.py recorded them."""
    with np.load(RECORDED / f"{name}.npz") as columns:
        return [*zip(*(columns[one].tolist() for one in ("action", "size", "address", "stream")))]  # noqa: B905


def initial(name: str) -> list[tuple[int, int, int]]:
    with np.load(RECORDED / f"{name}.npz") as columns:
        return [tuple(one) for one in columns["initial"].tolist()]


def replayed(name: str) -> CachingAllocator:
    """The allocator after a recording, begun with an empty one."""
    allocator = CachingAllocator(expandable="expandable" in facts(name)["settings"])
    live: dict[int, DeviceBlock] = {}
    for action, size, address, stream in events(name):
        if action == ALLOCATED:
            live[address] = allocator.allocate(size, stream)
        elif action == FREED and address in live:
            allocator.free(live.pop(address))
    return allocator


def test_there_are_recordings() -> None:
    assert len(NAMES) >= 20
    assert sum(one[0] == ALLOCATED for name in NAMES for one in events(name)) > 90_000


@pytest.mark.parametrize("name", [name for name in NAMES if "expandable" not in name])
def test_every_block_is_where_it_was(name: str) -> None:
    """Only where the driver puts a segment is taken from the recording."""
    made = [event for event in events(name) if event[0] == SEGMENT]
    asked: list[tuple[int, int]] = []

    def address(size: int, stream: int) -> int:
        asked.append((size, stream))
        return made[len(asked) - 1][2]

    allocator = CachingAllocator(addresses=address)
    for at, size, stream in initial(name):
        allocator.add_segment(at, size, stream, small=size == SMALL_SEGMENT)
    live: dict[int, DeviceBlock] = {}
    for action, size, at, stream in events(name):
        if action == ALLOCATED:
            live[at] = allocator.allocate(size, stream)
            assert live[at].address == at
        elif action == FREED and at in live:
            allocator.free(live.pop(at))
    assert asked == [(size, stream) for _, size, _, stream in made]
    assert allocator.peak_reserved == max(one["reserved_peak"] for one in facts(name)["phases"])


@pytest.mark.parametrize("name", [name for name in NAMES if "expandable" in name])
def test_every_block_of_expandable_segments_is_where_it_was(name: str) -> None:
    allocator = CachingAllocator(expandable=True)
    live: dict[int, DeviceBlock] = {}
    begins: dict[tuple[int, bool], int] = {}
    for action, size, address, stream in events(name):
        if action == ALLOCATED:
            block = live[address] = allocator.allocate(size, stream)
            assert address - block.address == begins.setdefault(block.pool, address - block.address)
        elif action == FREED and address in live:
            allocator.free(live.pop(address))
    assert allocator.peak_reserved == max(one["reserved_peak"] for one in facts(name)["phases"])


SIMULATED = [name for name in NAMES if facts(name).get("setup") and name != "fsdp1"]
OFTEN = (
    "convolutions-ddp", "ddp", "ddp-checkpointed", "ddp-muon", "fsdp2-accumulated",
    "fsdp2-checkpointed-expandable", "fsdp2-kept", "fsdp2-layers", "fsdp2-of-two", "llama",
    "pictures-fp32", "zero1", "zero2-expandable", "zero3",
)  # fmt: skip
"""Of each kind one, and none of the models of a billion parameters."""
APART = {"convolutions-ddp": (0.011, 0.013), "convolutions-fsdp2": (0.03, 0.21)}
"""Shares of what is allocated and reserved that are not modelled: workspaces of cuDNN."""


@pytest.mark.every(8)
@pytest.mark.parametrize("name", sliced(SIMULATED, [n for n in SIMULATED if n in OFTEN]))
def test_a_simulation_says_what_a_gpu_reserves(name: str) -> None:
    """The rank with data on a GPU, and without on the CPU: both through the model, begun empty.

    Kernels of attention and norms keep other tensors of some KiB there, which may take one more
    segment for small sizes.
    """
    one = facts(name)
    setup = Setup(**one["setup"])
    expandable = "expandable" in one["settings"]
    found = reserved(simulate(setup, source(setup.model), one["blocks"]).log, expandable=expandable)
    there = replayed(name)
    allocated, kept = APART.get(name, (0.0003, 0.0))
    assert found.peak_allocated == pytest.approx(there.peak_allocated, rel=allocated)
    apart = abs(found.peak_reserved - there.peak_reserved)
    assert apart <= max(SMALL_SEGMENT, kept * there.peak_reserved)


def test_a_real_step_of_a_whole_model() -> None:
    """The one recording that began with an empty allocator: as it was, and as it is simulated."""
    one = facts("ddp")
    setup = Setup(**one["setup"])
    found = reserved(simulate(setup, source(setup.model), one["blocks"]).log)
    measured = max(phase["reserved_peak"] for phase in one["phases"])
    assert found.peak_reserved == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize("name", ["zero3", pytest.param("deepspeed3", marks=pytest.mark.long)])
def test_what_is_reserved_shrinks_with_the_ranks(tmp_path: Path, name: str) -> None:
    """The whole model on the device, before it is sharded, is the same on any number of them."""
    implementation = name
    if name == "deepspeed3":
        config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
        sizes = {"reduce_bucket_size": 1_000_000, "stage3_max_live_parameters": 1}
        config["zero_optimization"] = {"stage": 3, **sizes}  # type: ignore[assignment]
        (tmp_path / "ds.json").write_text(json.dumps(config))
        implementation = str(tmp_path / "ds.json")
    shape = {"n_embd": 1024, "n_head": 8, "n_layer": 8, "n_positions": 64, "vocab_size": 100}
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"model_type": "gpt2", **shape}))
    given = source(str(model))
    whole = 4 * sum(parameter.numel() for parameter in given.build().parameters())
    training, building = [], []
    for ranks in (2, 16, 128):
        setup = Setup(
            model=given.name, implementation=implementation, world_size=ranks, sequence=16
        )
        log = simulate(setup, given).log
        training.append(reserved(log, building=False).peak_reserved)
        building.append(reserved(log).peak_reserved)
    assert training == sorted(training, reverse=True) and len({*training}) == 3
    assert min(building) >= whole and building[-1] - training[-1] > whole / 3


def test_sizes_are_rounded() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(1).size == 512 and allocator.reserved == 2 * MIB
    assert allocator.allocate(MIB).size == MIB and allocator.reserved == 2 * MIB
    assert allocator.allocate(MIB + 1).size == MIB + 512 and allocator.reserved == 22 * MIB
    assert allocator.allocate(11 * MIB).size == 11 * MIB and allocator.reserved == 22 * MIB
    assert allocator.allocate(11 * MIB).size == 12 * MIB and allocator.reserved == 34 * MIB
    assert allocator.allocate(12 * MIB, 1).size == 12 * MIB and allocator.reserved == 46 * MIB


def test_what_is_left_of_1_mib_is_not_split() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    assert allocator.allocate(19 * MIB).size == 20 * MIB


SIZES = st.integers(1, 40 * MIB)


@given(
    st.lists(st.tuples(SIZES, st.integers(0, 2), st.integers(0, 30)), max_size=60), st.booleans()
)
def test_blocks_never_overlap_and_merge_again(
    asked: list[tuple[int, int, int]], expandable: bool
) -> None:
    allocator = CachingAllocator(expandable=expandable)
    live: list[DeviceBlock] = []
    for size, stream, frees in asked:
        block = allocator.allocate(size, stream)
        assert block.size >= size
        live.append(block)
        if frees < len(live):
            allocator.free(live.pop(frees))
        assert allocator.allocated == sum(one.size for one in live) <= allocator.reserved
        for pool in {one.pool for one in live}:
            ends = sorted((one.address, one.size) for one in live if one.pool == pool)
            assert all(a + size <= b for (a, size), (b, _) in pairwise(ends))
    for block in live:
        allocator.free(block)
    assert allocator.allocated == 0
    before = allocator.reserved
    for size, stream, _ in asked[:1]:
        allocator.allocate(size, stream)
        assert allocator.reserved == before  # all of it can be handed out again
