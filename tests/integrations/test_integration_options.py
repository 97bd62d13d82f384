"""Options of integrations are refused before the training; tests/field runs the trainers."""

from __future__ import annotations

import builtins
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerocheck.errors import UsageError, Violated
from zerocheck.integrations.accelerate import check
from zerocheck.integrations.options import check_options, library


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refrence": None}, "unknown option of attach 'refrence'; did you mean 'reference'?"),
        ({"model": None}, "model is not to be given: the trainer knows it"),
        ({"done": 3}, "done is not to be given"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        check_options(options)
    assert message in str(error.value)


def test_options_of_attach_are_taken() -> None:
    check_options({"reference": None, "steps": (1,), "every": None, "on_violation": "warn"})


def test_a_library_that_is_not_there() -> None:
    with pytest.raises(ImportError, match=r"needs no_such_trainer, .* or use zerocheck.attach"):
        library("no_such_trainer")
    assert library("builtins") is builtins


class Accelerator:
    """What is used of accelerate: `accumulate`, and whether an update follows."""

    def __init__(self, every: int) -> None:
        model = nn.Linear(2, 1)
        self._models = [model]
        self._optimizers = [torch.optim.AdamW(model.parameters())]
        self._every, self._count = every, 0
        self.sync_gradients = False

    def save_state(self, place: Any) -> Any:
        torch.save(self._models[0].state_dict(), f"{place}/model.pt")
        return place

    def load_state(self, place: Any) -> None:
        self._models[0].load_state_dict(torch.load(f"{place}/model.pt"))

    def accumulate(self, *models: Any) -> Any:
        self._count += 1
        self.sync_gradients = self._count % self._every == 0
        return nullcontext()


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_is_an_update_of_accelerate(every: int) -> None:
    accelerator: Any = Accelerator(every)
    attached = check(accelerator, steps=(1, 2), every=None, on_violation="raise")
    (model,), (optimizer,) = accelerator._models, accelerator._optimizers
    for _ in range(2 * every):
        with accelerator.accumulate(model):
            model(torch.ones(3, 2)).sum().backward()
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
    assert attached.taken == 2
    assert attached.last is not None and attached.last.statuses["update"] == "holds"


def test_a_load_of_accelerate_is_judged(tmp_path: Path) -> None:
    """Of a trainer that forgets the optimizer; a folder without a record is not judged."""
    first: Any = Accelerator(1)
    check(first)
    (model,), (optimizer,) = first._models, first._optimizers
    with first.accumulate(model):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert first.save_state(tmp_path) == tmp_path
    second: Any = Accelerator(1)
    check(second, directory=tmp_path / "kept")
    with pytest.raises(Violated, match="exp_avg of every parameter was saved, and is missing"):
        second.load_state(tmp_path)
    (tmp_path / "zerocheck.json").unlink()
    second.load_state(tmp_path)


@pytest.mark.parametrize("number", [0, 2])
def test_what_is_prepared(number: int) -> None:
    accelerator: Any = SimpleNamespace(_models=[nn.Linear(2, 1)] * number, _optimizers=[])
    with pytest.raises(UsageError, match=f"{number} models and 0 optimizers are prepared"):
        check(accelerator)
