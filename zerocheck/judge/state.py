"""State of an implementation at one moment, assembled from all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ..case.schema import Case
from ..contract.shard import Role
from ..contract.start import initial_state
from ..optimizers import optimizer_of
from ..protocol.observations import Point
from . import vectors
from .assemble import Observation, RoleState
from .layout import ParameterLayout
from .manifest_plan import ManifestPlan
from .pieces import Positions, in_pieces, split


class StartState(NamedTuple):
    """State that must be held before the first step.

    parameter: flat vector; moments: by role, none if the state was not restored; counts: steps
    taken, per parameter in layout order.
    """

    parameter: torch.Tensor
    moments: Mapping[Role, torch.Tensor]
    counts: list[float]

    @classmethod
    def of(
        cls,
        case: Case,
        model: nn.Module,
        layout: ParameterLayout,
        *,
        restored: bool,
        rounded: torch.dtype | None = None,
    ) -> StartState:
        """Return the start of a case.

        restored: the case's state of mid-training was loaded; rounded: otherwise, dtype that
        parameters are cast to before masters are made from them.
        """
        state = initial_state(case, model) if restored else None
        flat = vectors.zeros(layout.size)
        moments: dict[Role, torch.Tensor] = {}
        if state:
            roles = optimizer_of(case.optimizer).states
            moments |= {role: vectors.zeros(layout.size) for role in roles}
        counts = [0.0] * len(layout.places)
        for position, (place, (name, parameter)) in enumerate(
            zip(layout.places, model.named_parameters(), strict=True)
        ):
            part = slice(place.start, place.stop)
            value = parameter if state is None else state[name, "parameter"]
            if state is None and rounded is not None:
                value = value.to(rounded)
            flat[part] = value.detach().reshape(-1)
            for role, vector in moments.items():
                if state is not None and (name, role) in state:
                    vector[part] = state[name, role].reshape(-1)
            if state is not None and (name, "step") in state:
                counts[position] = float(state[name, "step"])
        return cls(flat, moments, counts)


@dataclass(frozen=True)
class State:
    """Whole flat vectors (fp32, over all parameters) and the number of steps per parameter.

    parameter: where several ranks hold an element, that of the rank whose optimizer owns it, so
    that a copy that was not refreshed is told apart from a wrong update; of what has a master, the
    master. rounded: the same with masters rounded to the parameters' dtype, None without any;
    mastered: mask of the elements that have one, None for none. moments: zero where the
    optimizer has none yet; present[role]: names it has them for. steps: per parameter in layout
    order; None where ranks disagree. per_rank[r]: the parameters that rank r computes with.
    """

    parameter: torch.Tensor
    per_rank: list[torch.Tensor]
    moments: Mapping[str, torch.Tensor]
    present: Mapping[str, frozenset[str]]
    steps: list[float | None]
    rounded: torch.Tensor | None = None
    mastered: torch.Tensor | None = None
    owners: tuple[ManifestPlan, ...] = ()
    """Where the first moment of each rank lies, if no two ranks have the same elements."""

    @property
    def published(self) -> torch.Tensor:
        """Parameters that all ranks compute with: masters are rounded."""
        return self.parameter if self.rounded is None else self.rounded

    @classmethod
    def observed(cls, observation: Observation, step: int, point: Point = "state") -> State:
        """Assemble the state after `step` (-1: before the first); point: "saved", after saving."""
        held = observation.held(step, point, "parameter")
        assert held is not None, "ownership checks that parameters are shown"
        moments: dict[str, torch.Tensor] = {}
        present: dict[str, frozenset[str]] = {}
        owners: RoleState | None = None
        for role in observation.states:
            moment = observation.held(step, point, role)
            if moment is None:
                continue
            owners = owners or moment
            present[role] = moment.present
            covered = moment.covered()
            # Only what nobody holds is 0: a NaN that somebody holds stays one.
            if covered is None or bool(covered.all()):
                moments[role] = moment.whole
            else:
                moments[role] = vectors.copy(moment.whole).masked_fill_(~covered, 0.0)
        copies = _by_owner(held, owners)
        masters = observation.held(step, point, "master")
        parameter, rounded, mastered = copies, None, None
        if masters is not None:
            covered = masters.covered()
            mastered = covered if covered is not None else torch.ones_like(copies, dtype=torch.bool)
            dtype = observation.dtype(step, point, "parameter")
            parameter, rounded = vectors.copy(copies), vectors.copy(copies)
            for here in split(len(copies)):
                known = mastered[here]
                parameter[here][known] = masters.whole[here][known]
                rounded[here][known] = parameter[here][known].to(dtype).to(copies.dtype)
        return cls(
            parameter=parameter,
            rounded=rounded,
            mastered=mastered,
            per_rank=_per_rank(held, copies),
            moments=moments,
            present=present,
            steps=_steps(observation, step, point),
            owners=owners.plans if owners is not None and owners.held_once else (),
        )

    def moment(self, role: str) -> torch.Tensor:
        """Return the flat vector of a moment; zeros if the optimizer has none."""
        moment = self.moments.get(role)
        if moment is not None:
            return moment
        if in_pieces(None, len(self.parameter)):  # one zero for all elements
            return torch.zeros((), dtype=self.parameter.dtype).expand(len(self.parameter))
        return torch.zeros_like(self.parameter)

    def values(self, roles: Iterable[str], elements: Positions | None) -> dict[str, torch.Tensor]:
        """Return some elements of the moments of these roles, float64."""
        return {role: float64(self.moment(role), elements) for role in roles}


def float64(vector: torch.Tensor, elements: Positions | None) -> torch.Tensor:
    """Return some elements of a vector in float64, all for None."""
    return (vector if elements is None else vector[elements]).to(torch.float64)


def _by_owner(held: RoleState, owners: RoleState | None) -> torch.Tensor:
    """Return the parameters, each element from the rank that holds its first state."""
    if owners is None or not held.whole_everywhere or owners.whole_everywhere:
        return held.whole
    first = held.parts[0]
    if all(torch.equal(first, part) for part in held.parts[1:]):
        return first
    whole = vectors.copy(held.whole)
    for part, plan in zip(reversed(held.parts), reversed(owners.plans), strict=True):
        if plan.index is None:
            whole.copy_(part)
        else:
            whole[plan.index] = part[plan.index]
    return whole


def _per_rank(held: RoleState, whole: torch.Tensor) -> list[torch.Tensor]:
    """Return, per rank, its own copy where it holds all, else the assembled one.

    On a mesh with a replicate axis that is its replica's; one object if bits agree.
    """
    per_rank: list[torch.Tensor] = []
    for rank, (part, plan) in enumerate(zip(held.parts, held.plans, strict=True)):
        if held.replicated is not None and plan.index is not None:
            of_replica = held.as_of(rank)
            per_rank.append(whole if of_replica is held.whole else of_replica)
            continue
        mine = plan.index is None and part is not whole and not torch.equal(part, whole)
        per_rank.append(part if mine else whole)
    return per_rank


def _steps(observation: Observation, step: int, point: Point) -> list[float | None]:
    ranks = observation.scalars(step, "step", point)
    result: list[float | None] = []
    for place in observation.layout.places:
        values = {rank[place.name] for rank in ranks if place.name in rank}
        result.append(values.pop() if len(values) == 1 else None if values else 0.0)
    return result
