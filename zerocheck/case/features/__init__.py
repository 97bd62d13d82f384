"""Every dimension of a case as named features: the rows of the coverage table, and --feature.

- `model.py`: features of the model: zerocheck's own, or the user's
- `options.py`: features of options that adapters declare
- `resume.py`: features of checkpoints, and of disturbances of a run
- `row.py`: one feature, and tables of them
- `sharding.py`: features of sharding: each is about a field that an implementation may ignore
- `training.py`: features of the data, the optimizer, the start, and how a step is taken
- `world.py`: features of the ranks: their number, their hosts, and the divisibility of sizes
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import chain

from ...errors import unknown
from ..mesh import INNER
from ..schema import Case, Optimizer, TrainingSegment
from .model import MODEL, OF_PARAMETERS
from .options import of_dimension
from .resume import DISTURBANCE, RESUME
from .row import Feature, Present
from .sharding import SHARDING
from .training import DATA, OF_OPTIMIZERS, OPTIMIZER, START, TRAINING
from .world import OF_AXIS, WORLD

FEATURES: dict[str, Feature] = {
    row.name: row
    for row in chain(
        WORLD,
        MODEL,
        DATA,
        OPTIMIZER,
        START,
        TRAINING,
        SHARDING,
        of_dimension("sharding"),
        RESUME,
        of_dimension("resume"),
        DISTURBANCE,
    )
}
"""Name -> feature, in the order of the coverage table."""

OF_STEPS = tuple(name for name, row in FEATURES.items() if row.dimension != "resume")
"""Names of the features that cases without checkpoints have."""

COMPILED = frozenset(("compile", "compile-aot", "compile-inductor"))
"""Names of those that only cases with a compiled model have, which are slow."""

OF_INNER_AXES = frozenset(name for axis in INNER for name in OF_AXIS[axis])
"""Names of those that only meshes with an inner axis have; their cases are slow."""

IN_PAIRS = tuple(name for name in OF_STEPS if name not in COMPILED | OF_INNER_AXES)
"""Names of the features of which a covering array has all pairs."""

OF_PRECISION = frozenset(
    ("compute-bf16", "compute-fp16", "reduce-narrow", "reduce-narrower", "reduce-wide")
)
"""Names of those that no case in fp32 has."""

OF_RESUME = tuple(name for name, row in FEATURES.items() if row.dimension == "resume")
"""Names of those that only cases with checkpoints have."""

BASIC = "basic"
GROUPS = (BASIC, *dict.fromkeys(row.dimension for row in FEATURES.values()))
"""What tests are grouped by: what needs no feature, then each dimension of features."""


def features(case: Case) -> tuple[str, ...]:
    """Return the names of the features that the case has, in the order of the table."""
    return tuple(name for name, feature in FEATURES.items() if feature.present(case))


def found_by_looking(name: str) -> bool:
    """Return True if a feature of the user's own model is recorded when the model is inspected.

    Others of models follow from its parameters.
    """
    return FEATURES[name].dimension == "model" and name not in OF_PARAMETERS


def feature(name: str) -> Feature:
    """Return the feature of that name. Raises UsageError with the nearest one."""
    if name not in FEATURES:
        raise unknown("feature", name, FEATURES)
    return FEATURES[name]


@cache
def _plain(options: Optimizer, *, resumed: bool) -> frozenset[str]:
    """Return the features of the default case with this optimizer."""
    resume = (TrainingSegment(),) if resumed else ()
    return frozenset(features(Case(optimizer=options, resume=resume)))


def groups(case: Case, ignored: Collection[str] = ()) -> frozenset[str]:
    """Return the GROUPS that describe the case: BASIC, and those that depart from the default.

    ignored: features of options that the implementation does not obey. The default of a resumed
    case saves and loads on 2 ranks.
    """
    usual = Optimizer(kind=case.optimizer.kind, user=case.optimizer.user)
    plain = _plain(usual, resumed=bool(case.resume))
    departs = (name for name in features(case) if name not in plain and name not in ignored)
    return frozenset((BASIC, *(FEATURES[name].dimension for name in departs)))


__all__ = [
    "BASIC",
    "COMPILED",
    "FEATURES",
    "GROUPS",
    "IN_PAIRS",
    "OF_AXIS",
    "OF_INNER_AXES",
    "OF_OPTIMIZERS",
    "OF_PRECISION",
    "OF_RESUME",
    "OF_STEPS",
    "Feature",
    "Present",
    "feature",
    "features",
    "found_by_looking",
    "groups",
]
