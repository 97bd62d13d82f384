"""What cannot be judged never ends a training: one sentence, and the trainer goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zerocheck
from zerocheck.errors import UsageError
from zerocheck.integrations.accelerate import check as check_accelerator

KINDS = ["NAdam", "Adafactor"]


class _Trainer:
    """Names of transformers and Lightning that their integrations use, and a loop."""

    def __init__(self, optimizer: str) -> None:
        self.model_wrapped: nn.Module = nn.Linear(2, 1)
        self.optimizers = [getattr(torch.optim, optimizer)(self.model_wrapped.parameters())]
        self.strategy = SimpleNamespace(model=self.model_wrapped)
        self.args = SimpleNamespace(output_dir="unused")
        self.state = SimpleNamespace(global_step=0)
        self.callbacks: list[Any] = []
        self.global_step, self.ckpt_path = 0, None

    def _save_checkpoint(self) -> None: ...

    def save_checkpoint(self, path: Any) -> None: ...

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def update(self) -> None:
        self.model_wrapped(torch.ones(3, 2)).sum().backward()
        self.optimizers[0].step()
        self.global_step += 1
        self.state.global_step += 1

    def train(self, steps: int = 3) -> None:
        """As transformers calls a callback."""
        for _ in range(steps):
            for one in self.callbacks:
                one.on_step_begin(self.args, self.state, None, optimizer=self.optimizers[0])
            self.update()
            for one in self.callbacks:
                one.on_step_end(self.args, self.state, None)

    def fit(self, callback: Any, steps: int = 3) -> None:
        """As Lightning calls one."""
        module: Any = None
        callback.on_train_start(self, module)
        for number in range(steps):
            callback.on_train_batch_start(self, module, None, number)
            self.update()
            callback.on_train_batch_end(self)


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import an integration with a library of these names in the place of its own."""
    imported = []

    def of(name: str) -> Any:
        library: Any = ModuleType(name)
        library.Trainer = _Trainer
        library.TrainerCallback = library.Callback = object
        library.LightningModule = nn.Module
        monkeypatch.setitem(sys.modules, name, library)
        path = f"zerocheck.integrations.{name}"
        monkeypatch.delitem(sys.modules, path, raising=False)
        imported.append(path)
        return import_module(path)

    yield of
    for path in imported:
        sys.modules.pop(path, None)


def goes_on(attached: Any, said: str, kind: str, steps: int = 3) -> None:
    assert attached.taken == steps and attached.last is None and attached.wrong == 0
    assert said.count(f"got {kind}") == 1 and said.count("zerocheck:") == 1, said
    assert "No step is checked from here on; the training goes on" in said
    assert f"0 of {steps} steps checked" in attached.summary


@pytest.mark.parametrize("mode", ["raise", "warn"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers(integration: Any, capsys: Any, kind: str, mode: str) -> None:
    trainer = _Trainer(kind)
    callback = integration("transformers").check(trainer, on_violation=mode)
    trainer.train()
    goes_on(callback.attached, capsys.readouterr().err, kind)


@pytest.mark.parametrize("mode", ["raise", "warn"])
@pytest.mark.parametrize("kind", KINDS)
def test_lightning(integration: Any, capsys: Any, kind: str, mode: str) -> None:
    trainer = _Trainer(kind)
    callback = integration("lightning").LightningCheck(on_violation=mode)
    trainer.fit(callback)
    goes_on(callback.attached, capsys.readouterr().err, kind)


def test_lightning_without_an_optimizer(integration: Any, capsys: Any) -> None:
    trainer = _Trainer("SGD")
    trainer.optimizers, step = [], trainer.optimizers[0].step
    trainer.update = step  # type: ignore[method-assign]
    callback = integration("lightning").LightningCheck()
    callback.on_train_start(trainer, None)
    said = capsys.readouterr().err
    assert "an empty list of optimizers" in said and "the training goes on" in said


def test_right_trainers_are_checked(integration: Any) -> None:
    """The same loops with an optimizer that is judged."""
    trainer = _Trainer("AdamW")
    callback = integration("transformers").check(trainer)
    trainer.train()
    assert callback.attached.last.statuses["update"] == "holds"
    trainer = _Trainer("AdamW")
    callback = integration("lightning").LightningCheck()
    trainer.fit(callback)
    assert callback.attached.last.statuses["update"] == "holds"


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate(capsys: Any, kind: str) -> None:
    from test_integration_options import Accelerator

    accelerator: Any = Accelerator(1)
    (model,) = accelerator._models
    optimizer = getattr(torch.optim, kind)(model.parameters())
    accelerator._optimizers = [optimizer]
    attached = check_accelerator(accelerator, on_violation="raise")
    for _ in range(3):
        with accelerator.accumulate(model):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    goes_on(attached, capsys.readouterr().err, kind)


def test_a_damaged_record_of_a_checkpoint(tmp_path: Any, capsys: Any) -> None:
    """It is read while the training runs."""
    from test_integration_options import Accelerator

    accelerator: Any = Accelerator(1)
    torch.save(accelerator._models[0].state_dict(), tmp_path / "model.pt")
    (tmp_path / "zerocheck.json").write_text("{}")
    check_accelerator(accelerator)
    accelerator.load_state(tmp_path)
    assert "is no record of a saved state" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0"),
        ({"on_violation": "warning"}, "did you mean 'warn'"),
        ({"reference": 3}, "reference= is of type int"),
        ({"recorder": "much"}, "much"),
    ],
)
def test_wrong_values_are_refused_before_the_training(
    integration: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        integration("lightning").LightningCheck(**options)


def test_attach_itself(capsys: Any) -> None:
    """It raises, unless that is not wanted."""
    trainer = _Trainer("NAdam")
    model, (optimizer,) = trainer.model_wrapped, trainer.optimizers
    with pytest.raises(UsageError, match="got NAdam"):
        zerocheck.attach(model, optimizer)
    check = zerocheck.attach(model, optimizer, on_unsupported="warn")
    for _ in range(3):
        with check.step():
            trainer.update()
    goes_on(check, capsys.readouterr().err, "NAdam")
    with pytest.raises(UsageError, match="on_unsupported"):
        zerocheck.attach(model, optimizer, on_unsupported="go on")  # type: ignore[arg-type]
