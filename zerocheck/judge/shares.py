"""Share of the parameters, gradients and optimizer states that one rank holds.

A wrapper that had no effect trains rightly, and saves no memory: accelerate, for one, ignores its
FSDP plugin on the CPU. So the largest share is part of every judgement, and reports show it. An
implementation that declares its `stage` of the ZeRO paper must shard what this stage shards. That
is violated only where every rank holds all of it: how evenly it is shared out is for `persistent`.
"""

from __future__ import annotations

from typing import Literal

from .. import causes as bugs
from ..case.schema import Case
from ..protocol.observations import Point
from ..protocol.verdicts import Violation
from .assemble import Observation

Kind = Literal["parameters", "gradients", "optimizer states"]

KINDS: dict[Kind, tuple[Point, str, int]] = {
    "parameters": ("state", "parameter", 3),
    "gradients": ("reduced", "gradient", 2),
    "optimizer states": ("state", "", 1),
}
"""Place of each kind in the observations (point and role, "" for the first state that is exposed),
and the first stage that shards it."""


def shares(observation: Observation) -> dict[str, float]:
    """Return, per exposed kind, the largest share that one rank holds; 1.0: all of it.

    Empty on one rank, and where the shard axis of the mesh has one.
    """
    mesh = observation.replicated
    if observation.world_size == 1 or (mesh is not None and mesh.size("shard") == 1):
        return {}
    found = {
        kind: _held(observation, point, role or _state(observation, point))
        for kind, (point, role, _) in KINDS.items()
    }
    return {kind: max(held) / total for kind, (held, total) in found.items() if total}


def check(observation: Observation, case: Case, stage: int | None) -> Violation | None:
    """Return the violation of `ownership` if a declared stage is not implemented: see above."""
    if stage is None or case.axes.size("shard") == 1:
        return None  # tensor parallelism shards some layers, and no stage shards the others
    for kind, (point, named, first) in KINDS.items():
        role = named or _state(observation, point)
        held, total = _held(observation, point, role)
        if stage >= first and total and min(held) == total:
            causes, why = _causes(observation, kind)
            return Violation(
                obligation="ownership",
                step=observation.first,
                role=role,
                tensors=(),
                ranks=tuple(range(observation.world_size)),
                explanation=f"every rank holds all {kind}: {why}, and the implementation declares "
                f"stage {stage}",
                causes=causes,
            )
    return None


def _causes(observation: Observation, kind: Kind) -> tuple[tuple[str, ...], str]:
    """Return why ranks hold all of a kind, and its sentence."""
    whole = (bugs.NOT_SHARDED,), "nothing of them is sharded"
    if kind != "parameters":
        return whole
    held, total = _held(observation, "state", _state(observation, "state"))
    if not total:  # an optimizer without states
        return (bugs.NOT_SHARDED, bugs.LEFT_GATHERED), "they are not sharded, or still gathered"
    if max(held) == total:
        return whole
    return (bugs.LEFT_GATHERED,), (
        "they are still gathered after the step, though the optimizer has shards of them"
    )


def _state(observation: Observation, point: Point) -> str:
    """Return the first optimizer state that was exposed at a point; "" if none was."""
    states = observation.states
    return next((one for one in states if observation.last(point, one) is not None), "")


def _held(observation: Observation, point: Point, role: str) -> tuple[list[int], int]:
    """Return (elements per rank, elements in total) at the last exposure of a role."""
    step = observation.last(point, role)
    if step is None:
        return [0] * observation.world_size, 0
    ranks = observation.entries(step, point, role)
    present = [[entry for entry in held if entry.present] for held in ranks]
    places = observation.layout.by_name
    names = {entry.name for held in present for entry in held if entry.name in places}
    total = sum(places[name].stop - places[name].start for name in names)
    return [sum(entry.stop - entry.start for entry in held) for held in present], total
