"""torch.compile, as `case.training.compile` names its backend.

Modules are compiled in place (`nn.Module.compile`), so that names and state dicts stay. The batches
of a case have one shape, so graphs are compiled for it. What was compiled is forgotten at `close`:
the cases of one process share nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn

from ...case.schema import Case
from ...case.shapes import draws_random
from ...case.traits import reduced_precision

COMPILERS = ("g++", "clang++")
"""Of C++, which inductor looks for where CXX does not name one."""


def compiles(case: Case) -> bool:
    """Return True if the case compiles its model."""
    return case.training.compile != "none"


def compile_model(modules: Iterable[nn.Module], case: Case) -> None:
    """Compile each of the modules in place, if the case asks for it, at its first call."""
    if not compiles(case):
        return
    if case.training.compile == "inductor":
        import torch._inductor.config as inductor

        inductor.compile_threads = 1  # ranks start no processes
    for module in modules:
        module.compile(backend=case.training.compile, dynamic=False)


def forget(case: Case) -> None:
    """Discard all compiled code."""
    if compiles(case):
        torch.compiler.reset()


def uncompiled(case: Case) -> str | None:
    """Return the reason why the case's model cannot be compiled or compared, or None."""
    if not compiles(case):
        return None
    if reduced_precision(case):
        return "bounds of a compiled model are estimated in fp32 only (training.compile)"
    if case.disturbance.delay:
        return (
            "torch compiles nothing under a dispatch mode, by which collectives are delayed "
            "(training.compile with disturbance.delay)"
        )
    if case.training.compile != "eager" and draws_random(case.model):
        return (
            "compiled dropout draws other random numbers than that of one device "
            f"(training.compile is {case.training.compile!r})"
        )
    norms = [block for block in case.model.blocks if block.kind == "batch_norm"]
    if any(block.checkpoint for block in norms):
        return (
            "compiled, the statistics of a batch norm that is checkpointed are updated once, and "
            "twice on one device (training.compile)"
        )
    if case.training.compile != "eager" and norms:
        return (
            "torch cannot compile a batch norm over features, on one device neither: view size is "
            f"not compatible (training.compile is {case.training.compile!r})"
        )
    if case.training.compile == "inductor" and not _compiler():
        return "torch's inductor needs a C++ compiler, and there is none here"
    return None


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), *COMPILERS)
    return next((found for name in names if name and (found := shutil.which(name))), None)
