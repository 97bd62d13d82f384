"""Round-off of every operator of a forward and backward, moved at random."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from zerocheck_reference import unit_roundoff

from .moving import NEXT

_EXACT = """
_to_copy _unsafe_view abs amax amin bernoulli cat clamp clamp_min clone col2im constant_pad_nd copy
embedding empty empty_like empty_strided fill flip full full_like gather im2col index index_select
lift_fresh_copy masked_fill max maximum min minimum neg new_empty new_full new_ones new_zeros ones
ones_like rand rand_like randn relu repeat roll scalar_tensor scatter select_backward select_scatter
sign slice_backward slice_scatter stack threshold_backward tril triu where zeros zeros_like
"""
EXACT = frozenset(f"aten::{name}" for name in _EXACT.split())
"""Operators that do not round."""


class OperatorNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that moves each rounded result of an operator to a neighbouring number.

    Unlike what hooks on modules do, this reaches the operators between modules, and those of the
    backward. Results that share memory with an argument are left alone.
    """

    def __init__(self, twin: int) -> None:
        """Start the mode. twin: seed of the directions."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = torch.Generator().manual_seed(1_000 + twin)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.name in EXACT or any(one.alias_info is not None for one in schema.returns):
            return result
        return tree_map_only(torch.Tensor, self._moved, result)

    def _moved(self, result: torch.Tensor) -> torch.Tensor:
        if not result.is_floating_point():
            return result
        signs = torch.randint(0, 2, tuple(result.shape), generator=self._draw) * 2 - 1
        factor = 1 + NEXT * unit_roundoff(result.dtype) * signs.double()
        return result.mul_(factor.to(result.dtype).to(result.device))
