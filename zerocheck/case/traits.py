"""Requirements of a case that several packages must know."""

from __future__ import annotations

from .schema import Case


def reduced_precision(case: Case) -> bool:
    """Return True if anything is computed or reduced in a dtype other than fp32."""
    return case.precision.compute != "fp32" or case.precision.reduce != "fp32"


def two_axes(case: Case) -> bool:
    """Return True if some segment has a mesh of two axes."""
    return len(case.mesh) > 1 or any(len(segment.mesh) > 1 for segment in case.resume)


def cuts(case: Case) -> bool:
    """Return True if layers are sharded over ranks (tensor parallelism)."""
    return case.sharding.tensor_parallel > 1


def estimated(case: Case) -> bool:
    """Return True if bounds are estimated, since kernels differ from those of one device.

    That is the case if the model is compiled, or its layers are sharded.
    """
    return case.training.compile != "none" or cuts(case)
