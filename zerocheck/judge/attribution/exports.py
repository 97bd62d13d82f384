"""Provenance of exported tensors that are not what the shards hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..assemble import Observation
from ..compare import different_bits
from ..layout import ParameterLayout
from ..state import State
from .carried import changed_buffers
from .copies import RankVector, by_rank
from .counts import step_counts
from .facts import Fact, Facts
from .known_vectors import lines_of, of_role, other_roles, scopes_of
from .places import Where, where
from .values import Source
from .vector import Known


class Exported(NamedTuple):
    """Tensors that one rank exported of one role."""

    role: str
    rank: int
    tensors: Mapping[str, torch.Tensor]
    """Flat, by name."""
    narrow: frozenset[str]
    """Names of those in a dtype narrower than fp32."""


def exported_state(
    exports: Sequence[Exported], state: State, observation: Observation, step: int
) -> str:
    """Return the provenance of what is wrong in some exports, as one sentence."""
    layout = observation.layout
    found: list[Facts] = []
    for role in dict.fromkeys(one.role for one in exports):
        same = [one for one in exports if one.role == role]
        if role == "buffer":
            held = observation.buffers(step)
            found.append(changed_buffers([one.tensors for one in same], held, "the rank's"))
            continue
        if role == "step":
            found += [_counts(one, state, layout, step) for one in same]
            continue
        right = _copied(state, layout, same[0].narrow) if role == "parameter" else None
        right = of_role(state, role) if right is None else right
        vectors = []
        for one in same:
            facts, vector = _assembled(one, right, layout)
            found.append(facts)
            if vector is not None:
                vectors.append(vector)
        known = Known(
            Source("the one that the shards hold", "those that the shards hold", right),
            list(_copies(state)) if role == "parameter" else [],
            list(other_roles(role, state)),
            {float(observation.world_size): "the number of ranks"},
            lines_of(observation, ""),
            scopes_of(observation, step, ""),
        )
        found.append(by_rank(role, vectors, known, layout))
    sentence = Facts.joined(found).sentence(observation.world_size)
    return sentence and f"in the export, {sentence}"


def _assembled(
    one: Exported, right: torch.Tensor, layout: ParameterLayout
) -> tuple[Facts, RankVector | None]:
    """Return facts on tensors that do not fit, and the flat vector of those that do."""
    observed = right.clone()
    missing, sizes = [], []
    for place in layout.places:
        given = one.tensors.get(place.name)
        size = place.stop - place.start
        needed = one.role == "parameter" or bool(right[place.start : place.stop].any())
        if given is None:
            missing.append(needed)
            continue
        missing.append(False)
        if given.numel() == size:
            observed[place.start : place.stop] = given.to(right.dtype)
        else:
            sizes.append((place.name, given.numel(), size))
    facts = []
    unknown = [name for name in one.tensors if name not in layout.by_name]
    for name in unknown:
        words = "not in the model"
        names = Where(name, False)
        facts.append(Fact(one.role, names, f"is {words}", f"are {words}", 1, (one.rank,)))
    if any(missing):
        mask = layout.spread(missing)
        every = torch.ones_like(mask) if one.role == "parameter" else right != 0
        place_words = where(mask, mask, every, layout)
        facts.append(
            Fact(one.role, place_words, "is missing", "are missing", sum(missing), (one.rank,))
        )
    for name, count, size in sizes:
        mask = layout.spread([place.name == name for place in layout.places])
        words = f"{count} elements, not {size}"
        facts.append(
            Fact(
                one.role,
                where(mask, mask, mask, layout),
                f"has {words}",
                f"have {words}",
                size,
                (one.rank,),
            )
        )
    wrong = different_bits(observed, right)
    vector = RankVector(one.rank, observed, wrong) if bool(wrong.any()) else None
    return Facts(tuple(facts), 0, 0), vector


def _counts(one: Exported, state: State, layout: ParameterLayout, step: int) -> Facts:
    due = [count or 0.0 for count in state.steps]
    given = [
        float(one.tensors[place.name].reshape(-1)[0]) if place.name in one.tensors else due[number]
        for number, place in enumerate(layout.places)
    ]
    facts = step_counts(given, due, layout, {}, step, "was due")
    return facts._replace(facts=tuple(f._replace(ranks=(one.rank,)) for f in facts.facts))


def _copied(state: State, layout: ParameterLayout, narrow: frozenset[str]) -> torch.Tensor:
    """Return the parameters, those in a narrow dtype as the ranks compute with them."""
    inside = layout.spread([place.name in narrow for place in layout.places])
    return torch.where(inside, state.published, state.parameter)


def _copies(state: State) -> list[Source]:
    if state.rounded is None:
        return []
    one = Source(
        "is the copy that ranks compute with", "are the copies that ranks compute with",
        state.rounded,
    )  # fmt: skip
    return [one]
