"""Reasons to reject cases that several adapters share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from ...case.codec import merged
from ...case.reductions import value_at
from ...case.schema import Case, OptimizerKind
from ...case.shapes import graph_differs, parameter_dtypes
from ...case.traits import meshes, reduced_precision
from ...optimizers import OPTIMIZERS, optimizer_of


def one_axis(case: Case) -> str | None:
    """Return the reason to reject a replicate axis, or None."""
    if any(mesh.has("replicate") for mesh in meshes(case)):
        return "works on a mesh of one axis only, the case has one of two"
    return None


def fp32(case: Case) -> str | None:
    """Return the reason to reject mixed precision, or None."""
    if reduced_precision(case):
        return "computes and reduces in fp32 only"
    return None


def elementwise(case: Case) -> str | None:
    """Return the reason to reject an optimizer that needs whole matrices, or None."""
    optimizer = optimizer_of(case.optimizer)
    if any(rule.whole for rule in optimizer.rules):
        return f"updates flat shards, and {optimizer.name} needs whole matrices"
    return None


def one_of(case: Case, *kinds: OptimizerKind) -> str | None:
    """Return the reason to reject an optimizer that is none of these, or None."""
    if case.optimizer.kind in kinds:
        return None
    *some, last = (OPTIMIZERS[kind].name for kind in kinds)
    name = optimizer_of(case.optimizer).name
    return f"is checked with {', '.join(some)} and {last}, and not with {name}"


def one_precision(case: Case) -> str | None:
    """Return the reason to reject mixed parameter dtypes under a single compute dtype, or None."""
    if reduced_precision(case) and set(parameter_dtypes(case.model).values()) != {"fp32"}:
        return "casts parameters of fp32 to the dtype of compute; the model has others"
    return None


def bf16_only(case: Case) -> str | None:
    """Return the reason to reject fp16, or None."""
    if "fp16" in (case.precision.compute, case.precision.reduce):
        return "computes and reduces in fp32 and bf16 only"
    return None


def norms_cast(case: Case) -> str | None:
    """Return the reason to reject batch norms that would be cast with the other modules, or None.

    torch on the CPU wants running statistics in the dtype of the weights, which FSDP2 leaves as
    they are (`expected scalar type BFloat16 but found Float`). FSDP1 leaves batch norms in fp32, in
    units of their own.
    """
    if case.precision.compute == "fp32":
        return None
    if any(block.kind == "batch_norm" for block in case.model.blocks):
        return "casts all parameters of a unit, but not the running statistics of a batch norm"
    return None


def same_units(case: Case) -> str | None:
    """Return the reason to reject a backward that needs different units on each rank, or None.

    A unit is gathered in the backward where its output needs a gradient. Where that depends on
    the rank, ranks call different collectives.
    """
    if graph_differs(case.model):
        return (
            "the backward runs through other layers on each rank: what is before a layer that "
            "some ranks use is frozen"
        )
    return None


def unpinned(case: Case) -> str | None:
    """Return the reason why CPU memory cannot be pinned, or None.

    That is of the machine and not of the case: cases are asked about where they are to run.
    """
    if case.sharding.offload == "pinned" and not torch.accelerator.is_available():
        return (
            "torch cannot pin memory here: Cannot access accelerator device when none is available "
            "(sharding.offload is 'pinned')"
        )
    return None


def contradiction(name: str, fixed: Mapping[str, Any], case: Case) -> str | None:
    """Return a message naming a field of the case that a config says otherwise, or None.

    name: of the config; fixed: fields of cases that it fixes, nested.
    """
    wanted = merged(Case(), fixed, source=name)
    for section, fields in fixed.items():
        for path in (f"{section}.{field}" for field in fields):
            if value_at(case, path) != value_at(wanted, path):
                words = msgspec.json.encode(value_at(wanted, path)).decode()
                return f"{name} fixes {path} as {words}, and the case has another"
    return None
