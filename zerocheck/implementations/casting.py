"""Mixed precision as torch's FSDP has it: `case.precision`, with fp32 weights to update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from ..case.schema import Case
from ..case.traits import lowered
from ..contract import Semantics
from ..contract.implementation import Call
from ..models.blocks import DTYPES


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


def of_fsdp1(semantics: Semantics, case: Case) -> Semantics:
    """What FSDP1 means by a step in mixed precision.

    Under no_sync autograd sums whole gradients, in the dtype of compute; with a reduction they are
    cast to its dtype (`_post_backward_hook`). Shards of microbatches that are reduced each are cast
    to the parameter's dtype and summed in that (`_accumulate_sharded_grad`). With one rank on the
    shard axis it does not shard, and casts and reduces the sum of all microbatches until then
    (`_reduce_grad_no_shard`).
    """
    if not lowered(case):
        return semantics
    each = semantics.accumulate == "reduce_each"
    words: Any = {"summed": "fp32" if each else "own"}
    if each and case.mesh[-1] == 1:
        words["accumulate"] = "reduce_again"
    return replace(computing(semantics, case), reduce=case.precision.reduce, **words)


def of_autocast(semantics: Semantics, case: Case) -> Semantics:
    """What it means to run the forward under torch.autocast: gradients stay fp32."""
    if case.precision.compute == "fp32":
        return semantics
    return replace(semantics, compute=case.precision.compute, lowered="autocast")


def autocast(call: Call, case: Case, device: str) -> Call:
    """The call under torch.autocast to the dtype of compute, if that is not fp32."""
    if case.precision.compute == "fp32":
        return call
    dtype = DTYPES[case.precision.compute]

    def lowered_call(*inputs: Any) -> torch.Tensor:
        with torch.autocast(device, dtype):
            return call(*inputs)

    return lowered_call


def with_cast_inputs(call: Call, dtype: torch.dtype) -> Call:
    """The call with its floating inputs cast."""

    def casting(*inputs: torch.Tensor) -> torch.Tensor:
        return call(*(one.to(dtype) if one.is_floating_point() else one for one in inputs))

    return casting


def computing(semantics: Semantics, case: Case) -> Semantics:
    """The semantics with all parameters and the model's inputs cast to the dtype of compute."""
    if case.precision.compute == "fp32":
        return semantics
    return replace(semantics, compute=case.precision.compute, lowered="cast", inputs="cast")
