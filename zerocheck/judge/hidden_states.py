"""An optimizer that shows no states, judged by its parameters: the exact range of each update.

The start is known: moments of 0, no step taken. From then on the moments are enclosed, step after
step, by what the gradient can have been: it was seen, or it is the reference's, with its bound.
With m in [m-, m+] and v in [v-, v+] before a step, and a gradient g in [g-, g+], the update is

    F(a, b, g) = (lr / c1) (a + w g) / (sqrt(b + c g^2) + eps)

with a = b1 m, w = 1 - b1, b = b2 v / c2, c = (1 - b2) / c2. F grows with a; for given a and g it is
monotone in b, falling where a + w g > 0 and growing where it is below; in g it has one stationary
point, a c g = w (b + eps sqrt(b + c g^2)), of which the square is

    (a^2 c^2 - w^2 eps^2 c) g^2 - 2 a c w b g + w^2 b (b - eps^2) = 0.

So the range over the box is that over a at one end, b at both, and g at both ends and at the roots
of the square that lie between (a root that solves the square alone is a point of the interval like
any other, and widens nothing). Division of intervals, by contrast, forgets that numerator and
denominator have one g: where a gradient is small it is up to 4e7 times wider.

Moments are rounded where they are stored: by the bounds of `bounds.exp_avg` and `exp_avg_sq`, at
the largest sizes that they can have here, which widen [m-, m+] and [v-, v+] after the step too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from zerocheck_reference import half_ulp

from ..contract.semantics import Semantics
from . import bounds
from .bounds import ETA, SECOND_ORDER, Enclosure, Reading, Scalars, U
from .compare import Misfit, compare, describe
from .diagnose.update import Segment, causes, sentence
from .layout import Layout, Part
from .local import Passes
from .pieces import Enclosing, Positions, pieces
from .state import State
from .update import Recipe
from .verdict import Violation

LEAST = 1e-300
"""In place of a denominator of 0."""


class HiddenUpdate(NamedTuple):
    """One update of an optimizer that shows no states.

    gradient: what it was given, which has no width where it was seen; has: per parameter, whether
    it has a gradient; lr: per group; others: by name, gradients that a known bug would give it.
    """

    before: State
    after: State
    gradient: Enclosing
    has: Sequence[bool]
    lr: Sequence[float]
    others: Callable[[], Iterator[tuple[str, torch.Tensor]]] = lambda: iter(())


class _Box(NamedTuple):
    """Enclosed moments and gradient of some elements, float64: middles and half widths."""

    m: torch.Tensor
    m_error: torch.Tensor
    v: torch.Tensor
    v_error: torch.Tensor
    g: torch.Tensor
    g_error: torch.Tensor


def wrong_gradients(
    passes: Passes | None, semantics: Semantics
) -> Iterator[tuple[str, torch.Tensor]]:
    """(cause, flat gradient) of what an optimizer is given by known bugs in the reduction."""
    if passes is None or not passes.gradients.numel():
        return
    world, count = passes.gradients.shape[:2]
    divisor = count if semantics.divide == "gradient" else 1
    local = passes.gradients.double().sum(1) / divisor
    total = local.sum(0)
    if semantics.average == "mean":
        yield "gradient x W", total
        yield "gradient / W", total / world**2
    for rank in range(world):
        yield "local gradient only", local[rank]


class HiddenStates:
    """The enclosed moments of all parameters, carried from step to step."""

    def __init__(self, layout: Layout, recipe: Recipe) -> None:
        self.layout = layout
        self.recipe = recipe
        self.readings: list[Reading] = list(bounds.READINGS)
        self._m, self._m_error, self._v, self._v_error = (
            torch.zeros(layout.size, dtype=torch.float64) for _ in range(4)
        )
        self._counts = [0] * len(layout.places)

    def check(self, update: HiddenUpdate, *, step: int) -> tuple[float, Violation | None, State]:
        """(share of the bound, violation or None, the state after).

        Where ranks hold different copies of a parameter, the one that is right becomes that of the
        state: which rank updates it, and whom it forgets to tell, is not known.
        """
        parts = self.layout.segments(self._keys(update))
        best: tuple[float, Misfit | None, Part | None, State] | None = None
        for reading in self.readings:
            found = self._under(reading, parts, update)
            if best is None or found[1] is None:
                best = found
            if found[1] is None:
                self.readings = self.readings[self.readings.index(reading) :]
                break
        share, misfit, part, after = best or (0.0, None, None, update.after)
        violation = None
        if misfit is not None and part is not None:
            text, names = self._words(misfit, part, update, after)
            violation = describe(
                misfit,
                self.layout,
                obligation="update",
                step=step,
                role="parameter",
                ranks=(),
                elements=part.elements,
                explanation=text,
                causes=names,
            )
        self._advance(parts, update)
        return share, violation, after

    def _keys(self, update: HiddenUpdate) -> list[int | None]:
        return [
            count + 1 if has and place.trainable and place.stop > place.start else None
            for place, has, count in zip(self.layout.places, update.has, self._counts, strict=True)
        ]

    def _under(
        self, reading: Reading, parts: Sequence[Part], update: HiddenUpdate
    ) -> tuple[float, Misfit | None, Part | None, State]:
        """(share, misfit, part that it is in, state after) under one reading of the options."""
        share = 0.0
        after = update.after
        for part in parts:
            scalars = self._scalars(part, update, reading)
            wanted = self._wanted(part, update, scalars)
            observed = _some(after.parameter, part)
            used, misfit = compare(observed, wanted)
            if misfit is not None:
                after = self._best_copies(after, part, misfit, wanted)
                used, misfit = compare(_some(after.parameter, part), wanted)
            if misfit is not None:
                return used, misfit, part, after
            share = max(share, used)
        return share, None, None, after

    def _best_copies(self, after: State, part: Part, misfit: Misfit, wanted: Enclosure) -> State:
        """The state with each wrong parameter from a rank whose copy of it is right, if any is."""
        outside = self._spread(part, misfit.outside)
        chosen = after.parameter
        for own in after.own:
            if own is after.parameter:
                continue
            right = ~self._spread(part, _outside(_some(own, part), wanted))
            for place in self.layout.places:
                here = slice(place.start, place.stop)
                if bool(outside[here].any()) and bool(right[here].all()):
                    if chosen is after.parameter:
                        chosen = chosen.clone()
                    chosen[here] = own[here]
                    outside[here] = False
        if chosen is after.parameter:
            return after
        held = [chosen if torch.equal(own, chosen) else own for own in after.own]
        return replace(after, parameter=chosen, own=held)

    def _spread(self, part: Part, mask: torch.Tensor) -> torch.Tensor:
        """A mask over the elements of a part as one over the flat vector."""
        if part.elements is None:
            return mask
        whole = torch.zeros(self.layout.size, dtype=torch.bool)
        whole[part.elements] = mask
        return whole

    def _wanted(self, part: Part, update: HiddenUpdate, s: Scalars) -> Enclosure:
        """The range of the parameters after the update."""
        size = self.layout.size if part.elements is None else len(part.elements)
        exact, bound = (torch.empty(size, dtype=torch.float64) for _ in range(2))
        for here, there in pieces(part.elements, self.layout.size):
            p = update.before.parameter[there].double()
            low, high = update_range(self._box(update, there), s)
            exact[here], bound[here] = _parameter(p, low, high, s)
        return Enclosure(exact, bound)

    def _box(self, update: HiddenUpdate, there: Positions) -> _Box:
        g, g_error = update.gradient.at(there)
        return _Box(
            self._m[there],
            self._m_error[there],
            self._v[there],
            self._v_error[there],
            -g if self.recipe.maximize else g,
            g_error,
        )

    def _advance(self, parts: Sequence[Part], update: HiddenUpdate) -> None:
        """Enclose the moments after the step."""
        for part in parts:
            s = self._scalars(part, update, "double")
            for _, there in pieces(part.elements, self.layout.size):
                box = self._box(update, there)
                m, v = _moments(box, s)
                self._m[there], self._m_error[there] = m
                self._v[there], self._v_error[there] = v
        keys = self._keys(update)
        self._counts = [
            old if key is None else key for old, key in zip(self._counts, keys, strict=True)
        ]

    def _scalars(self, part: Part, update: HiddenUpdate, reading: Reading) -> Scalars:
        options = self.recipe.groups[part.group]
        return bounds.scalars(
            lr=update.lr[part.group],
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            step=part.key,
            reading=reading,
        )

    def _words(
        self, misfit: Misfit, part: Part, update: HiddenUpdate, after: State
    ) -> tuple[str, tuple[str, ...]]:
        """(explanation, causes) of parameters outside their range."""
        before = _some(update.before.parameter, part)
        outside = misfit.outside
        if bool(misfit.observed.isnan().any()):
            return "parameter holds NaN: memory that was never written was read", (
                "uninitialised memory",
            )
        names = self._causes(part, update, after, misfit)
        if torch.equal(misfit.observed[outside], before[outside]):
            return "parameter was not updated", ("never updated", *names)
        if names:
            return sentence("parameter", names), names
        return (
            "parameter is not what AdamW can give from the parameter before and the gradient",
            (),
        )

    def _causes(
        self, part: Part, update: HiddenUpdate, after: State, misfit: Misfit
    ) -> tuple[str, ...]:
        """Known causes that explain every element of the wrong tensors."""
        mask = self._spread(part, misfit.outside)
        wrong = [p for p in self.layout.places if bool(mask[p.start : p.stop].any())]
        asked = torch.cat([torch.arange(p.start, p.stop) for p in wrong])
        box = self._box(update, asked)
        s = self._scalars(part, update, self.readings[0])
        low, high = update_range(box, s)
        (m, _), (v, _) = _moments(box, s)
        (_, width) = _parameter(update.before.parameter[asked].double(), low, high, s)
        group = self.recipe.groups
        segment = Segment(
            role="parameter",
            observed=after.parameter[asked].double(),
            p=update.before.parameter[asked].double(),
            g=box.g,
            unclipped=None,
            old_m=box.m,
            old_v=box.v,
            m=m,
            v=v,
            scalars=s,
            step=part.key,
            rates=self.recipe.rates[part.group],
            others=[(o, update.lr[n]) for n, o in enumerate(group) if n != part.group],
            since=part.key,
            microbatches=self.recipe.microbatches,
            wider=width,
        )
        names = list(causes([segment]))
        for name, gradient in update.others():
            g = gradient[asked].double()
            other = box._replace(g=-g if self.recipe.maximize else g)
            wanted = Enclosure(*_parameter(segment.p, *update_range(other, s), s))
            if name not in names and not bool(_outside(segment.observed, wanted).any()):
                names.append(name)
        return tuple(names)


def update_range(box: _Box, s: Scalars) -> tuple[torch.Tensor, torch.Tensor]:
    """[low, high] of lr / c1 m' / (sqrt(v' / c2) + eps), moments rounded as they are stored."""
    m_round, v_round = _roundings(box, s)
    w, c = 1 - s.beta1, (1 - s.beta2) / s.correction2
    a, a_error = s.beta1 * box.m, s.beta1 * box.m_error + m_round
    b, b_error = s.beta2 * box.v / s.correction2, s.beta2 * box.v_error + v_round
    b_error = b_error / s.correction2
    low_g, high_g = box.g - box.g_error, box.g + box.g_error
    values: list[list[torch.Tensor]] = []
    for end in (a - a_error, a + a_error):
        found = []
        for root in ((b - b_error).clamp(min=0.0), b + b_error):
            for g in (low_g, high_g, *_stationary(end, root, w, c, s.eps, low_g, high_g)):
                denominator = ((root + c * g * g).sqrt() + s.eps).clamp(min=LEAST)
                found.append((end + w * g) / denominator)
        values.append(found)
    step = s.lr / s.correction1
    low = torch.stack(values[0]).amin(0) * step
    high = torch.stack(values[1]).amax(0) * step
    return (low, high) if step >= 0 else (high, low)


def _stationary(
    a: torch.Tensor,
    b: torch.Tensor,
    w: float,
    c: float,
    eps: float,
    low: torch.Tensor,
    high: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """Roots of the square of the stationary condition, brought into [low, high]."""
    square = a * a * c * c - w * w * eps * eps * c
    half = a * c * w * b
    rest = w * w * b * (b - eps * eps)
    spread = (half * half - square * rest).clamp(min=0.0).sqrt()
    for root in ((half + spread) / square, (half - spread) / square):
        yield torch.where(root.isfinite(), root.clamp(low, high), low)


def _roundings(box: _Box, s: Scalars) -> tuple[torch.Tensor, torch.Tensor]:
    """Round-off of the new moments, at the largest sizes in the box."""
    w1, w2 = 1 - s.beta1, 1 - s.beta2
    m = box.m.abs() + box.m_error
    v = box.v.abs() + box.v_error
    g = box.g.abs() + box.g_error
    m_q = U * torch.maximum(3 * w1 * (g + m), 2 * s.beta1 * m + 2 * w1 * g) + 2 * ETA
    v_q = U * (2 * s.beta2 * v + 3 * w2 * g * g) + 2 * ETA
    m_h = half_ulp(s.beta1 * m + w1 * g + m_q, torch.float32)
    v_h = half_ulp(s.beta2 * v + w2 * g * g + v_q, torch.float32)
    return SECOND_ORDER * (m_q + m_h), SECOND_ORDER * (v_q + v_h)


def _moments(
    box: _Box, s: Scalars
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(middle, half width) of each moment after the step."""
    m_round, v_round = _roundings(box, s)
    w1, w2 = 1 - s.beta1, 1 - s.beta2
    m = s.beta1 * box.m + w1 * box.g
    m_error = s.beta1 * box.m_error + w1 * box.g_error + m_round
    v = s.beta2 * box.v + w2 * box.g * box.g
    off = box.g_error * (2 * box.g.abs() + box.g_error)
    v_error = s.beta2 * box.v_error + w2 * off + v_round
    return (m, m_error), (v, v_error)


def _parameter(
    p: torch.Tensor, low: torch.Tensor, high: torch.Tensor, s: Scalars
) -> tuple[torch.Tensor, torch.Tensor]:
    """(middle, bound) of the new parameter, with the roundings of `bounds.parameter`."""
    decayed = p * (1 - s.lr * s.weight_decay)
    largest = torch.maximum(low.abs(), high.abs())
    error = (high - low) / 2 + (7 * U + s.extra) * largest + 2 * ETA
    error = error + ETA * s.lr / s.correction1 / max(s.eps, LEAST)
    if s.weight_decay != 0:
        error = error + 2 * U * decayed.abs()
    return bounds.rounded(decayed - (low + high) / 2, error)


def _some(vector: torch.Tensor, part: Part) -> torch.Tensor:
    """The elements of a part, float64."""
    return (vector if part.elements is None else vector[part.elements]).double()


def _outside(observed: torch.Tensor, wanted: Enclosure) -> torch.Tensor:
    """Mask of what lies outside its enclosure."""
    misfit = compare(observed, wanted)[1]
    return torch.zeros(len(observed), dtype=torch.bool) if misfit is None else misfit.outside
