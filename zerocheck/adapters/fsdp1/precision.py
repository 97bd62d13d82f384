"""Mixed precision of FSDP1: `case.precision`, with fp32 parameters to update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.fsdp import MixedPrecision

from ...case.schema import Case
from ...case.traits import reduced_precision
from ...contract import Semantics
from ...models.blocks import DTYPES
from ..shared.casting import computing


def fsdp1_policy(case: Case) -> MixedPrecision | None:
    """Return FSDP1's mixed-precision policy: the compute and the reduction dtype; None in fp32."""
    if reduced_precision(case):
        compute, reduce = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]
        return MixedPrecision(param_dtype=compute, reduce_dtype=reduce)
    return None


def of_fsdp1(semantics: Semantics, case: Case, *, shards: bool) -> Semantics:
    """Return the semantics of a mixed-precision step of FSDP1.

    Under no_sync autograd sums whole gradients in the compute dtype; with a reduction they are cast
    to the reduction dtype (`_post_backward_hook`). Shards of microbatches that are reduced one by
    one are cast to the parameter's dtype and summed in it (`_accumulate_sharded_grad`). With
    NO_SHARD, and with one rank on the shard axis, FSDP1 does not shard: it casts and reduces the
    running sum with each microbatch (`_reduce_grad_no_shard`).
    """
    if not reduced_precision(case):
        return semantics
    each = semantics.accumulate == "reduce_each"
    words: Any = {"accumulate_dtype": "fp32" if each else "own"}
    if each and (not shards or case.axes.size("shard") == 1):
        words["accumulate"] = "reduce_again"
    return replace(computing(semantics, case), reduce=case.precision.reduce, **words)
