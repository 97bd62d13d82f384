"""A call of a model gives what it gave in the run, whatever it draws from and counts by."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from three_steps import trained
from torch import nn

import zerocheck
from zerocheck.attached.bundle import read
from zerocheck.attached.record.call_state import draws_in_cudnn, host_states, set_host_states
from zerocheck.attached.replay import replay


class Net(nn.Module):
    """`mixed` is what the models here differ in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.temperature, self.calls, self.memory = 1.0, 0, torch.zeros(8)
        self.generator = torch.Generator().manual_seed(3)
        self.seen: dict[str, int] = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        result: torch.Tensor = self.head(self.mixed(hidden) * hidden + self.second(hidden))
        return result

    def mixed(self, hidden: torch.Tensor) -> Any:
        raise NotImplementedError


class OfPython(Net):
    """Stochastic depth; normal numbers are drawn in pairs."""

    def mixed(self, hidden: torch.Tensor) -> Any:
        return random.random() + random.gauss()


class OfNumpy(Net):
    """Masks, as of wav2vec 2.0."""

    def mixed(self, hidden: torch.Tensor) -> Any:
        mask = np.random.rand(*hidden.shape) < 0.5
        return torch.from_numpy(mask) * float(np.random.standard_normal())


class Counting(Net):
    def mixed(self, hidden: torch.Tensor) -> Any:
        self.calls += 1
        return 1 / self.calls


class Tempered(Net):
    """A script lowers the temperature after each step."""

    def mixed(self, hidden: torch.Tensor) -> Any:
        return torch.softmax(hidden.detach() / self.temperature, -1)


class OfGenerator(Net):
    def mixed(self, hidden: torch.Tensor) -> Any:
        return torch.rand(hidden.shape, generator=self.generator)


class Remembering(Net):
    """What a layer gave in the call before."""

    def mixed(self, hidden: torch.Tensor) -> Any:
        before, self.memory = self.memory, hidden.detach().mean(0)
        return before


class CountingElsewhere(Net):
    def mixed(self, hidden: torch.Tensor) -> Any:
        self.seen["calls"] += 1
        return float(self.seen["calls"])


KNOWN: list[type[Net]] = [OfPython, OfNumpy, Counting, Tempered]
"""Models whose calls can be repeated."""


def cooled(model: Any) -> None:
    model.temperature *= 0.5


def loss(model: Any) -> torch.Tensor:
    x = torch.randn(2, 5, 4)
    result: torch.Tensor = model(x[0]).square().mean() + model(x[1]).abs().mean()
    return result


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(1)
    np.random.seed(1)


@pytest.mark.parametrize("made", KNOWN)
def test_a_right_training_holds_and_a_scaled_gradient_is_found_in_all_of_it(
    made: type[Net], tmp_path: Path
) -> None:
    right = trained(made(), loss, made, tmp_path, after=cooled)
    assert right.statuses["gradient"] == "holds" and not right.unjudged, right
    wrong = trained(made(), loss, made, tmp_path, factor=1.001, after=cooled)
    (violation,) = wrong.violations
    assert violation.causes == ("gradient scaled",)
    assert len(violation.tensors) == 6, violation


@pytest.mark.parametrize("made", [OfGenerator, Remembering, CountingElsewhere])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_what_cannot_be_repeated_is_not_judged(
    made: type[Net], factor: float, tmp_path: Path
) -> None:
    last = trained(made(), loss, made, tmp_path, factor=factor)
    assert not last.violations and last.statuses["update"] == "holds"
    assert "other outputs for the same inputs" in last.unjudged["gradient"]


@pytest.mark.parametrize("made", KNOWN)
def test_a_bundle_has_it_too(made: type[Net], tmp_path: Path) -> None:
    model = made()
    model.temperature, model.calls = 0.25, 3
    trained(model, loss, made, tmp_path, factor=2.0)
    _, (rank,) = read(tmp_path / "step-1")
    assert rank.forwards[0].numbers["temperature"] == 0.25
    assert rank.forwards[1].numbers == ({"calls": 4} if made is Counting else {})
    of = {OfPython: ["python"], OfNumpy: ["numpy"]}.get(made, [])
    assert [[*one.drawn] for one in rank.forwards] == [of, of]
    again = replay(tmp_path / "step-1", f"{__file__}:{made.__name__}")
    assert again.local.reason == "" and again.verdict.startswith("reproduced: the same"), again.text


def test_a_check_draws_nothing_from_the_run(tmp_path: Path) -> None:
    """Of a factory that seeds all generators, the training sees nothing."""

    def factory() -> nn.Module:
        random.seed(0)
        np.random.seed(0)
        return OfPython()

    drawn = []
    for steps in ((), (1,)):
        random.seed(5)
        np.random.seed(5)
        model = OfPython()
        optimizer = torch.optim.AdamW(model.parameters())
        check = zerocheck.attach(
            model, optimizer, reference=factory, steps=steps, every=None, directory=tmp_path
        )
        with check.step():
            loss(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        drawn.append((random.random(), np.random.rand(), random.gauss()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("drawn", [0, 1])
@pytest.mark.parametrize(
    "draw", [lambda: random.gauss(), lambda: float(np.random.standard_normal())]
)
def test_states_are_restored_within_a_pair_of_normal_numbers(
    draw: Callable[[], float], drawn: int
) -> None:
    for _ in range(drawn):
        draw()
    states = host_states()
    assert {one.dtype for one in states.values()} == {torch.int64}
    expected = [draw() for _ in range(3)]
    set_host_states(states)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize(
    ("layers", "dropout", "device", "draws"),
    [
        (2, 0.1, "cuda", True),
        (2, 0.1, "cpu", False),
        (2, 0.0, "cuda", False),
        (1, 0.1, "cuda", False),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_recurrent_modules_draw_in_cudnn(
    layers: int, dropout: float, device: str, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GRU(4, 4, layers, dropout=dropout))
    assert draws_in_cudnn(model, device) is draws
    assert not draws_in_cudnn(model.eval(), device)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert not draws_in_cudnn(model.train(), device)
