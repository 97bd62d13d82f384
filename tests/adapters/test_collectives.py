"""What each implementation calls is what its layout says, call by call, and nothing else."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import msgspec
import pytest
from slices import sliced

from adapters.cases import CASES, on
from adapters.driver import in_ranks
from adapters.tracing import calls_of_all
from zerocheck.adapters.shared.trace import trace
from zerocheck.adapters.shared.units import unit_modules
from zerocheck.case.drawing import draw
from zerocheck.case.schema import Block, Case, Disturbance, Model, Sharding, Training, WrapKind
from zerocheck.catalogue import BUILT_IN
from zerocheck.contract.loading import load
from zerocheck.drive.rank import _refusal
from zerocheck.judge.footprint import trained_bytes
from zerocheck.judge.obligations.communication import predicted, volume
from zerocheck.models.network import build_model
from zerocheck.protocol.layout import Call
from zerocheck.run.records.footprint import in_psi

AFTER_THE_UNIT = Model(
    inputs=4,
    width=6,
    blocks=(
        Block(kind="experts", hidden=5, experts=2, dropout=0.5, checkpoint=True),
        Block(kind="mlp", hidden=5, dropout=0.5, checkpoint=True),
    ),
    outputs=3,
)
"""What is run again begins, backward, after its last unit."""

FROZEN_IN_PART = Model(
    inputs=4,
    width=6,
    blocks=(Block(kind="layer_norm"), Block(kind="conv")),
    outputs=3,
    frozen=("blocks.*", "stem.*"),
)
"""The stem is frozen, and part of a flat parameter that is not."""

FROZEN_TWICE = Model(
    inputs=4,
    width=6,
    blocks=(Block(kind="layer_norm"), Block(kind="mlp", hidden=5)),
    calls=(0, 1, 1),
    outputs=3,
    frozen=("blocks.*",),
)

SHARDED = ("block", "layer", "block_kept", "each", "flat", "size", "views")


@cache
def _jobs(world_size: int) -> tuple[Case, ...]:
    """Cases by hand, each on one of the shardings in turn, and drawn ones."""
    by_hand = [
        on(case, world_size, SHARDED[place % len(SHARDED)])
        for place, case in enumerate(CASES.values())
    ]
    by_hand += [
        Case(mesh=(world_size,), model=model, sharding=sharding)
        for model in (AFTER_THE_UNIT, FROZEN_IN_PART, FROZEN_TWICE)
        for sharding in (
            Sharding(wrap="layer", backward_prefetch="none", prefetch=0),
            Sharding(wrap="layer", use_orig_params=True, backward_prefetch="post"),
            Sharding(use_orig_params=True),
        )
    ]
    by_hand = by_hand[:: sliced(1, 4 if world_size == 3 else 8)]
    drawn = [
        msgspec.structs.replace(case, resume=(), disturbance=Disturbance())
        for case in draw(sliced(30, 4), seed=6, world_sizes=(world_size,))
        if case.training.loss_scale is None  # the driver of these tests lets nothing overflow
        and not case.sharding.static_graph  # known: fails under no_sync
        and case.sharding.tensor_parallel == 1  # nor has its mesh two axes
    ]
    return (*by_hand, *drawn)


@pytest.mark.every(10)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", BUILT_IN)
def test_calls_are_those_of_the_layout(name: str, world_size: int) -> None:
    kind = load(name)
    cases = [case for case in _jobs(world_size) if _refusal(kind, case) is None]
    of_ranks = in_ranks(world_size, calls_of_all, [(kind, case) for case in cases])
    compared = 0
    for case, *seen in zip(cases, *of_ranks, strict=True):
        if isinstance(seen[0], str):
            continue
        assert all(calls == seen[0] for calls in seen), "ranks call other collectives"
        layout = kind.layout(build_model(case), case, 0)
        if layout is None or layout.calls is None:
            continue
        for step in range(case.training.first, case.training.steps):
            wanted = [_there(call) for call in predicted(layout, step)]
            assert [_there(call) for call in seen[0] if call.step == step] == wanted, case
        compared += 1
    assert compared >= len(cases) * 0.8


def _there(call: Call) -> tuple[object, ...]:
    return call.kind, call.bytes, call.ranks, call.dtype, call.phase


MLP = Model(inputs=8, width=8, blocks=(Block(kind="mlp", hidden=8),) * 2, outputs=8)


# Six layers of 32 x 32 + 32 elements. Half of one is a multiple of what anything is aligned to (16
# elements), and 32 rows are cut evenly, so that nothing is padded.
EQUAL = Model(inputs=32, width=32, blocks=(Block(kind="mlp", hidden=32),) * 2, outputs=32)
LAYERS = 6
ROOT_SHARE = {"layer": Fraction(0), "block": Fraction(2, LAYERS), "whole": Fraction(1)}
"""Of the elements, those of the root unit: of no layer, of stem and head, of all."""
GATHERS_TWICE = ("zero3", "fsdp2", "fsdp1")


@pytest.mark.parametrize("wrap", ROOT_SHARE)
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_volume_is_that_of_the_paper(name: str, wrap: WrapKind) -> None:
    """Psi for each time that everything is gathered, reduce-scattered or broadcast, 2 Psi for an
    all-reduce, each times (N - 1) / N: 2 Psi in stages 0 to 2, 3 Psi in stage 3.

    A root unit stays gathered for the backward, so it is gathered once and not twice. SHARD_GRAD_OP
    keeps every unit. ZeroRedundancyOptimizer broadcasts parameters after DDP has all-reduced whole
    gradients. Other dtypes carry no parameters or gradients.
    """
    wanted = Fraction(2)
    if name in GATHERS_TWICE:
        wanted = 3 - ROOT_SHARE[wrap]
    elif name == "zero-redundancy":
        wanted = Fraction(3)
    case = Case(
        mesh=(2,), model=EQUAL, training=Training(steps=4), sharding=Sharding(wrap=wrap, prefetch=1)
    )
    layout = load(name).layout(build_model(case), case, 0)
    assert layout is not None and layout.calls is not None
    calls = [call for call in predicted(layout, 99) if call.dtype == "float32"]
    trained = trained_bytes(case)
    assert trained == 4 * LAYERS * (32 * 32 + 32)
    assert volume(calls) == wanted * trained / 2
    assert in_psi(volume(calls), trained, 2) == float(wanted)


@pytest.mark.parametrize("name", ["zero3", "fsdp2", "fsdp1", "ddp"])
def test_another_model_is_not_predicted(name: str) -> None:
    case = Case(mesh=(2,), model=MLP)
    other = build_model(Case(model=msgspec.structs.replace(MLP, width=16)))
    layout = load(name).layout(other, case, 0)
    assert layout is None or layout.calls is None


def test_a_passage_goes_forward_then_backward() -> None:
    case = Case(model=MLP, sharding=Sharding(wrap="block"))
    events = trace(case, lambda model: unit_modules(model, case.sharding), step=0, marked=True)
    units = [(event.what, event.unit) for event in events if event.what != "parameter"]
    assert units == [
        ("enter", -1), ("enter", 0), ("leave", 0), ("enter", 1), ("leave", 1), ("leave", -1),
        ("loss", -1), ("output", -1), ("output", 1), ("inputs", 1), ("output", 0), ("inputs", 0),
        ("over", -1),
    ]  # fmt: skip
    assert {event.name for event in events if event.what == "parameter"} == set(
        dict(build_model(case).named_parameters())
    )


def test_a_checkpointed_block_is_entered_again_in_the_backward() -> None:
    block = Block(kind="mlp", checkpoint=True)
    case = Case(
        model=msgspec.structs.replace(MLP, blocks=(block,)), sharding=Sharding(wrap="layer")
    )
    events = trace(case, lambda model: unit_modules(model, case.sharding), step=0)
    again = [event.unit for event in events if event.what == "enter" and event.again]
    assert again == [1, 2]
