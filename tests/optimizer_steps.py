"""One step of an optimizer of torch in mid-training, as the judge has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerocheck.case.schema import Group, Optimizer
from zerocheck.floating_point import Format
from zerocheck.optimizers import OPTIMIZERS
from zerocheck.optimizers.specification import UpdateElements

SIZE = 512 + 13
"""With elements that are left over from vectors, which kernels round otherwise."""

OneStep = tuple[UpdateElements, dict[str, torch.Tensor]]
"""Elements of a step, and its results by role, in fp64."""


def vector(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.empty(SIZE).normal_(generator=generator) * scale).to(dtype)


def fourth_step(
    options: Optimizer,
    group: Group,
    old: Mapping[str, torch.Tensor],
    *,
    p: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    kind: type[torch.optim.Optimizer] | None = None,
) -> OneStep:
    """Take step 4 with torch's optimizer. old: states by role; kind: another class than its own."""
    rule: Any = OPTIMIZERS[options.kind]
    p = vector(1) if p is None else p
    g = vector(2) if g is None else g
    parameter = p.clone().requires_grad_()
    parameter.grad = g.clone()
    made: Any = kind or rule.torch_class
    optimizer = made([{"params": [parameter], **rule.torch_group(group, options)}])
    states = {name: state.clone() for name, state in old.items()}
    optimizer.state[parameter] = {"step": torch.tensor(3.0), **states}
    optimizer.step()
    new = {name: optimizer.state[parameter][name].double() for name in old}
    elements = UpdateElements(
        p.double(),
        (-g if options.maximize else g).double(),
        {name: state.double() for name, state in old.items()},
        new,
        format=Format.of(p.dtype),
    )
    return elements, {**new, "parameter": parameter.detach().double()}
