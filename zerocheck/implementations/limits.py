"""What the built-in implementations cannot run, said as a reason."""

from __future__ import annotations

from ..case.schema import Case


def one_axis_fp32(case: Case) -> str | None:
    """None for a mesh of one axis in fp32, else the reason why the case cannot be run."""
    if len(case.mesh) != 1:
        return f"shards over one mesh axis only, the case has {len(case.mesh)}"
    if case.precision.compute != "fp32" or case.precision.reduce != "fp32":
        return "computes and reduces in fp32 only"
    return None
