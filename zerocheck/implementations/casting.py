"""Mixed precision of torch's DDP and FSDP: `case.precision`, with fp32 parameters to update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from ..case.schema import Case
from ..case.traits import reduced_precision
from ..contract import Semantics
from ..contract.implementation import Call
from ..models.blocks import DTYPES


def fsdp2_policy(case: Case) -> MixedPrecisionPolicy:
    """Return FSDP2's mixed-precision policy: the compute and the reduction dtype; fp32: default."""
    if reduced_precision(case):
        compute, reduce = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    return MixedPrecisionPolicy()


def fsdp1_policy(case: Case) -> MixedPrecision | None:
    """Return FSDP1's mixed-precision policy: the compute and the reduction dtype; None in fp32."""
    if reduced_precision(case):
        compute, reduce = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]
        return MixedPrecision(param_dtype=compute, reduce_dtype=reduce)
    return None


def of_fsdp2(semantics: Semantics, case: Case) -> Semantics:
    """Return the semantics of a mixed-precision step of FSDP2.

    Whole gradients of microbatches are summed in the dtype of reduction
    (`FSDPParam.to_accumulated_grad_if_needed`; where it is the dtype of compute, by autograd, in
    it), and so are shards that wait for their reduction over replicas (`foreach_reduce`). Shards of
    microbatches that are reduced each are cast to the parameter's dtype first.
    """
    if not reduced_precision(case):
        return semantics
    each = semantics.accumulate == "reduce_each"
    words: Any = {"summed": "fp32" if each else case.precision.reduce}
    return replace(computing(semantics, case), reduce=case.precision.reduce, **words)


def of_fsdp1(semantics: Semantics, case: Case) -> Semantics:
    """Return the semantics of a mixed-precision step of FSDP1.

    Under no_sync autograd sums whole gradients in the compute dtype; with a reduction they are cast
    to the reduction dtype (`_post_backward_hook`). Shards of microbatches that are reduced one by
    one are cast to the parameter's dtype and summed in it (`_accumulate_sharded_grad`). With one
    rank on the shard axis FSDP1 does not shard: it casts and reduces the running sum with each
    microbatch (`_reduce_grad_no_shard`).
    """
    if not reduced_precision(case):
        return semantics
    each = semantics.accumulate == "reduce_each"
    words: Any = {"summed": "fp32" if each else "own"}
    if each and case.mesh[-1] == 1:
        words["accumulate"] = "reduce_again"
    return replace(computing(semantics, case), reduce=case.precision.reduce, **words)


def of_autocast(semantics: Semantics, case: Case) -> Semantics:
    """Return the semantics of a step with its forward under torch.autocast; gradients stay fp32."""
    if case.precision.compute == "fp32":
        return semantics
    return replace(semantics, compute=case.precision.compute, lowered="autocast")


def autocast(call: Call, case: Case, device: str) -> Call:
    """Wrap a call in torch.autocast to the compute dtype, unless that is fp32."""
    if case.precision.compute == "fp32":
        return call
    dtype = DTYPES[case.precision.compute]

    def lowered_call(*inputs: Any) -> torch.Tensor:
        with torch.autocast(device, dtype):
            return call(*inputs)

    return lowered_call


def with_cast_inputs(call: Call, dtype: torch.dtype) -> Call:
    """Wrap a call so that its floating-point inputs are cast."""

    def casting(*inputs: torch.Tensor) -> torch.Tensor:
        return call(*(one.to(dtype) if one.is_floating_point() else one for one in inputs))

    return casting


def computing(semantics: Semantics, case: Case) -> Semantics:
    """Return semantics that cast all parameters and the model's inputs to the compute dtype."""
    if case.precision.compute == "fp32":
        return semantics
    return replace(semantics, compute=case.precision.compute, lowered="cast", inputs="cast")
