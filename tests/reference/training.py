"""A small model, its groups and its batches, for the tests of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zerocheck_reference import AdamWOptions, AdamWState, Group

from .states import optimizer_state

Loss = Callable[[nn.Module], Tensor]
WEIGHTS = Group(names=("0.weight", "2.weight"), options=AdamWOptions(lr=1e-2, weight_decay=0.1))
BIASES = Group(
    names=("0.bias", "2.bias"),
    options=AdamWOptions(lr=3e-3, beta2=0.99, eps=1e-3, weight_decay=0.0, amsgrad=True),
)
GROUPS = (WEIGHTS, BIASES)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batches(ranks: int, microbatches: int, seed: int, size: int = 4) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            (torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator))
            for _ in range(microbatches)
        ]
        for _ in range(ranks)
    ]


def mse(batch: tuple[Tensor, Tensor]) -> Loss:
    return lambda model: nn.functional.mse_loss(model(batch[0]), batch[1])


def losses_of(data: list[list[Any]]) -> list[list[Loss]]:
    return [[mse(batch) for batch in row] for row in data]


class Torch:
    """The same training in torch, group by group."""

    def __init__(self, model: nn.Module, groups: tuple[Group, ...] = GROUPS) -> None:
        self.model = model
        named = dict(model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [named[n] for n in group.names],
                    "lr": group.options.lr,
                    "betas": (group.options.beta1, group.options.beta2),
                    "eps": group.options.eps,
                    "weight_decay": group.options.weight_decay,
                    "amsgrad": group.options.amsgrad,
                    "maximize": group.options.maximize,
                }
                for group in groups
            ]
        )
        self.named = named

    def state(self) -> dict[str, AdamWState]:
        held = {name: optimizer_state(self.optimizer, p) for name, p in self.named.items()}
        return {name: state for name, state in held.items() if state is not None}
