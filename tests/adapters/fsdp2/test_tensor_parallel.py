"""FSDP2 beside tensor parallelism: what is right holds, what is wrong is named, what is refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from slices import sliced

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.case.measurement import UNTOLD
from zerocheck.case.schema import (
    Block,
    Case,
    Data,
    Model,
    Precision,
    Sharding,
    Training,
    TrainingSegment,
)
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial

from ..holding import holds

FAULTS = "zerocheck.faults.wrapper_options"

MODEL = Model(
    inputs=5,
    width=4,
    outputs=4,
    blocks=(Block(kind="mlp", hidden=8), Block(kind="layer_norm"), Block(kind="attention")),
)
"""A column- and a row-wise layer, replicated norms, and layers that gather."""

UNEVEN = Model(
    stem="embedding",
    inputs=7,
    width=3,
    outputs=7,
    tied=True,
    blocks=(Block(kind="mlp", hidden=5, dropout=0.5), Block(kind="attention")),
)
"""A tied vocabulary, and rows that neither axis divides."""


def tp_case(model: Model = MODEL, ranks: int = 4, count: int = 2, **fields: object) -> Case:
    case = Case(
        mesh=(ranks,),
        model=model,
        data=Data(batch=2, length=2),
        training=Training(steps=2, microbatches=2, clip=0.1),
        sharding=Sharding(tensor_parallel=count),
    )
    return replace(case, **fields)


NORM_OF_ONE = tp_case(
    Model(
        stem="embedding", inputs=24, width=1, outputs=10, side=True,
        blocks=(Block(kind="layer_norm", checkpoint=True),),
    ),
    ranks=2, seed=7480, data=Data(batch=4, length=2, masked=True, rng="seeded"),
    training=Training(steps=2, clip=0.1),
    sharding=Sharding(tensor_parallel=2, wrap="size", reshard=False),
)  # fmt: skip
"""The gradient behind the norm is 0 but for round-off, which is 316 times that of its terms."""
REPLICATED_LAYERS = tp_case(
    Model(
        stem="embedding", inputs=8, width=4, outputs=8, tied=True, frozen=("stem.*", "*.bias"),
        blocks=(Block(kind="layer_norm"),),
    ),
    ranks=2, seed=3, sharding=Sharding(tensor_parallel=2),
)  # fmt: skip
"""No trainable parameter is sharded over tp: one data-parallel rank has nothing to share out."""


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "case",
    sliced(
        [
            tp_case(),
            tp_case(UNEVEN),
            tp_case(ranks=2),
            tp_case(ranks=6, count=3),
            tp_case(UNEVEN, 6, 2),
            NORM_OF_ONE,
            REPLICATED_LAYERS,
        ],
        [tp_case(), tp_case(UNEVEN), NORM_OF_ONE, REPLICATED_LAYERS],
    ),
    ids=lambda case: "-".join((case.model.stem, "x".join(map(str, case.axes.sizes)))),
)
def test_what_is_right_holds_and_is_said_to_be_estimated(pool: Pool, case: Case) -> None:
    asked = ("gradient", "clip", "update", "ownership", "publish", "loss", "persistent")
    judgement = holds(pool, "fsdp2", case, asked)
    assert judgement.estimated == ("loss", "gradient")
    assert judgement.statuses == {**dict.fromkeys(asked, "holds"), "persistent": "unsupported"}
    assert judgement.unjudged == {"persistent": UNTOLD}


@pytest.mark.parametrize("kind", sliced(["distributed", "full"], ["distributed"]))
def test_a_checkpoint_is_loaded_on_another_shard_axis(pool: Pool, kind: str) -> None:
    sharding = Sharding(tensor_parallel=2, checkpoint=kind)  # type: ignore[arg-type]
    case = tp_case(resume=(TrainingSegment(mesh=(2,), steps=1),), sharding=sharding)
    assert holds(pool, "fsdp2", case).statuses["roundtrip"] == "holds"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("fault", "obligation", "cause"),
    [
        ("ReplicatedSummedOverTp", "gradient", "gradient x tp"),
        ("StridedTakenForPlain", "publish", "pieces in the order of a plain shard"),
        ("BiasOnEveryRank", "loss", "bias of each tensor-parallel rank"),
        ("DividedByAllRanks", "gradient", "gradient / tp"),
    ],
)
def test_a_fault_is_caught_first_and_named(
    pool: Pool, fault: str, obligation: str, cause: str
) -> None:
    found = Trial(pool, f"{FAULTS}:{fault}", tp_case()).outcome()
    assert found.judgement is not None, found.reason
    first = found.judgement.violations[0]
    assert (first.obligation, cause in first.causes) == (obligation, True), first


def test_what_cannot_be_sharded_or_compared_is_refused() -> None:
    assert Fsdp2.supports(tp_case()) is None
    bf16 = replace(MODEL, blocks=(Block(kind="mlp", dtype="bf16"),))
    for case, reason in (
        (tp_case(bf16), "fp32 only"),
        (tp_case(precision=Precision(compute="bf16")), "fp32 only"),
        (tp_case(training=Training(compile="eager")), "compiled"),
        (tp_case(replace(MODEL, stem="conv", blocks=(), outputs=1)), "no layer"),
        (tp_case(UNEVEN, 6, training=Training(clip=1.0, norm="inf")), "empty shard of blocks.0.up"),
    ):
        assert reason in (Fsdp2.supports(case) or ""), reason
    assert Fsdp2.supports(tp_case(UNEVEN, training=Training(clip=1.0, norm="inf"))) is None
    assert "tp" not in Ddp.axes
