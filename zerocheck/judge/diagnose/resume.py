"""Known bugs of saving and loading that explain wrong state after a load.

There is no round-off here, so a cause explains what is wrong only if every wrong bit is what it
gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ... import causes as bugs
from ...case.schema import Case
from ...contract.shard import OF_NO_STATE
from ...contract.start import scramble
from ...models.blocks import DTYPES
from ...models.network import build_model
from ...optimizers import optimizer_of
from ...optimizers.specification import UpdateElements
from ..compare import compare, different_bits
from ..layout import ParameterLayout, ParameterPlace
from ..recipe import UpdateRecipe
from ..state import State


class Wrong(NamedTuple):
    """Role that is wrong after a load: flat vectors, and the mask of the wrong elements."""

    role: str
    loaded: torch.Tensor
    saved: torch.Tensor
    different: torch.Tensor


class ResumeEvidence(NamedTuple):
    """Evidence from which causes are recognised.

    state: what was saved, after `step`; others: {step: the state after it}; case: of the load.
    """

    state: State
    others: Mapping[int, State]
    step: int
    layout: ParameterLayout
    case: Case


Steps = Sequence[tuple[float | None, float | None]]
"""Wrong step counts: (loaded, saved)."""


def causes(wrong: Sequence[Wrong], steps: Steps, known: ResumeEvidence) -> tuple[str, ...]:
    """Find the causes that explain every wrong role; if there are none, those of the first role."""
    by_role = [_of_role(one, known) for one in wrong]
    by_step = list(of_steps(steps, known))
    lost: list[str] = []
    gone = bugs.STEP_COUNT_LOST in by_step and all(bugs.MOMENTS_LOST in one for one in by_role)
    optimizer = optimizer_of(known.case.optimizer)
    shown = {role for role in optimizer.hidden if bool((known.state.moment(role) != 0).any())}
    if optimizer.counts_steps and gone and shown <= {one.role for one in wrong}:
        lost = [bugs.OPTIMIZER_STATE_LOST]
    if steps and wrong:
        # A step count says in its own words what the tensors say in theirs.
        by_step = [
            {bugs.STEP_COUNT_OF_AN_EARLIER_STEP: bugs.STATE_OF_AN_EARLIER_STEP}.get(one, one)
            for one in by_step
        ]
    found = [*by_role, *([by_step] if steps else [])]
    common = [name for name in found[0] if all(name in one for one in found)]
    return (*lost, *(common or (found[0] if not lost else ())))


def explained(
    names: Sequence[str], wrong: Sequence[Wrong], steps: Steps, known: ResumeEvidence
) -> bool:
    """Return True if one of these causes explains every wrong role, and every wrong step count."""
    if bugs.OPTIMIZER_STATE_LOST in names:
        return True
    found = [_of_role(one, known) for one in wrong]
    if steps:
        as_of_tensors = {bugs.STEP_COUNT_OF_AN_EARLIER_STEP: bugs.STATE_OF_AN_EARLIER_STEP}
        counts = of_steps(steps, known)
        found.append([*counts, *(as_of_tensors[one] for one in counts if one in as_of_tensors)])
    return any(all(name in one for one in found) for name in names)


def causes_by_tensor(
    wrong: Wrong, known: ResumeEvidence
) -> list[tuple[tuple[ParameterPlace, ...], tuple[str, ...]]]:
    """Find causes of a role's wrong tensors: (places, causes).

    Those that nothing explains by themselves are explained together, if at all.
    """
    layout = known.layout
    found: dict[tuple[str, ...], list[ParameterPlace]] = {}
    left: list[ParameterPlace] = []
    for place in layout.places:
        if bool(wrong.different[place.start : place.stop].any()):
            names = tuple(_of_role(_within(wrong, [place], layout), known))
            found.setdefault(names, []).append(place) if names else left.append(place)
    if left:
        names = tuple(_of_role(_within(wrong, left, layout), known))
        found.setdefault(names, []).extend(left)
    return [(tuple(places), names) for names, places in found.items()]


def _within(wrong: Wrong, places: Sequence[ParameterPlace], layout: ParameterLayout) -> Wrong:
    inside = layout.spread([place in places for place in layout.places])
    return wrong._replace(different=wrong.different & inside)


def _of_role(wrong: Wrong, known: ResumeEvidence) -> list[str]:
    moment = wrong.role not in OF_NO_STATE
    found: list[str] = []
    for name, make in _candidates(wrong, known):
        if not bool(different_bits(make(), wrong.loaded)[wrong.different].any()):
            found.append(name)
    layout = known.layout
    places = [p for p in layout.places if bool(wrong.different[p.start : p.stop].any())]
    if bugs.NOT_LOADED in found and all(not place.trainable for place in places):
        found = [bugs.FROZEN_PARAMETER_NOT_LOADED]
    partial = {
        bugs.NOT_LOADED: bugs.PART_NOT_LOADED,
        bugs.MOMENTS_LOST: bugs.PART_OF_THE_MOMENTS_LOST,
    }
    for whole, part in partial.items():
        if whole in found and any(
            not bool(wrong.different[p.start : p.stop][_told(wrong, p, moment)].all())
            for p in places
        ):
            found[found.index(whole)] = part
    if not found and moment and _stepped(wrong, places, known):
        found = [bugs.OPTIMIZER_STEPPED_BY_THE_LOAD]
    return list(dict.fromkeys(found or _moved(wrong, places, layout)))


def _stepped(wrong: Wrong, places: Sequence[ParameterPlace], known: ResumeEvidence) -> bool:
    """Return True if a step without a gradient gives what was loaded.

    torch takes one to make the states of parameters that have none; weight decay moves them. The
    parameters are those that were saved, or of the model before the load.
    """
    saved, recipe = known.state, UpdateRecipe.of(known.case)

    def fits(place: ParameterPlace, parameters: torch.Tensor) -> bool:
        here, rule = slice(place.start, place.stop), recipe.rule(place)
        roles = rule.states_with(recipe.options)
        count = saved.steps[known.layout.places.index(place)]
        if wrong.role not in roles or not place.trainable:
            return False
        old = {role: saved.moment(role)[here].double() for role in roles}
        elements = UpdateElements(
            parameters[here].double(),
            torch.zeros(place.stop - place.start, dtype=torch.float64),
            old,
            {**old, wrong.role: wrong.loaded[here].double()},
            format=place.format,
            shape=place.shape,
            strides=place.strides,
            held=bool(count),
        )
        for reading in rule.readings:
            scalars = recipe.scalars(
                rule,
                place.group,
                lr=recipe.options.groups[place.group].lr,
                step=int(count or 0) + 1,
                reading=reading,
            )
            made = dict(rule.enclosures(elements, scalars))[wrong.role]
            if compare(wrong.loaded[here].double(), made)[1] is None:
                return True
        return False

    if all(fits(place, saved.parameter) for place in places):
        return True
    fresh = _fresh(wrong.loaded, known.case, known.layout)
    return all(fits(place, fresh) for place in places)


def _told(wrong: Wrong, place: ParameterPlace, moment: bool) -> torch.Tensor:
    """Mask of the elements that show a loss of data: not those that are 0 and become 0."""
    saved = wrong.saved[place.start : place.stop]
    return saved != 0 if moment else torch.ones_like(saved, dtype=torch.bool)


def _candidates(
    wrong: Wrong, known: ResumeEvidence
) -> list[tuple[str, Callable[[], torch.Tensor]]]:
    """Return (cause, the flat vector of the role that it gives) of all known causes."""
    saved, role = wrong.saved, wrong.role
    state, others, step, layout, case = known
    found: list[tuple[str, Callable[[], torch.Tensor]]] = []

    def of(other: State) -> torch.Tensor:
        return other.parameter if role == "parameter" else other.moment(role)

    if role == "parameter":
        found.append((bugs.NOT_LOADED, lambda: _fresh(wrong.loaded, case, layout)))
    else:
        found.append((bugs.MOMENTS_LOST, lambda: torch.zeros_like(saved)))
    for number, other in others.items():
        name = bugs.STATE_OF_AN_EARLIER_STEP if number < step else bugs.STATE_OF_A_LATER_STEP
        found.append((name, lambda other=other: of(other)))  # type: ignore[misc]
    for name, taken in optimizer_of(case.optimizer).swaps(role):
        if taken in state.moments:
            found.append((name, lambda taken=taken: state.moment(taken)))  # type: ignore[misc]
    found.append((bugs.ROUNDED_TO_BF16, lambda: saved.to(torch.bfloat16).to(saved.dtype)))
    found.append((bugs.REPLICAS_SUMMED, lambda: saved * case.world_size))
    return found


def _fresh(loaded: torch.Tensor, case: Case, layout: ParameterLayout) -> torch.Tensor:
    """Parameters of a model before the load.

    Rounded to the compute dtype where they are observed so, since some implementations cast a model
    when they are built.
    """
    model = build_model(case)
    scramble(model, case)
    flat = torch.zeros(layout.size)
    for place, parameter in zip(layout.places, model.parameters(), strict=True):
        flat[place.start : place.stop] = parameter.detach().reshape(-1)
    if case.precision.compute == "fp32":
        return flat
    rounded = flat.to(DTYPES[case.precision.compute]).to(flat.dtype)
    return torch.where(loaded == rounded, rounded, flat)


def _moved(wrong: Wrong, places: Sequence[ParameterPlace], layout: ParameterLayout) -> list[str]:
    """Find the causes that misplace saved elements."""
    if _exchanged(wrong, places, layout):
        return [bugs.TENSORS_EXCHANGED]
    if all(_transposed(wrong, place) for place in places):
        return [bugs.DIMS_TRANSPOSED]
    if all(_rolled(wrong, place) for place in places):
        return [bugs.ELEMENTS_SHIFTED]
    if _permuted(wrong):
        return [bugs.SHARDS_IN_ANOTHER_ORDER]
    if all(_shortened(wrong, place) for place in places):
        return [bugs.ELEMENTS_MOVED_OTHERS_0]
    return []


def _exchanged(wrong: Wrong, places: Sequence[ParameterPlace], layout: ParameterLayout) -> bool:
    """Return True if every wrong tensor is the saved one of another parameter."""
    for place in places:
        loaded = wrong.loaded[place.start : place.stop]
        if not any(
            other is not place
            and other.stop - other.start == len(loaded)
            and torch.equal(loaded, wrong.saved[other.start : other.stop])
            for other in layout.places
        ):
            return False
    return True


def _transposed(wrong: Wrong, place: ParameterPlace) -> bool:
    if len(place.shape) != 2:
        return False
    saved = wrong.saved[place.start : place.stop].view(place.shape)
    loaded = wrong.loaded[place.start : place.stop]
    return torch.equal(loaded, saved.t().reshape(-1))


def _rolled(wrong: Wrong, place: ParameterPlace) -> bool:
    """Return True if the tensor is the saved one, rotated by some elements."""
    loaded, saved = (v[place.start : place.stop] for v in (wrong.loaded, wrong.saved))
    starts = (saved == loaded[0]).nonzero().reshape(-1).tolist()
    return any(torch.equal(loaded, saved.roll(-start)) for start in starts if start)


def _shortened(wrong: Wrong, place: ParameterPlace) -> bool:
    """Return True if all elements are from the saved tensor or 0, and some 0 is new."""
    loaded, saved = (v[place.start : place.stop] for v in (wrong.loaded, wrong.saved))
    kept = (loaded == 0) | torch.isin(loaded, saved)
    return bool(kept.all()) and bool(((loaded == 0) & (saved != 0)).any())


def _permuted(wrong: Wrong) -> bool:
    """Return True if the wrong elements are a permutation of the saved ones in their places."""
    loaded, saved = (vector[wrong.different] for vector in (wrong.loaded, wrong.saved))
    return torch.equal(loaded.sort().values, saved.sort().values)


def of_steps(steps: Steps, known: ResumeEvidence) -> tuple[str, ...]:
    """Find the causes that explain every wrong step count; none where all are right."""
    if not steps:
        return ()
    found: list[str] = []
    if all(loaded in (None, 0.0) for loaded, _ in steps):
        found.append(bugs.STEP_COUNT_LOST)
    if all(loaded == (saved or 0.0) + 1 for loaded, saved in steps):
        found.append(bugs.OPTIMIZER_STEPPED_BY_THE_LOAD)
    for number, other in known.others.items():
        counts = {count for count in other.steps if count is not None}
        if number < known.step and all(loaded in counts for loaded, _ in steps):
            found.append(bugs.STEP_COUNT_OF_AN_EARLIER_STEP)
        if number > known.step and all(loaded in counts for loaded, _ in steps):
            found.append(bugs.STATE_OF_A_LATER_STEP)
    return tuple(dict.fromkeys(found))


def data_causes(given: Sequence[int], saved: int, ranks_before: int, ranks: int) -> tuple[str, ...]:
    """Find the causes of a data position, given in samples that each rank believes were read.

    Positions are whole numbers: what was read on other numbers of ranks need not divide by these.
    """
    found = []
    if all(samples == 0 for samples in given):
        found.append(bugs.DATA_POSITION_LOST)
    if ranks != ranks_before and all(s == saved * ranks // ranks_before for s in given):
        found.append(bugs.DATA_POSITION_COUNTED_IN_STEPS)
    if ranks_before > 1 and all(s == saved // ranks_before for s in given):
        found.append(bugs.DATA_POSITION_OF_ONE_RANK)
    return tuple(found)


def random_causes(loaded: Sequence[bytes], saved: Sequence[bytes]) -> tuple[str, ...]:
    """Find the causes of the random states after a load, per rank."""
    if len(saved) > 1 and all(state == saved[0] for state in loaded):
        return (bugs.RANDOM_STATE_OF_RANK_0_ON_ALL_RANKS,)
    if all(state in saved for state in loaded):
        return (bugs.RANDOM_STATES_OF_OTHER_RANKS,)
    return (bugs.RANDOM_STATE_NOT_LOADED,)


def export_causes(
    got: torch.Tensor,
    held: torch.Tensor,
    place: ParameterPlace,
    role: str,
    state: State,
    layout: ParameterLayout,
) -> tuple[str, ...]:
    """Find the causes of an exported tensor that differs from the one held, both flat."""
    candidates: list[tuple[str, torch.Tensor]] = [
        (bugs.ROUNDED_TO_BF16, held.to(torch.bfloat16).to(held.dtype)),
        (bugs.ZEROS, torch.zeros_like(held)),
        (bugs.STEP_OFF_BY_1, held + 1),
        (bugs.STEP_OFF_BY_1, held - 1),
    ]
    if role not in OF_NO_STATE:
        for moment in state.moments:
            if moment != role:
                other = state.moment(moment)[place.start : place.stop]
                candidates.append((bugs.MOMENTS_SWAPPED, other))
    if role != "step":
        vector = state.parameter if role == "parameter" else state.moment(role)
        candidates += [
            (bugs.TENSORS_EXCHANGED, vector[other.start : other.stop])
            for other in layout.places
            if other is not place and other.stop - other.start == len(held)
        ]
    names = [name for name, value in candidates if torch.equal(got, value)]
    if not names and torch.equal(got.sort().values, held.sort().values):
        names = [bugs.ELEMENTS_IN_ANOTHER_ORDER]
    if not names and role != "step" and len(held) > 1:
        elsewhere = (got == 0) | torch.isin(got, vector)
        if bool(elsewhere.all()) and bool(got.any()):
            names = [bugs.ELEMENTS_OF_OTHER_PARAMETERS]
    if bool((got == 0).logical_or(got == held).all()):
        names.append(bugs.PART_OF_IT_IS_0)  # all of it, where it has one part
    return tuple(dict.fromkeys(names))
