"""Provenance of copies that ranks hold, and that are not what they were to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ...case.schema import Case
from ..assemble import Observation, RoleState
from ..compare import different_bits, same_bits
from ..layout import ParameterLayout
from ..manifest_plan import ManifestPlan
from .facts import Facts
from .known_vectors import lines_of, models, of_step, scopes_of
from .values import Source
from .vector import Known, provenance


class RankVector(NamedTuple):
    """Flat vector of one rank, right where the rank has no element."""

    rank: int
    observed: torch.Tensor
    wrong: torch.Tensor
    """Mask of the wrong elements."""
    held: torch.Tensor | None = None
    """Mask of the elements that the rank has; None: all."""


def rank_vectors(held: RoleState, whole: torch.Tensor) -> Iterator[RankVector]:
    """Iterate over the ranks whose shards differ from the right vector."""
    for rank, (part, plan) in enumerate(zip(held.parts, held.plans, strict=True)):
        if same_bits(part, plan.gather(whole)):
            continue
        observed = whole.clone()
        plan.scatter(observed, part)
        yield RankVector(rank, observed, different_bits(observed, whole), mask_of(plan, whole))


def mask_of(plan: ManifestPlan, whole: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of the elements that a rank has; None: all."""
    if plan.index is None:
        return None
    mask = torch.zeros(len(whole), dtype=torch.bool)
    mask[plan.index] = True
    return mask


def by_rank(role: str, ranks: Sequence[RankVector], known: Known, layout: ParameterLayout) -> Facts:
    """Return facts on the wrong elements of some ranks. Ranks that hold one vector share them."""
    found: list[Facts] = []
    asked: list[tuple[RankVector, Facts]] = []
    for one in ranks:
        before = next((f for other, f in asked if same_bits(one.observed, other.observed)), None)
        if before is None:
            before = provenance(role, one.observed, one.wrong, known, layout, one.held)
            asked.append((one, before))
        facts = tuple(fact._replace(ranks=(one.rank,)) for fact in before.facts)
        found.append(before._replace(facts=facts))
    return Facts.joined(found)


def published_copies(
    role: str,
    held: RoleState,
    whole: torch.Tensor,
    observation: Observation,
    step: int,
    case: Case | None,
    right: str,
) -> str:
    """Return the provenance of copies after a step that are not the owner's, as one sentence.

    whole: the right values; right: their name, "owner's" or "master".
    """
    layout = observation.layout
    words = {
        "owner": ("the owner's", "the owners'"),
        "master": ("its master rounded", "their masters rounded"),
    }[right]
    known = Known(
        Source(*words, whole),
        list(earlier_steps(observation, role, step, case)),
        factors=number_of_ranks(observation.world_size),
        lines=lines_of(observation, ""),
        scopes=scopes_of(observation, step, ""),
    )
    facts = by_rank(role, list(rank_vectors(held, whole)), known, layout)
    return facts.sentence(observation.world_size)


def earlier_steps(
    observation: Observation, role: str, step: int, case: Case | None
) -> Iterator[Source]:
    """Iterate over a role after earlier steps, and before training."""
    for number in range(step - 1, observation.first - 2, -1):
        held = observation.held(number, "state", role)
        if held is not None:
            yield of_step(held.whole.nan_to_num(nan=0.0), number, step)
    if case is not None and role == "parameter":
        yield from models(case, observation.layout)


def number_of_ranks(world_size: int) -> dict[float, str]:
    """Return the number of ranks as a factor, with its words."""
    return {float(world_size): "the number of ranks"} if world_size > 1 else {}
