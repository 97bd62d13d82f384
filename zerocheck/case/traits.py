"""Requirements of a case that several packages must know."""

from __future__ import annotations

from .mesh import Mesh, mesh_of
from .schema import Case


def reduced_precision(case: Case) -> bool:
    """Return True if anything is computed or reduced in a dtype other than fp32."""
    return case.precision.compute != "fp32" or case.precision.reduce != "fp32"


def meshes(case: Case) -> tuple[Mesh, ...]:
    """Return the mesh of each training segment."""
    sizes = (case.mesh, *(segment.mesh for segment in case.resume))
    return tuple(mesh_of(one, case.sharding.inner) for one in sizes)


def can_pass_wrapper(case: Case) -> bool:
    """Return True if what a wrapper does to a module's inputs and outputs changes no number."""
    own = case.model.user is None and case.training.compile == "none"
    return own and case.precision.compute == "fp32"


def estimated(case: Case) -> bool:
    """Return True if bounds are estimated, since kernels differ from those of one device.

    That is the case if the model is compiled, or its activations are split.
    """
    return case.training.compile != "none" or case.axes.parts("activations") > 1
