"""Replies of a rank, one struct for each kind; that of observed steps is in `observations.py`."""

from __future__ import annotations

import msgspec

from ..case.capabilities import Capability
from ..case.mesh import AxisName
from ..case.schema import UserModel, UserOptimizer
from .measurements import Measured
from .observations import RankObservation


class Description(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to `Describe`: the implementation's declarations, or the reason to reject it."""

    error: str = ""
    semantics: dict[str, str] = {}
    fixed: dict[str, object] = {}
    without: dict[str, str] = {}
    """Obligations that no case of it can exercise, each with the reason."""
    options: tuple[str, ...] | None = None
    """Fields of `case.sharding` and names in `case.options` that it obeys; None if it does not
    declare them."""
    restores: bool = False
    """True if it can start in mid-training."""
    resumes: bool = False
    """True if it has `save` and `load`."""
    exchanges: tuple[str, ...] = ()
    """Names of the implementations that load one another's checkpoints."""
    capabilities: tuple[Capability, ...] = ()
    """Features that it declares to handle; others are not drawn."""
    axes: tuple[AxisName, ...] = ("shard",)
    """Axes of a mesh that it declares to handle; others are not drawn."""


class ModelLook(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply of rank 0 to `LookAtModel`: the user's model, or the reason to reject it.

    Other ranks reply without content.
    """

    model: UserModel | None = None
    error: str = ""


class OptimizerLook(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply of rank 0 to `LookAtOptimizer`: the user's optimizer, or the reason to reject it.

    Other ranks reply without content.
    """

    optimizer: UserOptimizer | None = None
    error: str = ""


class Refusals(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to `Supports`."""

    reasons: tuple[str, ...] = ()
    of: tuple[int, ...] = ()
    """For each candidate 0 if it is supported, else 1 + the index of its reason."""


class CaseUnsupported(msgspec.Struct, frozen=True, tag=True):
    """Reply to a job with a case that the implementation does not support."""

    reason: str


class StepsTaken(msgspec.Struct, frozen=True, tag=True):
    """Reply to `Build` and `TakeSteps`: the implementation was closed without an error."""


class MemoryReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to `Measure`."""

    semantics: dict[str, str] = {}
    measured: Measured
    device: str = "cpu"
    """Device of the rank: "cuda:0"."""


CaseReply = CaseUnsupported | StepsTaken | RankObservation | MemoryReply
"""Replies to a job with a case."""
Reply = Description | ModelLook | OptimizerLook | Refusals | CaseReply
