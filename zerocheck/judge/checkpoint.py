"""Obligation: what is loaded is what was saved, bit for bit, and saving changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from .. import causes as bugs
from ..case.schema import Case
from ..case.segments import end_of
from ..causes.registry import said
from ..protocol.verdicts import Explanation, Violation, merge_violations, with_attribution
from .assemble import Observation
from .attribution.carried import data_position, loaded_buffers, loss_scale, random_states
from .attribution.guard import guarded
from .attribution.loaded import SavedStates, loaded_state
from .attribution.saving import changed_by_saving
from .compare import different_bits, same_bits
from .diagnose.named import if_named, named
from .diagnose.resume import (
    ResumeEvidence,
    Wrong,
    causes,
    causes_by_tensor,
    data_causes,
    explained,
    of_steps,
    random_causes,
)
from .layout import ParameterLayout
from .state import State


@dataclass(frozen=True)
class Checkpoint:
    """State that the ranks held when they saved.

    step: the last one that it holds; state, buffers (per rank), random (per rank, or empty);
    samples: read by all ranks by then; scale: of the losses of the next step; others: {step: the
    state after it} of the same training, for the diagnosis; older: the checkpoint that this one
    was to replace, of the state before the segment; observation: of the ranks that saved, for the
    attribution.
    """

    step: int
    state: State
    buffers: list[dict[str, torch.Tensor]]
    random: list[bytes]
    samples: int
    scale: float
    others: Mapping[int, State]
    older: Checkpoint | None = None
    observation: Observation | None = None

    @classmethod
    def of(cls, observation: Observation, case: Case, *, before: int, samples: int) -> Checkpoint:
        """Return a segment's saved state, from its observation.

        before, samples: read by all ranks when the segment began, and when it saved.
        """
        step = case.training.steps - 1
        first = case.training.first - 1
        states = {
            number: State.observed(observation, number)
            for number in range(first, end_of(case))
            if observation.held(number, "state", "parameter") is not None
        }
        older = None
        if case.resume[0].over:
            # What it holds is what saving it left: see compare_saved.
            held = State.observed(observation, first, "saved")
            older = cls(first, held, observation.buffers(first), [], before, 1.0, {})
        return cls(
            step,
            states.pop(step),
            observation.buffers(step),
            [one.checkpoint.random.get("saved", b"") for one in observation.ranks],
            samples,
            _next_scale(observation, step),
            states,
            older,
            observation,
        )


def compare_loaded(
    saved: Checkpoint,
    loaded: State,
    observation: Observation,
    layout: ParameterLayout,
    case: Case,
    *,
    attributed: bool = True,
) -> Violation | None:
    """Compare the state before a segment's first step with the checkpoint that it loaded.

    attributed: False where a difference is no violation yet, so that nothing is looked up.
    """
    roles = [_compared("parameter", loaded.parameter, saved.state.parameter, layout)]
    for role in dict.fromkeys((*saved.state.moments, *loaded.moments)):
        roles.append(_compared(role, loaded.moment(role), saved.state.moment(role), layout))
    wrong_steps = _wrong_steps(loaded, saved.state, layout)
    wrong = [role for role in roles if bool(role.different.any())]
    found: list[Violation | None] = []
    if wrong or wrong_steps:
        violation = _state_violation(wrong, wrong_steps, saved, loaded, layout, case)
        if attributed:
            states = SavedStates(saved.step, saved.state, saved.others, saved.observation)
            masks = {one.role: one.different for one in wrong}
            text = guarded(lambda: loaded_state(loaded, states, masks, observation, case))
            violation = with_attribution(violation, text)
        found.append(violation)
    found.append(_buffers(saved, observation, case, attributed=attributed))
    found.append(_loss_scale(saved, observation, case))
    found += _loader_and_rng(saved, observation)
    return merge_violations([one for one in found if one is not None])


def compare_saved(observation: Observation, step: int) -> Violation | None:
    """Compare the state after `save` with the state before it: saving changes nothing."""
    found: list[Violation] = []
    for role in ("parameter", *observation.states, "step", "buffer"):
        before = observation.by_name(step, "state", role)
        after = observation.by_name(step, "saved", role)
        for rank, (one, other) in enumerate(zip(before, after, strict=True)):
            names = [
                name for name in one if name not in other or not same_bits(one[name], other[name])
            ]
            names += [name for name in other if name not in one and bool((other[name] != 0).any())]
            if names:
                stepped = role == "step" and all(
                    not bool(one[name].any() if name in one else 0)
                    and bool((other[name] == 1).all())
                    for name in names
                    if name in other
                )
                found.append(
                    Violation(
                        obligation="roundtrip",
                        step=step,
                        role=role,
                        tensors=tuple(names),
                        ranks=(rank,),
                        explanation=f"saving, or exporting, changed the {role} that training has",
                        causes=if_named(
                            bugs.CHANGED_BY_SAVING,
                            *((bugs.FIRST_STEP_COUNTED_BY_SAVING,) if stepped else ()),
                        ),
                    )
                )
    merged = merge_violations(found)
    if merged is None:
        return None
    roles = tuple(dict.fromkeys(one.role for one in found))
    return with_attribution(merged, guarded(lambda: changed_by_saving(observation, step, roles)))


def _compared(
    role: str, loaded: torch.Tensor, saved: torch.Tensor, layout: ParameterLayout
) -> Wrong:
    different = different_bits(loaded, saved)
    if role != "parameter":
        different &= layout.trainable
    return Wrong(role, loaded, saved, different)


def _wrong_steps(loaded: State, saved: State, layout: ParameterLayout) -> list[int]:
    """Positions of the parameters whose step count differs."""
    return [
        position
        for position, place in enumerate(layout.places)
        if place.trainable
        and place.stop > place.start
        and loaded.steps[position] != saved.steps[position]
    ]


def _state_violation(
    wrong: Sequence[Wrong],
    wrong_steps: Sequence[int],
    saved: Checkpoint,
    loaded: State,
    layout: ParameterLayout,
    case: Case,
) -> Violation:
    what = [one.role for one in wrong] + (["step"] if wrong_steps else [])
    steps = [(loaded.steps[n], saved.state.steps[n]) for n in wrong_steps]
    known = ResumeEvidence(saved.state, saved.others, saved.step, layout, case)
    names = causes(wrong, steps, known) if named() else ()
    text = f"after the load, {_listed(what)} {'is' if len(what) == 1 else 'are'} not what was saved"
    parts: list[Violation] = []
    if named() and not explained(names, wrong, steps, known):
        for one in wrong:
            for places, found in causes_by_tensor(one, known):
                inside = layout.spread([place in places for place in layout.places])
                part = one._replace(different=one.different & inside)
                of = f"after the load, {one.role} is not what was saved"
                parts.append(_role_violation(part, saved, layout, of, found))
        if wrong_steps:
            parts.append(
                _step_violation(wrong_steps, saved, loaded, layout, "", of_steps(steps, known))
            )
    violation = (
        _role_violation(wrong[0], saved, layout, text, names)
        if wrong
        else _step_violation(wrong_steps, saved, loaded, layout, text, names)
    )
    return msgspec.structs.replace(violation, parts=tuple(parts) if len(parts) > 1 else ())


def _step_violation(
    wrong_steps: Sequence[int],
    saved: Checkpoint,
    loaded: State,
    layout: ParameterLayout,
    text: str,
    names: tuple[str, ...],
) -> Violation:
    place = layout.places[wrong_steps[0]]
    explanation = Explanation.of(names, said(names), f"{text}: {place.name}")
    return Violation(
        obligation="roundtrip",
        step=saved.step,
        role="step",
        tensors=tuple(layout.places[n].name for n in wrong_steps),
        ranks=(),
        observed=loaded.steps[wrong_steps[0]],
        expected=saved.state.steps[wrong_steps[0]],
        wrong=len(wrong_steps),
        total=sum(place.trainable for place in layout.places),
        explanation=explanation.text,
        causes=names,
        sentences=explanation.sentences,
    )


def _role_violation(
    wrong: Wrong, saved: Checkpoint, layout: ParameterLayout, text: str, names: tuple[str, ...]
) -> Violation:
    element = int(wrong.different.nonzero()[0])
    _, index = layout.at(element)
    explanation = Explanation.of(names, said(names), text)
    return Violation(
        obligation="roundtrip",
        step=saved.step,
        role=wrong.role,
        tensors=layout.names_of(wrong.different),
        ranks=(),
        element=index,
        observed=float(wrong.loaded[element]),
        expected=float(wrong.saved[element]),
        bound=0.0,
        wrong=int(torch.count_nonzero(wrong.different)),
        total=layout.size,
        explanation=explanation.text,
        causes=names,
        sentences=explanation.sentences,
    )


def _buffers(
    saved: Checkpoint, observation: Observation, case: Case, *, attributed: bool
) -> Violation | None:
    """Check that every rank's buffers are those of one of the ranks that saved."""
    loaded = observation.buffers(case.training.first - 1)
    for rank, held in enumerate(loaded):
        if any(_same_buffers(held, one) for one in saved.buffers):
            continue
        names = [
            name
            for name in held
            if not any(name in one and torch.equal(held[name], one[name]) for one in saved.buffers)
        ]
        return Violation(
            obligation="roundtrip",
            step=saved.step,
            role="buffer",
            tensors=tuple(names or held),
            ranks=(rank,),
            explanation="after the load, the buffers are those of no rank that saved them",
            causes=if_named(bugs.BUFFERS_NOT_LOADED if names else bugs.BUFFERS_OF_SEVERAL_RANKS),
            attribution=loaded_buffers(loaded, saved.buffers, case) if attributed else "",
        )
    return None


def _next_scale(observation: Observation, step: int) -> float:
    """Return the loss scale after a step: half of it if the step was skipped."""
    last = observation.steps(step)[0]
    return last.loss_scale / 2 if last.skipped else last.loss_scale


def _loss_scale(saved: Checkpoint, observation: Observation, case: Case) -> Violation | None:
    """Check that the first step after the load has the loss scale that follows the saved one."""
    if case.training.loss_scale is None or not observation.ranks[0].steps:
        return None
    scales = observation.loss_scales(case.training.first)
    bad = tuple(rank for rank, scale in enumerate(scales) if scale != saved.scale)
    if not bad:
        return None
    first = case.training.loss_scale
    return Violation(
        obligation="roundtrip",
        step=saved.step,
        role="loss_scale",
        tensors=(),
        ranks=bad,
        observed=scales[bad[0]],
        expected=saved.scale,
        explanation=f"after the load, the loss scale is {scales[bad[0]]:g}, not {saved.scale:g}",
        causes=if_named(bugs.LOSS_SCALE_BEGINS_ANEW) if scales[bad[0]] == first else (),
        attribution=loss_scale(scales, saved.scale, first),
    )


def _same_buffers(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(name in other and torch.equal(one[name], other[name]) for name in one)


def _loader_and_rng(saved: Checkpoint, observation: Observation) -> Iterator[Violation]:
    """Check the data position, and the random states if the number of ranks is unchanged."""
    observations = observation.ranks
    if "data" in observations[0].declaration.keeps:
        given = [rank.checkpoint.samples[0] for rank in observations]
        bad = tuple(rank for rank, samples in enumerate(given) if samples != saved.samples)
        if bad:
            samples = given[bad[0]]
            before, now = len(saved.buffers), len(observations)
            names = data_causes(given, saved.samples, before, now) if named() else ()
            ahead = samples - saved.samples
            text = (
                f"{ahead} samples are left out" if ahead > 0 else f"{-ahead} samples are read again"
            )
            yield Violation(
                obligation="roundtrip",
                step=saved.step,
                role="data",
                tensors=(),
                ranks=bad,
                observed=float(samples),
                expected=float(saved.samples),
                explanation=f"after the load, the data stands at sample {samples}, not "
                f"{saved.samples}: {text}",
                causes=names,
                attribution=data_position(given, saved.samples, before, now),
            )
    if "rng" in observations[0].declaration.keeps and len(observations) == len(saved.random):
        loaded = [rank.checkpoint.random["loaded"] for rank in observations]
        bad = tuple(r for r, state in enumerate(loaded) if state != saved.random[r])
        if bad:
            yield Violation(
                obligation="roundtrip",
                step=saved.step,
                role="rng",
                tensors=(),
                ranks=bad,
                explanation="after the load, the random state of the rank is not the saved one",
                causes=random_causes(loaded, saved.random) if named() else (),
                attribution=random_states(loaded, saved.random),
            )


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
