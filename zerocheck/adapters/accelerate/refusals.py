"""Cases that what accelerate makes cannot run, known from the case alone."""

from __future__ import annotations

import torch

from ...case.schema import Case
from ...case.shapes import empties, sometimes_used, transposed, uncalled
from ..fsdp1 import refusals as fsdp1
from ..fsdp2 import refusals as fsdp2
from ..shared.limits import norms_cast, one_precision
from .user_config.config import AccelerateConfig

FREED = (
    "the full state dict of FSDP1, as accelerate takes it, is of freed memory on the CPU: see "
    "reports/findings/fsdp1-offloaded-state-dict-kills-ranks-on-cpu.md"
)


def refusal(given: AccelerateConfig, case: Case) -> str | None:
    """Return the reason to reject this case, or None: of torch, or of accelerate."""
    fsdp = given.fsdp
    reason = _of_resume(given, case) if case.resume else None
    if fsdp is None or reason is not None:
        return reason or one_precision(case)
    norms = any(block.kind == "batch_norm" for block in case.model.blocks)
    if fsdp.checkpointing and norms:
        return (
            "activation checkpointing runs the forward of a batch norm once more in the backward, "
            "which updates its running statistics twice"
        )
    if case.model.user is not None:
        return None  # units are those of its own classes: torch says what it refuses
    if fsdp.version == 2 and fsdp.from_rank_0:
        if norms:
            return "accelerate shards all that rank 0 sends, and fails at a buffer, of batch norms"
        if case.model.tied:
            return "accelerate has a model tie its weights again by tie_weights(), which it has not"
    if given.mixed == "bf16" and (reason := norms_cast(case)):
        return reason
    if fsdp.version == 2:
        return fsdp2.refusal(case)
    return fsdp1.refusal(case, shards=fsdp.strategy != "no_shard")


def _of_resume(given: AccelerateConfig, case: Case) -> str | None:
    """Return the reason why accelerate cannot save or load a drawn model, or None.

    A model of the user's own that it cannot is a finding.
    """
    fsdp = given.fsdp
    on_cpu = not torch.accelerator.is_available()
    if fsdp is not None and fsdp.version == 1 and fsdp.full and on_cpu:
        return FREED
    if case.model.user is not None:
        return None
    if fsdp is None and empties(case.model):
        return (
            "accelerate takes parameters without elements for one that is shared, and saves one of "
            f"them: {empties(case.model)[0]}"
        )
    idle = (*uncalled(case.model), *sometimes_used(case.model))
    if fsdp is not None and fsdp.version == 2 and idle:
        return (
            "torch does not load the state of an optimizer that has none of a parameter: "
            f"{idle[0].rstrip('.')} has no gradient"
        )
    if fsdp is not None and fsdp.version == 1 and transposed(case.model):
        return f"torch has no ShardedTensor that is not contiguous: {transposed(case.model)[0]}"
    return None
