"""User's own optimizer as that of every case: `--optimizer`, or `fixed = {"optimizer": ...}`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...case.schema import Case, UserOptimizer
from ...case.validity import check
from ...catalogue import check_factory
from ...errors import UsageError
from ...protocol.replies import Description
from .rank_pool import RankPool
from .rank_requests import look_at_optimizer


def with_optimizers(
    ranks: RankPool, described: Mapping[str, Description], asked: str | None, *, world_size: int
) -> dict[str, Description]:
    """Add the user's optimizer to the fixed fields that the implementations declare.

    asked: of the run, the location of a class or the name of an optimizer that zerocheck brings.
    Each class is inspected once, in a rank process. Raises UsageError for one that cannot be
    judged, or that does not go with what an implementation fixes.
    """
    looked: dict[str, UserOptimizer] = {}
    found = {}
    for name, one in described.items():
        location = _location(name, one.fixed.get("optimizer"), asked)
        if location is None:
            found[name] = one
            continue
        if location not in looked:
            looked[location] = look_at_optimizer(ranks, location, world_size=world_size)
        given = one.fixed.get("optimizer")
        fields = given if isinstance(given, Mapping) else {}
        user = msgspec.to_builtins(looked[location])
        optimizer = {**fields, "kind": "user", "user": user}
        found[name] = msgspec.structs.replace(one, fixed={**one.fixed, "optimizer": optimizer})
    return found


def case_with_optimizer(ranks: RankPool, case: Case, location: str, *, world_size: int) -> Case:
    """Replace the user's optimizer in a case by the class at a location, as it is now.

    Raises UsageError where the rest of the case does not go with it.
    """
    user = look_at_optimizer(ranks, location, world_size=world_size)
    optimizer = msgspec.structs.replace(case.optimizer, user=user)
    case = msgspec.structs.replace(case, optimizer=optimizer)
    check(case)
    return case


def _location(name: str, fixed: object, asked: str | None) -> str | None:
    """Return the class that an implementation is checked with, or None for another optimizer."""
    of_run = asked if asked is not None and ":" in asked else None
    if isinstance(fixed, str):
        check_factory(fixed, "optimizer")
        if asked is not None and asked != fixed:
            raise UsageError(
                f"--optimizer {asked}: {name} has the optimizer {fixed} of its own (fixed)"
            )
        return fixed
    kind = fixed.get("kind") if isinstance(fixed, Mapping) else None
    if of_run is not None and kind not in (None, "user"):
        raise UsageError(
            f"--optimizer {asked}: {name} has {kind} (fixed optimizer.kind); leave one of the two "
            "out"
        )
    return of_run
