"""Faults that only mixed precision shows."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

PRECISION = [
    fault(
        "precision:MastersRounded", "zero1", "update",
        "the fp32 masters are rounded to bf16 with the parameters", "HF accelerate #2674, #3979",
        bugs.ROUNDED_TO_BF16, features=("compute-bf16",),
    ),
    fault(
        "precision:CopyNotRefreshed", "zero3", "publish",
        "the bf16 parameters are not made anew from their masters", "DS PR#4141",
        bugs.COPIES_OF_THE_PREVIOUS_STEP, features=("compute-bf16",),
    ),
    fault(
        "precision:StaleCopyOnOneRank", "zero1", "publish",
        "one rank sends its parameters before they were rounded from the masters", "DS PR#7707",
        bugs.COPIES_OF_THE_PREVIOUS_STEP, features=("compute-bf16",),
    ),
    fault(
        "precision:UpdateOnCopy", "zero1", "update",
        "the update goes to the bf16 parameters, and not to their masters", "DS PR#5170",
        bugs.NEVER_UPDATED, features=("compute-bf16",),
    ),
    fault(
        "precision:AccumulatedInBf16", "zero1", "gradient",
        "microbatches are summed in bf16, though fp32 is declared", "seen in FSDP1",
        bugs.ACCUMULATED_IN(format="bf16"),
        features=("compute-bf16", "reduce-wide", "microbatches"),
        microbatches=3,
    ),
    fault(
        "precision:ReducedNarrow", "zero1", "gradient",
        "gradients are rounded to bf16 before they are reduced, though fp32 is declared",
        "FSDP's reduce_dtype left out", bugs.REDUCED_IN(format="bf16"),
        features=("compute-bf16", "reduce-wide", "microbatches"), microbatches=3,
    ),
    fault(
        "precision:MomentsInBf16", "zero1", "update",
        "the moments are kept in the dtype of compute", "PT #104770",
        bugs.ROUNDED_TO_BF16, features=("compute-bf16",),
    ),
    fault(
        "precision:SavesTheCopies", "zero1", "roundtrip",
        "a checkpoint has the bf16 parameters, and their masters are lost", "PT #104770",
        bugs.ROUNDED_TO_BF16, features=("compute-bf16",),
    ),
]  # fmt: skip
