"""Cases that what Lightning makes cannot run, known from the case alone."""

from __future__ import annotations

import torch

from ...case.schema import Case
from ...case.shapes import parameter_dtypes, transposed
from ...optimizers import optimizer_of, states_of
from ..fsdp1 import refusals as fsdp1
from ..shared.limits import norms_cast, one_precision
from .user_config import LightningConfig
from .user_config.strategy import FsdpArguments

FREED = (
    "the full state dict of FSDP1, as Lightning takes it, is of freed memory on the CPU: see "
    "reports/findings/fsdp1-offloaded-state-dict-kills-ranks-on-cpu.md"
)

STATELESS = "torch does not load the sharded state of an optimizer that has none"


def refusal(given: LightningConfig, case: Case) -> str | None:
    """Return the reason to reject this case, or None: of torch, or of Lightning."""
    if len(optimizer_of(case.optimizer).rules) > 1:
        return "a Trainer takes the steps of one optimizer, and the case has two"
    if reason := one_precision(case) or _fused(given, case):
        return reason
    return None if given.strategy.fsdp is None else _of_fsdp(given.strategy.fsdp, case)


def _fused(given: LightningConfig, case: Case) -> str | None:
    """Return the reason why Lightning does not clip, or None."""
    mixed = given.precision == "bf16-mixed" and given.strategy.fsdp is None
    if mixed and case.optimizer.kernel == "fused" and case.training.clip is not None:
        return (
            "Lightning does not clip gradients of a fused optimizer in mixed precision, which "
            "unscales them by itself"
        )
    return None


def _of_fsdp(fsdp: FsdpArguments, case: Case) -> str | None:
    if set(parameter_dtypes(case.model).values()) != {"fp32"}:
        return "Lightning has FSDP cast all parameters to one dtype; the model has several"
    norms = any(block.kind == "batch_norm" for block in case.model.blocks)
    if fsdp.checkpointing.kind != "whole" and norms:
        return (
            "activation checkpointing runs the forward of a batch norm once more in the backward, "
            "which updates its running statistics twice"
        )
    if case.resume and fsdp.full and not torch.accelerator.is_available():
        return FREED
    if case.model.user is not None:
        return None  # units are those of its own classes: torch says what it refuses
    if case.resume and (reason := _of_sharded(case)):
        return reason
    if case.precision.compute != "fp32" and (reason := norms_cast(case)):
        return reason
    return fsdp1.refusal(case, shards=fsdp.sharding != "NO_SHARD")


def _of_sharded(case: Case) -> str | None:
    """Return the reason why Lightning cannot save or load a sharded checkpoint, or None."""
    if transposed(case.model):
        return f"torch has no ShardedTensor that is not contiguous: {transposed(case.model)[0]}"
    if not states_of(case.optimizer):
        return STATELESS
    if case.resume[0].over and not case.start.step:
        return f"{STATELESS}: the older checkpoint is of the state before the first step"
    return None
