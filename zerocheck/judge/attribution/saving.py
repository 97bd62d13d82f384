"""Provenance of what saving changed in the state of a training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..assemble import Observation
from ..compare import different_bits
from .carried import changed_buffers
from .copies import RankVector, by_rank, earlier_steps, mask_of, number_of_ranks
from .counts import step_counts
from .facts import Facts
from .known_vectors import lines_of, scopes_of
from .values import Source
from .vector import Known


def changed_by_saving(observation: Observation, step: int, roles: Sequence[str]) -> str:
    """Return the provenance of what `save` changed in these roles, as one sentence."""
    found = []
    for role in roles:
        if role == "step":
            found.append(_counts(observation, step))
        elif role == "buffer":
            before = observation.by_name(step, "state", role)
            found.append(changed_buffers(observation.by_name(step, "saved", role), before))
        else:
            found.append(_role(observation, step, role))
    sentence = Facts.joined(found).sentence(observation.world_size)
    return sentence and f"after saving, {sentence}"


def _role(observation: Observation, step: int, role: str) -> Facts:
    after = observation.held(step, "saved", role)
    if after is None:
        return Facts((), 0, 0)
    held = observation.held(step, "state", role)
    size = observation.layout.size
    whole = torch.zeros(size) if held is None else held.whole.nan_to_num(nan=0.0)
    vectors = []
    for rank, (part, plan) in enumerate(zip(after.parts, after.plans, strict=True)):
        before = whole if held is None else held.as_of(rank).nan_to_num(nan=0.0)
        observed = before.clone()
        plan.scatter(observed, part)
        wrong = different_bits(observed, before)
        if bool(wrong.any()):
            vectors.append(RankVector(rank, observed, wrong, mask_of(plan, whole)))
    others = []
    for other in ("parameter", *observation.states):
        there = None if other == role else observation.held(step, "state", other)
        if there is not None:
            name = "the parameter" if other == "parameter" else other
            others.append(Source(name, name, there.whole.nan_to_num(nan=0.0)))
    known = Known(
        Source("the one before", "those before", whole),
        list(earlier_steps(observation, role, step, None)),
        others,
        number_of_ranks(observation.world_size),
        lines_of(observation, ""),
        scopes_of(observation, step, ""),
    )
    return by_rank(role, vectors, known, observation.layout)


def _counts(observation: Observation, step: int) -> Facts:
    layout, found = observation.layout, []
    before = observation.scalars(step, "step")
    for rank, after in enumerate(observation.scalars(step, "step", "saved")):
        due = [before[rank].get(place.name, 0.0) for place in layout.places]
        counts = [after.get(p.name, due[n]) for n, p in enumerate(layout.places)]
        facts = step_counts(counts, due, layout, {}, step, "was before", held=after)
        owned = tuple(fact._replace(ranks=(rank,)) for fact in facts.facts)
        found.append(facts._replace(facts=owned))
    return Facts.joined(found)
