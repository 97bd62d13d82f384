"""The contract between zerocheck and the code under test."""

from .build import Built, BuiltImplementation
from .groups import grouped, groups
from .implementation import Implementation, Microbatch, Step, StepReport
from .semantics import Semantics
from .shard import Shard

__all__ = [
    "Built",
    "BuiltImplementation",
    "Implementation",
    "Microbatch",
    "Semantics",
    "Shard",
    "Step",
    "StepReport",
    "grouped",
    "groups",
]
