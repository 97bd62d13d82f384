"""What each implementation says beforehand of its bytes, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp1.adapter import Fsdp1, Fsdp1NoShard
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.adapters.shared.units import skeleton
from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.adapters.zero_redundancy.adapter import ZeroRedundancy
from zerocheck.case.schema import (
    Block,
    Case,
    Data,
    Model,
    Optimizer,
    Precision,
    Sharding,
    Start,
    Training,
)
from zerocheck.contract.implementation import Implementation
from zerocheck.models.network import build_model
from zerocheck.protocol.layout import Call, Layout, Line

# stem.weight (3, 2), stem.bias (3,), head.weight (5, 3), head.bias (5,): 6 + 3 + 15 + 5 elements.
MODEL = Model(inputs=2, width=3, outputs=5)
CASE = Case(mesh=(2,), model=MODEL, sharding=Sharding(prefetch=0))
ELEMENTS = 29
STEPS = 4 * 4
"""Bytes of the step counts of four parameters."""


def answer(
    kind: type[Implementation], case: Case, rank: int, step: int, phase: str
) -> dict[str, int]:
    layout = kind.layout(build_model(case), case, rank)
    assert layout is not None
    return at(layout, step, phase)


def at(layout: Layout, step: int, phase: str) -> dict[str, int]:
    lines = [one for one in layout.lines if (one.step, one.phase) == (step, phase)]
    return {one.category: one.bytes for one in lines if one.bytes}


def test_ddp_holds_everything_and_a_bucket() -> None:
    whole = 4 * ELEMENTS
    assert answer(Ddp, CASE, 0, -1, "built") == {"parameter": whole, "bucket": whole}
    assert answer(Ddp, CASE, 1, 0, "backward") == {
        "parameter": whole, "bucket": whole, "gradient": whole,
    }  # fmt: skip
    assert answer(Ddp, CASE, 1, 0, "step")["optimizer"] == 2 * whole + STEPS
    amsgrad = Case(mesh=(2,), model=MODEL, optimizer=Optimizer(amsgrad=True))
    assert answer(Ddp, amsgrad, 1, 0, "step")["optimizer"] == 3 * whole + STEPS


@pytest.mark.parametrize("kind", [Zero1, Zero2, Zero3])
def test_mixed_precision_is_2_2_12_of_which_the_stages_cut_more_and_more(
    kind: type[Implementation],
) -> None:
    # A flat buffer of 2-byte elements at multiples of 32: 0, 32, 64, 96 + 5; cut in two, 51 each.
    whole, shard = 102, 51
    case = replace(CASE, precision=Precision(compute="bf16", reduce="bf16"))
    kept = shard if kind is Zero3 else whole
    gradients = whole if kind is Zero1 else shard
    built = answer(kind, case, 0, -1, "built")
    assert built == {"parameter": 2 * kept + 4 * shard, "gradient": 2 * gradients}
    # AdamW takes the gradient in fp32, while it takes it.
    assert answer(kind, case, 0, 0, "backward")["gradient"] == 2 * gradients + 4 * shard
    after = answer(kind, case, 0, 0, "step")
    assert after["gradient"] == 2 * gradients
    states = [answer(kind, case, rank, 0, "step")["optimizer"] for rank in (0, 1)]
    assert sum(states) % 4 == 0 and 2 * 4 * ELEMENTS < sum(states) <= 2 * 4 * ELEMENTS + 5 * 4
    wide = replace(CASE, precision=Precision(compute="bf16", reduce="fp32"))
    assert answer(kind, wide, 0, 0, "backward")["gradient"] == 4 * gradients
    assert {call.dtype for call in _calls(kind, case)} == {"bfloat16"}
    assert {(call.kind, call.dtype) for call in _calls(kind, wide)} == {
        ("reduce_scatter", "float32"),
        ("all_gather", "bfloat16"),
    }


def test_fsdp2_gathers_in_the_dtype_of_compute_and_reduces_in_its_own() -> None:
    training = Training(microbatches=2)
    case = replace(CASE, precision=Precision(compute="bf16", reduce="fp32"), training=training)
    # Chunks of 2 x 2, 2, 3 x 3 and 3 elements, of 2 ranks each, in whole: 36 of 2 bytes.
    assert answer(Fsdp2, case, 0, 0, "forward")["gathered"] == 36 * 2
    assert answer(Fsdp2, case, 0, 0, "forward")["gradient"] == 4 * ELEMENTS
    assert answer(Fsdp2, case, 0, 0, "backward")["gradient"] == 4 * 18
    assert {(call.kind, call.dtype) for call in _calls(Fsdp2, case)} == {
        ("reduce_scatter", "float32"),
        ("all_gather", "bfloat16"),
    }
    narrow = replace(case, precision=Precision(compute="bf16", reduce="bf16"))
    assert answer(Fsdp2, narrow, 0, 0, "forward")["gradient"] == 2 * ELEMENTS
    assert {call.dtype for call in _calls(Fsdp2, narrow)} == {"bfloat16"}


def _calls(kind: type[Implementation], case: Case) -> tuple[Call, ...]:
    layout = kind.layout(build_model(case), case, 0)
    assert layout is not None and layout.calls is not None
    assert not layout.highest  # what is held within a step is told of fp32 alone
    return layout.calls


def test_zero_redundancy_gives_whole_parameters_to_ranks() -> None:
    # head.weight (15) to rank 0, then stem.weight (6), head.bias (5) and stem.bias (3) to rank 1.
    assert answer(ZeroRedundancy, CASE, 0, 0, "step")["optimizer"] == 2 * 4 * 15 + 4
    assert answer(ZeroRedundancy, CASE, 1, 0, "step")["optimizer"] == 2 * 4 * 14 + 12


def test_a_flat_parameter_that_nobody_uses_has_the_state_that_is_restored() -> None:
    # Of 5 parts of stem (12), head (4), spare.up (12) and spare.down (10) the last has padding of
    # the first three, and 2 elements. Only stem and head are updated.
    model = Model(stem="embedding", inputs=6, width=2, outputs=2, head_bias=False, unused=True)
    sharding = Sharding(wrap="layer", use_orig_params=False)
    case = Case(mesh=(5,), model=model, sharding=sharding, start=Start(step=1, moments="typical"))
    assert answer(Fsdp1, case, 4, -1, "built")["optimizer"] == 2 * 4 * 2 + 4
    assert answer(Fsdp1, case, 4, 0, "step")["optimizer"] == 2 * 4 * (2 + 3 + 1) + 3 * 4
    assert answer(Fsdp1, case, 3, 0, "step")["optimizer"] == 2 * 4 * (3 + 1 + 3 + 2) + 4 * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_the_textbook_stages_cut_a_flat_buffer(rank: int) -> None:
    # Each parameter begins at a multiple of 16: head.bias 0, head.weight 16, stem.bias 32,
    # stem.weight 48 to 54; two shards of 27.
    flat, shard = 4 * 54, 4 * 27
    assert answer(Zero1, CASE, rank, -1, "built") == {"parameter": flat, "gradient": flat}
    assert answer(Zero2, CASE, rank, -1, "built") == {"parameter": flat, "gradient": shard}
    # Rank 0 owns head.bias (5) and 11 of head.weight; rank 1 the other 4, and the stem (9).
    own, pieces = [(16, 2), (13, 3)][rank]
    for kind in (Zero1, Zero2):
        assert answer(kind, CASE, rank, 0, "step")["optimizer"] == 2 * 4 * own + 4 * pieces
    # In the order of the model: stem.weight 0, stem.bias 16, head.weight 32, head.bias 48 to 53.
    assert answer(Zero3, CASE, rank, -1, "built") == {"parameter": shard, "gradient": shard}
    assert answer(Zero3, CASE, rank, 0, "forward")["gathered"] == flat


def test_fsdp2_pads_the_rows_of_each_parameter() -> None:
    # Of 3 rows 2 and 1, of 5 rows 3 and 2; both ranks hold 2 and 3.
    padded = 4 * (2 * 2 + 2 + 3 * 3 + 3)
    for rank, own in enumerate((4 + 2 + 9 + 3, 2 + 1 + 6 + 2)):
        assert answer(Fsdp2, CASE, rank, -1, "built") == {"parameter": padded}
        assert answer(Fsdp2, CASE, rank, 0, "step") == {
            "parameter": padded, "gradient": padded, "optimizer": 2 * 4 * own + STEPS,
        }  # fmt: skip
        assert answer(Fsdp2, CASE, rank, 0, "forward")["gathered"] == 2 * padded


def test_fsdp1_aligns_parameters_and_pads_the_end() -> None:
    # 16 bytes are 4 elements: 0 to 6, 8 to 11, 12 to 27, 28 to 33; two chunks of 17.
    assert answer(Fsdp1, CASE, 0, -1, "built") == {"parameter": 4 * 17}
    # Rank 0 has 6 + 3 + 5 elements, rank 1 10 + 5: of three parameters, and of two.
    assert answer(Fsdp1, CASE, 0, 0, "step")["optimizer"] == 2 * 4 * 14 + 12
    assert answer(Fsdp1, CASE, 1, 0, "step")["optimizer"] == 2 * 4 * 15 + 8
    assert answer(Fsdp1NoShard, CASE, 1, -1, "built") == {"parameter": 4 * 34}
    flat = Case(mesh=(2,), model=MODEL, sharding=Sharding(use_orig_params=False))
    assert answer(Fsdp1, flat, 1, 0, "step") == {
        "parameter": 4 * 15, "gradient": 4 * 15, "optimizer": 2 * 4 * 15 + 4,
    }  # fmt: skip


@pytest.mark.parametrize("kind", [Ddp, ZeroRedundancy, Zero1, Zero3, Fsdp1, Fsdp2])
def test_a_state_of_mid_training_is_there_from_the_start(kind: type[Implementation]) -> None:
    case = Case(mesh=(2,), model=MODEL, start=Start(step=5, moments="typical"))
    built = answer(kind, case, 0, -1, "built")["optimizer"]
    assert built == answer(kind, case, 0, 0, "step")["optimizer"] > 0


@pytest.mark.parametrize("kind", [Ddp, ZeroRedundancy, Zero2, Zero3, Fsdp1, Fsdp2])
def test_a_step_that_overflows_makes_no_state(kind: type[Implementation]) -> None:
    case = Case(mesh=(2,), model=MODEL, training=Training(steps=2, loss_scale=2.0, overflow=0))
    assert "optimizer" not in answer(kind, case, 0, 0, "step")
    assert answer(kind, case, 0, 1, "step")["optimizer"] > 0


@pytest.mark.parametrize("kind", [Ddp, Zero1, Zero3, Fsdp1, Fsdp2])
def test_what_is_unfrozen_later_has_a_state_from_then_on(kind: type[Implementation]) -> None:
    model = Model(inputs=2, width=3, outputs=5, frozen=("head.*",))
    case = Case(mesh=(1,), model=model, training=Training(steps=3, unfreeze=1))
    before, after = (answer(kind, case, 0, step, "step")["optimizer"] for step in (0, 1))
    assert after - before == 2 * 4 * 20 + 8


@pytest.mark.parametrize("kind", [Ddp, ZeroRedundancy, Fsdp1, Fsdp2])
def test_what_is_unfrozen_later_has_no_gradient_kept_from_before(
    kind: type[Implementation],
) -> None:
    model = Model(inputs=2, width=3, outputs=5, frozen=("head.*",))
    training = Training(steps=3, unfreeze=1, set_to_none=False)
    sharding = Sharding(bucket_view=False, wrap="layer", prefetch=0)
    case = Case(mesh=(2,), model=model, training=training, sharding=sharding)
    before, at, after = (answer(kind, case, 0, step, "forward") for step in (0, 1, 2))
    assert "gradient" not in before
    assert at["gradient"] == answer(kind, case, 0, 0, "backward")["gradient"]
    assert after["gradient"] == answer(kind, case, 0, 1, "backward")["gradient"] > at["gradient"]


@pytest.mark.parametrize(("wrap", "twice"), [("whole", True), ("layer", False)])
def test_a_gradient_of_fsdp2_keeps_all_that_was_reduced_with_it(wrap: str, twice: bool) -> None:
    """The head's first gradient is a view of what the stem's is added from."""
    model = Model(inputs=2, width=3, outputs=5, frozen=("head.*",))
    training = Training(steps=3, unfreeze=1, set_to_none=False)
    case = Case(mesh=(2,), model=model, training=training, sharding=Sharding(wrap=wrap))
    stem, head = 4 * (2 * 2 + 2), 4 * (3 * 3 + 3)
    assert answer(Fsdp2, case, 0, 0, "backward")["gradient"] == stem
    assert answer(Fsdp2, case, 0, 1, "backward")["gradient"] == stem + head + stem * twice
    assert answer(Fsdp2, case, 0, 2, "step")["gradient"] == stem + head + stem * twice


def lines_of(kind: type[Implementation], case: Case) -> tuple[Line, ...]:
    """The bytes that it tells of; its collectives may be told of without."""
    layout = kind.layout(build_model(case), case, 0)
    return () if layout is None else layout.lines


@pytest.mark.parametrize("kind", [Ddp, ZeroRedundancy, Fsdp1, Fsdp1NoShard, Fsdp2])
def test_what_depends_on_the_data_is_not_told(kind: type[Implementation]) -> None:
    experts = Model(blocks=(Block(kind="experts"),))
    for model in (experts, Model(side=True)):
        case = Case(mesh=(2,), model=model, data=Data())
        assert not lines_of(kind, case)
        assert lines_of(Zero3, case)


@pytest.mark.parametrize("kind", [Ddp, ZeroRedundancy, Zero1, Zero2, Zero3, Fsdp1, Fsdp2])
def test_a_model_without_memory_gives_the_same(kind: type[Implementation]) -> None:
    blocks = (Block(kind="mlp", transposed=True), Block(kind="batch_norm"))
    case = Case(mesh=(3,), model=Model(blocks=blocks))
    model: nn.Module = skeleton(case)
    assert next(model.parameters()).device == torch.device("meta")
    assert kind.layout(model, case, 1) == kind.layout(build_model(case), case, 1)


def test_fsdp1_keeps_no_gradient_of_which_no_parameter_has_a_part() -> None:
    """16 elements of the weight and 4 of the bias, on 4 ranks: the bias is the last rank's."""
    model = Model(inputs=4, width=4, outputs=4, frozen=("stem.*", "*.weight"))
    case = Case(
        mesh=(4,),
        model=model,
        training=Training(steps=2, set_to_none=False),
        sharding=Sharding(wrap="layer", prefetch=0, use_orig_params=True),
    )
    for rank, kept in enumerate((False, False, False, True)):
        assert answer(Fsdp1, case, rank, 0, "backward")["gradient"] == 4 * 5
        assert ("gradient" in answer(Fsdp1, case, rank, 1, "forward")) == kept


def test_fsdp1_keeps_gradients_of_frozen_elements_whatever_it_reduces_in() -> None:
    """A flat gradient is whole, and cast back to fp32 once it is reduced."""
    sharding = Sharding(wrap="block", prefetch=0)
    case = Case(mesh=(2,), model=replace(MODEL, frozen=("*.weight",)), sharding=sharding)
    narrow = replace(case, precision=Precision(reduce="bf16"))
    both = [answer(Fsdp1, one, 0, 0, "step")["gradient"] for one in (case, narrow)]
    assert both[0] == both[1] > 4 * 8 // 2  # 8 elements learn


@pytest.mark.parametrize("wrap", ["block", "whole"])
def test_fsdp1_holds_the_same_with_batch_norms_in_mixed_precision(wrap: str) -> None:
    """It makes a unit of each, as the block is anyway; without a policy it does not."""
    model = Model(inputs=2, width=3, outputs=5, blocks=(Block(kind="batch_norm"),))
    case = Case(mesh=(4,), model=model, sharding=Sharding(wrap=wrap, prefetch=0))
    narrow = replace(case, precision=Precision(reduce="bf16"))
    found = [answer(Fsdp1, one, 0, 0, "step") for one in (case, narrow)]
    assert found[0] == found[1]


def test_fsdp1_says_nothing_of_batch_norms_within_units_of_a_least_size() -> None:
    model = Model(inputs=2, width=3, outputs=5, blocks=(Block(kind="batch_norm"),))
    case = Case(mesh=(4,), model=model, sharding=Sharding(wrap="size", bucket=4))
    assert Fsdp1.layout(build_model(case), case, 0) is not None
    narrow = replace(case, precision=Precision(reduce="bf16"))
    assert Fsdp1.layout(build_model(narrow), narrow, 0) is None
