"""Tensor parallelism with FSDP2, as users write it: torch's `parallelize_module`, then shards.

`case/tensor_parallel.py` selects the layers that are sharded. Their parameters are DTensors of two
mesh axes (shard, tp); all others have the shard axis alone, and each rank of the tp axis holds the
same. So there are two meshes in one model, and torch's foreach kernels want one: parameters of each
are groups of their own in the optimizer, and their norms are combined (`clip_grad_norm_` of torch
2.13 raises: https://github.com/pytorch/pytorch/issues/180346).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ...case.schema import Case
from ...case.shapes import learning, leaves_a_rank_empty, parameter_dtypes, parameter_shapes
from ...case.tensor_parallel import Style, plan_of, sharded_dim
from ...case.traits import reduced_precision
from ...models.parts import parameter_places, tie

STYLES: dict[Style, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
    "row": RowwiseParallel,
    "split": lambda: RowwiseParallel(input_layouts=Replicate()),
    "vocabulary": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""torch's styles, by our words for them."""


def parallelized(model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
    """Shard the layers of the model in place, over the tp axis of the mesh.

    torch shards each layer by itself, so what is tied is tied again. A model that is no case's
    shows the styles of its layers (`show_sharded_layers`).
    """
    styles: Mapping[str, ParallelStyle] | None = getattr(model, "sharded_layers", None)
    if styles is None:
        plan = plan_of(case.model, case.axes.size("tp"))
        styles = {path: STYLES[style]() for path, style in plan.items()}
    places = parameter_places(model)
    parallelize_module(model, mesh["tp"], dict(styles))
    tie(places)


def refuse_uneven(case: Case) -> str | None:
    """Return the reason why layers of the case cannot be sharded or compared, or None."""
    if not case.axes.has("tp"):
        return None
    if case.model.user is not None:
        return "which layers of the user's own model to shard is not known (tensor_parallel)"
    if not plan_of(case.model, case.axes.size("tp")):
        return "the model has no layer that could be sharded (tensor_parallel)"
    if reduced_precision(case) or set(parameter_dtypes(case.model).values()) != {"fp32"}:
        return "bounds of sharded layers are estimated in fp32 only (tensor_parallel)"
    if case.training.compile != "none":
        return "a compiled model with sharded layers is not checked yet (tensor_parallel)"
    return _inf_norm_of_empty(case)


def _inf_norm_of_empty(case: Case) -> str | None:
    """Return the reason why torch cannot take the inf-norm of an empty shard, or None."""
    if case.training.clip is None or case.training.norm != "inf":
        return None
    count = case.axes.size("tp")
    plan = plan_of(case.model, count)
    shapes = parameter_shapes(case.model)
    for name in learning(case):
        rows = shapes[name][0]
        if sharded_dim(plan, name) == 0:  # the last rank of the tp axis has fewest
            most = -(-rows // count)
            rows -= most * (count - 1)
        if leaves_a_rank_empty(rows, case.axes.size("shard")):
            return f"torch has no inf-norm of the empty shard of {name}"
    return None


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of a DTensor, None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by mesh, in the order in which the meshes first occur."""
    found: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(mesh_of(tensor), []).append(tensor)
    return list(found.values())


def split_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups with one mesh each."""
    return [
        {**group, "params": members}
        for group in groups
        for members in by_mesh(group["params"]) or [[]]
    ]


def clip(model: nn.Module, max_norm: float, norm_type: float) -> float:
    """Clip gradients of several meshes by their norm together, which is returned."""
    graded = [p for p in model.parameters() if p.grad is not None]
    parts = by_mesh(graded)
    norms = []
    for part in parts:
        norm = torch.nn.utils.get_total_norm([p.grad for p in part], norm_type)  # type: ignore[misc]
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for part in parts:
        torch.nn.utils.clip_grads_with_norm_(part, max_norm, total)
    return float(total)
