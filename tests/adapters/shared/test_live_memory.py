"""What is said beforehand of the most that is held within a step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from zerocheck.adapters.shared.live_memory import LiveMemory, ModelMemory, model_memory, terms_of
from zerocheck.case.schema import Block, Case, Data, Model, Sharding
from zerocheck.catalogue import BUILT_IN
from zerocheck.compat_memory import Allocation
from zerocheck.contract.loading import load
from zerocheck.models.network import build_model
from zerocheck.protocol.layout import Highest, Term

MODEL = Model(
    inputs=16,
    width=16,
    blocks=tuple(Block(kind="mlp", hidden=hidden) for hidden in (16, 64, 16, 64)),
    outputs=16,
)
CASE = Case(mesh=(2,), model=MODEL, data=Data(batch=2, length=4))
LINEAR = 4 * (16 * 16 + 16)
"""Bytes of the stem, and of the head; both are on 16-element boundaries and even."""
SMALL, LARGE = 4 * (2 * 16 * 16 + 32), 4 * (2 * 16 * 64 + 80)
"""Bytes of a block's parameters."""


def answer(name: str, sharding: Sharding, term: Term, phase: str = "backward") -> int:
    """The most of the last step that is told of."""
    case = replace(CASE, sharding=sharding)
    layout = load(name).layout(build_model(case), case, 0)
    assert layout is not None and layout.highest is not None
    (size,) = [
        one.bytes
        for one in layout.highest
        if (one.step, one.phase, one.term) == (layout.last, phase, term)
    ]
    return size


def test_what_is_held_and_let_go_of_adds_up() -> None:
    window = LiveMemory()
    window.hold("gradient", "shard", 100)
    window.at(0, "forward")
    window.hold("gathered", "a", 40)
    window.hold("gathered", "a", 40)  # it is there already
    window.of_model(ModelMemory(60, 20))
    window.free("gathered", "a")
    window.free("gathered", "never")
    window.of_model(ModelMemory(None, 24))
    window.at(0, "backward")
    window.of_model(ModelMemory(50, 50))
    window.gradient("w", 12)
    window.hold("bucket", 0, 16)
    window.free("other", "w")
    window.hold("gathered", "b", 8)  # a single number
    assert window.highest(["gathered", "bucket", "working"]) == (
        Highest("forward", 0, "gathered", 40),
        Highest("forward", 0, "bucket", 0),
        Highest("forward", 0, "working", 100 + 40 + 60),
        Highest("backward", 0, "gathered", 0),
        Highest("backward", 0, "bucket", 16),
        Highest("backward", 0, "working", 100 + 50 + 16),
    )


def test_a_gradient_that_is_added_to_another_is_gone() -> None:
    window = LiveMemory()
    window.at(0, "forward")
    window.of_model(ModelMemory(30, 30))
    window.gradient("w", 30)
    window.of_model(ModelMemory(30, 30))
    window.gradient("w", 30)
    window.of_model(ModelMemory(60, 0))
    assert window.highest(["working"]) == (Highest("forward", 0, "working", 90),)


def test_the_models_own_memory_between_events() -> None:
    happened: list[str | Allocation] = [
        Allocation(1, 40, ()), Allocation(2, 8, ()), "0",
        Allocation(9, -500, ()), Allocation(1, -40, ()), "1",
        Allocation(3, 12, ()), Allocation(4, 20, ()), Allocation(3, -12, ()), "2",
    ]  # fmt: skip
    assert list(model_memory(happened)) == [
        ModelMemory(40, 40),
        ModelMemory(None, 0),
        ModelMemory(32, 20),
    ]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_zero3_gathers_as_many_units_ahead_as_it_is_told(prefetch: int) -> None:
    units = [LINEAR, SMALL, LARGE, SMALL, LARGE, LINEAR]
    root = units[0] + units[-1]
    blocks = units[1:-1]
    most = max(sum(blocks[n : n + 1 + prefetch]) for n in range(len(blocks)))
    for phase in ("forward", "backward"):
        sharding = Sharding(wrap="block", prefetch=prefetch)
        assert answer("zero3", sharding, "gathered", phase) == root + most


def test_fsdp2_holds_what_it_gathers_beside_what_it_copies() -> None:
    """In the forward it keeps the buffer of the unit before too, while it copies."""
    root = 2 * LINEAR
    assert answer("fsdp2", Sharding(wrap="block", prefetch=0), "gathered", "forward") == (
        root + SMALL + 2 * LARGE
    )
    # In the backward the next unit is gathered ahead, once the buffer is let go of.
    assert answer("fsdp2", Sharding(wrap="block", prefetch=0), "gathered") == root + 2 * LARGE


@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_the_window_shrinks_with_finer_wrapping_and_grows_with_prefetching(name: str) -> None:
    for term in ("gathered", "working"):
        of_wraps = [
            answer(name, Sharding(wrap=wrap, prefetch=1), term)  # type: ignore[arg-type]
            for wrap in ("layer", "block", "whole")
        ]
        assert all(one < other for one, other in pairwise(of_wraps))
        ahead = [answer(name, Sharding(wrap="layer", prefetch=n), term) for n in (1, 2, 4)]  # type: ignore[arg-type]
        assert all(one < other for one, other in pairwise(ahead))


def test_larger_buckets_are_larger() -> None:
    for term in ("bucket", "working"):
        sizes = [answer("zero2", Sharding(bucket=n), term) for n in (256, 2048, 1 << 14)]  # type: ignore[arg-type]
        assert all(one < other for one, other in pairwise(sizes))
    everything = 2 * LINEAR + 2 * SMALL + 2 * LARGE
    assert answer("zero2", Sharding(), "bucket") == everything
    assert answer("zero1", Sharding(), "bucket") == 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_outside_of_forward_and_backward_nothing_is_gathered(name: str) -> None:
    assert answer(name, Sharding(), "gathered", "step") == 0


@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_what_the_model_needs_is_not_told_where_the_data_say_it(name: str) -> None:
    case = Case(mesh=(2,), model=Model(blocks=(Block(kind="experts"),)))
    layout = load(name).layout(build_model(case), case, 0)
    assert layout is not None
    assert not [one for one in layout.highest or () if one.term == "working"]


def test_only_what_does_not_depend_on_more_is_told() -> None:
    def terms(*kinds: str) -> tuple[Term, ...]:
        blocks = tuple(Block(kind=kind) for kind in kinds)  # type: ignore[arg-type]
        return terms_of(Case(model=Model(blocks=blocks)))

    assert terms("mlp") == ("gathered", "bucket", "working", "gathering", "reducing")
    assert terms("experts", "mlp") == ("gathered",)
    repacked = Model(blocks=(Block(kind="recurrent", dtype="bf16", transposed=True),))
    assert terms_of(Case(model=repacked)) == ("gathered", "bucket")
    assert terms_of(Case(), adds=True) == ("gathered", "bucket")
