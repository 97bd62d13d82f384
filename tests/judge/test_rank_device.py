"""The judge where ranks ran on a GPU. There is none: its branches run on the CPU, and what torch
says of a GPU is stood in for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from zerocheck.case.schema import Block, Case, Data, Model, Training
from zerocheck.errors import Unsupported
from zerocheck.judge import context, local, rank_device
from zerocheck.judge.local import Passes
from zerocheck.protocol.observations import RankObservation

Observe = Callable[[str, Case], Any]

CASE = Case(
    mesh=(2,),
    model=Model(
        blocks=(
            Block(kind="mlp", dropout=0.25),
            Block(kind="recurrent"),
            Block(kind="batch_norm", transposed=False),
        ),
        unused=True,
    ),
    data=Data(batch=2, length=3, rng="carried"),
    training=Training(steps=2, microbatches=2),
)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branches of a GPU are taken, with tensors of the CPU."""
    monkeypatch.setattr(local, "CPU", "another kind")
    monkeypatch.setattr(context, "CPU", "another kind")


@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp1"])
def test_the_branches_of_a_gpu_come_to_the_same_bits(
    observe: Observe, name: str, request: pytest.FixtureRequest
) -> None:
    observed = observe(name, CASE)
    plain = observed.judge()
    assert not plain.violations
    request.getfixturevalue("as_on_a_gpu")
    assert observed.judge() == plain


def test_a_violation_is_one_there_too(observe: Observe, as_on_a_gpu: None) -> None:
    observed = observe("zero2", CASE)
    for _, data in observed.places("gradient", "reduced", 1, "head.weight"):
        data[:1] += 1.0
    (violation,) = (v for v in observed.judge().violations if v.obligation == "gradient")
    assert violation.tensors == ("head.weight",) and violation.step == 1


def changing(runner: type[local.LocalRunner], what: str) -> Callable[..., Passes]:
    """LocalRunner.run, but other bits from its second call on, as of a kernel with atomics."""
    right, calls = runner.run, []

    def run(self: local.LocalRunner, *given: object, **named: object) -> Passes:
        passes = right(self, *given, **named)  # type: ignore[arg-type]
        calls.append(1)
        if what == "loss":
            passes.losses[0][0] += 1e-6 * len(calls)
        elif what == "gradient":
            passes.gradients[0, 0, 0] += 1e-6 * len(calls)
        return passes

    return run


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_model_that_does_not_repeat_is_unsupported(
    observe: Observe, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    observed = observe("zero2", CASE)
    monkeypatch.setattr(local.LocalRunner, "run", changing(local.LocalRunner, what))
    with pytest.raises(Unsupported, match=f"does not give the same bits twice.*{what} differs"):
        observed.judge()


def test_on_the_cpu_it_is_a_violation(observe: Observe, monkeypatch: pytest.MonkeyPatch) -> None:
    """There kernels repeat, so nothing is asked again."""
    observed = observe("zero2", CASE)
    monkeypatch.setattr(local.LocalRunner, "run", changing(local.LocalRunner, "loss"))
    assert {v.obligation for v in observed.judge().violations} == {"loss"}


def test_passes_that_repeat_are_let_through() -> None:
    nan = Passes(torch.tensor([[[torch.nan]]]), torch.ones(1, 1, 1), [[torch.nan]], [{}])
    rank_device.check_repeats(nan, lambda: nan)
    count: list[int] = []

    def again() -> Passes:
        count.append(1)
        return nan if len(count) < rank_device.AGAIN else replaced

    buffers = {"running_mean": torch.tensor([1.0])}
    replaced = Passes(nan.gradients, nan.arrived, nan.losses, [buffers])
    nan.buffers[0]["running_mean"] = torch.tensor([1.0000001])
    with pytest.raises(Unsupported, match="a buffer differs"):
        rank_device.check_repeats(nan, again)


def seen_on(*processors: str) -> Sequence[RankObservation]:
    return [RankObservation(device="cuda:0", processor=one) for one in processors]


def test_one_kind_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_device, "processor", lambda _: "A (9.0, 132 multiprocessors)")
    assert rank_device.ran_on(seen_on(*["A (9.0, 132 multiprocessors)"] * 2)) == torch.device(
        "cuda", 0
    )
    for others in (("A (9.0, 132 multiprocessors)", "A (9.0, 114 multiprocessors)"), ("B", "B")):
        with pytest.raises(Unsupported, match="different GPUs"):
            rank_device.ran_on(seen_on(*others))
    assert rank_device.ran_on([RankObservation(), RankObservation()]) == torch.device("cpu")


def test_only_the_gpus_own_state_tells_ranks_apart(observe: Observe) -> None:
    cpu = torch.get_rng_state().numel()
    states = [[b"ab" + bytes(cpu)], [b"ab" + b"\1" * cpu]]
    assert rank_device.states_of_device(states, torch.device("cuda", 0)) == [[b"ab"], [b"ab"]]
    assert rank_device.states_of_device(states, torch.device("cpu")) == states
    assert replace(RankObservation(), device="cuda:0") != RankObservation()
