"""Free runs of sharded code for some steps, for comparison with a trainer on one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from msgspec.structs import replace

from ...case.schema import Case
from ...judge.assemble import RoleState
from ...protocol.observations import StepObservation

STEPS = 10
"""Of free training: parity tests of FSDP take 2 to 10."""


def free_run_case(case: Case, fixed: Mapping[str, object]) -> Case:
    """Return the case with STEPS steps, unless the implementation fixes their number."""
    if fixes(fixed, "training", "steps"):
        return case
    return replace(case, training=replace(case.training, steps=STEPS))


def fixes(fixed: Mapping[str, object], section: str, name: str) -> bool:
    """Return True if an implementation fixes that field of its cases."""
    fields = fixed.get(section)
    return isinstance(fields, Mapping) and name in fields


def mean_loss(steps: Iterable[StepObservation]) -> float:
    """Return the mean loss of a step over ranks and microbatches, NaN if no rank had one."""
    losses = [loss for step in steps for loss in step.losses]
    return sum(losses) / len(losses) if losses else math.nan


def copies(held: RoleState) -> Iterator[torch.Tensor]:
    """Yield the whole vector (NaN where no rank holds an element), then its differing versions.

    A version has one rank's elements, where they differ from those of the whole.
    """
    yield held.whole
    for part, plan in zip(held.parts, held.plans, strict=True):
        whole = held.whole.clone()
        plan.scatter(whole, part)
        if not torch.equal(whole.nan_to_num(nan=0.0), held.whole.nan_to_num(nan=0.0)):
            yield whole
