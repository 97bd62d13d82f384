"""What a case asks for, where several rooms must know it."""

from __future__ import annotations

from .schema import Case


def lowered(case: Case) -> bool:
    """Whether anything is computed or reduced in another dtype than fp32."""
    return case.precision.compute != "fp32" or case.precision.reduce != "fp32"


def two_axes(case: Case) -> bool:
    """Whether the ranks of some leg have a mesh of two axes."""
    return len(case.mesh) > 1 or any(len(leg.mesh) > 1 for leg in case.resume)


def cuts(case: Case) -> bool:
    """Whether layers are cut over ranks (tensor parallelism)."""
    return case.sharding.tensor_parallel > 1


def estimated(case: Case) -> bool:
    """Whether kernels differ from those of one device, so that bounds are estimated: the model is
    compiled, or its layers are cut."""
    return case.training.compile != "none" or cuts(case)
