"""Memory and communication of a case's ranks, for reports, which compare it with `paper`."""

from __future__ import annotations

from collections.abc import Sequence

from ..case.schema import Case
from ..case.shapes import learning, parameter_bytes, parameter_elements
from ..protocol.layout import Call, Category
from ..protocol.measurements import Measured
from ..protocol.verdicts import MeasuredBytes
from .obligations.communication import volume
from .placement import state_bytes

BETWEEN: tuple[Category, ...] = ("parameter", "gradient", "optimizer", "bucket", "gathered")
"""What a rank holds of training between steps."""


def measured_bytes(case: Case, measured: Sequence[Measured]) -> MeasuredBytes | None:
    """Bytes and volume of one case, or None if no step was measured."""
    ends = [_at_the_end(one) for one in measured]
    if not any(ends):
        return None
    layouts = [one.layout for one in measured]
    most: Sequence[Call] = max(
        (one.calls[-1] for one in measured if one.calls), key=volume, default=()
    )
    kinds = dict.fromkeys(call.kind for call in most)
    return MeasuredBytes(
        copy=copy_bytes(case),
        held=max(ends),
        total=sum(ends),
        sent=volume(most),
        trained=trained_bytes(case),
        elements=parameter_elements(case.model),
        stage=measured[0].stage,
        predicted=all(layout is not None and bool(layout.lines) for layout in layouts),
        by_kind={kind: sent for kind in kinds if (sent := volume(_of(kind, most)))},
    )


def _of(kind: str, calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.kind == kind]


def _at_the_end(measured: Measured) -> int:
    """Bytes held between steps, after the last measured one."""
    last = max((line.step for line in measured.lines if line.phase == "step"), default=-1)
    return sum(
        line.bytes
        for line in measured.lines
        if (line.phase, line.step) == ("step", last) and line.category in BETWEEN
    )


def copy_bytes(case: Case) -> tuple[int, int, int]:
    """Bytes of one copy: parameters, gradients and states; frozen ones have neither of these."""
    parameters = sum(parameter_bytes(case.model).values())
    trained = trained_bytes(case)
    return parameters, trained, state_bytes(case)


def trained_bytes(case: Case) -> int:
    """Bytes of the parameters that are trained, from the start or later."""
    sizes = parameter_bytes(case.model)
    return sum(sizes[name] for name in learning(case))
