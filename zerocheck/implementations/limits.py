"""Reasons to reject cases that built-in implementations cannot run."""

from __future__ import annotations

import torch

from ..case.schema import Case, WrapKind
from ..case.shapes import (
    empties,
    graph_differs,
    learning,
    leaves_a_rank_empty,
    parameter_dtypes,
    parameter_shapes,
    scalars,
    transposed,
)
from ..case.traits import reduced_precision, two_axes


def under_autocast(case: Case) -> str | None:
    """Return the reason to reject mixed precision other than autocast in bf16, or None."""
    return one_precision(case) or bf16_only(case) or reduces_fp32(case)


def one_axis_fp32(case: Case) -> str | None:
    """Return the reason to reject a mesh of several axes or mixed precision, or None."""
    return one_axis(case) or fp32(case)


def one_axis(case: Case) -> str | None:
    """Return the reason to reject a mesh of several axes, or None."""
    return "works on a mesh of one axis only, the case has one of two" if two_axes(case) else None


def fp32(case: Case) -> str | None:
    """Return the reason to reject mixed precision, or None."""
    if reduced_precision(case):
        return "computes and reduces in fp32 only"
    return None


def one_precision(case: Case) -> str | None:
    """Return the reason to reject mixed parameter dtypes under a single compute dtype, or None."""
    if reduced_precision(case) and set(parameter_dtypes(case.model).values()) != {"fp32"}:
        return "casts parameters of fp32 to the dtype of compute; the model has others"
    return None


def bf16_only(case: Case) -> str | None:
    """Return the reason to reject fp16, or None."""
    if "fp16" in (case.precision.compute, case.precision.reduce):
        return "computes and reduces in fp32 and bf16 only"
    return None


def norms_cast(case: Case) -> str | None:
    """Return the reason to reject batch norms that would be cast with the other modules, or None.

    torch on the CPU wants running statistics in the dtype of the weights, which FSDP2 leaves as
    they are (`expected scalar type BFloat16 but found Float`). FSDP1 leaves batch norms in fp32, in
    units of their own.
    """
    if case.precision.compute == "fp32":
        return None
    if any(block.kind == "batch_norm" for block in case.model.blocks):
        return "casts all parameters of a unit, but not the running statistics of a batch norm"
    return None


def reduces_fp32(case: Case) -> str | None:
    """Return the reason to reject a reduction in a dtype other than fp32, or None."""
    if case.precision.reduce != "fp32":
        return "gradients under autocast are in fp32, and are reduced in it"
    return None


def same_units(case: Case) -> str | None:
    """Return the reason to reject a backward that needs different units on each rank, or None.

    A unit is gathered in the backward where its output needs a gradient. Where that depends on
    the rank, ranks call different collectives.
    """
    if graph_differs(case.model):
        return (
            "the backward runs through other layers on each rank: what is before a layer that "
            "some ranks use is frozen"
        )
    return None


def unpinned(case: Case) -> str | None:
    """Return the reason why CPU memory cannot be pinned, or None.

    That is of the machine and not of the case: cases are asked about where they are to run.
    """
    if case.sharding.offload == "pinned" and not torch.accelerator.is_available():
        return (
            "torch cannot pin memory here: Cannot access accelerator device when none is available "
            "(sharding.offload is 'pinned')"
        )
    return None


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


def norm_of_empties(case: Case) -> str | None:
    """Return the reason why torch's clip_grad_norm_ cannot compute the norm, or None."""
    if case.training.clip is not None and case.training.norm == "inf" and empties(case.model):
        return f"torch has no inf-norm of a tensor without elements: {empties(case.model)[0]}"
    return None


def norm_of_empty_shards(case: Case) -> str | None:
    """Return the reason why torch cannot compute the inf-norm of empty dim-0 shards, or None.

    A rank with an empty shard raises, while the others wait for it.
    """
    if case.training.clip is None or case.training.norm != "inf":
        return None
    shapes = parameter_shapes(case.model)
    for name in learning(case):
        if shapes[name] and leaves_a_rank_empty(shapes[name][0], case.shards):
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
