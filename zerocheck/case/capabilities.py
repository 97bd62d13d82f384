"""Capabilities and mesh axes of a case that an implementation must declare that it handles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from .mesh import AXES, AxisName
from .schema import Case
from .traits import meshes, reduced_precision

Capability = Literal["loss_scale", "unfreeze", "compile", "precision", "past_wrapper"]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)
"""All of them; `Implementation.capabilities` says what each means."""


def required(case: Case) -> Iterator[tuple[Capability, str]]:
    """Iterate over the capabilities that the case needs, each with the words for the reason."""
    training = case.training
    if training.loss_scale is not None:
        yield "loss_scale", "training.loss_scale"
    if training.unfreeze is not None:
        yield "unfreeze", "training.unfreeze"
    if training.compile != "none":
        yield "compile", "training.compile"
    if reduced_precision(case):
        yield "precision", "case.precision (precision)"
    if case.data.past_wrapper:
        yield "past_wrapper", "data.past_wrapper"


def required_axes(case: Case) -> tuple[AxisName, ...]:
    """Return the names of the mesh axes that the case needs in some training segment."""
    needed = {name for mesh in meshes(case) for name in mesh.names}
    return tuple(name for name in AXES if name in needed)
