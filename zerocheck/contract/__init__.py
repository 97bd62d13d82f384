"""Contract between zerocheck and the code under test."""

from .build import Built, BuiltImplementation
from .groups import grouped, groups
from .implementation import Implementation, Loader, Microbatch, Saving, Step, StepReport
from .semantics import Semantics
from .shard import Shard

__all__ = [
    "Built",
    "BuiltImplementation",
    "Implementation",
    "Loader",
    "Microbatch",
    "Saving",
    "Semantics",
    "Shard",
    "Step",
    "StepReport",
    "grouped",
    "groups",
]
