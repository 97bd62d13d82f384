"""Faults of a reduction: a change of gradients that is a part of the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from zerocheck.attached.record.holdings import local


@contextmanager
def after_backward(change: Callable[[], None]) -> Iterator[None]:
    """Change gradients at the end of each backward; to be entered before the checked step."""
    original = torch.autograd.backward

    def backward(*args: Any, **named: Any) -> None:
        original(*args, **named)
        change()

    with patch.object(torch.autograd, "backward", backward):
        yield


def multiplied(model: nn.Module, factor: float) -> None:
    """Multiply all gradients of a rank."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)
