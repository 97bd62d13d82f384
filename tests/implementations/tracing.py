"""The collectives of real ranks, and what was predicted of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from implementations.driver import step_of
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.case.schema import Case
from zerocheck.case.shapes import unfrozen
from zerocheck.contract import Implementation
from zerocheck.contract.implementation import Step
from zerocheck.contract.layout import Call
from zerocheck.drive.calls import CallTrace
from zerocheck.drive.poison import deterministic
from zerocheck.errors import Unsupported
from zerocheck.models.network import build_model
from zerocheck.models.start import initial_state

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def calls_of(mesh: DeviceMesh, kind: type[Implementation], case: Case) -> list[Call] | str:
    """What this rank calls in the steps of a case; the reason if it is not supported."""
    reason = kind.supports(case)
    if reason is not None:
        return reason
    model = build_model(case)
    state = initial_state(case, model)
    trace = CallTrace()
    with trace:
        try:
            implementation = kind(model, case, mesh)
        except Unsupported as refusal:
            return str(refusal)
        if state is not None:
            implementation.restore(state)
        for index in range(case.training.steps):
            step = _told(trace, case, step_of(case, index, dist.get_rank(), lambda _: None))
            trace.at(index, "forward")
            implementation.train_step(step)
            trace.at(index, None)
    implementation.close()
    return trace.calls


def calls_of_all(
    mesh: DeviceMesh, jobs: Sequence[tuple[type[Implementation], Case]]
) -> list[list[Call] | str]:
    """Those of many cases in one life of the ranks."""
    deterministic()
    return [calls_of(mesh, kind, case) for kind, case in jobs]


def _told(trace: CallTrace, case: Case, step: Step) -> Step:
    """The step, which tells the trace where it is."""

    def entered() -> None:
        trace.at(step.index, "forward")

    def loss_of(of: Loss, *given: torch.Tensor) -> torch.Tensor:
        loss = of(*given)
        trace.at(step.index, "backward")
        return loss

    return replace(
        step,
        microbatches=[
            replace(one, entered=entered, loss_of=partial(loss_of, one.loss_of))
            for one in step.microbatches
        ],
        reached=lambda _: trace.at(step.index, "step"),
        unfreeze=unfrozen(case) if step.index == case.training.unfreeze else (),
    )
