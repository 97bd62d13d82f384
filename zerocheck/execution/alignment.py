"""Alignment and strides of a tensor, by which kernels choose another order of additions.

On the CPU the address modulo 64 bytes counts: BLAS takes another path for weights that are not
aligned. On a GPU the address modulo 256: that is the alignment that torch reports to cuBLASLt,
which chooses by it, and no other kernel looks further. GPU allocations are aligned to 512.
"""

from __future__ import annotations

import torch

ALIGNMENT = 64
"""Bytes; the widest vector that CPU kernels load at once."""
GPU_ALIGNMENT = 256
"""Bytes; the largest alignment that a choice of kernels on a GPU depends on."""


def lies(tensor: torch.Tensor) -> int:
    """Return a tensor's address modulo the alignment that kernels of its device use, in bytes."""
    return tensor.data_ptr() % alignment(tensor.device)


def alignment(device: torch.device) -> int:
    """Return ALIGNMENT or GPU_ALIGNMENT, by the device."""
    return ALIGNMENT if device.type == "cpu" else GPU_ALIGNMENT


def place(
    tensor: torch.Tensor, offset: int, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Copy a tensor on its device to an address for which `lies` is `offset`. Same shape and dtype.

    strides: in elements; None for those of a contiguous tensor.
    """
    size, unit = tensor.element_size(), alignment(tensor.device)
    if strides is None:
        strides = torch.empty(tensor.shape, device="meta").stride()
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True) if n)
    spare = torch.empty(extent + 2 * unit // size, dtype=tensor.dtype, device=tensor.device)
    start = ((offset - spare.data_ptr()) % unit) // size
    return spare.as_strided(tensor.shape, strides, start).copy_(tensor)
