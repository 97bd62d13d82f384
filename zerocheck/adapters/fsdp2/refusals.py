"""Cases that FSDP2 cannot run, with the reason, known from the case alone."""

from __future__ import annotations

from ...case.schema import Case, WrapKind
from ...case.shapes import (
    empties,
    learning,
    leaves_a_rank_empty,
    parameter_dtypes,
    parameter_shapes,
    scalars,
    transposed,
)
from ..shared.compiling import uncompiled
from ..shared.limits import bf16_only, elementwise, norms_cast, one_precision, same_units, unpinned
from .tensor_parallel import refuse_uneven


def refusal(case: Case) -> str | None:
    """Return the reason to reject what torch refuses or computes wrongly, or None."""
    reason = one_precision(case) or bf16_only(case) or norms_cast(case)
    reason = reason or dim0_sharded(case) or same_units(case) or unpinned(case)
    reason = reason or one_dtype(case, wrap=case.sharding.wrap) or uncompiled(case)
    reason = reason or fused_dtensors(case) or adafactor_of_dtensors(case)
    if case.axes.has("tp"):
        reason = reason or elementwise(case)
    return reason or (refuse_uneven(case) if case.axes.has("tp") else norm_of_empty_shards(case))


def dim0_sharded(case: Case) -> str | None:
    """Return the reason why torch cannot shard each parameter along its dim 0, or None."""
    for names, what in (
        (scalars(case.model), "refuses 0-d parameters"),
        # They are wrapped without a word; the first backward raises in `_chunk_cat`.
        (empties(case.model), "cannot reduce gradients without elements"),
        (transposed(case.model), "refuses parameters that are not contiguous"),
    ):
        if names:
            return f"torch {what}: {names[0]}"
    return None


def fused_dtensors(case: Case) -> str | None:
    """Return the reason why torch's fused kernel cannot update DTensors, or None."""
    if case.optimizer.kind == "sgd" and case.optimizer.kernel == "fused":
        return "torch has no sharding strategy for the fused kernel of SGD: aten._fused_sgd_"
    return None


def adafactor_of_dtensors(case: Case) -> str | None:
    """Return the reason why torch's Adafactor cannot update DTensors, or None.

    Both of its kernels take the squares of norms of rows in place, of which each rank has a part.
    """
    if case.optimizer.kind == "adafactor":
        return (
            "torch refuses Adafactor of DTensors: aten.pow_.Scalar: in-place operations that "
            "require placement changes are not supported"
        )
    return None


def norm_of_empty_shards(case: Case) -> str | None:
    """Return the reason why torch cannot compute the inf-norm of empty dim-0 shards, or None.

    A rank with an empty shard raises, while the others wait for it.
    """
    if case.training.clip is None or case.training.norm != "inf":
        return None
    shapes = parameter_shapes(case.model)
    for name in learning(case):
        if shapes[name] and leaves_a_rank_empty(shapes[name][0], case.axes.size("shard")):
            return f"torch has no inf-norm of the empty shard of {name}"
    return None


def one_dtype(case: Case, *, wrap: WrapKind) -> str | None:
    """Return the reason why FSDP refuses the dtypes of a unit's parameters, or None.

    A unit must have trainable parameters of one dtype (`FSDP expects uniform original parameter
    dtype`). With `whole` the root has them all, and with `size` it has what is too small of every
    block; other units lie within a block, of one dtype.
    """
    dtypes = parameter_dtypes(case.model)
    if wrap in ("whole", "size") and len({dtypes[name] for name in learning(case)}) > 1:
        return "torch wants one dtype in a unit: the root has blocks of several"
    return None
