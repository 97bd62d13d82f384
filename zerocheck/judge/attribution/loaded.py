"""Provenance of a state that was loaded, or restored, and is not the right one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...case.schema import Case
from ..assemble import Observation
from ..compare import different_bits, same_bits
from ..state import StartState, State
from .counts import step_counts
from .facts import Facts
from .known_vectors import lines_of, models, of_role, other_roles, other_steps, scopes_of
from .values import Source
from .vector import Known, provenance


class SavedStates(NamedTuple):
    """States of the training that saved, and where its ranks had their shards."""

    step: int
    """Last step that the checkpoint holds."""
    state: State
    others: Mapping[int, State]
    """States after other steps."""
    observation: Observation | None
    """Observation of the ranks that saved, if it is known."""


def loaded_state(
    loaded: State,
    saved: SavedStates,
    wrong: Mapping[str, torch.Tensor],
    observation: Observation,
    case: Case,
) -> str:
    """Return the provenance of a state after a load, as one sentence.

    wrong: masks of the wrong elements by role; observation: of the ranks that loaded.
    """
    layout = observation.layout
    lines, scopes = [], []
    factors = {float(case.world_size): "the number of ranks that loaded"}
    if saved.observation is not None:
        lines = lines_of(saved.observation, "that saved")
        scopes = scopes_of(saved.observation, saved.step, "that saved")
        factors = {float(saved.observation.world_size): "the number of ranks that saved"} | factors
    factors.pop(1.0, None)
    first = case.training.first - 1
    found = []
    for role, mask in wrong.items():
        same_place = list(other_steps(role, saved.others, saved.step))
        if role == "parameter":
            same_place += models(case, layout)
            copies = saved.state.rounded
            if copies is not None and not _rounded(copies, saved.state.parameter):
                same_place.append(
                    Source(
                        "is the saved copy that ranks compute with",
                        "are the saved copies that ranks compute with",
                        copies,
                    )
                )
        known = Known(
            Source("the saved one", "the saved ones", of_role(saved.state, role)),
            same_place,
            list(other_roles(role, saved.state)),
            factors,
            [*lines, *lines_of(observation, "that loaded")],
            [*scopes, *scopes_of(observation, first, "that loaded")],
        )
        relevant = None if role == "parameter" else layout.trainable
        found.append(provenance(role, of_role(loaded, role), mask, known, layout, relevant))
    others = {number: state.steps for number, state in saved.others.items()}
    found.append(
        step_counts(loaded.steps, saved.state.steps, layout, others, saved.step, "was saved")
    )
    return Facts.joined(found).sentence()


def _rounded(copies: torch.Tensor, masters: torch.Tensor) -> bool:
    """Return True if the copies are the masters rounded, which other words say."""
    dtypes = (torch.bfloat16, torch.float16)
    return any(same_bits(masters.to(dtype).to(masters.dtype), copies) for dtype in dtypes)


def start_state(
    state: State, wanted: StartState, observation: Observation, case: Case, roles: Sequence[str]
) -> str:
    """Return the provenance of a wrong state before the first step, as one sentence.

    roles: those that are compared.
    """
    layout = observation.layout
    found = []
    vectors: dict[str, torch.Tensor] = {"parameter": wanted.parameter}
    vectors |= {str(role): vector for role, vector in wanted.moments.items()}
    for role in roles:
        right = vectors.get(role)
        right = torch.zeros(layout.size) if right is None else right
        observed = of_role(state, role)
        wrong = different_bits(observed, right)
        relevant = None if role == "parameter" else layout.trainable
        if relevant is not None:
            wrong &= relevant
        if not bool(wrong.any()):
            continue
        known = Known(
            Source("the right one", "the right ones", right),
            list(models(case, layout)) if role == "parameter" else [],
            [Source(other, other, vector) for other, vector in vectors.items() if other != role],
            {float(case.world_size): "the number of ranks"} if case.world_size > 1 else {},
            lines_of(observation, ""),
            scopes_of(observation, case.training.first - 1, ""),
        )
        found.append(provenance(role, observed, wrong, known, layout, relevant))
    found.append(step_counts(state.steps, wanted.counts, layout, {}, -1, "was due"))
    sentence = Facts.joined(found).sentence()
    return sentence and f"before the first step, {sentence}"
