"""Tests of the samples of a microbatch: token ids, or what a factory's batch function draws."""

from __future__ import annotations

import pytest
import torch

from zerocheck.errors import UsageError
from zerocheck.memory.analyse import analyse
from zerocheck.memory.fit.assemble import fit
from zerocheck.memory.fit.choices import Restriction
from zerocheck.memory.fit.text import render_fit
from zerocheck.memory.operations import forward_operations
from zerocheck.memory.setup import Setup
from zerocheck.memory.simulate import simulate
from zerocheck.memory.source import CUDNN, source
from zerocheck.memory.tables import measure
from zerocheck.memory.text import render
from zerocheck.memory.timeline import timeline

PICTURES = "small_models:pictures"


def setup(model: str, **more: object) -> Setup:
    options = {"world_size": 4, "precision": "fp32", **more}
    return Setup(model=model, **options)  # type: ignore[arg-type]


@pytest.mark.every(2)
@pytest.mark.parametrize("implementation", ["ddp", "fsdp2"])
@pytest.mark.parametrize("model", [PICTURES, "small_models:with_loss"])
def test_what_a_factory_draws_takes_what_the_allocator_counts(
    model: str, implementation: str
) -> None:
    given = setup(model, implementation=implementation)
    made = source(model)
    run = simulate(given, made)
    line, measured = timeline(run.log, run.blocks), measure(given, made)
    for (step, phase), held in measured.ends.items():
        assert sum(line.at_end(phase, step).values()) == held, (step, phase)  # type: ignore[arg-type]
    if model != PICTURES:  # a convolution of the CPU allocates within its kernel
        assert line.peak().total == measured.peak


def test_shapes_and_dtypes_are_those_of_the_function_and_its_values_where_they_are_asked_for() -> (
    None
):
    drawn = source(PICTURES).samples(setup(PICTURES))
    assert drawn.keywords == ("pictures", "scale")
    there, values = drawn.on("meta"), drawn.on("cpu", data=True)
    assert [one.shape for one in there.inputs] == [(5, 3, 12, 12), (5,)]
    assert there.target.dtype == torch.int64 and there.inputs[0].device.type == "meta"
    scale = values.inputs[1]
    assert torch.equal(scale, drawn.inputs[1]) and scale is not drawn.inputs[1]


def test_token_ids_are_their_own_target() -> None:
    tokens = source("small_models:small").samples(setup("small_models:small", batch=2, sequence=7))
    assert tokens.inputs[0].shape == (2, 7) and tokens.words == ()
    made = tokens.on("cpu", data=True)
    assert made.target is made.inputs[0]


def test_reports_say_what_is_drawn() -> None:
    words = "inputs (5, 3, 12, 12), (5,)"
    assert f"{words}, fp32 precision" in render(analyse(setup(PICTURES)))
    given = Restriction(implementation="ddp", checkpoint=False)
    report = fit(setup(PICTURES), 10**9, most_ranks=2, restriction=given)
    assert f"{words} per rank and step" in render_fit(report)


@pytest.mark.parametrize(
    ("implementation", "precision", "said"),
    [("fsdp2", "mixed", True), ("fsdp1", "mixed", True), ("fsdp2", "fp32", False),
     ("ddp", "mixed", False)],
)  # fmt: skip
def test_batch_norms_need_a_policy_of_their_own(
    implementation: str, precision: str, said: bool
) -> None:
    """A GPU refused the step that was simulated: "Expected running_mean to have type BFloat16"."""
    name = "small_models:residual_network"
    given = setup(name, implementation=implementation, precision=precision)
    told = source(name).assumes(given)
    assert any("a policy of their own" in one for one in told) is said
    assert source("small_models:small").assumes(given) == ()


@pytest.mark.long
def test_reports_say_that_workspaces_of_cudnn_are_not_in_it() -> None:
    assert "workspaces of cuDNN are not modelled" in render(analyse(setup(PICTURES)))
    assert source(PICTURES).assumes(setup(PICTURES)) == (CUDNN,)
    assert "cuDNN" not in render(analyse(setup("small_models:small")))


def test_operations_are_those_of_the_drawn_samples() -> None:
    """2 per weight and place: 10 x 10 of the stem, and of each layer."""
    counted = forward_operations(source(PICTURES), setup(PICTURES))
    assert counted.blocks == (2 * 5 * 100 * 7 * 7 * 9,) * 3
    assert counted.total == sum(counted.blocks) + 2 * 5 * (100 * 7 * 3 * 9 + 7 * 11)


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (PICTURES, {"batch": 4}, "--batch 4 is of token ids, and small_models:pictures draws"),
        (PICTURES, {"sequence": 4}, "--sequence 4 is of token ids"),
        ("small_models:no_batch", {}, "the batch function of small_models:no_batch fails: FileNot"),
    ],
)
def test_mistakes_are_errors_that_say_what_to_do(
    model: str, more: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        analyse(setup(model, **more))
    assert message in str(raised.value)
