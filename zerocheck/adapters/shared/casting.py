"""Casts to the compute dtype of `case.precision`: of the inputs, and of all parameters."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...case.schema import Case
from ...contract import Semantics
from ...contract.implementation import Call


def with_cast_inputs(call: Call, dtype: torch.dtype) -> Call:
    """Wrap a call so that its floating-point inputs are cast."""

    def casting(*inputs: torch.Tensor) -> torch.Tensor:
        return call(*(one.to(dtype) if one.is_floating_point() else one for one in inputs))

    return casting


def computing(semantics: Semantics, case: Case) -> Semantics:
    """Return semantics that cast all parameters and the model's inputs to the compute dtype."""
    if case.precision.compute == "fp32":
        return semantics
    return replace(semantics, compute=case.precision.compute, precision_mode="cast", inputs="cast")
