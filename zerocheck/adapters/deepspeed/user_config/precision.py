"""Dtypes in a DeepSpeed config.

    compute   bf16.enabled; else fp32
    reduce    communication_data_type; else the dtype of compute
    summed    data_types.grad_accum_dtype; else the dtype of compute

A case has the first two, and sums in the dtype of the reduction. DeepSpeed sums by default in the
dtype of compute, so a config may say more than a case: `summed`. A sum in bf16 of what is reduced
in fp32 is refused, since each reduced gradient is then rounded once more, which `Semantics` does
not know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...shared.user_config.section import Section
from ...shared.user_config.treatment import treat_keys
from .keys import BF16, DATA_TYPES, FP16

DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "torch.float32": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
}
"""Spellings that DeepSpeed takes in `data_types`."""


class Dtypes(NamedTuple):
    """Dtypes of a config.

    fixed: fields of `case.precision`; accumulate_dtype: dtype of the sum of microbatches where
    parameters are in bf16, None for that of the reduction; bf16, data_types: further keys for the
    engine there.
    """

    fixed: dict[str, str]
    accumulate_dtype: str | None
    bf16: dict[str, Any]
    data_types: dict[str, Any]


def dtypes_of(top: Section, stage: int) -> Dtypes:
    """Read the dtypes from the config; those that are "auto" are not fixed."""
    bf16 = top.part("bf16" if "bf16" in top.values else "bfloat16")
    fp16 = top.part("fp16")
    fp16.check_names(FP16, "it refuses the config")
    if fp16.flag("enabled", False):
        raise fp16.refuse(
            "enabled",
            "DeepSpeed computes in fp16 on a GPU only, and zerocheck runs it on the CPU",
            'false, or "auto"; bf16.enabled can be true',
        )
    of_bf16 = treat_keys(bf16, BF16, "it refuses the config")
    of_types = treat_keys(top.part("data_types"), DATA_TYPES, "it would ignore it")
    types = top.part("data_types")
    reduce = top.word("communication_data_type", None, ("fp32", "bf16"), "fp16 needs a GPU")
    named = types.word("grad_accum_dtype", None, tuple(DTYPES), "fp16 needs a GPU")
    accumulate_dtype = None if named is None else DTYPES[named]
    if bf16.auto("enabled") or fp16.auto("enabled"):
        if accumulate_dtype == "bf16":
            raise types.refuse("grad_accum_dtype", "bf16.enabled is left open", "bf16.enabled true")
        fixed = {} if reduce is None else {"reduce": reduce}
        return Dtypes(fixed, accumulate_dtype, of_bf16.passed, of_types.passed)
    compute = "bf16" if bf16.flag("enabled", False) else "fp32"
    _check_parameters(types, compute)
    reduce, accumulate_dtype = reduce or compute, accumulate_dtype or compute
    if compute == "fp32" and accumulate_dtype != "fp32":
        raise types.refuse("grad_accum_dtype", "parameters are in fp32 (bf16.enabled)", '"fp32"')
    if stage == 0 and accumulate_dtype != compute:
        raise types.refuse(
            "grad_accum_dtype", "DeepSpeed refuses this mix without ZeRO", f'"{compute}"'
        )
    if accumulate_dtype != compute or reduce == compute or compute == "fp32":
        other = accumulate_dtype if compute == "bf16" and accumulate_dtype != reduce else None
        fixed = {"compute": compute, "reduce": reduce}
        return Dtypes(fixed, other, of_bf16.passed, of_types.passed)
    raise top.refuse(
        "communication_data_type",
        "gradients are summed in bf16 by default, so what was reduced in fp32 is rounded again",
        '"bf16", or data_types.grad_accum_dtype "fp32" beside it',
    )


def _check_parameters(types: Section, compute: str) -> None:
    """Check that `param_dtype` agrees with `bf16.enabled`, as DeepSpeed requires."""
    named = types.word("param_dtype", None, tuple(DTYPES))
    if named is not None and DTYPES[named] != compute:
        raise types.wrong("param_dtype", f'"{compute}", as bf16.enabled says')
