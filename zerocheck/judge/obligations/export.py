"""Obligation: exported tensors equal the shards' contents, bit for bit, role by role."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ... import causes as bugs
from ...protocol.verdicts import Violation, merge_violations, with_attribution
from ..assemble import Observation
from ..attribution.exports import Exported, exported_state
from ..attribution.guard import guarded
from ..compare import different_bits
from ..diagnose.named import if_named, named
from ..diagnose.resume import export_causes
from ..layout import ParameterLayout, ParameterPlace
from ..state import State


def check_export(
    observation: Observation, layout: ParameterLayout, state: State, step: int
) -> Violation | None:
    """Check every exported tensor, on every rank that has any, against the shards.

    state: what all ranks hold. A parameter must be there, frozen or not; of the optimizer what it
    has; nothing that the model does not have. A role that is not exported at all is let pass, but
    for the parameters. A parameter that is given in a narrow dtype is what ranks compute with, and
    else its master.
    """
    found: list[Violation] = []
    wrong: list[Exported] = []
    for role in ("parameter", *observation.states, "step", "buffer"):
        ranks = observation.by_name(step, "export", role)
        if not any(ranks):
            if role == "parameter":
                text = "export() gives no parameter at all"
                found.append(_violation(step, role, (), (), text, ()))
            continue
        narrow = observation.narrow(step, "export", role)
        for rank, given in enumerate(ranks):
            if given:
                here = [*_check(observation, layout, state, step, role, rank, given, narrow[rank])]
                wrong += [Exported(role, rank, given, narrow[rank])] if here else []
                found += here
    merged = merge_violations(found)
    if merged is None or not wrong:
        return merged
    text = guarded(lambda: exported_state(wrong, state, observation, step))
    return with_attribution(merged, text)


def _check(
    observation: Observation,
    layout: ParameterLayout,
    state: State,
    step: int,
    role: str,
    rank: int,
    given: dict[str, torch.Tensor],
    narrow: frozenset[str],
) -> Iterator[Violation]:
    known = layout.buffers if role == "buffer" else layout.by_name
    for name in given:
        if name not in known:
            text = f"export() gives a {role} of {name!r}, which the model does not have"
            yield _violation(step, role, (name,), (rank,), text, (bugs.UNKNOWN_NAME,))
    if role == "buffer":
        yield from _buffers(observation, step, rank, given)
        return
    for position, place in enumerate(layout.places):
        held = _held(state, role, position, place, copy=place.name in narrow)
        got = given.get(place.name)
        if got is None:
            if role == "parameter" or bool((held != 0).any()):
                text = f"export() leaves out the {role} of {place.name}"
                yield _violation(step, role, (place.name,), (rank,), text, (bugs.LEFT_OUT,))
            continue
        if got.numel() != held.numel():
            text = (
                f"export() gives {place.name} a {role} of {got.numel()} elements; "
                f"it has {held.numel()}"
            )
            yield _violation(step, role, (place.name,), (rank,), text, (bugs.WRONG_SHAPE,))
            continue
        got = got.to(held.dtype)
        different = different_bits(got, held)
        if bool(different.any()):
            yield _difference(layout, state, step, role, rank, place, got, held, different)


def _held(
    state: State, role: str, position: int, place: ParameterPlace, *, copy: bool
) -> torch.Tensor:
    if role == "step":
        return torch.tensor([state.steps[position] or 0.0])
    vector = state.published if copy else state.parameter
    if role != "parameter":
        vector = state.moment(role)
    return vector[place.start : place.stop]


def _difference(
    layout: ParameterLayout,
    state: State,
    step: int,
    role: str,
    rank: int,
    place: ParameterPlace,
    got: torch.Tensor,
    held: torch.Tensor,
    different: torch.Tensor,
) -> Violation:
    first = int(different.nonzero()[0])
    _, index = layout.at(place.start + first) if role != "step" else (place, ())
    return Violation(
        obligation="export",
        step=step,
        role=role,
        tensors=(place.name,),
        ranks=(rank,),
        element=index,
        observed=float(got[first]),
        expected=float(held[first]),
        bound=0.0,
        wrong=int(torch.count_nonzero(different)),
        total=held.numel(),
        explanation=f"export() gives another {role} of {place.name} than the shards hold",
        causes=export_causes(got, held, place, role, state, layout) if named() else (),
    )


def _buffers(
    observation: Observation, step: int, rank: int, given: dict[str, torch.Tensor]
) -> Iterator[Violation]:
    """Check that each buffer is that of the rank itself, or of one rank."""
    held = observation.buffers(step)
    for name in held[rank]:
        if name not in given:
            text = f"export() leaves out the buffer {name!r}"
            yield _violation(step, "buffer", (name,), (rank,), text, (bugs.LEFT_OUT,))
        elif not any(torch.equal(given[name].reshape(-1), one[name].reshape(-1)) for one in held):
            text = f"export() gives buffer {name!r} values that no rank holds"
            yield _violation(step, "buffer", (name,), (rank,), text, (bugs.BUFFER_OF_NO_RANK,))


def _violation(
    step: int,
    role: str,
    names: tuple[str, ...],
    ranks: tuple[int, ...],
    text: str,
    causes: tuple[str, ...],
) -> Violation:
    return Violation(
        obligation="export",
        step=step,
        role=role,
        tensors=names,
        ranks=ranks,
        explanation=text,
        causes=if_named(*causes),
    )
