"""Simulation in a process of its own, which has an accelerator from then on: compat_device.py.

What torch's autograd cannot pass on as an error ends that process, and not this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context

from ..errors import UsageError
from ..machine.signals import die_with
from .setup import Setup
from .simulate import Simulation, simulate
from .source import ModelSource, source


def simulate_apart(
    setup: Setup, blocks: int | None = None, notify: Callable[[str], None] = lambda words: None
) -> Simulation:
    """Simulate with the model's first blocks, or all, in another process, kept for the next one.

    notify: called with words while it runs, often.

    Raises UsageError as `simulate`, and where the process ends.
    """
    try:
        future = _process().submit(_simulate, setup, blocks)
        while not wait([future], timeout=1.0).done:
            notify("in a process of its own")
        return future.result()
    except BrokenProcessPool as error:
        _process.cache_clear()
        raise UsageError(
            f"{setup.model} with {setup.implementation} and --offload {setup.offload} ends the "
            "process that simulates it: its own lines stand above"
        ) from error


@cache
def _process() -> ProcessPoolExecutor:
    spawn = get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initializer=die_with, initargs=(os.getpid(),))


@cache
def _source(name: str) -> ModelSource:
    return source(name)


def _simulate(setup: Setup, blocks: int | None) -> Simulation:
    return simulate(setup, _source(setup.model), blocks)
