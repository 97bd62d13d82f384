"""The free-running reference beside a training loop as it is usually written."""

from __future__ import annotations

import math

import pytest
import torch
from msgspec.structs import replace

from zerocheck.case.schema import Block, Case, Data, Group, Model, Optimizer, Start, Training
from zerocheck.case.shapes import unfrozen
from zerocheck.contract.groups import groups, learning_rates
from zerocheck.contract.semantics import Semantics
from zerocheck.contract.start import initial_state
from zerocheck.judge.free_run import trajectory
from zerocheck.models.batches import batch, carried_seed, loss_of, overflows, weight
from zerocheck.models.network import build_model

PLAIN = Case(
    mesh=(3,),
    model=Model(blocks=(Block(kind="mlp", dropout=0.25), Block(kind="layer_norm"))),
    training=Training(steps=6, microbatches=2),
)
TOKENS = Model(stem="embedding", inputs=7, outputs=7, tied=True, blocks=(Block(kind="mlp"),))
CASES = {
    "plain": PLAIN,
    "carried": replace(PLAIN, data=Data(rng="carried")),
    "clipped": replace(PLAIN, training=replace(PLAIN.training, clip=0.01)),
    "clipped by the largest": replace(
        PLAIN, training=replace(PLAIN.training, clip=0.01, norm="inf")
    ),
    "groups": replace(
        PLAIN,
        optimizer=Optimizer(
            groups=(Group(pattern="*.bias", lr=1e-2, weight_decay=0.0), Group(beta1=0.8)),
            schedule="warmup",
            amsgrad=True,
            maximize=True,
        ),
    ),
    "unfrozen": replace(
        PLAIN,
        model=replace(PLAIN.model, frozen=("stem.*", "blocks.1.*")),
        training=replace(PLAIN.training, unfreeze=3),
    ),
    "frozen": replace(PLAIN, model=replace(PLAIN.model, frozen=("stem.*",))),
    "overflow": replace(PLAIN, training=replace(PLAIN.training, loss_scale=1024.0, overflow=2)),
    "overflow-alone": replace(
        PLAIN,
        training=replace(PLAIN.training, loss_scale=1024.0, overflow=2, overflow_in="head.weight"),
    ),
    "mid-training": replace(PLAIN, start=Start(step=255, moments="typical")),
    "masked": replace(PLAIN, model=TOKENS, data=Data(masked=True, batch=3)),
}


def plain_loop(case: Case, *, tokens: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same steps with torch.optim, its clipping and one backward of the mean of all losses."""
    model = build_model(case)
    world, count = case.world_size, case.training.microbatches
    optimizer = torch.optim.AdamW(groups(model, case))
    state = initial_state(case, model)
    if state is not None:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(state[name, "parameter"])
            optimizer.state[parameter] = {
                role: state[name, role].clone() for role in ("exp_avg", "exp_avg_sq", "step")
            }
    generators = [torch.Generator().manual_seed(carried_seed(case, rank)) for rank in range(world)]
    states = [generator.get_state() for generator in generators]
    curve = []
    for index in range(case.training.steps):
        if index == case.training.unfreeze:
            for name in unfrozen(case):
                model.get_parameter(name).requires_grad_(True)
        total, plain = torch.zeros(()), []
        skipped = False
        for rank in range(world):
            for number in range(count):
                where = {"step": index, "rank": rank, "microbatch": number}
                drawn = batch(case, **where)
                if case.data.rng == "carried":
                    torch.set_rng_state(states[rank])
                else:
                    torch.manual_seed(drawn.seed)
                loss = loss_of(case)(model(*drawn.inputs), drawn.target)
                states[rank] = torch.get_rng_state()
                infinite = overflows(case, **where)
                skipped = skipped or infinite
                alone = case.training.overflow_in is not None
                plain.append(math.inf if infinite and not alone else float(loss.detach()))
                factor = weight(case, **where) if tokens else 1.0
                total = total + loss * factor / (world * count)
        curve.append(sum(plain) / len(plain))
        if skipped:
            continue
        optimizer.zero_grad()
        total.backward()
        if case.training.clip is not None:
            norm = float(case.training.norm)
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.training.clip, norm)
        for group, rate in zip(optimizer.param_groups, learning_rates(case, index), strict=True):
            group["lr"] = rate
        optimizer.step()
    return curve, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_it_goes_where_a_usual_loop_goes(name: str) -> None:
    """In fp64 one could ask for bits; in fp32 sums are ordered in another way. A step moves a
    parameter by about its learning rate, 1e-3: what is asked for is a thousandth of that."""
    case = CASES[name]
    tokens = case.data.masked
    semantics = Semantics(weight="token" if tokens else "microbatch")
    free = trajectory(case, semantics, restored=case.start.step > 0)
    curve, parameters = plain_loop(case, tokens=tokens)
    assert list(free.losses) == pytest.approx(curve, rel=1e-5)
    moved = build_model(case)
    for key, value in parameters.items():
        torch.testing.assert_close(free.parameters[key], value, rtol=1e-5, atol=1e-6)
    assert any(
        not torch.equal(value, dict(moved.named_parameters())[key])
        for key, value in parameters.items()
    )


def test_what_the_semantics_say_counts() -> None:
    mean = trajectory(PLAIN, Semantics(), restored=False)
    other = trajectory(PLAIN, Semantics(average="sum"), restored=False)
    assert mean.losses[0] == other.losses[0]
    assert mean.parameters["head.weight"].ne(other.parameters["head.weight"]).any()


def test_it_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    trajectory(PLAIN, Semantics(), restored=False)
    assert torch.equal(before, torch.get_rng_state())
