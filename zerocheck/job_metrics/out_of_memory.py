"""Where a rank ran out of memory: the phase of the step, the module and the line of the script."""

from __future__ import annotations

import sys
import sysconfig
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
from torch import nn

PLACES = (
    *(str(Path(sysconfig.get_path(name))) for name in ("purelib", "platlib", "stdlib")),
    str(Path(__file__).parent.parent),
)
"""Folders of libraries, and of zerocheck: lines in them are not the script's."""
WORDS = ("out of memory", "can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""In the messages of allocators that raise a RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of an allocator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


class OomPlace(NamedTuple):
    """Place of an error, as in `OutOfMemory`."""

    phase: str
    module: str
    place: str


def place_of(error: BaseException, model: nn.Module) -> OomPlace:
    """Find out where an error was raised, from the frames of its traceback."""
    names = {id(module): name for name, module in model.named_modules()}
    phase, module, line = "elsewhere", "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = names.get(id(owner)) or module or type(owner).__name__
            phase = "forward" if phase == "elsewhere" else phase
        elif isinstance(owner, torch.optim.Optimizer):
            phase = "optimizer"
        elif frame.f_code.co_name == "_engine_run_backward":
            phase, module = "backward", ""
        if not _of_library(frame):
            line = f"{frame.f_code.co_filename}:{number}"
    return OomPlace(phase, module, line)


def on_uncaught(call: weakref.WeakMethod[Callable[[BaseException], None]]) -> None:
    """Call a method with an exception that ends the process, before it is printed as always."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        method = call()
        if method is not None:
            method(error)
        before(kind, error, trace)

    sys.excepthook = hook


def _of_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*PLACES, "<"))
