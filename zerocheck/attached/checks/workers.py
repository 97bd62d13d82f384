"""Threads that judge the shards of a step: the cores of the host, divided among its ranks.

Launchers give each rank one thread of torch, and the cores beside a GPU wait while a step is
judged. Kernels of torch and hashing hold no lock of Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch.distributed as dist

from ...machine.host import processors

MOST = 16
"""Threads of one rank at most: with more, memory is what they wait for."""

T = TypeVar("T")
R = TypeVar("R")


def workers() -> int:
    """Return how many threads this rank has; all ranks are on one host unless a launcher says."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    here = min(ranks, int(local)) if local.isdigit() and int(local) else ranks
    return max(1, min(MOST, processors() // here))


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield what `work` returns for each item, in their order, each in the context of the call."""
    count = min(workers(), len(items))
    if count < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(count) as threads:
        contexts = [copy_context() for _ in items]
        yield from threads.map(lambda context, item: context.run(work, item), contexts, items)
