"""What the programs of this folder share: code from the docs, planted bugs, the result line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from documents import example

FAULTS = ("", "doubled", "doubled on rank 1", "not reduced")


def shown(name: str) -> dict[str, Any]:
    """The names that a Python file of the docs defines."""
    names: dict[str, Any] = {"__name__": name.removesuffix(".py")}
    exec(compile(example(name), name, "exec"), names)
    return names


def trained(fault: str, model: nn.Module, step: Callable[[], Any]) -> Any:
    """Go forward and backward by `step`, with a fault. model: in DDP."""
    alone: Any = getattr(model, "no_sync", nullcontext)
    with alone() if fault == "not reduced" else nullcontext():
        result = step()
    if fault == "doubled" or (fault == "doubled on rank 1" and dist.get_rank() == 1):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
    return result


def line(check: Any) -> str:
    """The verdict on the last step, for the test."""
    if check.last is None:
        return "RESULT nothing was checked"
    causes = [f"{one.obligation}: {', '.join(one.causes)}" for one in check.last.violations]
    held = [name for name, status in check.last.statuses.items() if status == "holds"]
    return f"RESULT holds {', '.join(held)}; violated {causes}; not judged {check.last.unjudged}"
