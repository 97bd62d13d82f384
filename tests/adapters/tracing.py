"""The collectives of real ranks, and what was predicted of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from adapters.driver import step_of
from zerocheck.case.schema import Case
from zerocheck.case.shapes import unfrozen
from zerocheck.contract import Implementation
from zerocheck.contract.implementation import Moment, Step
from zerocheck.contract.start import initial_state
from zerocheck.drive.collective_trace import CallTrace
from zerocheck.errors import Unsupported
from zerocheck.execution.kernels import deterministic
from zerocheck.models.network import build_model
from zerocheck.protocol.layout import Call, Phase

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def calls_of(mesh: DeviceMesh, kind: type[Implementation], case: Case) -> list[Call] | str:
    """What this rank calls in the steps of a case; the reason if it is not supported."""
    reason = kind.supports(case)
    if reason is not None:
        return reason
    model = build_model(case)
    state = initial_state(case, model)
    place = _Place()
    trace = CallTrace(lambda: place.now)
    with trace:
        try:
            implementation = kind(model, case, mesh)
        except Unsupported as refusal:
            return str(refusal)
        if state is not None:
            implementation.restore(state)
        for index in range(case.training.steps):
            step = _told(place, case, step_of(case, index, dist.get_rank(), lambda _: None))
            place.now = index, "forward"
            implementation.train_step(step)
            place.now = None
    implementation.close()
    return trace.calls


def calls_of_all(
    mesh: DeviceMesh, jobs: Sequence[tuple[type[Implementation], Case]]
) -> list[list[Call] | str]:
    """Those of many cases in one life of the ranks."""
    deterministic()
    return [calls_of(mesh, kind, case) for kind, case in jobs]


class _Place:
    """Where the rank is."""

    now: tuple[int, Phase] | None = None


def _told(place: _Place, case: Case, step: Step) -> Step:
    """The step, which tells where it is."""

    def entered() -> None:
        place.now = step.index, "forward"

    def loss_of(of: Loss, *given: torch.Tensor) -> torch.Tensor:
        loss = of(*given)
        place.now = step.index, "backward"
        return loss

    def reached(_: Moment) -> None:
        place.now = step.index, "step"

    return replace(
        step,
        microbatches=[
            replace(one, entered=entered, loss_of=partial(loss_of, one.loss_of))
            for one in step.microbatches
        ],
        reached=reached,
        unfreeze=unfrozen(case) if step.index == case.training.unfreeze else (),
    )
