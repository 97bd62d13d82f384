"""Models with outputs of many forms, and losses that use one, some or all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import scenarios
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zerocheck
from zerocheck.attached.record.holdings import local


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Data:
    loss: torch.Tensor
    logits: torch.Tensor
    nothing: None = None


@dataclass
class Ordered(OrderedDict):  # type: ignore[type-arg]
    """A mapping that is a dataclass too, as the outputs of transformers are."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            self[name] = getattr(self, name)


class Slots:
    """Neither a container nor an object with a __dict__."""

    __slots__ = ("logits", "loss")

    def __init__(self, loss: torch.Tensor, logits: torch.Tensor) -> None:
        self.loss, self.logits = loss, logits


FORMS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "named_tuple": Pair,
    "frozen_dataclass": Data,
    "model_output": Ordered,
    "object": SimpleNamespace,
    "slots": Slots,
    "nested": lambda loss, logits: {"a": [loss, (logits, {"again": logits})], "mask": None},
}


class Net(nn.Module):
    """A loss of the logits, and the logits."""

    form = "dict"

    def __init__(self) -> None:
        super().__init__()
        self.layers = scenarios.net()

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.layers(x)
        return FORMS[self.form](loss=logits.square().mean(), logits=logits)


def net_of(form: str) -> Callable[[], nn.Module]:
    return type(f"Net_{form}", (Net,), {"form": form})


def parts_of(outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(outputs, dict) and "a" in outputs:
        return outputs["a"][0], outputs["a"][1][0]
    if isinstance(outputs, dict):
        return outputs["loss"], outputs["logits"]
    return outputs.loss, outputs.logits


def _loss(model: nn.Module, x: torch.Tensor, loss: str) -> torch.Tensor:
    inner, logits = parts_of(model(x))
    if loss == "inner":
        return inner
    if loss == "outer":
        return logits.abs().mean()
    if loss == "weighted":
        return 3 * inner + 0.1 * logits.abs().mean() + (logits * logits.detach()).mean()
    if loss == "chained":  # an output as it is, and a part of it, go in again
        again = parts_of(model(logits))
        third = parts_of(model(torch.tanh(logits) + x))
        return inner + again[0] + again[1].mean() + logits.sin().mean() + third[0]
    assert loss == "input"
    return inner + logits.mean()


class Square(Net):
    """Its logits can be its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(3, 6))


def _checkpoint(module: nn.Module) -> None:
    forward = module.forward

    def again(x: torch.Tensor) -> Any:
        # Without an input that needs a gradient, a reentrant checkpoint has none either.
        given = x if x.requires_grad else x.clone().requires_grad_()
        return checkpoint(forward, given, use_reentrant=True)

    module.forward = again  # type: ignore[method-assign]


def outputs(
    wrap: str = "ddp",
    *,
    directory: str,
    form: str = "dict",
    loss: str = "weighted",
    world: bool = False,
    reentrant: int = 0,
) -> dict[str, Any]:
    """Two microbatches; world: the gradient is W times too large.

    reentrant: checkpoints around the layers, one in the other. The reference has none.
    """
    made: Callable[[], nn.Module] = Square if loss in ("chained", "input") else net_of(form)
    net = made()
    for _ in range(reentrant):
        _checkpoint(net.layers)  # type: ignore[arg-type]
    if wrap == "ddp_unused":
        model: nn.Module = DistributedDataParallel(net, find_unused_parameters=True)
    elif wrap == "fsdp2":
        model = torch.distributed.fsdp.fully_shard(net)
    else:
        model = scenarios.WRAPS[wrap](net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model, optimizer, reference=made, steps=(1,), directory=directory, on_violation="warn"
    )
    with check.step():
        optimizer.zero_grad()
        for microbatch in range(2):
            x = scenarios.batch() + microbatch
            if loss == "input":
                x.requires_grad_()
            given = _loss(model, x, loss)
            if microbatch:
                torch.autograd.backward([given], [torch.tensor(0.5)])
            else:
                (given / 2).backward()
        if world:
            for parameter in model.parameters():
                local(parameter.grad).mul_(torch.distributed.get_world_size())
        optimizer.step()
    return scenarios.answer(check)
