"""What the drive gives to an implementation lies on the device of the rank: the meta device stands
for one that is not the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from zerocheck.case.schema import Block, Case, Data, Model, Optimizer, Start, Training
from zerocheck.contract import Implementation, Step, StepReport
from zerocheck.drive.checkpoints import Checkpoints
from zerocheck.drive.steps import Driver
from zerocheck.execution.alignment import ALIGNMENT, GPU_ALIGNMENT, alignment, lies, place
from zerocheck.models.network import build_model

META = torch.device("meta")
CASE = Case(
    model=Model(
        blocks=(Block(kind="batch_norm"), Block(kind="recurrent")), side=True, stem="embedding"
    ),
    data=Data(batch=2, length=3),
    training=Training(microbatches=3),
    start=Start(step=2, moments="typical"),
)


class Given(Implementation):
    """Notes what it is given."""

    def __init__(self, model: nn.Module, case: Case, mesh: Any) -> None:
        self.model = model

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        self.full = full

    def train_step(self, step: Step) -> StepReport:
        raise NotImplementedError


class Silent:
    def at(self, text: str) -> None:
        return None


def driver(case: Case, device: torch.device) -> Driver:
    checkpoints = Checkpoints(case, device=device)
    return Driver(
        Given, case, None, rank=0, progress=Silent(), checkpoints=checkpoints, device=device  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("kernel", ["foreach", "fused"])
def test_model_state_and_samples_are_on_the_device(kernel: Any) -> None:
    case = replace(CASE, optimizer=Optimizer(kernel=kernel))
    one = driver(case, META)
    subject, _ = one._built()
    assert isinstance(subject, Given)
    tensors = [*subject.model.parameters(), *subject.model.buffers()]
    assert tensors and all(tensor.device == META for tensor in tensors)
    counts = {t.device for (_, role), t in subject.full.items() if role == "step"}
    # torch's AdamW has them there for its fused kernel, and on the CPU for the others.
    assert counts == {META if kernel == "fused" else torch.device("cpu")}
    assert {t.device for (_, role), t in subject.full.items() if role != "step"} == {META}
    step = one._step(0, on_loss=None, reached=lambda _: None)
    samples = [t for m in step.microbatches for t in (*m.inputs, m.target)]
    assert len(samples) > 2 * 3 and all(t.device == META for t in samples)


def test_on_the_cpu_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("moved")

    monkeypatch.setattr(nn.Module, "to", never)
    subject, _ = driver(CASE, torch.device("cpu"))._built()
    assert isinstance(subject, Given)
    monkeypatch.undo()
    wanted = dict(build_model(CASE).named_parameters())
    for name, parameter in subject.model.named_parameters():
        assert torch.equal(parameter, wanted[name])


def test_alignment_is_that_of_the_device() -> None:
    assert alignment(torch.device("cpu")) == ALIGNMENT == 64
    assert alignment(torch.device("cuda", 0)) == GPU_ALIGNMENT == 256
    placed = place(torch.arange(6.0).view(2, 3), 12, (1, 2))
    assert lies(placed) == 12 and placed.stride() == (1, 2)
    assert placed.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
