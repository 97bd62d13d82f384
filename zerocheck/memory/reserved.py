"""Memory that the caching allocator of a GPU would reserve for a simulated run.

The log of the simulation is replayed through the model of the allocator, with the workspaces of
cuBLAS: one for each thread that calls it, which is that of the forward and that of the backward,
taken at its first matrix product, behind the result, and kept; and with those of sums, taken while
they run. Next to what a rank needs at its peak stand the roundings, the blocks that are free and
too small for what is asked, and the memory that a stream keeps for itself.
"""

from __future__ import annotations

from collections import defaultdict

from .caching_allocator import MIB, CachingAllocator, DeviceBlock
from .log import Log

WORKSPACE = 32 * MIB
"""Workspace of cuBLAS on a Hopper GPU, of each thread. Others have 8.125 MiB. Source:
aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`."""

PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
"""Operators that call cuBLAS."""

WITH_BIAS = ("aten.addmm.",)
WORKSPACE_WITH_BIAS = MIB
"""Workspace of cuBLASLt, of each thread: it adds a bias to a product. Source: 31 recordings, all of
models with biases have it (tests/memory/recorded_on_a_gpu)."""


def reserved(
    log: Log, *, expandable: bool = False, workspace: int = WORKSPACE, building: bool = True
) -> CachingAllocator:
    """Return the allocator as it is after all steps of a simulation, begun with an empty one.

    Args:
        log: of the simulation.
        expandable: with `expandable_segments:True`.
        workspace: bytes of cuBLAS for each thread.
        building: the whole model is built on the device, also where it is sharded or copied before
            training. Otherwise these whole tensors are left out, as if they were on the CPU.
    """
    allocator = CachingAllocator(expandable=expandable)
    sizes: dict[int, int] = defaultdict(int)
    held: dict[int, DeviceBlock] = {}
    threads: set[tuple[bool, bool]] = set()
    inside: dict[int, int] = defaultdict(int)
    for index, taken in log.workspaces:
        inside[index] = max(inside[index], taken)
    elsewhere = set[int]() if building else _replaced(log)
    for index, (moment, number, more) in enumerate(log.changes):
        at = log.moments[moment]
        if at.phase == "closed":
            break
        if workspace and index in inside:
            allocator.free(allocator.allocate(inside[index]))
        if log.storages[number].place != "device" or number in elsewhere:
            continue
        if number in held:
            allocator.free(held.pop(number))
        sizes[number] += more
        if sizes[number]:
            held[number] = allocator.allocate(sizes[number], log.storages[number].stream)
        for operators, size in ((PRODUCTS, workspace), (WITH_BIAS, WORKSPACE_WITH_BIAS)):
            of = at.phase == "backward", operators is WITH_BIAS
            if workspace and of not in threads and at.operator.startswith(operators):
                threads.add(of)
                allocator.allocate(size)
    return allocator


def _replaced(log: Log) -> set[int]:
    """Return the storages of the whole model that are gone before the first step."""
    sizes: dict[int, int] = defaultdict(int)
    for moment, number, more in log.changes:
        if log.moments[moment].phase == "built" and number < log.whole:
            sizes[number] += more
    return {number for number, size in sizes.items() if not size}
