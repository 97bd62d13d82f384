"""An optimizer that is wrong from some step on, and a model for one process."""

from __future__ import annotations

import math
from typing import Any

import torch
from three_steps import net
from torch import nn


class DecaysTwice(torch.optim.AdamW):
    """It is wrong from step `wrong` on, or in that step only."""

    wrong = math.inf
    once = False
    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        if self.taken == self.wrong or (self.taken > self.wrong and not self.once):
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        return super().step(closure)


def parts(
    kind: type[torch.optim.Optimizer] = DecaysTwice, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, kind(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})
