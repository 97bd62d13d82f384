"""What the programs of this folder share: their options, planted bugs, the result line."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FAULTS = (
    "",
    "doubled",
    "doubled on rank 1",
    "not reduced",
    "a gradient zeroed",
    "drift on rank 1",
    "mean of means",
    "own tokens",
    "a layer divided by ep",
    "optimizer not loaded",
)


def asked(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a program. arguments: instead of those that it was called with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--moe", action="store_true", help="torchtitan: a mixture of experts")
    parser.add_argument("--unused", action="store_true", help="DDP looks for unused parameters")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true", help="by inductor")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--begin", type=int, default=1, help="the step with which a fault begins")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--every", type=int, default=1, help="steps from one check to the next")
    parser.add_argument("--recorder", help="bytes of the flight recorder")
    parser.add_argument("--unchecked", action="store_true", help="train without zerocheck")
    parser.add_argument("--tokens", action="store_true", help="declare that tokens count alike")
    parser.add_argument("--saves", help="a folder for a checkpoint of every second step")
    for axis in ("pp", "tp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1, help="ranks of this axis")
    parser.add_argument("--resume", action="store_true", help="go on from the last of them")
    given = parser.parse_args(arguments)
    # Else inductor draws random numbers of its own, and the gradient is not judged.
    torch._inductor.config.fallback_random = given.compile
    return given


def checks(given: argparse.Namespace) -> dict[str, Any]:
    """The options of attach for these of the program."""
    return {
        "steps": range(1, given.steps + 1) if given.every == 1 else (),
        "every": None if given.every == 1 else given.every,
        "recorder": given.recorder,
        "on_violation": "warn",
        "directory": tempfile.mkdtemp(),
    }


class Planted:
    """A fault that begins with a step. given: the options of the program."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._microbatches = 0

    @property
    def now(self) -> str:
        """The fault in the step that is being taken, or ""."""
        step = self._microbatches // self._given.accumulation + 1
        return self._given.fault if step >= self._given.begin else ""

    def trained(self, model: nn.Module, step: Callable[[], Any]) -> Any:
        """Go forward and backward by `step`, with the fault. model: in DDP."""
        alone: Any = getattr(model, "no_sync", nullcontext)
        with alone() if self.now == "not reduced" else nullcontext():
            result = step()
        self.change(model)
        self.count()
        return result

    def change(self, model: nn.Module) -> None:
        """Change the gradients, or a parameter, as the fault does after a backward."""
        with torch.no_grad():
            self._change([*model.parameters()])

    def count(self) -> None:
        """Count a microbatch."""
        self._microbatches += 1

    def _change(self, parameters: list[nn.Parameter]) -> None:
        on_rank_1 = dist.get_rank() == 1
        if self.now == "doubled" or (self.now == "doubled on rank 1" and on_rank_1):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
        elif self.now == "a gradient zeroed" and parameters[-1].grad is not None:
            parameters[-1].grad.zero_()
        elif self.now == "drift on rank 1" and on_rank_1:
            parameters[-1].mul_(1.001)


def line(check: Any) -> str:
    """The verdict on the last step, for the test."""
    if check is None or check.last is None:
        return "RESULT nothing was checked"
    causes = [f"{one.obligation}: {', '.join(one.causes)}" for one in check.last.violations]
    held = [name for name, status in check.last.statuses.items() if status == "holds"]
    return f"RESULT holds {', '.join(held)}; violated {causes}; not judged {check.last.unjudged}"
