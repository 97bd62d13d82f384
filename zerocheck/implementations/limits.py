"""What the built-in implementations cannot run, said as a reason."""

from __future__ import annotations

from ..case.schema import Case
from ..case.shapes import parameter_shapes, trainable


def one_axis_fp32(case: Case) -> str | None:
    """None for a mesh of one axis in fp32, else the reason why the case cannot be run."""
    if len(case.mesh) != 1:
        return f"shards over one mesh axis only, the case has {len(case.mesh)}"
    if case.precision.compute != "fp32" or case.precision.reduce != "fp32":
        return "computes and reduces in fp32 only"
    return None


def inf_norm_of_empty_shards(case: Case) -> str | None:
    """Why torch cannot clip by the infinity norm where dim 0 leaves a rank without rows.

    The rank with an empty shard raises in `torch._foreach_norm` while the others wait for it in the
    reduction of the norm: reports/findings/fsdp2-inf-norm-of-an-empty-shard.md.
    """
    if case.training.clip is None or case.training.norm != "inf":
        return None
    world = case.world_size
    shapes = parameter_shapes(case.model)
    for name in trainable(case.model):
        rows = shapes[name][0]
        if -(-rows // world) * (world - 1) >= rows:
            return (
                "torch cannot take the infinity norm of an empty shard: "
                "see reports/findings/fsdp2-inf-norm-of-an-empty-shard.md"
            )
    return None
