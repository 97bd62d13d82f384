"""Mixed precision as torch's FSDP has it: `case.precision`, with fp32 weights to update.

No case with it is run yet, since the judge knows fp32 only (`limits.one_axis_fp32`); `zerocheck
memory` counts the bytes.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from ..case.schema import Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def fsdp2_policy(case: Case) -> MixedPrecisionPolicy:
    """Units are gathered in the dtype of compute, and gradients reduced in that of reduction."""
    if casts(case):
        compute, reduce = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    return MixedPrecisionPolicy()


def fsdp1_policy(case: Case) -> MixedPrecision | None:
    """The same for FSDP1."""
    if casts(case):
        compute, reduce = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]
        return MixedPrecision(param_dtype=compute, reduce_dtype=reduce)
    return None


def casts(case: Case) -> bool:
    """Whether anything is not in fp32."""
    return case.precision.compute != "fp32" or case.precision.reduce != "fp32"
