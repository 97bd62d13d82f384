"""Features of a case that a short script of torch alone cannot show."""

from __future__ import annotations

from collections.abc import Iterator

from ..case.schema import Case
from ..case.shapes import draws_random


def reasons(case: Case) -> Iterator[str]:
    """Yield why a script of the case would be too long, or not the same; nothing if neither."""
    if case.model.user is not None:
        yield "the model is the user's own (model.user)"
    if case.axes.has("replicate"):
        yield "the mesh has 2 axes"
    if case.hosts:
        yield "its ranks are told that they are on several hosts (hosts)"
    if case.precision.compute != "fp32" or case.precision.reduce != "fp32":
        yield "it computes or reduces in another dtype than fp32 (precision)"
    if any(block.dtype != "fp32" for block in case.model.blocks):
        yield "a block has bf16 parameters, whose round-off has other bounds (model.blocks.dtype)"
    if any(block.empty for block in case.model.blocks):
        yield "parameters without elements (model.blocks.empty)"
    if case.resume:
        yield "it saves and loads a checkpoint (resume)"
    if case.training.overflow is not None:
        yield "a step overflows on purpose (training.overflow)"
    if case.training.compile != "none":
        yield "it compiles the model, and bounds are then estimated (training.compile)"
    if case.axes.has("tp"):
        yield (
            "its layers are sharded over the axis tp, and bounds are then estimated "
            "(sharding.tensor_parallel)"
        )
    if case.disturbance.delay:
        yield "it needs delays, which show a race in some runs only (disturbance.delay)"
    if case.data.rng == "carried" and draws_random(case.model):
        yield "dropout takes random numbers that each rank carries on (data.rng)"
