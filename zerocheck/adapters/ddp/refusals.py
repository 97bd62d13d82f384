"""Cases that DDP cannot run, with the reason, known from the case alone."""

from __future__ import annotations

from ...case.schema import Case
from ...case.shapes import empties, sometimes_used
from ..shared.compiling import compiles, uncompiled
from ..shared.limits import bf16_only, one_axis, one_precision

FIRST_BUCKET = 1 << 18
"""Elements in fp32 of `dist._DEFAULT_FIRST_BUCKET_BYTES`, which DDP has whatever its others are."""


def refusal(case: Case) -> str | None:
    """Return the reason to reject what torch refuses or documents as wrong use, or None."""
    reason = one_axis(case) or under_autocast(case)
    reason = reason or norm_of_empties(case) or _changing_graph(case)
    return reason or uncompiled(case) or _split_by_buckets(case)


def under_autocast(case: Case) -> str | None:
    """Return the reason to reject mixed precision other than autocast in bf16, or None."""
    return one_precision(case) or bf16_only(case) or reduces_fp32(case)


def reduces_fp32(case: Case) -> str | None:
    """Return the reason to reject a reduction in a dtype other than fp32, or None."""
    if case.precision.reduce != "fp32":
        return "gradients under autocast are in fp32, and are reduced in it"
    return None


def norm_of_empties(case: Case) -> str | None:
    """Return the reason why torch's clip_grad_norm_ cannot compute the norm, or None."""
    if case.training.clip is not None and case.training.norm == "inf" and empties(case.model):
        return f"torch has no inf-norm of a tensor without elements: {empties(case.model)[0]}"
    return None


def _split_by_buckets(case: Case) -> str | None:
    """Return the reason why torch cannot split the graph by DDP's buckets, or None."""
    if compiles(case) and case.sharding.bucket < FIRST_BUCKET:
        return (
            "torch's DDPOptimizer wants the first bucket, of 1 MiB, to be the smallest: sharding."
            f"bucket is {case.sharding.bucket}, needed are {FIRST_BUCKET} elements"
        )
    return None


def _changing_graph(case: Case) -> str | None:
    """Return the reason why DDP's `static_graph` would be wrong for the case, or None."""
    if case.sharding.static_graph and sometimes_used(case.model):
        return "the graph of the model changes from batch to batch (sharding.static_graph is true)"
    return None
