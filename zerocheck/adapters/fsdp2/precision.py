"""Mixed precision of FSDP2: `case.precision`, with fp32 parameters to update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ...case.schema import Case
from ...case.traits import reduced_precision
from ...contract import Semantics
from ...models.blocks import DTYPES
from ..shared.casting import computing


def fsdp2_policy(case: Case) -> MixedPrecisionPolicy:
    """Return FSDP2's mixed-precision policy: the compute and the reduction dtype; fp32: default."""
    if reduced_precision(case):
        compute, reduce = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    return MixedPrecisionPolicy()


def of_fsdp2(semantics: Semantics, case: Case) -> Semantics:
    """Return the semantics of a mixed-precision step of FSDP2.

    Whole gradients of microbatches are summed in the dtype of reduction
    (`FSDPParam.to_accumulated_grad_if_needed`; where it is the dtype of compute, by autograd, in
    it), and so are shards that wait for their reduction over replicas (`foreach_reduce`). Shards of
    microbatches that are reduced each are cast to the parameter's dtype first. From torch 2.15 on
    gradients that are reduced in a wider dtype than that of compute come as kernels give them
    (`FSDPParamGroup._set_unsharded_grad_dtypes`): fp32 is not rounded.
    """
    if not reduced_precision(case):
        return semantics
    each = semantics.accumulate == "reduce_each"
    words: Any = {"accumulate_dtype": "fp32" if each else case.precision.reduce}
    if case.precision.reduce == "fp32" and hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes"):
        words["gradient_dtype"] = "kernel"
    return replace(computing(semantics, case), reduce=case.precision.reduce, **words)
