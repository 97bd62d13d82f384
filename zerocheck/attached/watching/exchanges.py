"""Collectives that a model calls in its forward and backward, beyond those of what wraps it.

The gradient of a rank then depends on other ranks, in a way that no reference of one device knows:
parts of a sequence, tokens of experts. Such a gradient is judged where the ranks are those of a
declared axis (axes.py), and else not. Calls are seen where Python makes them; those of DDP's
reducer are made in C++, and those of FSDP come from torch's own files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...compat import in_backward, ranks_of_call
from ..record.forwards import tensors_in
from ..record.guard import ErrorGuard, around_forwards, before_collectives
from ..record.zero_engine import zero_engine

TORCH = Path(torch.__file__).parent
OWN = str(__package__).rpartition(".")[0]
"""Package whose functions stand between a script and torch in a checked step."""
PASSED_ON = (
    "autograd",
    "_compile.py",
    "_dynamo",
    "_ops.py",
    "_tensor.py",
    "distributed/_functional",
    "distributed/c10d_logger.py",
    "distributed/distributed_c10d.py",
    "distributed/nn",
    "utils",
)
"""Files of torch that call on behalf of their caller. Others call for themselves: DDP, FSDP,
DTensor, SyncBatchNorm."""


class ExchangeWatch:
    """Observation of the collectives of a step that the script's own code calls.

    call: the first one in a forward or backward of the model, in words, or ""; elements: of tensors
    in those outside of both, since it was last set to 0.
    """

    def __init__(
        self, model: nn.Module, guard: ErrorGuard, expected: frozenset[int] = frozenset()
    ) -> None:
        """Prepare. expected: ranks of the world among which the model may exchange what it will."""
        self._model, self._guard, self._expected = model, guard, expected
        self._open: list[bool] = []
        engine = zero_engine(model)
        self._packages = () if engine is None else (package_of(type(engine.optimizer)),)
        self._hooks = {*_codes_of_hooks(model)}
        self.call = ""
        self.elements = 0

    def hooked(self) -> ExitStack:
        """Observe the collectives; closing the stack ends it."""
        stack = around_forwards(self._model, self._enter, self._leave)
        stack.enter_context(before_collectives(self._seen))
        return stack

    def _enter(self, *_: Any) -> None:
        self._open.append(torch.is_grad_enabled())

    def _leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop()

    def _seen(self, called: str, owner: Any, args: Any, named: Any) -> None:
        with self._guard():
            self._note(called, owner, args, named, sys._getframe(1))

    def _note(self, name: str, owner: Any, args: Any, named: Any, frame: FrameType) -> None:
        phase = "backward" if in_backward() else "forward" if any(self._open) else ""
        given = args, named
        if not phase:
            self.elements += sum(one.numel() for one in tensors_in(given, every=True).values())
        if self.call or not phase or _is_number(given):
            return
        if self._expected and self._expected.issuperset(ranks_of_call(owner, args, named)):
            return
        caller, function = self._caller(frame)
        if caller is not None:
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
            called = function if function and phase == "forward" else name
            self.call = f"{called} in the {phase} ({place})"

    def _caller(self, frame: FrameType) -> tuple[FrameType | None, str]:
        """Return the frame of the script that calls, None where a library does for itself.

        With it, the name of the function of torch.distributed that it calls.
        """
        found, function = None, ""
        for one in _above(frame):
            if one.f_code in self._hooks:
                return None, ""
            if found is not None:
                continue
            path = Path(one.f_code.co_filename)
            if _passes_on(one):
                inside = "distributed" in path.parts and path.name != "c10d_logger.py"
                function = one.f_code.co_name if inside else function
                continue
            package = str(one.f_globals.get("__name__", "")).partition(".")[0]
            if path.is_relative_to(TORCH) or package in self._packages:
                return None, ""
            found = one
        return found, function


def package_of(kind: type) -> str:
    """Return the package that has a class."""
    return kind.__module__.partition(".")[0]


def _codes_of_hooks(model: nn.Module) -> Iterator[CodeType]:
    """Yield the code of communication hooks, whose collectives are those of DDP."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            for hook, _ in getattr(module, "_comm_hooks", ()):
                if code := getattr(hook, "__code__", None):
                    yield code


def _above(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _passes_on(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(TORCH):
        return path.name == "contextlib.py" or str(frame.f_globals.get("__package__")).startswith(
            OWN
        )
    return path.relative_to(TORCH).as_posix().startswith(PASSED_ON)


def _is_number(given: Any) -> bool:
    """Return True for numbers without a gradient, such as a metric or a count of tokens."""
    tensors = tensors_in(given, every=True).values()
    return all(one.numel() <= 1 and not one.requires_grad for one in tensors)
