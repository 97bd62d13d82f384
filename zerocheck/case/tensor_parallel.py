"""Tensor parallelism of a drawn model: the layers that are sharded, how, and its drawing.

No torch: `adapters/fsdp2/tensor_parallel.py` makes torch's styles of it. `Plan` names a layer by
its path. Either the output features of a layer are sharded over the ranks (column-wise), or its
inputs are, and partial sums are added over the ranks (row-wise):

    column         its output stays sharded, for a row-wise layer that takes it so
    gathered       column-wise, and its output is gathered
    row            its input is sharded, its output is the sum
    split          row-wise, and its input is whole: each rank uses its part
    vocabulary     an embedding: each rank has some of the rows

An MLP whose hidden width the ranks divide is column and row. Where they do not, and in an
attention, whose one layer makes queries, keys and values together, what is between the two layers
is gathered. Whatever is not named is replicated: every rank computes all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from .schema import Model
from .shapes import leaves_a_rank_empty, parameter_shapes

Style = Literal["column", "gathered", "row", "split", "vocabulary"]
Plan = Mapping[str, Style]

DIM: dict[Style, int] = {"column": 0, "gathered": 0, "row": 1, "split": 1, "vocabulary": 0}
"""Sharded dim of the weight. A bias is sharded with dim 0, and replicated with dim 1."""


def plan_of(model: Model, count: int) -> dict[str, Style]:
    """Return the path of each layer that is sharded over `count` ranks, with its style.

    None of the user's own model, none that only some ranks use (experts, `side`) or that are never
    called (`spare`), and none of which a rank would have nothing: FSDP2 cannot reduce gradients
    without elements.
    """
    found: dict[str, Style] = {}
    if model.user is not None or count == 1:
        return found
    if model.stem != "conv":
        found["stem"] = "vocabulary" if model.stem == "embedding" else "gathered"
    for index, block in enumerate(model.blocks):
        name = f"blocks.{index}"
        if block.kind == "mlp" and block.hidden % count == 0:
            found[f"{name}.up"], found[f"{name}.down"] = "column", "row"
        elif block.kind == "mlp":
            found[f"{name}.up"], found[f"{name}.down"] = "gathered", "split"
        elif block.kind == "attention":
            found[f"{name}.qkv"], found[f"{name}.out"] = "gathered", "split"
    found["head"] = "gathered"
    shapes = parameter_shapes(model)
    weights = {path: "stem.weight" if model.tied else f"{path}.weight" for path in ("stem", "head")}
    return {
        path: style
        for path, style in found.items()
        if not leaves_a_rank_empty(shapes[weights.get(path, f"{path}.weight")][DIM[style]], count)
    }


def sharded_dim(plan: Plan, name: str) -> int | None:
    """Return the dim of a parameter that is sharded, or None for one that is replicated."""
    layer, _, kind = name.rpartition(".")
    if layer not in plan:
        return None
    dim = DIM[plan[layer]]
    return dim if kind == "weight" or dim == 0 else None
