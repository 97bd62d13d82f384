"""Mixed precision as in section 3.1 of the paper: 2 + 2 + 12 bytes per parameter.

    compute     parameters and gradients in bf16 (or fp16)       2 + 2
    AdamW       an fp32 master of each parameter, two moments    4 + 8

The 12 are what is partitioned first. Forward and backward see the narrow parameters alone. AdamW
updates the master, from a gradient that is widened for as long as it takes, and each narrow
parameter is its master, rounded. With `precision.reduce` "fp32" gradients are summed and reduced in
fp32, which makes it 2 + 4 + 12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...case.schema import Case
from ...case.traits import reduced_precision
from ...contract import Semantics
from ...models.blocks import DTYPES
from ..shared.casting import computing, with_cast_inputs
from ..shared.limits import norms_cast, one_precision
from .flat import ShardedBuffer
from .sharded_optimizer import OwnedPiece


def reason_to_reject(case: Case) -> str | None:
    """Return the reason to reject the case's mixed precision, or None."""
    reason = one_precision(case) or norms_cast(case)
    if reason is not None or not reduced_precision(case):
        return reason
    compute, reduce = case.precision.compute, case.precision.reduce
    if compute == "fp32" or reduce not in ("fp32", compute):
        return (
            "keeps narrow gradients beside narrow parameters only, of one dtype; precision is "
            f"{compute} in compute and {reduce} in reduction"
        )
    return None


def semantics_of(semantics: Semantics, case: Case) -> Semantics:
    """Return the semantics of a step of a stage in the precision of the case."""
    if not reduced_precision(case):
        return semantics
    words: Any = {"accumulate_dtype": case.precision.reduce, "reduce": case.precision.reduce}
    return replace(computing(semantics, case), master="fp32", **words)


def compute_dtype(case: Case) -> torch.dtype | None:
    """Return the dtype of parameters that have masters; None: they stay as they are, without."""
    return DTYPES[case.precision.compute] if reduced_precision(case) else None


def gradient_dtype(case: Case, parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's gradients are kept, accumulated and reduced."""
    return DTYPES[case.precision.reduce] if reduced_precision(case) else parameter.dtype


def cast_parameters(model: nn.Module, case: Case) -> None:
    """Cast all parameters to the compute dtype. Masters are made before this."""
    dtype = compute_dtype(case)
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)


def cast_call(model: nn.Module, case: Case) -> Callable[..., torch.Tensor]:
    """Return the model, or a call of it with floating inputs cast to the compute dtype."""
    dtype = compute_dtype(case)
    return model if dtype is None else with_cast_inputs(model, dtype)


class WideGradient:
    """Gradient of a shard in the optimizer's dtype: the narrow one in fp32, while it is needed."""

    tensor: torch.Tensor
    """1-D, as many elements as the shard; the gradient itself where nothing is widened. Else its
    storage has 0 bytes but from `widen` to `release`."""

    def __init__(self, flat: ShardedBuffer, narrow: torch.Tensor) -> None:
        self.flat = flat
        self.tensor = self.narrow = narrow
        if flat.shard is not flat.local and narrow.dtype != torch.float32:
            self.tensor = torch.zeros_like(narrow, dtype=torch.float32)
            self._bytes = self.tensor.untyped_storage().nbytes()

    def owned(self) -> list[OwnedPiece]:
        """Return the pieces that this rank updates, and free the memory of their gradients."""
        owned = self.flat.owned(self.tensor)
        self.release()
        return owned

    def widen(self) -> None:
        """Allocate the widened gradient and fill it, if this rank updates any of it."""
        if self.tensor is not self.narrow and self.flat.trains():
            self.tensor.untyped_storage().resize_(self._bytes)
            self.tensor.copy_(self.narrow)

    def release(self) -> None:
        """Free the widened gradient's memory."""
        if self.tensor is not self.narrow:
            self.tensor.untyped_storage().resize_(0)
