"""Mixed precision as torch's FSDP has it: `case.precision`, with fp32 weights to update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from ..case.legs import lowered
from ..case.schema import Case
from ..contract import Semantics

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def fsdp2_policy(case: Case) -> MixedPrecisionPolicy:
    """Units are gathered in the dtype of compute, and gradients reduced in that of reduction."""
    if lowered(case):
        compute, reduce = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    return MixedPrecisionPolicy()


def fsdp1_policy(case: Case) -> MixedPrecision | None:
    """The same for FSDP1."""
    if lowered(case):
        compute, reduce = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]
        return MixedPrecision(param_dtype=compute, reduce_dtype=reduce)
    return None


def of_fsdp2(semantics: Semantics, case: Case) -> Semantics:
    """What FSDP2 means by a step in mixed precision.

    Whole gradients of microbatches are summed in the dtype of reduction
    (`FSDPParam.to_accumulated_grad_if_needed`; where it is the dtype of compute, by autograd, in
    it), and so are shards that wait for their reduction over replicas (`foreach_reduce`). Shards of
    microbatches that are reduced each are cast to the parameter's dtype first.
    """
    if not lowered(case):
        return semantics
    each = semantics.accumulate == "reduce_each"
    words: Any = {"summed": "fp32" if each else case.precision.reduce}
    return replace(computing(semantics, case), reduce=case.precision.reduce, **words)


def computing(semantics: Semantics, case: Case) -> Semantics:
    """The semantics with all parameters and the model's inputs cast to the dtype of compute."""
    if case.precision.compute == "fp32":
        return semantics
    return replace(semantics, compute=case.precision.compute, lowered="cast", inputs="cast")
