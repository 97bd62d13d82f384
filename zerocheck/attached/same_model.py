"""Comparison of the models of all ranks: a sharded or replicated run has only one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat import flat_parameters
from ..contract.names import unwrapped
from ..errors import UsageError
from .record.ranks import AllRanks

Shape = tuple[int, ...] | None

ADVICE = (
    "for the stages of a pipeline pass mesh= with their dimension (pp), or attach on the ranks of "
    "each stage with group=; else give every rank the same model; a rank with experts of its own "
    "numbers them from 0 on"
)


class Signature(msgspec.Struct, frozen=True):
    """Description of a model, equal on all ranks that train the same one.

    shapes: of the parameters in the unwrapped model, by name; None where a flat parameter hides
    it. meshes: dimensions and sizes of the device mesh, by parameter. stages: numbers of the
    stages of a pipeline that the model is in.
    """

    shapes: dict[str, Shape]
    meshes: dict[str, str]
    stages: list[int]


def check_same_model(model: nn.Module, stage: int, ranks: AllRanks) -> None:
    """Raise UsageError, on rank 0, if ranks of a stage have different parameters or stages."""
    gathered = ranks.gather(msgspec.msgpack.encode((stage, signature(model))))
    first: dict[int, tuple[int, Signature]] = {}
    for rank, data in enumerate(gathered):
        of, one = msgspec.msgpack.decode(data, type=tuple[int, Signature])
        other, known = first.setdefault(of, (rank, one))
        difference = _difference(known, one)
        if difference:
            raise UsageError(f"rank {other} and rank {rank} train different models: {difference}")


def signature(model: nn.Module) -> Signature:
    """Describe the model of this rank, without communication."""
    shapes: dict[str, Shape] = {}
    meshes = {}
    flat: set[int] = set()
    for unit in flat_parameters(model):
        flat |= {id(unit.tensor), *map(id, (unit.originals or {}).values())}
        shapes.update((unwrapped(name), None) for name in unit.names)
    for wrapped, parameter in model.named_parameters():
        if id(parameter) not in flat:
            name = unwrapped(wrapped)
            shapes[name] = tuple(parameter.shape)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                meshes[name] = f"{mesh.mesh_dim_names} of sizes {tuple(mesh.shape)}"
    return Signature(shapes, meshes, pipeline_stages(model))


def _difference(one: Signature, other: Signature) -> str:
    """Describe the first difference and what to do, or return an empty text."""
    if one.stages != other.stages:
        return f"stages {one.stages} and {other.stages} of a pipeline; {ADVICE}"
    for name in one.shapes.keys() ^ other.shapes.keys():
        return f"only one of them has the parameter {name}; {ADVICE}"
    for name, shape in one.shapes.items():
        if shape != other.shapes[name]:
            theirs = other.shapes[name]
            return f"{name} has the shape {_list(shape)} and {_list(theirs)}; {ADVICE}"
    for name in one.meshes.keys() | other.meshes.keys():
        here, there = one.meshes.get(name, "none"), other.meshes.get(name, "none")
        if here != there:
            return (
                f"the mesh of {name} is {here} and {there}; use one mesh on all ranks, or attach "
                "on the ranks of each mesh with group="
            )
    return ""


def _list(shape: Shape) -> object:
    return None if shape is None else list(shape)


def pipeline_stages(model: nn.Module) -> list[int]:
    """Return the stages of torch's pipelines that run this model, or a part of it.

    Parameters of two stages can have the same names and shapes, and only the stage tells them
    apart.
    """
    module: Any = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return []
    mine = set(model.modules())
    return sorted(
        one.stage_index
        for one in _objects(module._PipelineStageBase)
        if not mine.isdisjoint(one.submod.modules())
    )


def schedule_divides(model: nn.Module) -> bool:
    """Return True if torch's schedule of a pipeline divides gradients by the microbatches."""
    module: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    if module is None:
        return False
    mine = set(model.modules())
    for one in _objects(module._PipelineSchedule):
        stages = [one._stage] if hasattr(one, "_stage") else getattr(one, "_stages", ())
        if one.scale_grads and any(not mine.isdisjoint(s.submod.modules()) for s in stages):
            return True
    return False


def _objects(kind: type) -> Iterator[Any]:
    # Not isinstance, which asks lazy proxies for their class.
    return (one for one in gc.get_objects() if issubclass(type(one), kind))
