"""Steps of torch's Muon on one matrix, and what the judge makes of them."""

from __future__ import annotations

import torch

from zerocheck.case.schema import Group, Optimizer
from zerocheck.floating_point import Format
from zerocheck.optimizers.muon.bounds import MuonScalars
from zerocheck.optimizers.muon.optimizer import Muon
from zerocheck.optimizers.specification import Reading, Segment, UpdateElements

MUON = Muon()
GROUP = Group(lr=0.02, weight_decay=0.1)


def options_of(*, nesterov: bool = True, **more: object) -> Optimizer:
    return Optimizer(kind="muon", momentum=0.95, nesterov=nesterov, **more)  # type: ignore[arg-type]


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameter, gradient and buffer."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty(shape).normal_(generator=generator).to(dtype) for _ in range(3)]


def step(
    p: torch.Tensor, g: torch.Tensor, b: torch.Tensor, group: Group, options: Optimizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """(parameter, buffer) after torch's own step; nothing given is changed."""
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = g.clone()
    optimizer = torch.optim.Muon([parameter], **MUON.torch_group(group, options))
    optimizer.state[parameter]["momentum_buffer"] = b.clone()
    optimizer.step()
    return parameter.detach(), optimizer.state[parameter]["momentum_buffer"]


def scalars(options: Optimizer, reading: Reading = "same kernels") -> MuonScalars:
    return MUON.scalars(GROUP, options, lr=GROUP.lr, step=0, reading=reading)


def elements(
    p: torch.Tensor, g: torch.Tensor, b: torch.Tensor, after: torch.Tensor
) -> UpdateElements:
    strides = None if p.is_contiguous() else p.stride()

    def flat(one: torch.Tensor) -> torch.Tensor:
        return one.double().reshape(-1)

    return UpdateElements(
        flat(p),
        flat(g),
        {"momentum_buffer": flat(b)},
        {"momentum_buffer": flat(after)},
        0.0,
        Format.of(p.dtype),
        tuple(p.shape),
        strides,
    )


def segment(role: str, observed: torch.Tensor, made: UpdateElements, options: Optimizer) -> Segment:
    return Segment(
        role=role,
        observed=observed.double().reshape(-1),
        elements=made,
        options=options,
        group=GROUP,
        lr=GROUP.lr,
        step=1,
        reading="same kernels",
        rates=(GROUP.lr, 0.03),
        others=[(Group(pattern="x", lr=0.05, weight_decay=0.0), 0.05)],
        ranks=(2, 3),
    )
