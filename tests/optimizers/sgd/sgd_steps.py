"""Steps of torch's SGD on one tensor, by each of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerocheck.case.schema import Group, Optimizer
from zerocheck.optimizers import OPTIMIZERS
from zerocheck.optimizers.sgd.bounds import SGDScalars
from zerocheck.optimizers.specification import UpdateElements

SGD = OPTIMIZERS["sgd"]
KERNELS: Mapping[str, Mapping[str, Any]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
FORMS = ((0.0, False), (0.9, False), (0.9, True), (0.5, False), (0.5, True))
"""Momentum, and whether the form is Nesterov's."""


def options_of(momentum: float, *, nesterov: bool, maximize: bool = False) -> Optimizer:
    return Optimizer(kind="sgd", momentum=momentum, nesterov=nesterov, maximize=maximize)


def step(
    p: torch.Tensor,
    g: torch.Tensor,
    buffer: torch.Tensor | None,
    group: Group,
    options: Optimizer,
    kernel: str = "for-loop",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(parameter, buffer) after torch's own step; nothing given is changed."""
    parameter = p.clone().requires_grad_()
    parameter.grad = g.clone()
    given = {**SGD.torch_group(group, options), **{"foreach": None, "fused": None}}
    optimizer = torch.optim.SGD([parameter], **{**given, **KERNELS[kernel]})
    if buffer is not None:
        optimizer.state[parameter]["momentum_buffer"] = buffer.clone()
    optimizer.step()
    return parameter.detach(), optimizer.state[parameter].get("momentum_buffer")


def scalars(group: Group, options: Optimizer) -> SGDScalars:
    found = SGD.scalars(group, options, lr=group.lr, step=0, reading="double")
    assert isinstance(found, SGDScalars)
    return found


def elements(
    p: torch.Tensor,
    g: torch.Tensor,
    buffer: torch.Tensor | None,
    after: torch.Tensor | None,
    *,
    maximize: bool = False,
) -> UpdateElements:
    """What the judge makes of a step: zeros where there is no buffer."""
    from zerocheck.floating_point import Format

    def held(one: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": (torch.zeros_like(p) if one is None else one).double()}

    gradient = g.double()
    return UpdateElements(
        p.double(),
        -gradient if maximize else gradient,
        held(buffer),
        held(after),
        0.0,
        Format.of(p.dtype),
    )
