"""What the programs of this folder share: their options, planted bugs, the result line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FAULTS = ("", "doubled", "doubled on rank 1", "not reduced", "mean of means", "own tokens")


def asked() -> argparse.Namespace:
    """The options of a program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--unused", action="store_true", help="DDP looks for unused parameters")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", action="store_true", help="declare that tokens count alike")
    parser.add_argument("--saves", help="a folder for a checkpoint of every second step")
    parser.add_argument("--resume", action="store_true", help="go on from the last of them")
    return parser.parse_args()


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
