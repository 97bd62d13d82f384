"""Lines of AdamW's step as sums of terms, with inputs replaced and operations moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import sqrt

import torch

from ...case.schema import Group
from ..inputs import factors, gradients, rates
from ..specification import Equation, Segment
from . import bounds
from .variants import largest

MOMENTS = {"exp_avg": "beta1", "exp_avg_sq": "beta2"}


def _of(group: Group) -> str:
    return f"({group.pattern!r})"


def equations(segment: Segment) -> Iterator[Equation]:
    """Iterate over the line that gives the segment's role, the right one first."""
    if segment.role == "parameter":
        yield from _of_parameter(segment)
    elif segment.role in MOMENTS:
        yield from _of_moment(segment)
    elif segment.role == "max_exp_avg_sq":
        yield from _of_maximum(segment)


def _of_moment(segment: Segment) -> Iterator[Equation]:
    """Moment = beta old + (1 - beta) gradient, or its square."""
    s, e, role = segment.scalars, segment.elements, segment.role
    square = role == "exp_avg_sq"
    symbol = MOMENTS[role]
    beta = s.beta2 if square else s.beta1
    taken = "the square of the gradient" if square else "the gradient"
    coefficients = {
        "the old moment": _betas(segment, symbol, beta, one_minus=False),
        taken: _betas(segment, symbol, beta, one_minus=True),
    }

    def line(words: str, old: torch.Tensor, gradient: torch.Tensor) -> Equation:
        terms = {"the old moment": old, taken: gradient * gradient if square else gradient}
        right = {"the old moment": beta, taken: 1 - beta}
        if s.weight_decay and not words:
            p, g = e.parameter, gradient
            decay = s.weight_decay
            if square:
                terms["the decayed parameter"] = 2 * decay * g * p + (decay * p) ** 2
            else:
                terms["the decayed parameter"] = decay * p
            right["the decayed parameter"] = 0.0
            coefficients["the decayed parameter"] = {f"1 - {symbol}": 1 - beta}
        return Equation(words, terms, right, coefficients)

    yield line("", e.old[role], e.gradient)
    for words, gradient in gradients(segment):
        yield line(f"with {words} in place of the gradient", e.old[role], gradient)
    other = "exp_avg" if square else "exp_avg_sq"
    yield line(f"with {other} in place of {role}", e.old[other], e.gradient)
    terms = {
        f"the old {other}": e.old[other],
        f"what {other} takes in": e.gradient if square else e.gradient**2,
    }
    weight = s.beta1 if square else s.beta2
    right = dict(zip(terms, (weight, 1 - weight), strict=True))
    yield Equation(f"it is {other}, and not {role}", terms, right, {})


def _of_maximum(segment: Segment) -> Iterator[Equation]:
    e = segment.elements
    old, new = e.old["max_exp_avg_sq"], e.new["exp_avg_sq"]
    stale = torch.maximum(old, e.old["exp_avg_sq"])
    for words, vector in (
        ("", torch.maximum(old, new)),
        ("it is exp_avg_sq, and not the maximum", new),
        ("it is the old maximum", old),
        ("with the old exp_avg_sq in place of the new one", stale),
    ):
        yield Equation(words, {"the maximum": vector}, {"the maximum": 1.0}, {})


def _betas(segment: Segment, symbol: str, beta: float, *, one_minus: bool) -> Mapping[str, float]:
    """Return the coefficients that a term of a moment may have."""
    s = segment.scalars
    other, value = ("beta1", s.beta1) if symbol == "beta2" else ("beta2", s.beta2)
    betas = {symbol: beta, other: value}
    for group, _ in segment.others:
        of_group = group.beta2 if symbol == "beta2" else group.beta1
        betas[f"{symbol} of another group {_of(group)}"] = of_group
    found = betas
    if one_minus:
        found = {f"1 - {name}": 1 - value for name, value in betas.items()}
    found |= {"0": 0.0, "1": 1.0}
    if one_minus:
        found[f"-(1 - {symbol})"] = beta - 1
        found["lr"] = s.lr
    else:
        found[f"1 - {symbol}"] = 1 - beta
        found[f"{symbol}^2"] = beta**2
    return found


def _of_parameter(segment: Segment) -> Iterator[Equation]:
    """Parameter = (1 - lr weight_decay) parameter - lr / correction1 * direction."""
    s, e = segment.scalars, segment.elements
    p, m, v = e.parameter, e.new["exp_avg"], largest(e)
    old_m, old_v = e.old["exp_avg"], e.old["exp_avg_sq"]
    eps = s.eps

    def direction(
        first: torch.Tensor, second: torch.Tensor, c2: float = s.correction2
    ) -> torch.Tensor:
        made: torch.Tensor = first / ((second / c2).sqrt() + eps)
        return made

    def line(
        words: str, along: torch.Tensor, *, parameter: torch.Tensor = p, c1: float = s.correction1
    ) -> Equation:
        return Equation(
            words,
            {"the parameter": parameter, "the update": along},
            {"the parameter": 1 - s.lr * s.weight_decay, "the update": -s.lr / c1},
            {
                "the parameter": _decays(segment),
                "the update": _rates(segment, c1),
            },
        )

    yield line("", direction(m, v))
    for words, step in _steps(segment):
        c1, c2 = (bounds.correction(beta, step) for beta in (s.beta1, s.beta2))
        yield line(words, direction(m, v, c2), c1=c1)
    for words, first, second in (
        ("with moments from before this step", old_m, old_v),
        ("with exp_avg_sq from before this step", m, old_v),
        ("with exp_avg from before this step", old_m, v),
        ("with exp_avg and exp_avg_sq exchanged", v, m.abs()),
        ("with exp_avg_sq in place of its maximum", m, e.new["exp_avg_sq"]),
        ("with the gradient in place of exp_avg", e.gradient, v),
        ("with moments rounded to bf16", m.bfloat16().double(), v.bfloat16().double()),
    ):
        yield line(words, direction(first, second))
    yield line("without bias corrections", direction(m, v, 1.0), c1=1.0)
    yield line("without the bias correction of exp_avg", direction(m, v), c1=1.0)
    yield line("without the bias correction of exp_avg_sq", direction(m, v, 1.0))
    yield line("with eps inside of the root", m / (v / s.correction2 + eps).sqrt())
    yield line(
        "with eps before the bias correction",
        m / ((v.sqrt() + eps) / sqrt(s.correction2)),
    )
    for words, factor in factors(segment):
        denominator = (v / s.correction2).sqrt() + eps * factor
        yield line(f"with eps {words}", m / denominator)
    yield line("without eps", m / (v / s.correction2).sqrt().clamp(min=1e-300))
    for group, rate in segment.others:
        if group.eps != eps:
            denominator = (v / s.correction2).sqrt() + group.eps
            yield line(f"with eps of another group {_of(group)}", m / denominator)
        yield _of_group(segment, group, rate)
    rounded = p.bfloat16().double()
    yield line("with the parameter rounded to bf16", direction(m, v), parameter=rounded)
    for words, gradient in gradients(segment):
        first = s.beta1 * old_m + (1 - s.beta1) * gradient
        second = s.beta2 * old_v + (1 - s.beta2) * gradient**2
        yield line(f"with {words} in place of the gradient", direction(first, second))


def _of_group(segment: Segment, group: Group, rate: float) -> Equation:
    """Return the line with all options of another group but the betas of its bias corrections."""
    s, e = segment.scalars, segment.elements
    direction = e.new["exp_avg"] / ((largest(e) / s.correction2).sqrt() + group.eps)
    return Equation(
        f"with lr, weight_decay and eps of another group {_of(group)}",
        {"the parameter": e.parameter, "the update": direction},
        {
            "the parameter": 1 - rate * group.weight_decay,
            "the update": -rate / s.correction1,
        },
        {},
    )


def _steps(segment: Segment) -> Iterator[tuple[str, int]]:
    """Iterate over other step counts that bias corrections may have."""
    step, since, count = segment.step, segment.since, segment.microbatches
    for words, number in (
        ("with bias corrections of the next step", step + 1),
        ("with bias corrections of the step before", step - 1),
        ("with bias corrections two steps on", step + 2),
        ("with bias corrections two steps back", step - 2),
        ("with bias corrections that count the steps of this run alone", since),
        ("with bias corrections that count microbatches", step * count),
        ("with bias corrections that count microbatches", step + since * (count - 1)),
    ):
        if number > 0 and number != step:
            yield words, number


def _decays(segment: Segment) -> Mapping[str, float]:
    """Return the coefficients that the parameter may have."""
    s = segment.scalars
    decay, lr = s.weight_decay, s.lr
    found = {"1 (no weight decay)": 1.0}
    if decay:
        found |= {
            "1 - lr * weight_decay": 1 - lr * decay,
            "(1 - lr * weight_decay)^2 (decayed twice)": (1 - lr * decay) ** 2,
            "1 - 2 * lr * weight_decay (decayed twice)": 1 - 2 * lr * decay,
            "1 - lr / correction1 * weight_decay": 1 - lr * decay / s.correction1,
            "1 - weight_decay (without lr)": 1 - decay,
        }
    for words, factor in factors(segment) if decay else ():
        found[f"1 - lr * weight_decay with weight_decay {words}"] = 1 - lr * decay * factor
    for rate in segment.rates:
        if rate != lr:
            found["1 - lr * weight_decay with lr of another step"] = 1 - rate * decay
    for group, rate in segment.others:
        if rate != lr and decay:
            found[f"1 - lr * weight_decay with lr of another group {_of(group)}"] = 1 - rate * decay
        if group.weight_decay != decay or rate != lr:
            other = f"of another group {_of(group)}"
            found[f"1 - lr * weight_decay {other}"] = 1 - rate * group.weight_decay
            found[f"1 - lr * weight_decay with weight_decay {other}"] = 1 - lr * group.weight_decay
    return found


def _rates(segment: Segment, c1: float) -> Mapping[str, float]:
    """Return the coefficients that the update may have."""
    s = segment.scalars
    found = {
        "-lr / correction1": -s.lr / c1,
        "0 (no update)": 0.0,
        "-lr (without the correction)": -s.lr,
        "lr / correction1 (the wrong sign)": s.lr / c1,
        "-2 * lr / correction1 (updated twice)": -2 * s.lr / c1,
    }
    if s.weight_decay:
        factor = 1 - s.lr * s.weight_decay
        found["-lr / correction1 * (1 - lr * weight_decay) (decayed after the update)"] = (
            -s.lr / c1 * factor
        )
    return found | rates(segment, "-lr / correction1", -1 / c1)
