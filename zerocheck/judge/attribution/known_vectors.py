"""Known vectors of a case: models before training or a load, states of steps, shards of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ...case.schema import Case
from ...contract.start import initial_state, scramble
from ...models.blocks import DTYPES
from ...models.network import build_model
from ..assemble import Observation
from ..flat import NOBODY, flat_buffers
from ..layout import ParameterLayout
from ..state import State
from .moved import StorageOrder
from .places import Scope
from .values import Source


def models(case: Case, layout: ParameterLayout) -> Iterator[Source]:
    """Iterate over the parameters of a model before training, and before a load."""
    model = build_model(case)
    built = flat_parameters(model, layout)
    restored = initial_state(case, model) is not None and case.training.first == 0
    yield from _with_rounded("the model as it was built", built, case)
    if restored or case.training.first:
        scramble(model, case)
        yield from _with_rounded("the model before the load", flat_parameters(model, layout), case)


def _with_rounded(words: str, vector: torch.Tensor, case: Case) -> Iterator[Source]:
    yield Source(f"is that of {words}", f"are those of {words}", vector)
    if case.precision.compute != "fp32":
        rounded = vector.to(DTYPES[case.precision.compute]).to(vector.dtype)
        dtype = case.precision.compute
        yield Source(
            f"is that of {words}, rounded to {dtype}",
            f"are those of {words}, rounded to {dtype}",
            rounded,
        )


def flat_parameters(model: nn.Module, layout: ParameterLayout) -> torch.Tensor:
    """Return the parameters of a model as one flat vector."""
    flat = torch.zeros(layout.size)
    for place, parameter in zip(layout.places, model.parameters(), strict=True):
        flat[place.start : place.stop] = parameter.detach().reshape(-1)
    return flat


def buffers_before_a_load(case: Case) -> dict[str, torch.Tensor]:
    """Return the buffers of a model before a load."""
    model = build_model(case)
    scramble(model, case)
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def of_role(state: State, role: str) -> torch.Tensor:
    """Return the flat vector of a role."""
    return state.parameter if role == "parameter" else state.moment(role)


def other_steps(role: str, states: Mapping[int, State], step: int) -> Iterator[Source]:
    """Iterate over a role after other steps than the one that was due."""
    for number in sorted(states, key=lambda one: abs(one - step)):
        if number == step or (role != "parameter" and role not in states[number].moments):
            continue
        yield of_step(of_role(states[number], role), number, step)


def of_step(vector: torch.Tensor, number: int, step: int) -> Source:
    """Return a vector after another step than the one that was due."""
    words = step_words(number, step)
    return Source(f"is that {words}", f"are those {words}", vector)


def step_words(number: int, step: int) -> str:
    """Return a step in words: "after step 1, one step earlier"."""
    away = abs(number - step)
    count = "one step" if away == 1 else f"{away} steps"
    when = f"after step {number}" if number >= 0 else "before the first step"
    return f"{when}, {count} {'earlier' if number < step else 'later'}"


def other_roles(role: str, state: State) -> Iterator[Source]:
    """Iterate over the other roles of a state, by name."""
    for other in state.moments:
        if other != role:
            yield Source(other, other, state.moment(other))
    if role != "parameter":
        yield Source("the parameter", "the parameters", state.parameter)


def lines_of(observation: Observation, words: str) -> list[StorageOrder]:
    """Return the flat buffers of the ranks as one line, without any the shards end to end.

    words: after "the ranks", such as "that saved".
    """
    buffers = flat_buffers(observation.ranks, observation.layout)
    on = f" on the ranks {words}" if words else ""
    if buffers:
        names = f"its flat buffer{on}", f"their flat buffers{on}"
        return [StorageOrder(*names, [one.shards for one in buffers])]
    scopes = scopes_of(observation, observation.first - 1, words)
    if not scopes:
        return []
    held = [scope.mask.nonzero().reshape(-1) for scope in scopes]
    shards = torch.full((len(held), max(map(len, held))), NOBODY, dtype=torch.int64)
    for row, positions in zip(shards, held, strict=True):
        row[: len(positions)] = positions
    name = f"the shards of all ranks{on}"
    return [StorageOrder(name, name, [shards])]


def scopes_of(observation: Observation, step: int, words: str) -> list[Scope]:
    """Return the shards of each rank, of the first role that is sharded.

    words: after the rank, such as "that saved".
    """
    for role in ("parameter", *observation.states):
        held = observation.held(step, "state", role)
        if held is None or held.whole_everywhere:
            continue
        scopes = []
        for rank, plan in enumerate(held.plans):
            mask = torch.zeros(observation.layout.size, dtype=torch.bool)
            mask[slice(None) if plan.index is None else plan.index] = True
            scopes.append(Scope(rank, words, mask))
        return scopes
    return []
