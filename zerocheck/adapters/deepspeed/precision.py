"""Mixed precision of DeepSpeed: the dtypes in which each stage sums, divides and reduces.

    compute   `bf16.enabled`: parameters are cast to bf16, and the optimizer updates fp32 masters
    reduce    `communication_data_type`, and, with parameters in bf16, `data_types.grad_accum_dtype`

In bf16, stage 0 is `FP16_UnfusedOptimizer`, which keeps masters whole. Stage 1 with fp32
accumulation is `BF16_Optimizer`: it has none of the others' options, and keeps whole gradients in
fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...case.schema import Case
from ...case.traits import reduced_precision
from ...contract import Semantics
from ...models.blocks import DTYPES
from ..shared.casting import computing, with_cast_inputs
from .library import BF16_Optimizer, Engine
from .options import options_of


def semantics_of(semantics: Semantics, case: Case, stage: int) -> Semantics:
    """Return the semantics of a step of this stage in the precision of the case.

    fp32 parameters accumulate in fp32, whatever is communicated. bf16 parameters accumulate in the
    reduction dtype, and their masters are made after they are cast. Stage 2 divides the gradients
    in its bf16 bucket before they are cast for a reduction in fp32
    (`DeepSpeedZeroOptimizer.average_tensor`), unless it reduces whole buckets (`reduce_scatter`
    off) or has none (`contiguous_gradients` off; offloading turns it on).
    """
    if not reduced_precision(case):
        return semantics
    reduce = case.precision.reduce
    if case.precision.compute == "fp32":
        return replace(semantics, reduce=reduce, accumulate_dtype="fp32")
    words: Any = {
        "accumulate_dtype": reduce,
        "reduce": reduce,
        "master": "fp32",
        "master_init": "rounded",
    }
    options = options_of(case)
    buckets = options.contiguous_gradients or case.sharding.offload != "none"
    if stage == 2 and reduce == "fp32" and buckets and options.reduce_scatter:
        words["divide_ranks"] = "own"
    return replace(computing(semantics, case), **words)


def config_of(case: Case) -> dict[str, Any]:
    """Return the keys of DeepSpeed's configuration that set the precision."""
    if not reduced_precision(case):
        return {}
    config: dict[str, Any] = {"communication_data_type": case.precision.reduce}
    if case.precision.compute == "bf16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": case.precision.reduce}
    return config


def call_of(engine: Engine, case: Case) -> Callable[..., torch.Tensor]:
    """Return the engine, or a call of it with inputs cast, which it leaves out for bf16."""
    if case.precision.compute == "fp32":
        return engine  # type: ignore[no-any-return]
    return with_cast_inputs(engine, DTYPES[case.precision.compute])


def keeps_whole_gradients(optimizer: Any) -> bool:
    """Return True for a BF16_Optimizer, whose attributes have different names."""
    return isinstance(optimizer, BF16_Optimizer)
