"""What DeepSpeed's stages hold between steps: by hand, and by the ledger of real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from slices import WHOLE, sliced

from zerocheck.adapters.deepspeed.options import stored_as
from zerocheck.case.schema import Case, Model, Optimizer, Precision, Sharding
from zerocheck.catalogue import OF_EXTRAS
from zerocheck.contract import loading
from zerocheck.models.network import build_model
from zerocheck.protocol.verdicts import MEMORY
from zerocheck.ranks.pool import Pool

from ..holding import holds
from .deepspeed_cases import chosen, needs_deepspeed

pytestmark = needs_deepspeed

# stem.weight (3, 2), stem.bias (3,), head.weight (5, 3), head.bias (5,): 6 + 3 + 15 + 5 elements.
CASE = Case(mesh=(2,), model=Model(inputs=2, width=3, outputs=5), sharding=Sharding(bucket=16))
WHOLE_BYTES, STEP_BYTES, NORM = 4 * 29, 4, 4
NARROW = Precision(compute="bf16", reduce="bf16")
WIDE = Precision(compute="bf16", reduce="fp32")


def _told(stage: int, case: Case, step: int, phase: str) -> dict[str, int] | None:
    layout = loading.load(f"deepspeed{stage}").layout(build_model(case), case, 1)
    if layout is None:
        return None
    lines = [one for one in layout.lines if (one.step, one.phase) == (step, phase)]
    return {one.category: one.bytes for one in lines if one.bytes}


def test_stage_0() -> None:
    assert _told(0, CASE, -1, "built") == {"parameter": WHOLE_BYTES}
    states = 2 * WHOLE_BYTES + 4 * STEP_BYTES
    assert _told(0, CASE, 0, "step") == {"parameter": WHOLE_BYTES, "optimizer": states}
    # A step is taken when it is made; 2 + 4 bytes.
    narrow = replace(CASE, precision=NARROW)
    assert _told(0, narrow, -1, "built") == {"parameter": 6 * 29, "optimizer": states}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_flat_buffer_is_a_multiple_of_twice_the_ranks(stage: int) -> None:
    """29 elements make 32 on 2 ranks, of which 16 are a rank's."""
    assert _told(stage, CASE, -1, "built") == {"parameter": 4 * 32 + 4 * 16}
    after = {"parameter": 192, "gradient": NORM, "optimizer": 2 * 4 * 16 + STEP_BYTES}
    assert _told(stage, CASE, 0, "step") == after
    assert _told(stage, replace(CASE, precision=NARROW), -1, "built") == {
        "parameter": 2 * 32 + 4 * 16
    }
    wide = _told(stage, replace(CASE, precision=WIDE), -1, "built")
    kept = {"gradient": 4 * 32} if stage == 1 else {}  # BF16_Optimizer
    assert wide == {"parameter": 2 * 32 + 4 * 16, **kept}
    amsgrad = _told(stage, replace(CASE, optimizer=Optimizer(amsgrad=True)), 0, "step")
    assert amsgrad is not None and amsgrad["optimizer"] == 3 * 4 * 16 + STEP_BYTES


def test_stage_3_has_a_part_of_each_parameter() -> None:
    """3 + 2 + 8 + 3 elements on 2 ranks."""
    built = {"parameter": 4 * 16 + 4 * 16, "gradient": 4 * 16, "other": 1 + 4 * 16}
    assert _told(3, CASE, -1, "built") == built
    after = _told(3, CASE, 0, "step")
    assert after == {**built, "gradient": 4 * 16 + 2 * NORM, "optimizer": 2 * 64 + STEP_BYTES}
    narrow = _told(3, replace(CASE, precision=NARROW), -1, "built")
    assert narrow == {"parameter": 2 * 16 + 4 * 16, "gradient": 2 * 16, "other": 1 + 2 * 16}
    # What has at most 5 elements stays gathered: both biases, of 3 and 5, in 2 parts each.
    stays = replace(CASE, options=stored_as({"persistence_threshold": 5}))
    held = _told(3, stays, -1, "built")
    assert held is not None and held["parameter"] == built["parameter"] + 4 * (4 + 6)
    alone = replace(stays, mesh=(1,))
    held = _told(3, alone, -1, "built")
    assert held is not None and held["parameter"] == 2 * WHOLE_BYTES
    apart = replace(CASE, options=stored_as({"contiguous_gradients": False}))
    assert (_told(3, apart, -1, "built") or {})["other"] == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_not_told(stage: int) -> None:
    """A partition of padding alone, what is offloaded, and what is held within a step."""
    few = replace(CASE, mesh=(8,), model=Model(inputs=1, width=1, outputs=1))
    offloaded = replace(CASE, sharding=Sharding(offload="pageable"))
    assert _told(stage, few, -1, "built") is _told(stage, offloaded, -1, "built") is None
    assert _told(stage, CASE, 0, "backward") == {}


MEASURED: Any = sliced(
    [(key, p) for key in ("groups", "frozen", "unused") for p in (Precision(), NARROW, WIDE)],
    [("groups", NARROW)],
)


@pytest.mark.long
@pytest.mark.every(4)
@pytest.mark.parametrize("name", OF_EXTRAS)
@pytest.mark.parametrize(("key", "precision"), MEASURED)
def test_the_ledger_agrees(pool: Pool, name: str, key: str, precision: Precision) -> None:
    case = replace(chosen(key, 3 if WHOLE else 2), precision=precision)
    if loading.load(name).supports(case) is not None:
        assert (name, precision) == ("deepspeed0", WIDE)
        return
    assert "persistent" not in holds(pool, name, case, MEMORY).vacuous


@pytest.mark.every(2)
@pytest.mark.parametrize("threshold", [0, 16, 1000])
def test_one_parameter_that_stays_gathered_on_one_rank(pool: Pool, threshold: int) -> None:
    """DeepSpeed copies one, and not several: 16 elements are those of the bias alone."""
    case = Case(
        mesh=(1,),
        model=Model(stem="embedding", inputs=11, width=4, outputs=8, blocks=()),
        options=stored_as({"persistence_threshold": threshold}),
    )
    statuses = holds(pool, "deepspeed3", case, ("persistent",)).statuses
    assert statuses == {"persistent": "holds"}
