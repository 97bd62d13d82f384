"""Known causes of a wrong update: AdamW with one thing changed, each compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ... import causes as bugs
from ...case.schema import Group
from .. import bounds
from ..bounds import BF16, ETA, FP32, SECOND_ORDER, Enclosure, Format, Scalars
from ..compare import compare


class Segment(NamedTuple):
    """Inputs and results of AdamW for the wrong tensors of one parameter group. float64 vectors.

    role: which is wrong; m, v: new moments as observed (v: the largest, with amsgrad), old_m,
    old_v, p: before; g: the gradient, negated with maximize; unclipped: the same before clipping;
    previous: what it was to be in the step before; rates: learning rates of this group at other
    steps; since: steps since the case began; microbatches: of each step; wider: what is not known
    of each result, where moments are hidden.
    """

    role: str
    observed: torch.Tensor
    p: torch.Tensor
    g: torch.Tensor
    unclipped: torch.Tensor | None
    old_m: torch.Tensor
    old_v: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    scalars: Scalars
    step: int
    rates: Sequence[float]
    others: Sequence[tuple[Group, float]]
    format: Format = FP32
    since: int = 0
    microbatches: int = 1
    previous: torch.Tensor | None = None
    wider: torch.Tensor | float = 0.0
    in_memory: Sequence[torch.Tensor] = ()
    """The gradient with the elements of parameters that are not contiguous in the order of memory,
    and the other way round."""


SENTENCES = {
    bugs.ELEMENTS_IN_MEMORY_ORDER: "AdamW was given the gradient of parameters that are not "
    "contiguous in the order of memory, or took it so",
    bugs.L2_INSTEAD_OF_DECOUPLED: "weight decay was added to the gradient (L2), and went through "
    "the moments",
    bugs.WEIGHT_DECAY_TWICE: "weight decay was applied twice",
    bugs.WEIGHT_DECAY_BY_THE_CORRECTED_STEP_SIZE: "weight decay was multiplied by lr / (1 - "
    "beta1^t), the step size, and not by lr",
    bugs.WEIGHT_DECAY_MISSING: "weight decay was not applied",
    bugs.WEIGHT_DECAY_AFTER_THE_UPDATE: "weight decay came after the update and not before it",
    bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS: "weight decay was applied to parameters that the "
    "case excludes from it",
    bugs.EPS_INSIDE_THE_ROOT: "eps was added inside of the square root",
    bugs.EPS_BEFORE_THE_BIAS_CORRECTION: "eps was added before the bias correction",
    bugs.BETAS_SWAPPED: "beta1 and beta2 were exchanged",
    bugs.OPTIONS_OF_ANOTHER_GROUP: "the options of another parameter group were used",
    bugs.LEARNING_RATE_OF_ANOTHER_STEP: "the learning rate of another step was used",
    bugs.GRADIENT_BEFORE_CLIPPING: "AdamW was given the gradient from before clipping",
    bugs.GRADIENT_OF_THE_PREVIOUS_STEP: "AdamW was given the gradient of the step before",
    bugs.NO_BIAS_CORRECTION: "the bias corrections were left out",
    bugs.MOMENTS_RESET: "the moments of the step before were lost",
    bugs.MOMENTS_SWAPPED: "exp_avg and exp_avg_sq changed places",
    bugs.MOMENTS_OF_THE_PREVIOUS_STEP: "AdamW computed with moments from before this step",
    bugs.STEPS_COUNTED_FROM_0: "the bias corrections count the steps of this run alone, not those "
    "before it began",
    bugs.MICROBATCHES_COUNTED_AS_STEPS: "the bias corrections count microbatches, and not steps",
    bugs.ROUNDED_TO_BF16: "it was rounded to bf16 on its way, or is held in bf16",
}


def causes(segments: Iterable[Segment]) -> tuple[str, ...]:
    """Find all candidates that explain every wrong element. segments: pieces of tensors."""
    left: dict[tuple[str, int], None] | None = None
    for segment in segments:
        found: dict[tuple[str, int], None] = {}
        yielded: Counter[str] = Counter()
        for name, enclosure in _candidates(segment):
            # A name may be that of several candidates: it is the same one that must explain all.
            yielded[name] += 1
            key = name, yielded[name]
            wide = Enclosure(enclosure.exact, enclosure.bound + segment.wider)
            if (left is None or key in left) and compare(segment.observed, wide)[1] is None:
                found[key] = None
        left = found
        if not left:
            break
    return tuple(dict.fromkeys(name for name, _ in left or ()))


def sentence(role: str, names: Sequence[str]) -> str:
    """Return the explanation of the causes, in one plain sentence."""
    words = [SENTENCES.get(name, name) for name in names]
    return f"{role} is wrong: {'; or '.join(words)}"


def _candidates(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    if _in_bf16(segment):
        yield bugs.ROUNDED_TO_BF16, _right(segment, BF16)
    if segment.role == "parameter":
        yield from _of_parameter(segment)
    elif segment.role in ("exp_avg", "exp_avg_sq"):
        yield from _of_moment(segment)


def _in_bf16(segment: Segment) -> bool:
    """Return True if every observed value is a bf16 number, which few fp32 values are."""
    observed = segment.observed
    return not segment.format.narrow and torch.equal(observed, observed.bfloat16().double())


def _right(segment: Segment, format: Format) -> Enclosure:
    """Right result in another format."""
    s, g = segment.scalars, segment.g
    if segment.role == "exp_avg":
        return bounds.exp_avg(segment.old_m, g, s, format=format)
    if segment.role == "exp_avg_sq":
        return bounds.exp_avg_sq(segment.old_v, g, s, format=format)
    return bounds.parameter(segment.p, segment.m, segment.v, s, format)


def _of_moment(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    s = segment.scalars
    old = segment.old_m if segment.role == "exp_avg" else segment.old_v
    plain = bounds.exp_avg if segment.role == "exp_avg" else bounds.exp_avg_sq
    formula = partial(plain, format=segment.format)
    if s.weight_decay:
        coupled = segment.g + s.weight_decay * segment.p
        size = segment.g.abs() + (s.weight_decay * segment.p).abs()
        yield (
            bugs.L2_INSTEAD_OF_DECOUPLED,
            formula(old, coupled, s, 3 * segment.format.u * size + segment.format.eta),
        )
    if segment.unclipped is not None:
        yield bugs.GRADIENT_BEFORE_CLIPPING, formula(old, segment.unclipped, s)
    if segment.previous is not None and bool((segment.previous != segment.g).any()):
        yield bugs.GRADIENT_OF_THE_PREVIOUS_STEP, formula(old, segment.previous, s)
    for gradient in segment.in_memory:
        yield bugs.ELEMENTS_IN_MEMORY_ORDER, formula(old, gradient, s)
    if s.beta1 != s.beta2:
        swapped = s._replace(beta1=s.beta2, beta2=s.beta1)
        yield bugs.BETAS_SWAPPED, formula(old, segment.g, swapped)
    yield from _swapped(segment)
    if bool(old.any()):
        yield bugs.MOMENTS_RESET, formula(torch.zeros_like(old), segment.g, s)
    for group, _ in segment.others:
        other = s._replace(beta1=group.beta1, beta2=group.beta2)
        if (group.beta1, group.beta2) != (s.beta1, s.beta2):
            yield bugs.OPTIONS_OF_ANOTHER_GROUP, formula(old, segment.g, other)
    if segment.role == "exp_avg":
        yield bugs.GRADIENT_WITH_THE_WRONG_SIGN, formula(old, -segment.g, s)


def _swapped(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    """Moments swapped, before this step or after it."""
    s, g, format = segment.scalars, segment.g, segment.format
    if segment.role == "exp_avg":
        yield bugs.MOMENTS_SWAPPED, bounds.exp_avg(segment.old_v, g, s, format=format)
        yield bugs.MOMENTS_SWAPPED, bounds.exp_avg_sq(segment.old_v, g, s, format=format)
    else:
        yield bugs.MOMENTS_SWAPPED, bounds.exp_avg_sq(segment.old_m, g, s, format=format)
        yield bugs.MOMENTS_SWAPPED, bounds.exp_avg(segment.old_m, g, s, format=format)


def _of_parameter(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    s, p, m, v = segment.scalars, segment.p, segment.m, segment.v

    def with_(**changed: float) -> Enclosure:
        return bounds.parameter(p, m, v, s._replace(**changed), segment.format)

    decay = s.weight_decay
    if decay:
        yield bugs.WEIGHT_DECAY_MISSING, with_(weight_decay=0.0)
        u = segment.format.u
        yield bugs.WEIGHT_DECAY_TWICE, _wider(with_(weight_decay=decay * (2 - s.lr * decay)), p, u)
        by_step = _wider(with_(weight_decay=decay / s.correction1), p, u)
        yield bugs.WEIGHT_DECAY_BY_THE_CORRECTED_STEP_SIZE, by_step
        plain = with_(weight_decay=0.0)
        factor = 1 - s.lr * decay
        right = with_()
        yield (
            bugs.WEIGHT_DECAY_TWICE,  # the second time after the update
            _wider(Enclosure(right.exact * factor, right.bound * abs(factor)), p, u),
        )
        yield (
            bugs.WEIGHT_DECAY_AFTER_THE_UPDATE,
            _wider(Enclosure(plain.exact * factor, plain.bound * abs(factor)), p, u),
        )
        if s.lr != 1.0:
            yield (
                bugs.WEIGHT_DECAY_WITHOUT_THE_LEARNING_RATE,
                _wider(with_(weight_decay=decay / s.lr), p, u),
            )
    for step, name in (
        (segment.step + 1, bugs.STEP_OFF_BY_1),
        (segment.step - 1, bugs.STEP_OFF_BY_1),
        (segment.step + 2, bugs.STEP_OFF_BY_2),
        (segment.step - 2, bugs.STEP_OFF_BY_2),
        (segment.since, bugs.STEPS_COUNTED_FROM_0),
        (segment.step * segment.microbatches, bugs.MICROBATCHES_COUNTED_AS_STEPS),
        (
            segment.step + segment.since * (segment.microbatches - 1),
            bugs.MICROBATCHES_COUNTED_AS_STEPS,
        ),
    ):
        if step > 0 and step != segment.step:
            yield (
                name,
                with_(
                    correction1=bounds.correction(s.beta1, step),
                    correction2=bounds.correction(s.beta2, step),
                ),
            )
    for old_m, old_v in ((segment.old_m, segment.old_v), (m, segment.old_v), (segment.old_m, v)):
        yield (
            bugs.MOMENTS_OF_THE_PREVIOUS_STEP,
            bounds.parameter(p, old_m, old_v, s, segment.format),
        )
    yield bugs.NO_BIAS_CORRECTION, with_(correction1=1.0, correction2=1.0)
    yield bugs.EPS_INSIDE_THE_ROOT, _update(segment, (v / s.correction2 + s.eps).sqrt())
    yield bugs.EPS_BEFORE_THE_BIAS_CORRECTION, with_(eps=s.eps / s.correction2**0.5)
    for rate in segment.rates:
        if rate != s.lr:
            yield bugs.LEARNING_RATE_OF_ANOTHER_STEP, with_(lr=rate)
    for group, rate in segment.others:
        if not decay and group.weight_decay:
            yield bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS, with_(weight_decay=group.weight_decay)
        options = {"lr": rate, "weight_decay": group.weight_decay, "eps": group.eps}
        for some in ({"lr": rate}, options):
            yield bugs.OPTIONS_OF_ANOTHER_GROUP, with_(**some)


def _wider(enclosure: Enclosure, p: torch.Tensor, u: float) -> Enclosure:
    """Widen by two more roundings of the decayed parameter."""
    return Enclosure(enclosure.exact, enclosure.bound + 3 * u * (p.abs() + enclosure.exact.abs()))


def _update(segment: Segment, denominator: torch.Tensor) -> Enclosure:
    """Update with another denominator: the roundings of bounds.parameter, and 3 more."""
    s, u = segment.scalars, segment.format.u
    decayed = segment.p * (1 - s.lr * s.weight_decay)
    step = s.lr / s.correction1 * segment.m / denominator
    error = 2 * u * decayed.abs() + (10 * u + s.extra) * step.abs()
    error = error + 2 * segment.format.eta + ETA / denominator
    exact, bound = bounds.rounded(decayed - step, error, segment.format)
    return Enclosure(exact, bound * SECOND_ORDER)
