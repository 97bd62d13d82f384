"""Which cases a fault is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from functools import cache

from msgspec.structs import replace
from slices import sliced

from zerocheck.case.drawing import draw
from zerocheck.case.features import COMPILED, OF_INNER_AXES, OF_OPTIMIZERS, OF_PRECISION, features
from zerocheck.case.features import features as names
from zerocheck.case.resume import draw_resumed
from zerocheck.case.schema import Case
from zerocheck.catalogue import family
from zerocheck.faults import other_optimizers
from zerocheck.faults.fault import Fault
from zerocheck.protocol.verdicts import RESUME
from zerocheck.run.known_issues.entries import ours

MOST = 12
"""Cases until a fault must have been caught."""

DELAY = 2.0
"""Milliseconds, as cases are drawn that have delays."""

KINDS = {
    feature: kind
    for kind, of_kind in OF_OPTIMIZERS.items()
    for feature in of_kind
    if sum(feature in others for others in OF_OPTIMIZERS.values()) == 1
}
"""Kind of optimizer, by each feature that it alone has."""

MISSED = 1e-6
"""Chance that the tests miss a fault that shows sometimes, though nothing is wrong with them."""


def optimizer_of(features: Collection[str]) -> str:
    """Return the kind of optimizer that the features ask for."""
    return next((KINDS[one] for one in features if one in KINDS), "adamw")


def optimizer_of_fault(fault: Fault) -> str:
    """Return the optimizer that a fault is of, as JSON: what its class fixes, or its features."""
    module, _, name = fault.where.partition(":")
    if module == other_optimizers.__name__:
        fixed = getattr(other_optimizers, name).fixed["optimizer"]
        return json.dumps({key: fixed[key] for key in ("kind", "user") if key in fixed})
    return json.dumps({"kind": optimizer_of(fault.features)})


def repetitions(fault: Fault) -> int:
    """How often each of MOST cases is run, so that a fault with this share is MISSED rarely.

    Of n runs in all none shows it with the chance (1 - share)^n. Of the share, which was measured
    on a busy machine, half is counted on, since machines differ; of the cases a third, since an
    implementation may not support the others.
    """
    if fault.sometimes == 1.0:
        return 1
    runs = math.log(MISSED) / math.log(1 - fault.sometimes / 2)
    return math.ceil(runs / (MOST / 3))


@cache
def drawn(
    world_size: int,
    microbatches: int,
    *,
    restored: bool = False,
    delays: bool = False,
    replicates: bool = False,
    narrower: bool = False,
    optimizer: str = '{"kind": "adamw"}',
) -> list[tuple[Case, frozenset[str]]]:
    """Cases with their features; of the first step only, unless a fault needs a start in
    mid-training, so that every implementation runs them. All have `delays`, or it is left to
    chance. replicates: on meshes with several ranks on both axes; narrower: in fp32, and reduced in
    bf16; optimizer: its fields, in JSON.
    """
    fixed: dict[str, object] = {} if restored else {"start": {"step": 0, "moments": "zero"}}
    if optimizer != '{"kind": "adamw"}':
        fixed["optimizer"] = json.loads(optimizer)
    if delays:  # one of 25 has them, which is not enough
        fixed["disturbance"] = {"delay": DELAY}
    if narrower:  # as rare
        fixed["precision"] = {"compute": "fp32", "reduce": "bf16"}
    if microbatches > 1:
        fixed["training"] = {"microbatches": microbatches}
    sizes = () if replicates else (world_size,)
    cases = draw(
        700, seed=world_size, world_sizes=sizes, fixed=fixed, meshes=_meshes(world_size, replicates)
    )
    # Of a slice the shortest come first.
    ordered = sliced(cases[1:], sorted(cases[1:], key=_passes))
    return [(case, frozenset(features(case))) for case in ordered]


def _passes(case: Case) -> tuple[bool, int]:
    """Blocks that are gone through, in all steps; last where there is no step before another, or
    one tensor only, since then several causes explain what is seen."""
    answer = case.training.steps > 2 and len(case.model.blocks) > 1
    blocks = (1 + len(case.model.blocks)) * case.training.microbatches * case.training.steps
    return not answer, blocks


@cache
def resumed(
    world_size: int, features: tuple[str, ...], without: tuple[str, ...], optimizer: str
) -> list[Case]:
    """Cases with checkpoints, saved and loaded on this world size and the next two. Nothing is
    killed or damaged unless a fault needs it; writers are killed in the middle, where a fault shows
    nearly always."""
    wanted = [name for name in features if name not in _TRIED]
    tried = [name for name in features if name in _TRIED]
    cases = draw_resumed(
        MOST if tried else 2 * MOST,
        seed=world_size,
        world_sizes=(world_size, world_size + 1, world_size + 2),
        fixed={"start": {"step": 0, "moments": "zero"}, "optimizer": json.loads(optimizer)},
        having=(*wanted, *tried),
    )
    cases = [
        replace(case, resume=(*case.resume[:-1], replace(case.resume[-1], killed=0.5)))
        if case.resume[-1].killed is not None
        else case
        for case in cases
    ]
    has = [(case, set(names(case))) for case in cases]
    return [
        case
        for case, names_ in has
        if not names_ & set(without)
        and (tried or not names_ & set(_TRIED))
        and _as_plain_as_can_be(names_, features)
    ]


def _as_plain_as_can_be(has: Collection[str], wanted: Collection[str]) -> bool:
    """In fp32, not compiled and no layer sharded over tp, unless the fault needs that."""
    return all(
        not rare.isdisjoint(wanted) or rare.isdisjoint(has)
        for rare in (OF_PRECISION, COMPILED, OF_INNER_AXES)
    )


def _has_known_issue(fault: Fault, case: Case) -> bool:
    """Whether the parent is known to be wrong there, by features that the fault does not need."""
    return any(
        issue.implementation in family(fault.parent)
        and issue.features
        and not set(issue.features) <= set(fault.features)
        and issue.covers(case)
        for issue in ours()
    )


def _meshes(world_size: int, replicates: bool) -> list[tuple[int, int]]:
    sizes = [size for size in range(2, world_size) if world_size % size == 0]
    return [(world_size // size, size) for size in sizes] if replicates else []


_TRIED = ("resume-killed", "resume-flip", "resume-truncate", "resume-remove", "resume-mix")


def cases_for(fault: Fault) -> Iterator[Case]:
    """Up to MOST cases, of the smallest world size that shows it and of the next."""
    if fault.obligation in RESUME:
        optimizer = optimizer_of_fault(fault)
        yield from resumed(fault.world, fault.features, fault.without, optimizer)[:MOST]
        return
    replicates = "two-axes" in fault.features
    queues = [
        (
            case
            for case, has in drawn(
                size,
                fault.microbatches,
                restored="mid-training" in fault.features,
                delays="delays" in fault.features,
                replicates=replicates,
                narrower="reduce-narrower" in fault.features,
                optimizer=optimizer_of_fault(fault),
            )
            if set(fault.features) <= has
            and not has & set(fault.without)
            and _as_plain_as_can_be(has, fault.features)
            and not _has_known_issue(fault, case)
        )
        for size in (fault.world, fault.world + (2 if replicates else 1))
    ]
    for position in range(MOST):
        # The larger team is slower, and needed only to tell causes apart.
        case = next(queues[position % 3 == 1], None)
        if case is not None:
            yield case
