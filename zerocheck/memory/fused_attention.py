"""Attention in one kernel on the simulated device, for which torch has a composition only.

It is that of the CPU, as in all other simulations. Where the CPU has none, it composes too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional


@contextmanager
def fused_attention() -> Iterator[None]:
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

    with mock.patch.object(functional, "scaled_dot_product_attention", attention):
        yield


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
