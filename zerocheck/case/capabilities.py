"""Capabilities: features of a case that an implementation must declare that it handles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from .schema import Case
from .traits import cuts, reduced_precision, two_axes

Capability = Literal[
    "loss_scale", "unfreeze", "compile", "two_axes", "precision", "tensor_parallel"
]
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
    if two_axes(case):
        yield "two_axes", "a mesh of two axes (two_axes)"
    if cuts(case):
        yield "tensor_parallel", "sharding.tensor_parallel"
    if reduced_precision(case):
        yield "precision", "case.precision (precision)"
