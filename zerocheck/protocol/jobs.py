"""Requests to a rank, one struct for each kind."""

from __future__ import annotations

import msgspec

from ..case.schema import Case


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Request to load an implementation and to reply what it declares."""

    implementation: str


class LookAtModel(msgspec.Struct, frozen=True, tag=True):
    """Request to call the user's model factory and to reply what it makes."""

    factory: str


class LookAtOptimizer(msgspec.Struct, frozen=True, tag=True):
    """Request to inspect the user's optimizer class and to reply what it is like."""

    location: str


class Supports(msgspec.Struct, frozen=True, tag=True):
    """Request to ask the implementation which of the candidates it supports; none is run."""

    implementation: str
    candidates: tuple[Case, ...]


class Build(msgspec.Struct, frozen=True, tag=True):
    """Request to build the implementation for a case and to close it; no step is taken."""

    implementation: str
    case: Case


class TakeSteps(msgspec.Struct, frozen=True, tag=True):
    """Request to take the steps of a case as a user's loop would, with nothing observed."""

    implementation: str
    case: Case


class SegmentCheckpoints(msgspec.Struct, frozen=True):
    """Checkpoints that one training segment of a resumed case reads and writes."""

    save: str = ""
    """Directory to save into; empty for none."""
    load: str = ""
    """Directory to load from; empty for none."""
    older: str = ""
    """Directory of the checkpoint that `save` is to replace, if it is another one."""
    samples: int = 0
    """Samples that earlier segments have read."""
    kill: tuple[int, float] | None = None
    """(rank, seconds): this rank is killed so long after it began to save."""


class Observe(msgspec.Struct, frozen=True, tag=True):
    """Request to take the steps of a case and to record the state after each."""

    implementation: str
    case: Case
    checkpoints: SegmentCheckpoints = SegmentCheckpoints()
    trace: bool = False
    """Record every collective, for hangs and crashes."""


class LoadCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Request to load a checkpoint and to record the state or the refusal; no step is taken."""

    implementation: str
    case: Case
    checkpoints: SegmentCheckpoints
    trace: bool = False
    """Record every collective, for hangs and crashes."""


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Request to take the steps of a case, with memory and collectives measured."""

    implementation: str
    case: Case
    trace: bool = False
    """Record every collective, for hangs and crashes."""


SegmentJob = Observe | LoadCheckpoint
"""Requests for one training segment of a case."""
CaseJob = Build | TakeSteps | SegmentJob | Measure
"""Requests that build an implementation for one case."""
Job = Describe | LookAtModel | LookAtOptimizer | Supports | CaseJob
