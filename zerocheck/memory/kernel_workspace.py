"""Workspace that torch's kernel for sums takes from the allocator: of the gradient of a bias, say.

A sum over rows is divided among blocks of threads, whose partial sums go through memory. The buffer
has one fp32 number for each thread and output, though each thread has its own outputs: 3,152 rows
of 3,072 columns take 75 MiB on a Hopper GPU, four times what is summed in bf16. Source:
aten/src/ATen/native/cuda/Reduce.cuh, `setReduceConfig` and `global_memory_size`; a vision
transformer on an H200 took these sizes (tests/memory/test_kernel_workspace.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MULTIPROCESSORS = 132
"""Streaming multiprocessors of an H100 (SXM), and of an H200."""
THREADS = 2048
"""Resident threads of a multiprocessor of an A100, and of a Hopper GPU."""
MOST_THREADS = 512
"""Threads of a block of this kernel, divided by the outputs that each has."""
WARP = 32
SUMMED = 4
"""Bytes of a partial sum: fp32, of narrower dtypes too."""
FEW, MANY = 16, 256
"""Values that each thread sums, at least and at most."""

SUMS = ("aten.sum.dim_IntList", "aten.mean.dim")
"""Operators that call the kernel, with the tensor and the dimensions as their first arguments."""


def workspace_of(operator: str, args: Sequence[object]) -> int:
    """Return the bytes that a call of an operator takes while it runs, 0 for all others.

    Counted are sums over the first dimensions of a contiguous tensor; over others they take some
    KiB.
    """
    if operator not in SUMS or len(args) < 2 or not isinstance(args[0], torch.Tensor):
        return 0
    summed, dims = args[0], args[1]
    if not isinstance(dims, Sequence) or not summed.is_contiguous() or not summed.numel():
        return 0
    over = sorted(dim % summed.dim() for dim in dims)
    if over != list(range(len(over))) or len(over) in (0, summed.dim()):
        return 0
    columns = math.prod(summed.shape[len(over) :])
    offset = int(summed.storage_offset())
    vector = next(size for size in (4, 2, 1) if not columns % size and not offset % size)
    return bytes_of_columns(summed.numel() // columns, columns, vector)


def bytes_of_columns(rows: int, columns: int, vector: int) -> int:
    """Return the bytes for the sums of columns of a (rows, columns) tensor.

    vector: columns that a thread reads at once: 4 where sizes and addresses allow it, 2 or 1.
    """
    most = MOST_THREADS // vector
    wide, high = _power(columns // vector, most), _power(rows, most)
    width = min(wide, WARP)
    height = min(high, most // width)
    width = min(wide, most // height)
    if rows < min(height * 16, MANY):
        return 0
    values = -(-rows // height)
    grid = -(-(columns // vector) // width)
    wanted = MULTIPROCESSORS * (THREADS // (width * height))
    if values < MANY or grid > wanted:
        return 0
    parts = max(min(-(-wanted // grid), -(-values // FEW)), -(-values // MANY))
    return SUMMED * columns * parts * width * vector if parts > 1 else 0


def _power(size: int, most: int) -> int:
    """Return the largest power of two up to a size, at most `most`."""
    return most if size >= most else 1 << max(size.bit_length() - 1, 0)
