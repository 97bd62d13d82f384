"""The reduced gradient against the local gradients of all ranks, one tensor at a time.

Every rank computes its local gradients, then the ranks sum one tensor after the other in float64;
each compares what it holds. Where something is wrong, rank 0 gets the local gradients of the worst
tensors, and asks which known cause explains them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace

from ... import causes as bugs
from ...case.schema import Case, Training
from ...contract.semantics import Semantics
from ...floating_point import Enclosure, Format
from ...judge import bounds, vectors
from ...judge.assemble import RoleState
from ...judge.compare import Misfit, compare, describe
from ...judge.diagnose.evidence import Evidence
from ...judge.diagnose.gradient import causes
from ...judge.diagnose.unwritten import memory_of_a_job
from ...judge.layout import ParameterLayout
from ...judge.local import Passes
from ...judge.manifest_plan import plan_of
from ...judge.pieces import Enclosing, split
from ...protocol.observations import Entry
from ...protocol.verdicts import Explanation, Violation
from ..checks.script_changes import REPORTED
from ..checks.workers import in_threads
from ..record.dtypes import dtype_of
from ..record.ranks import Total
from ..record.run_parameters import RunParameter, layout_of
from ..record.step_record import ACCUMULATED, GIVEN, Observed, Point, StepSummary
from .gradient_scale import NO_SCALE, Scale, added, known_factors, projected, scaled
from .reference import Local

ASKED = 1 << 20
"""Elements of wrong tensors that are asked for a cause, at most; one tensor at least."""


SCALED = 16
"""Roundings of a gradient that a script multiplies, and of the factor that is read off it."""

CLOSE = 1e-3
"""Relative distance to a factor of a bug within which a factor is taken for it."""

LEFT_OUT = (
    "the wrapper of the model reduces none of what is wrong over all ranks, so that the script must"
)


def share_of(local: Local, tensor: RunParameter) -> Total:
    """Return one rank's contribution to the total, nothing for what another stage has."""
    there = [one for one in local.gradients.get(tensor.name, ()) if one is not None]
    numel = torch.Size(tensor.shape).numel()
    exact, absolute = (vectors.zeros(numel, dtype=torch.float64) for _ in range(2))

    def add(here: slice) -> None:
        for one in there:
            exact[here] += one[here]
            absolute[here] += one[here].abs()

    for _ in in_threads(add, split(numel)):
        pass
    noise, sway = (one.get(tensor.name, 0.0) for one in (local.noise, local.sway))
    return Total(exact, absolute, noise, len(there), sway)


def total_of(shares: Sequence[Total]) -> Total:
    """Return the total of several shares; of one, itself, without a copy."""
    if len(shares) == 1:
        return shares[0]
    return Total(
        torch.stack([one.exact for one in shares]).sum(0),
        torch.stack([one.absolute for one in shares]).sum(0),
        sum(one.noise for one in shares),
        sum(one.arrived for one in shares),
        sum(one.sway for one in shares),
    )


class Judged(NamedTuple):
    """Judgement of one rank on the gradient.

    share: of the bound; wrong: its worst tensors; missing, needless: tensors with such a gradient;
    scales: by tensor; along: <G', G>, <G, G> and the bound of the first, in any dtype.
    """

    share: float
    wrong: dict[str, float]
    missing: tuple[str, ...]
    needless: tuple[str, ...]
    scales: Mapping[str, Scale] = MappingProxyType({})
    along: Scale = NO_SCALE


def divisor_of(summary: StepSummary, semantics: Semantics) -> float:
    """Return what the sum of the local gradients is divided by.

    Ranks that compute with the same samples have all of their gradient, which a sum has once.
    """
    return summary.scale * (summary.reducing if semantics.reduction == "mean" else summary.alike)


def enclosure(
    total: Total, tensor: RunParameter, summary: StepSummary, semantics: Semantics
) -> Enclosure:
    """Return the enclosure of the reduced gradient of a whole tensor.

    Roundings as where each microbatch is reduced, the most that there can be, and two for a loss
    scale that is no power of two, in the dtype of the reduction; then what the local gradients can
    be off.
    """
    divisor = divisor_of(summary, semantics)
    roundings = 2 + bounds.gradient_roundings(
        world_size=summary.reducing,
        microbatches=max(1, summary.forwards),
        average=semantics.reduction,
        divide="loss",
        accumulate="reduce_each",
    )
    dtype = tensor.torch_dtype if summary.casts is None else dtype_of(summary.casts.reduce)
    format = Format.of(dtype)
    exact, absolute = total.exact / divisor, total.absolute / divisor
    derived = bounds.gradient(exact, absolute, roundings, format)
    return Enclosure(exact, derived.bound + total.noise / divisor)


class ScriptFactor(msgspec.Struct, frozen=True, array_like=True):
    """Factor by which a script that reduces gradients itself multiplies all of them.

    slack: how far it may be off, relative; with the roundings of the script's products.
    """

    value: float = 1.0
    slack: float = 0.0


NO_FACTOR = ScriptFactor()


def compare_shards(
    observed: Observed,
    tensor: RunParameter,
    total: Total,
    semantics: Semantics,
    point: Point,
    factor: ScriptFactor = NO_FACTOR,
) -> Judged:
    """Compare this rank's shards of one tensor, at a point, with the enclosure.

    factor: what the gradient there is divided by first.
    """
    share, wrong = 0.0, 0.0
    missing = needless = False
    scale = projection = NO_SCALE
    divisor = divisor_of(observed.summary, semantics)
    length = float(total.exact.norm()) / divisor
    sway, noise = total.sway / divisor, total.noise / divisor
    for number, piece in enumerate(observed.summary.pieces):
        step = observed.summary.optimizer_of(piece)
        if piece.name != tensor.name or step is None or not step.reached:
            continue
        gradient = observed.gradient(number, point)
        if gradient is None:
            missing |= total.arrived > 0
            continue
        needless |= not total.arrived and semantics.unused == "skip" and bool(gradient.any())
        exact, absolute = (local_slice(one, piece.entry) for one in total[:2])

        def judged(
            here: slice,
            shard: torch.Tensor = gradient,
            exact: torch.Tensor = exact,
            absolute: torch.Tensor = absolute,
        ) -> tuple[Scale, Scale, float, Misfit | None]:
            there = total._replace(exact=exact[here], absolute=absolute[here])
            part = enclosure(there, tensor, observed.summary, semantics)
            held = shard[here].double() / factor.value
            part = Enclosure(part.exact, part.bound + factor.slack * part.exact.abs())
            dots = float(held @ part.exact), float(part.exact @ part.exact)
            whole = (*dots, float(part.bound @ part.exact.abs()))
            along = projected(held, part, length=length, sway=sway, noise=noise)
            return (along, whole, *compare(held, part))

        for along, whole, used, misfit in in_threads(judged, split(len(gradient))):
            scale, projection = added(scale, along), added(projection, whole)
            if misfit is None:
                share = max(share, used)
            else:
                wrong = max(wrong, float(misfit.ratio.max()))
    return Judged(
        share,
        {tensor.name: wrong} if wrong else {},
        (tensor.name,) if missing else (),
        (tensor.name,) if needless else (),
        {tensor.name: scale},
        projection,
    )


def local_slice(whole: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return the elements of a shard, flat, from a whole flat tensor."""
    if entry.box is None:
        return whole[entry.start : entry.stop]
    box = tuple(slice(low, high) for low, high in entry.box)
    return whole.view(entry.shape)[box].reshape(-1)


def put(into: torch.Tensor, entry: Entry, part: torch.Tensor) -> None:
    """Write the elements of a shard into a whole flat tensor."""
    if entry.box is None:
        into[entry.start : entry.stop] = part
    else:
        box = tuple(slice(low, high) for low, high in entry.box)
        view = into.view(entry.shape)[box]
        view.copy_(part.view(view.shape))


class Exhibit(msgspec.Struct, frozen=True):
    """Wrong tensors of a rank, sent as evidence: bytes of fp32.

    rank: its number; lines: ranks along each dimension of the meshes; local: gradients per tensor
    and microbatch, None where there is none; held: the rank's shards of the reduced gradient.
    """

    rank: int
    lines: dict[str, tuple[int, ...]]
    local: tuple[tuple[bytes | None, ...], ...]
    noise: tuple[float, ...]
    entries: tuple[Entry, ...]
    held: tuple[bytes, ...]


def first_right(
    found: Mapping[Point, Sequence[Judged]], summary: StepSummary, semantics: Semantics
) -> tuple[Point, Sequence[Judged]]:
    """Return the first point at which the gradient of all ranks is right.

    Else the one with the fewest wrong tensors, and the last of those where the wrapper leaves them
    out: what a script reduces itself is local before that.
    """

    for point, every in found.items():
        right = scaled([one.scales for one in every], summary, semantics) is None
        if right and not faults(every):
            return point, every
    wrapped = {piece.name for piece in summary.pieces if not piece.left_out}
    ordered = [*found.items()]
    if faults(ordered[0][1]).isdisjoint(wrapped):
        ordered.reverse()
    return min(ordered, key=lambda item: len(faults(item[1])))


def faults(every: Sequence[Judged]) -> set[str]:
    """Return the names of wrong tensors. every: of each rank."""
    return {name for one in every for name in (*one.wrong, *one.missing, *one.needless)}


def multiplied(factor: ScriptFactor) -> str:
    """Return what a script that reduces gradients itself does to them besides, in words."""
    return (
        f"{REPORTED}, and in a reduction of its own: it multiplies every gradient by "
        f"{factor.value:.6g}"
    )


def script_factor(
    found: Mapping[Point, Sequence[Judged]], summary: StepSummary, semantics: Semantics
) -> ScriptFactor:
    """Return the factor of a gradient that is wrong where the optimizer is given it, if it has one.

    A script that reduces gradients itself, all or those that the wrapper leaves out, may clip or
    scale them afterwards, and where its reduction ends is not seen. Then all may be off by one
    factor: the projection of what is observed on what is expected. Not where a bug gives it: with
    the number of ranks, one more or less of them, or that of microbatches.

    found: by point, of each rank.
    """
    every, before = found[GIVEN], found.get(ACCUMULATED)
    wrapped = {piece.name for piece in summary.pieces if not piece.left_out}
    own = summary.reduces or (before is not None and faults(before).isdisjoint(wrapped))
    observed, expected, off = (sum(each) for each in zip(*(o.along for o in every), strict=True))
    swayed = sum(each[2] for one in every for each in one.scales.values())
    off = swayed if isfinite(swayed) else off
    if not (own and faults(every) and observed > 0 and expected > 0 and isfinite(off)):
        return NO_FACTOR
    value, world = observed / expected, summary.reducing
    slack = off / expected + SCALED * Format.of(dtype_of(summary.pieces[0].dtype)).u
    known = [one.factor for one in known_factors(summary, semantics)]
    known += [1.0, world / (world + 1), (world + 1) / world]
    known += [world / (world - 1), (world - 1) / world] if world > 1 else []
    if any(abs(value - one) <= CLOSE * one for one in known):
        return NO_FACTOR
    return ScriptFactor(value, slack)


def worst(found: Sequence[Judged], tensors: Sequence[RunParameter]) -> list[RunParameter]:
    """Return the wrong tensors to examine: the worst first, not more than ASKED elements.

    All of them are of one stage of a pipeline.
    """
    sizes = {one.name: torch.Size(one.shape).numel() for one in tensors}
    ratios: dict[str, float] = {}
    for one in found:
        for name, ratio in one.wrong.items():
            if name in sizes:
                ratios[name] = max(ratio, ratios.get(name, 0.0))
    asked: set[str] = set()
    room = ASKED
    for name in sorted(ratios, key=lambda name: -ratios[name]):
        if not asked or sizes[name] <= room:
            asked.add(name)
            room -= sizes[name]
    found_there = [one for one in tensors if one.name in asked]
    stages = {max(asked, key=lambda name: ratios[name])} if asked else set()
    stage = next((one.stage for one in found_there if one.name in stages), 0)
    return [one for one in found_there if one.stage == stage]


def exhibit(
    observed: Observed, local: Local, asked: Sequence[RunParameter], point: Point
) -> Exhibit:
    """Collect this rank's evidence on the tensors asked for, none where another stage has them."""
    asked = [one for one in asked if one.stage == observed.summary.stage]
    names = {one.name for one in asked}
    entries, held = [], []
    for number, piece in enumerate(observed.summary.pieces):
        gradient = observed.gradient(number, point)
        if piece.name in names and gradient is not None:
            entries.append(piece.entry)
            held.append(_bytes(gradient))
    return Exhibit(
        observed.summary.rank,
        observed.summary.lines,
        tuple(
            tuple(None if g is None else _bytes(g) for g in local.gradients[one.name])
            for one in asked
        ),
        tuple(local.noise[one.name] for one in asked),
        tuple(entries),
        tuple(held),
    )


def violation(
    found: Sequence[Judged],
    asked: Sequence[RunParameter],
    exhibits: Sequence[Exhibit],
    summary: StepSummary,
    semantics: Semantics,
) -> Violation | None:
    """Return the violation of the gradient with its causes, or None.

    found, exhibits: of each rank.
    """
    for role, text, cause in (
        ("missing", "has no gradient though the model used it", bugs.GRADIENT_MISSING),
        (
            "needless",
            "has a gradient though no rank used it; the declared semantics (unused='skip') leave "
            "it alone",
            bugs.NONE_BECAME_ZERO,
        ),
    ):
        names = [name for one in found for name in getattr(one, role)]
        if names:
            ranks = tuple(r for r, one in enumerate(found) if names[0] in getattr(one, role))
            return Violation(
                obligation="gradient",
                step=summary.number,
                role="gradient",
                tensors=tuple(dict.fromkeys(names)),
                ranks=ranks,
                explanation=f"{names[0]} {text}",
                causes=(cause,),
            )
    found_of_elements = _diagnosed(asked, exhibits, summary, semantics) if asked else None
    if found_of_elements is None or not found_of_elements.causes:
        of_kinds = scaled([one.scales for one in found], summary, semantics)
        if found_of_elements is None or of_kinds is None:
            return of_kinds or found_of_elements
        text, causes = of_kinds.explanation, of_kinds.causes
        found_of_elements = replace(found_of_elements, explanation=text, causes=causes)
    wrapped = {piece.name for piece in summary.pieces if not piece.left_out}
    wrong = {name for one in found for name in one.wrong}
    if wrong.isdisjoint(wrapped) and summary.reducing > 1:
        text = f"{found_of_elements.explanation}; {LEFT_OUT}"
        return replace(found_of_elements, explanation=text)
    return found_of_elements


def _diagnosed(
    asked: Sequence[RunParameter],
    exhibits: Sequence[Exhibit],
    summary: StepSummary,
    semantics: Semantics,
) -> Violation | None:
    exhibits = [one for one in exhibits if one.local]  # of the stage that has the tensors
    reduced_in = summary.casts.reduce if summary.casts is not None else ""
    layout = layout_of([one._replace(dtype=reduced_in or one.dtype) for one in asked])
    passes = _passes(layout, exhibits, summary)
    noise = torch.zeros(layout.size, dtype=torch.float64)
    parts = []
    for number, (tensor, place) in enumerate(zip(asked, layout.places, strict=True)):
        terms = passes.gradients[..., place.start : place.stop].double()
        total = Total(
            terms.sum((0, 1)) * summary.scale,
            terms.abs().sum((0, 1)) * summary.scale,
            sum(one.noise[number] for one in exhibits),
            int(passes.arrived[..., number].sum()),
        )
        noise[place.start : place.stop] = total.noise / summary.scale
        parts.append(enclosure(total, tensor, summary, semantics))
    wanted = Enclosure(torch.cat([p.exact for p in parts]), torch.cat([p.bound for p in parts]))
    held = _held(layout, exhibits)
    bad, first = [], None
    for rank, (part, plan) in enumerate(zip(held.parts, held.plans, strict=True)):
        local = Enclosure(plan.gather(wanted.exact), plan.gather(wanted.bound))
        misfit = compare(part.double(), local)[1]
        if misfit is not None:
            bad.append(exhibits[rank].rank)
            first = first or (misfit, plan.index)
    if first is None:
        return None
    case = Case(
        mesh=(len(exhibits),), training=Training(microbatches=min(64, max(1, summary.forwards)))
    )
    with memory_of_a_job():
        diagnosis = causes(
            Evidence(
                held,
                passes,
                Enclosing.known(wanted),
                layout,
                case,
                semantics,
                loss_scale=summary.loss_scale,
                axes=summary.axes,
                noise=noise,
            )
        )
    if not diagnosis.causes and bad:
        diagnosis = _over_an_axis(bad, exhibits, held, wanted) or diagnosis
    return describe(
        first[0],
        layout,
        obligation="gradient",
        step=summary.number,
        role="gradient",
        ranks=tuple(bad),
        elements=first[1],
        explanation=diagnosis,
    )


def _over_an_axis(
    bad: Sequence[int], exhibits: Sequence[Exhibit], held: RoleState, wanted: Enclosure
) -> Explanation | None:
    """Return the dimension of a mesh over which the gradient is not reduced, if there is one.

    The parts of its ranks, added up, are right then, or their mean. Each of them is as exact as the
    whole, so their sum is that many times as far off. bad: numbers of the wrong ranks.
    """
    at = {one.rank: number for number, one in enumerate(exhibits)}
    for name in exhibits[0].lines:
        lines = {one.rank: one.lines.get(name, ()) for one in exhibits if one.rank in bad}
        if not all(line and {*line} <= at.keys() for line in lines.values()):
            continue
        members = [[at[one] for one in line] for line in lines.values()]
        count = len(members[0])
        for how, divisor in (("added up", 1), ("averaged", count)):
            if all(_is_sum(each, divisor, exhibits, held, wanted) for each in members):
                text = f"{name}, an axis of the mesh, has {count} ranks, and the gradient is not "
                text += f"reduced over them: {how} over them it is right"
                return Explanation(text, (bugs.NOT_REDUCED_OVER_AN_AXIS,))
    return None


def _is_sum(
    members: Sequence[int],
    divisor: int,
    exhibits: Sequence[Exhibit],
    held: RoleState,
    wanted: Enclosure,
) -> bool:
    if len({exhibits[one].entries for one in members}) > 1:
        return False  # they hold other elements
    plan = held.plans[members[0]]
    total = torch.stack([held.parts[one].double() for one in members]).sum(0) / divisor
    bound = plan.gather(wanted.bound) * len(members)
    return compare(total, Enclosure(plan.gather(wanted.exact), bound))[1] is None


def _passes(layout: ParameterLayout, exhibits: Sequence[Exhibit], summary: StepSummary) -> Passes:
    """Lay out the local gradients by rank and microbatch; missing microbatches are zeros."""
    count = max((len(one.local[0]) for one in exhibits), default=1) or 1
    gradients = torch.zeros(len(exhibits), count, layout.size)
    arrived = torch.zeros(len(exhibits), count, len(layout.places), dtype=torch.bool)
    for rank, one in enumerate(exhibits):
        for number, place in enumerate(layout.places):
            for microbatch, data in enumerate(one.local[number]):
                if data is not None:
                    gradients[rank, microbatch, place.start : place.stop] = _tensor(data)
                    arrived[rank, microbatch, number] = True
    if summary.scale != 1.0:
        gradients = gradients.double() / summary.scale
    return Passes(gradients, arrived, [], [])


def _held(layout: ParameterLayout, exhibits: Sequence[Exhibit]) -> RoleState:
    parts, plans = [], []
    for one in exhibits:
        plan = plan_of(one.entries, layout)
        part = torch.cat([_tensor(data) for data in one.held]) if one.held else torch.empty(0)
        parts.append(part if plan.order is None else part[plan.order])
        plans.append(plan)
    whole = torch.full((layout.size,), torch.nan)
    for part, plan in zip(reversed(parts), reversed(plans), strict=True):
        plan.scatter(whole, part)
    return RoleState(whole, tuple(parts), tuple(plans), tuple(one.entries for one in exhibits))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.float().contiguous().numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0)
    return torch.frombuffer(bytearray(data), dtype=torch.float32)
