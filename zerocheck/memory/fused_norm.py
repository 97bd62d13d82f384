"""RMS norm in one kernel, as on a GPU, where torch's CPU takes several operators.

On the CPU `torch.nn.functional.rms_norm` is made of a product, a mean and others, each with a
result in fp32 that the backward needs. A GPU keeps the input and one fp32 number for each row.
As recorded on an H100: tests/memory/recorded_on_a_gpu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional


class _FusedNorm(torch.autograd.Function):
    """Shapes of the kernel's results; it computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        rows = (*x.shape[: x.dim() - dims], *[1] * dims)
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, _rows = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


@contextmanager
def fused_norm() -> Iterator[None]:
    """Let `rms_norm` take the memory that it takes on a GPU. It computes nothing then.

    Where the weight has another dtype than the input, torch has no such kernel on a GPU either.
    """
    composed = functional.rms_norm

    def rms_norm(
        x: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if isinstance(x, DTensor):  # of some positions: gradients of its weight are added up
            own = None
            if isinstance(weight, DTensor):
                own = weight.to_local(grad_placements=[Partial()] * x.device_mesh.ndim)
            local = rms_norm(x.to_local(), normalized_shape, own, eps)
            return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)
        if weight is not None and weight.dtype != x.dtype:
            return composed(x, [*normalized_shape], weight, eps)
        result: torch.Tensor = _FusedNorm.apply(x, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
        return result

    with mock.patch.object(functional, "rms_norm", rms_norm):
        yield
