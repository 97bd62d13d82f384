"""The judge on real observations: as they are, and with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from slices import sliced

from zerocheck.case.schema import Block, Case, Data, Model, Start, Training
from zerocheck.protocol.verdicts import EQUIVALENCE

CASE = Case(
    mesh=(3,),
    seed=5,
    model=Model(
        inputs=5,
        width=6,
        outputs=3,
        blocks=(
            Block(kind="mlp", hidden=7),
            Block(kind="batch_norm"),
            Block(kind="attention", heads=2, dropout=0.1),
        ),
        frozen=("blocks.0.up.bias",),
    ),
    data=Data(batch=2, length=3),
    start=Start(step=2, moments="typical"),
    training=Training(steps=3, microbatches=2, clip=0.01),
)
SIDE_ONCE = 3
"""A seed with which one of 2 ranks has a second input in step 0, and none has in step 1."""

ALL = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
FORMS = ("ddp", "fsdp2", "zero2")
"""What ranks show in each of the forms that the judge tells apart: whole copies, shards of each
tensor, and ranges of a flat vector beside whole parameters."""


@pytest.mark.parametrize("implementation", ALL)
def test_all_obligations_hold(observe: Callable, implementation: str) -> None:
    judgement = observe(implementation, CASE).judge()
    assert judgement.violations == ()
    assert judgement.statuses == dict.fromkeys(EQUIVALENCE, "holds")
    assert judgement.tier == "full"
    assert all(share <= 1.0 for share in judgement.share.values())
    assert judgement.share["gradient"] > 0.05
    assert judgement.share["update"] > 0.3
    assert judgement.share["publish"] == judgement.share["ownership"] == 0.0, "bit for bit"


@pytest.mark.parametrize("implementation", FORMS)
def test_the_last_publish_is_judged_by_one_forward(observe: Callable, implementation: str) -> None:
    """After the last of several steps: its loss is that of the parameters then, and no other."""
    observed = observe(implementation, CASE)
    for seen in observed.seen:
        assert [len(step.losses) for step in seen.steps] == [2, 2, 2, 1]
    assert not observed.places("gradient", "reduced", 3, "head.weight")
    losses = [list(seen.steps[3].losses) for seen in observed.seen]
    for place, seen in enumerate(observed.seen):
        changed = tuple(torch.tensor(losses[place]).nextafter(torch.tensor(9.0)).tolist())
        last = msgspec.structs.replace(seen.steps[3], losses=changed)
        observed.seen[place] = msgspec.structs.replace(seen, steps=(*seen.steps[:3], last))
    (violation,) = observed.judge().violations
    assert violation.obligation == "loss" and violation.step == 3


def test_a_case_of_one_step_ends_in_a_second_gradient(observe: Callable) -> None:
    training = msgspec.structs.replace(CASE.training, steps=1)
    observed = observe("zero2", msgspec.structs.replace(CASE, training=training))
    assert [len(step.losses) for step in observed.seen[0].steps] == [2, 2]
    assert observed.places("gradient", "reduced", 1, "head.weight")


UNUSUAL = msgspec.structs.replace(
    CASE,
    model=Model(
        inputs=5,
        width=6,
        outputs=3,
        side=True,
        blocks=(
            Block(kind="experts", hidden=16, experts=3, transposed=True, gain=True),
            Block(kind="recurrent", transposed=True, empty=True),
            Block(kind="mlp", hidden=32, transposed=True, dropout=0.2, checkpoint=True),
        ),
    ),
)
"""0-d, empty and transposed parameters, some used on some ranks only."""


@pytest.mark.every(2)
@pytest.mark.parametrize("implementation", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_of_every_shape_and_use(
    observe: Callable, implementation: str, set_to_none: bool
) -> None:
    training = msgspec.structs.replace(UNUSUAL.training, set_to_none=set_to_none)
    observed = observe(implementation, msgspec.structs.replace(UNUSUAL, training=training))
    judgement = observed.judge()
    assert judgement.violations == ()
    strides = observed.seen[0].steps[0].strides
    flat = implementation != "ddp"
    assert ("blocks.2.up.weight" in strides) is flat, "a flat buffer makes it contiguous"


def test_strides_are_mirrored(observe: Callable) -> None:
    """Without them the local passes have other bits, and a loss is blamed that is right."""
    model = Model(
        inputs=5, width=64, outputs=3, blocks=(Block(kind="mlp", hidden=64, transposed=True),) * 2
    )
    data = Data(batch=1, length=1)  # one row: BLAS multiplies a vector, and cares most
    observed = observe("zero1", msgspec.structs.replace(CASE, model=model, data=data))
    assert observed.judge().violations == ()
    observed.seen = [
        msgspec.structs.replace(
            seen, steps=tuple(msgspec.structs.replace(step, strides={}) for step in seen.steps)
        )
        for seen in observed.seen
    ]
    assert "loss" in {violation.obligation for violation in observed.judge().violations}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_where_nobody_used_the_parameter(observe: Callable, set_to_none: bool) -> None:
    """Kept zeros are what one device has too; otherwise no gradient may exist."""
    case = msgspec.structs.replace(
        CASE,
        mesh=(2,),
        seed=SIDE_ONCE,
        model=Model(inputs=5, width=6, outputs=3, side=True),
        training=Training(steps=2, set_to_none=set_to_none),
    )
    observed = observe("ddp", case)
    assert observed.judge().violations == ()
    gradients = observed.places("gradient", "reduced", 1, "side.weight")
    assert len(gradients) == (0 if set_to_none else 2)
    assert all(not data.any() for _, data in gradients)
    for _, data in gradients:
        data.fill_(1e-3)
    judged = {violation.obligation for violation in observed.judge().violations}
    assert ("gradient" in judged) is not set_to_none


@pytest.mark.every(2)
@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize(
    ("role", "point", "step", "obligation"),
    [
        ("gradient", "reduced", 1, "gradient"),
        ("gradient", "reduced", 2, "gradient"),
        ("gradient", "clipped", 1, "clip"),
        ("exp_avg", "state", 1, "update"),
        ("exp_avg_sq", "state", 0, "update"),
        ("parameter", "state", 2, "update"),
        ("parameter", "state", -1, "publish"),
        ("exp_avg", "state", -1, "publish"),
        ("step", "state", 1, "update"),
        ("step", "state", -1, "publish"),
        ("buffer", "state", 1, "buffers"),
    ],
)
def test_a_change_on_all_ranks_is_flagged_where_it_is(
    observe: Callable, implementation: str, role: str, point: str, step: int, obligation: str
) -> None:
    """One element is changed in every copy, so that only the reference can tell."""
    observed = observe(implementation, CASE)
    name = "blocks.1.norm.running_mean" if role == "buffer" else "blocks.2.out.weight"
    shards = observed.places(role, point, step, name)
    assert shards
    start = shards[0][0]
    for first, data in shards:
        if first == start:
            data[0] += max(1e-3, 1e-3 * float(data[0].abs()))
    violations = observed.judge().violations
    first = violations[0]
    assert (first.obligation, first.step) == (obligation, step)
    assert first.tensors[0] == name
    if point == "state":
        # Of its own step nothing else is blamed.
        assert [v.obligation for v in violations if v.step == step] == [obligation]


def test_a_copy_that_differs_on_one_rank_is_published_wrong(observe: Callable) -> None:
    observed = observe("zero2", CASE)
    copies = observed.places("parameter", "state", 1, "head.weight")
    copies[2][1][4] = torch.nextafter(copies[2][1][4], torch.tensor(9.0))
    first = observed.judge().violations[0]
    assert (first.obligation, first.step, first.role) == ("publish", 1, "parameter")
    assert first.tensors == ("head.weight",)
    assert first.ranks == (2,)
    assert first.element == (0, 4)


def test_a_loss_that_differs_in_its_last_bit(observe: Callable) -> None:
    observed = observe("ddp", CASE)
    step = observed.seen[1].steps[1]
    losses = [step.losses[0], step.losses[1] * (1 + 2**-23)]
    steps = list(observed.seen[1].steps)
    steps[1] = msgspec.structs.replace(step, losses=tuple(losses))
    observed.seen[1] = msgspec.structs.replace(observed.seen[1], steps=tuple(steps))
    first = observed.judge().violations[0]
    assert (first.obligation, first.step, first.ranks) == ("loss", 1, (1,))


def test_a_norm_that_is_only_logged_wrong_is_mild(observe: Callable) -> None:
    observed = observe("zero3", CASE)
    for rank, seen in enumerate(observed.seen):
        steps = list(seen.steps)
        steps[1] = msgspec.structs.replace(steps[1], grad_norm=steps[1].grad_norm * 1.01)
        observed.seen[rank] = msgspec.structs.replace(seen, steps=tuple(steps))
    violations = observed.judge().violations
    assert violations[0].obligation == "clip"
    assert violations[0].role == "norm"
    assert violations[0].mild


@pytest.mark.parametrize("implementation", ["fsdp2", "zero3"])
def test_a_shard_at_the_wrong_place_is_not_owned(observe: Callable, implementation: str) -> None:
    observed = observe(implementation, CASE)
    seen = observed.seen[1]
    manifests = [
        tuple(
            msgspec.structs.replace(entry, start=entry.start + 1, stop=entry.stop + 1)
            if entry.name == "blocks.2.qkv.weight" and entry.stop > entry.start
            else entry
            for entry in manifest
        )
        for manifest in seen.manifests
    ]
    observed.seen[1] = msgspec.structs.replace(seen, manifests=tuple(manifests))
    first = observed.judge().violations[0]
    assert (first.obligation, first.step) == ("ownership", -1)
    assert first.tensors == ("blocks.2.qkv.weight",)


@pytest.mark.every(2)
@pytest.mark.parametrize("implementation", FORMS)
def test_nan_anywhere_is_flagged(observe: Callable, implementation: str) -> None:
    for role, point in (("gradient", "reduced"), ("parameter", "state"), ("exp_avg", "state")):
        observed = observe(implementation, CASE)
        for _, data in observed.places(role, point, 1, "stem.weight"):
            data[0] = torch.nan
        assert observed.judge().violations, role


def test_judging_leaves_the_global_state_alone(observe: Callable) -> None:
    observed = observe("ddp", CASE)
    torch.manual_seed(11)
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    observed.judge()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_digest_is_that_of_the_bits(observe: Callable) -> None:
    one, two = observe("fsdp2", CASE), observe("fsdp2", CASE, anew=True)
    for observed in (one, two):
        for _, data in observed.places("parameter", "state", 0, "head.bias"):
            data[0] += 1.0
    assert one.judge().digest == two.judge().digest != ""
    for _, data in two.places("gradient", "reduced", 0, "stem.bias"):
        data[0] = torch.nextafter(data[0], torch.tensor(9.0))
    assert one.judge().digest != two.judge().digest


@pytest.mark.long
@pytest.mark.parametrize("implementation", sliced(["fsdp1", "fsdp1-no-shard"], ["fsdp1"]))
def test_views_that_are_made_at_each_call_are_mirrored(
    observe: Callable, implementation: str
) -> None:
    """The steps of a recurrent block are summed by call. In bf16 the order shows."""
    twice = Block(kind="recurrent", dtype="bf16", checkpoint=True)
    model = Model(inputs=5, width=7, outputs=3, blocks=(twice, Block(kind="rms_norm")))
    model = msgspec.structs.replace(model, calls=(0, 1, 0))
    case = msgspec.structs.replace(CASE, mesh=(2,), model=model, data=Data(batch=2, length=5))
    observed = observe(implementation, case)
    assert {"blocks.0.gru"} <= set(observed.seen[0].steps[0].viewed)
    assert observed.judge().violations == ()
    observed.seen = [
        msgspec.structs.replace(
            seen, steps=tuple(msgspec.structs.replace(step, viewed=()) for step in seen.steps)
        )
        for seen in observed.seen
    ]
    judgement = observed.judge()  # another graph than the reference's, so its bits may differ
    assert (judgement.violations, judgement.estimated) == ((), ("gradient",))


def hide(observed: Any, *points: str) -> None:
    """Nothing was shown of the gradient at these points."""
    observed.seen = [
        msgspec.structs.replace(
            one,
            records=tuple(r for r in one.records if r.role != "gradient" or r.point not in points),
        )
        for one in observed.seen
    ]


HIDDEN = [("clipped",), ("reduced", "clipped")]


@pytest.mark.parametrize("points", HIDDEN)
def test_a_gradient_that_was_not_clipped_is_one_finding_where_it_is_hidden(
    observe: Callable, points: tuple[str, ...]
) -> None:
    """exp_avg took in the whole gradient, and the gradient itself is right."""
    observed = observe("ddp", CASE)
    beta = CASE.optimizer.groups[0].beta1
    for rank in range(3):
        ((_, taken),) = [
            one for one in observed.records("gradient", "reduced", 0) if one[0] == rank
        ]
        (before,) = [one for one in observed.records("exp_avg", "state", -1) if one[0] == rank]
        (after,) = [one for one in observed.records("exp_avg", "state", 0) if one[0] == rank]
        moment, gradient = observed.tensors[before], observed.tensors[rank, taken]
        observed.tensors[after].copy_(torch.lerp(moment, gradient, 1 - beta))
    hide(observed, *points)
    judged = {violation.obligation for violation in observed.judge().violations}
    assert "clip" in judged and "gradient" not in judged


@pytest.mark.parametrize("points", HIDDEN)
def test_a_clip_that_is_hidden_could_have_failed(
    observe: Callable, points: tuple[str, ...]
) -> None:
    observed = observe("ddp", CASE)
    hide(observed, *points)
    judgement = observed.judge()
    assert judgement.violations == () and judgement.tier == "state only"
    assert judgement.statuses["clip"] == "holds" and "clip" not in judgement.vacuous


def test_buffers_that_change_in_the_only_step_could_have_failed(observe: Callable) -> None:
    case = msgspec.structs.replace(CASE, training=Training(steps=1))
    judgement = observe("ddp", case).judge()
    assert judgement.statuses["buffers"] == "holds" and "buffers" not in judgement.vacuous
