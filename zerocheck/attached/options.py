"""Options of `zerocheck.attach`, checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch.distributed as dist
from torch import nn

from ..contract.semantics import Semantics
from ..errors import UsageError, unknown
from ..job_metrics.options import JobMetrics, metrics_options
from .record.axes import Axes
from .record.holdings import check_parameters
from .record.optimizers import JobOptimizers, check_kind
from .record.zero_engine import engine_refusal, zero_stage
from .recorder import recorder_bytes
from .verdict.reference import Factory
from .violated import OnViolation


@dataclass(frozen=True)
class AttachOptions:
    """Options of `attach`; see there. recorder: bytes. Raises UsageError for wrong ones."""

    reference: Factory | None
    semantics: Semantics
    steps: frozenset[int]
    every: int | None
    directory: Path
    on_violation: OnViolation
    on_unsupported: OnViolation
    group: dist.ProcessGroup | None
    recorder: int | None
    verbose: bool
    metrics: JobMetrics | None
    axes: Axes
    resume_from: Path | None

    @classmethod
    def checked(
        cls,
        *,
        reference: Factory | None,
        semantics: Semantics | None,
        steps: Iterable[int],
        every: int | None,
        directory: str | Path,
        on_violation: OnViolation,
        on_unsupported: OnViolation,
        group: dist.ProcessGroup | None,
        recorder: str | int | None,
        verbose: bool,
        metrics: str | Path | JobMetrics | None,
        axes: Axes,
        resume_from: str | Path | None,
    ) -> AttachOptions:
        """Check the options as they were given."""
        for name, value in (("on_violation", on_violation), ("on_unsupported", on_unsupported)):
            if value not in get_args(OnViolation):
                raise unknown(name, str(value), get_args(OnViolation))
        numbers = frozenset(steps)
        for number in numbers:
            if not isinstance(number, int) or number < 1:
                raise UsageError(f"steps holds {number!r} (allowed: ints from 1 on)")
        if every is not None and (not isinstance(every, int) or every < 1):
            raise UsageError(f"every is {every!r} (allowed: an int from 1 on, or None)")
        if reference is not None and not callable(reference):
            raise UsageError(
                f"reference= is of type {type(reference).__name__} (allowed: a function without "
                "arguments that returns the model before it is wrapped)"
            )
        return cls(
            reference=reference,
            semantics=semantics or Semantics(),
            steps=numbers,
            every=every,
            directory=Path(directory),
            on_violation=on_violation,
            on_unsupported=on_unsupported,
            group=group,
            recorder=recorder_bytes(recorder),
            verbose=verbose,
            metrics=metrics_options(metrics),
            axes=axes,
            resume_from=None if resume_from is None else Path(resume_from),
        )

    def after(self, number: int) -> int:
        """Return the next step to check after this one; -1 for none."""
        after = [step for step in self.steps if step > number]
        if self.every is not None:
            after.append((number // self.every + 1) * self.every)
        return min(after, default=-1)


def check_parts(model: nn.Module, optimizers: JobOptimizers) -> None:
    """Raise UsageError for a model or an optimizer whose update cannot be judged."""
    refusal = engine_refusal(model)
    if refusal:
        raise UsageError(refusal)
    if not optimizers:
        raise UsageError("attach is given an empty list of optimizers (needed: at least 1)")
    if len(set(map(id, optimizers))) < len(optimizers):
        raise UsageError("attach is given the same optimizer twice (allowed: once in the list)")
    for optimizer in optimizers:
        check_kind(optimizer)
    check_parameters(model, optimizers)


def default_semantics(model: nn.Module) -> Semantics:
    """Return what is meant by a model: engines of DeepSpeed fill in zeros for what is unused."""
    return Semantics(unused="zero") if zero_stage(model) else Semantics()
