"""Kernels of a GPU that torch's CPU or its simulated device does not have.

- Attention in one kernel on the simulated device, for which torch has a composition only. It is
  that of the CPU, as in all other simulations. Where the CPU has none, it composes too.
- RMS norm in one kernel: on the CPU it is made of a product, a mean and others, each with a result
  in fp32 that the backward needs. A GPU keeps the input and one fp32 number for each row. As
  recorded on an H100: tests/memory/recorded_on_a_gpu.
- Attention in fp32, whose kernel on a GPU (`_scaled_dot_product_efficient_attention`) gives (batch,
  heads, positions, width) with the positions outside of the heads. On the CPU, and in bf16 on a
  GPU, the result has the strides of the queries. `nn.MultiheadAttention` has the batch inside of
  the positions, so there it copies what it gets, and both stay for the backward. As recorded on an
  H200: tests/memory/recorded_on_a_gpu, pictures-fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional


def fused_attention() -> AbstractContextManager[Any]:
    """Compute `scaled_dot_product_attention` in the kernel that the CPU would choose."""
    composed: Any = functional.scaled_dot_product_attention
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        inputs = query, key, value
        if dropout_p or not _fused(*inputs, attn_mask, grouped=enable_gqa):
            result: torch.Tensor = composed(
                *inputs, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return result
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            none, all_ = (
                torch.scalar_tensor(number, dtype=query.dtype, device=query.device)
                for number in (0.0, -torch.inf)
            )
            attn_mask = torch.where(attn_mask, none, all_)
        fused: torch.Tensor = kernel(*inputs, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return fused

    return mock.patch.object(functional, "scaled_dot_product_attention", attention)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    grouped: bool,
) -> bool:
    """Return True if the CPU has a kernel for these.

    Source: aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, `use_flash_attention_cpp`.
    """
    inputs = query, key, value
    if any(one.dim() != 4 or one.stride(-1) != 1 or not one.numel() for one in inputs):
        return False
    if any(len({one.shape[axis] for one in inputs}) > 1 for axis in (0, 3)):
        return False
    if key.shape[1] != value.shape[1] or len({one.dtype for one in inputs}) > 1:
        return False
    if query.shape[1] % key.shape[1] if grouped else query.shape[1] != key.shape[1]:
        return False
    return mask is None or not mask.requires_grad


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


def fused_norm() -> AbstractContextManager[Any]:
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

    return mock.patch.object(functional, "rms_norm", rms_norm)


def fp32_attention() -> AbstractContextManager[Any]:
    """Let attention in fp32 give the strides that it gives on a GPU.

    The copy that this takes here is freed at once.
    """
    composed = functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = composed(query, *args, **kwargs)
        narrow = query.dtype != torch.float32 or torch.is_autocast_enabled(query.device.type)
        if narrow or result.dim() != 4:
            return result
        return result.transpose(1, 2).contiguous().transpose(1, 2)

    return mock.patch.object(functional, "scaled_dot_product_attention", attention)
