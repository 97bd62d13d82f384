"""Training of three checked steps in one process, for tests of what surrounds a model.

And a small model, for tests that write their steps themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from wrong_reductions import after_backward, multiplied

import zerocheck
from zerocheck.attached.session import Attached
from zerocheck.protocol.verdicts import Judgement


def trained(
    model: nn.Module,
    loss: Callable[[Any], torch.Tensor],
    reference: Callable[[], nn.Module],
    where: Path,
    *,
    factor: float = 1.0,
    after: Callable[[Any], None] = lambda model: None,
) -> Judgement:
    """The verdict on the third step.

    loss: of the model, with new samples each time; factor: that the backward multiplies gradients
    by, which is a fault; after: what the script does to the model behind it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model, optimizer, reference=reference, directory=where, on_violation="warn", every=1
    )
    torch.manual_seed(1)
    for _ in range(3):
        with after_backward(partial(multiplied, model, factor)), check.step():
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            with torch.no_grad():
                after(model)
    assert check.last is not None
    return check.last


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def attached(model: nn.Module, optimizers: Any, directory: Path, **options: Any) -> Attached:
    return zerocheck.attach(
        model, optimizers, directory=directory / "kept", on_violation="warn", **options
    )
