"""User code as `build` functions is judged as what it is: right holds, each bug has its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from observing import Observed

from zerocheck.case.schema import Block, Case, Data, Group, Model, Optimizer, Start, Training
from zerocheck.models.inspection import inspect_model
from zerocheck.protocol.verdicts import Judgement

BLOCKS = (Block(kind="mlp", residual=True), Block(kind="layer_norm"))
CASE = Case(
    mesh=(3,),
    seed=5,
    model=Model(inputs=5, width=8, outputs=3, blocks=BLOCKS),
    data=Data(batch=2, length=3),
    training=Training(steps=3, microbatches=2),
    optimizer=Optimizer(groups=(Group(lr=1e-2, weight_decay=0.1),)),
)
GROUPS = (Group(pattern="*.bias", lr=3e-2, weight_decay=0.0), Group(lr=1e-2, weight_decay=0.1))
STARTED = msgspec.structs.replace(
    CASE,
    start=Start(step=255, moments="typical"),
    optimizer=Optimizer(groups=GROUPS, schedule="cosine"),
)
Observe = Callable[..., Observed]


def judged(observe: Observe, name: str, case: Case = CASE) -> Judgement:
    return observe(f"built_subjects:{name}", case).judge()


@pytest.mark.every(2)
@pytest.mark.parametrize("case", [CASE, STARTED], ids=["fresh", "started"])
@pytest.mark.parametrize(
    "name",
    [
        "wrapped",
        "wrapped_with_states",
        "two_optimizers",
        "tensor_rate",
        "fsdp1",
        "fsdp1_flat",
        "other_names",
    ],
)
def test_optimizers_of_every_form_hold(observe: Observe, name: str, case: Case) -> None:
    if name == "fsdp1_flat" and case is STARTED:  # one flat parameter is of one group
        case = msgspec.structs.replace(case, optimizer=CASE.optimizer)
    if name == "two_optimizers":
        case = msgspec.structs.replace(case, optimizer=CASE.optimizer)
    judgement = judged(observe, name, case)
    assert not judgement.violations, judgement.violations
    assert judgement.tier == "full"
    assert judgement.statuses["update"] == "holds"


@pytest.mark.parametrize("norm", ["2", "inf"])
def test_a_norm_may_be_a_dtensor(observe: Observe, norm: str) -> None:
    """Of an infinity norm each rank holds a part, and float() of it is that part."""
    training = msgspec.structs.replace(CASE.training, clip=0.01, norm=norm)
    judgement = judged(observe, "own_clip", msgspec.structs.replace(CASE, training=training))
    assert judgement.statuses["clip"] == "holds", judgement.violations


@pytest.mark.parametrize("norm", ["2", "inf"])
def test_a_model_that_clips_is_clipped_by_itself(observe: Observe, norm: str) -> None:
    """FSDP1 has local shards, whose norms are no norm of the gradient."""
    training = msgspec.structs.replace(CASE.training, clip=0.01, norm=norm)
    case = msgspec.structs.replace(CASE, training=training)
    judgement = judged(observe, "fsdp1_without_clip", case)
    assert judgement.statuses["clip"] == "holds", judgement.violations
    (violation, *_) = judged(observe, "fsdp1_clipped_by_rank", case).violations
    assert violation.obligation == "clip"


@pytest.mark.parametrize("name", ["zero1", "to_owners", "own_over_ddp", "flat_zero1"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_optimizer_without_states_is_judged_by_its_parameters(
    observe: Observe, name: str, ranks: int
) -> None:
    judgement = judged(observe, name, msgspec.structs.replace(CASE, mesh=(ranks,)))
    assert not judgement.violations, judgement.violations
    assert judgement.tier == "parameters only"
    held = {one for one, status in judgement.statuses.items() if status == "holds"}
    assert {"ownership", "loss", "update", "publish"} <= held
    assert ("gradient" in held) == (name != "flat_zero1" or ranks == 1)


@pytest.mark.parametrize("name", ["frees_others", "frees_others_and_shows"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_may_free_gradients_that_another_one_applies(
    observe: Observe, name: str, ranks: int
) -> None:
    """ZeRO-2: each gradient is with the rank that updates its parameter, and nowhere else."""
    judgement = judged(observe, name, msgspec.structs.replace(CASE, mesh=(ranks,)))
    assert not judgement.violations, judgement.violations
    assert judgement.statuses["gradient"] == judgement.statuses["update"] == "holds"
    assert judgement.shares["gradients"] < 1.0


ONE_BATCH = msgspec.structs.replace(
    CASE, training=msgspec.structs.replace(CASE.training, microbatches=1)
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_optimizer_that_reduces_may_have_states_of_rows(observe: Observe, ranks: int) -> None:
    """Its states are of no whole parameter, so it is judged by its parameters."""
    judgement = judged(observe, "rows", msgspec.structs.replace(CASE, mesh=(ranks,)))
    assert not judgement.violations, judgement.violations
    assert judgement.tier == "parameters only" and judgement.statuses["update"] == "holds"


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_an_inner_optimizer_is_found_in_any_attribute(observe: Observe, ranks: int) -> None:
    """On a rank that owns no parameter it is an empty one, and not the wrapper."""
    case = msgspec.structs.replace(CASE, mesh=(ranks,), start=STARTED.start)
    judgement = judged(observe, "wrapper", case)
    assert not judgement.violations, judgement.violations
    assert judgement.tier == "full"
    assert (judgement.shares.get("optimizer states", 1.0) < 1.0) == (ranks > 1)


def test_declared_states_may_be_of_what_a_rank_owns(observe: Observe) -> None:
    """None is invented where another rank owns the parameter."""
    judgement = judged(observe, "wrapper_with_states", STARTED)
    assert not judgement.violations, judgement.violations
    assert judgement.tier == "full" and judgement.shares["optimizer states"] < 1.0


def test_an_optimizer_may_step_in_the_backward(observe: Observe) -> None:
    """What it is given is seen then, though it is freed when the backward ends."""
    judgement = judged(observe, "in_backward", ONE_BATCH)
    assert not judgement.violations, judgement.violations
    assert judgement.tier == "full" and judgement.statuses["gradient"] == "holds"


def test_bugs_of_an_optimizer_in_the_backward_are_named(observe: Observe) -> None:
    (violation, *_) = judged(observe, "in_backward_twice", ONE_BATCH).violations
    assert violation.obligation == "update" and "weight decay twice" in violation.causes


def test_a_rate_that_only_the_wrapper_gets_is_seen(observe: Observe) -> None:
    """A scheduler sets the groups of the wrapper; zerocheck sets no others."""
    optimizer = msgspec.structs.replace(CASE.optimizer, schedule="cosine")
    case = msgspec.structs.replace(CASE, optimizer=optimizer)
    assert not judged(observe, "wrapper", case).violations
    (violation, *_) = judged(observe, "deaf_wrapper", case).violations
    assert violation.obligation == "update"


def test_torchs_optimizer_in_an_attribute_shows_its_states(observe: Observe) -> None:
    judgement = judged(observe, "shows")
    assert not judgement.violations and judgement.tier == "full"
    assert judgement.shares["optimizer states"] < 1.0


@pytest.mark.parametrize(
    ("name", "obligation", "cause"),
    [
        ("summed", "gradient", "gradient x W"),
        ("summed_by_owners", "gradient", "gradient x W"),
        ("frees_others_and_sums", "gradient", "gradient x W"),
        ("frees_its_own", "gradient", "gradient missing"),
        ("rows_decay_twice", "update", "weight decay twice"),
        ("decays_twice", "update", "weight decay twice"),
        ("forgets", "publish", "copies of the previous step"),
        ("flat_decays_twice", "update", "weight decay twice"),
    ],
)
def test_bugs_of_an_optimizer_without_states_are_named(
    observe: Observe, name: str, obligation: str, cause: str
) -> None:
    (violation, *_) = judged(observe, name).violations
    assert violation.obligation == obligation
    assert cause in violation.causes


def test_a_rank_without_parameters_has_no_states(observe: Observe) -> None:
    """ZeroRedundancyOptimizer gives its optimizer an empty parameter there."""
    model = Model(inputs=5, width=8, outputs=3, head_bias=False)
    case = msgspec.structs.replace(STARTED, mesh=(5,), model=model)
    judgement = observe("zero-redundancy", case).judge()
    assert not judgement.violations, judgement.violations
    assert judgement.shares["optimizer states"] < 1.0


def test_what_is_sharded_is_observed(observe: Observe) -> None:
    kinds = {"parameters", "gradients", "optimizer states"}
    whole = observe("ddp", CASE).judge().shares
    assert whole == dict.fromkeys(kinds, 1.0)
    sharded = judged(observe, "wrapped").shares
    assert set(sharded) == kinds and max(sharded.values()) < 0.6


def test_a_declared_stage_that_shards_nothing_is_violated(observe: Observe) -> None:
    (violation, *_) = observe("zerocheck.faults.ownership:NothingSharded", CASE).judge().violations
    assert (violation.obligation, violation.causes) == ("ownership", ("not sharded",))


@pytest.mark.parametrize("name", ["ddp", "wrapped"])
def test_a_model_with_keywords_and_a_loss_inside_holds(observe: Observe, name: str) -> None:
    model = Model(user=inspect_model(f"{Path(__file__).parents[1] / 'own_models.py'}:named"))
    case = msgspec.structs.replace(CASE, model=model)
    where = name if name == "ddp" else f"built_subjects:{name}"
    judgement = observe(where, case).judge()
    assert not judgement.violations and judgement.statuses["gradient"] == "holds"
