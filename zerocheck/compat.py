"""Every private torch API that zerocheck needs, probed in this one place."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local_index(tensor: DTensor) -> tuple[slice, ...]:
    """Where the local tensor of a DTensor lies in the whole one, a slice per dim."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def all_gather_single(
    output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work | None:
    """Launch an all-gather of equal 1-D parts into one tensor; wait for what it returns."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(output, part, group=group, async_op=True)  # type: ignore[no-any-return]


def reduce_scatter_single(
    part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work | None:
    """Launch a reduce-scatter (sum) of one 1-D tensor; wait for what it returns."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(part, whole, group=group, async_op=True)  # type: ignore[no-any-return]
