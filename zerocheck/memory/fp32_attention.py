"""Attention in fp32 as on a GPU, whose kernel lays its result out by positions.

On the CPU, and in bf16 on a GPU, the result has the strides of the queries. The kernel for fp32
(`_scaled_dot_product_efficient_attention`) gives (batch, heads, positions, width) with the
positions outside of the heads. `nn.MultiheadAttention` has the batch inside of the positions, so
there it copies what it gets, and both stay for the backward. As recorded on an H200:
tests/memory/recorded_on_a_gpu, pictures-fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional


@contextmanager
def fp32_attention() -> Iterator[None]:
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

    with mock.patch.object(functional, "scaled_dot_product_attention", attention):
        yield
