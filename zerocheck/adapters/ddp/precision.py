"""Mixed precision of DDP: forwards under torch.autocast, with fp32 parameters to update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...case.schema import Case
from ...contract import Semantics
from ...contract.implementation import Call
from ...models.blocks import DTYPES


def of_autocast(semantics: Semantics, case: Case) -> Semantics:
    """Return the semantics of a step with its forward under torch.autocast; gradients stay fp32."""
    if case.precision.compute == "fp32":
        return semantics
    return replace(semantics, compute=case.precision.compute, precision_mode="autocast")


def autocast(call: Call, case: Case, device: str) -> Call:
    """Wrap a call in torch.autocast to the compute dtype, unless that is fp32."""
    if case.precision.compute == "fp32":
        return call
    dtype = DTYPES[case.precision.compute]

    def lowered_call(*inputs: Any) -> torch.Tensor:
        with torch.autocast(device, dtype):
            return call(*inputs)

    return lowered_call
