"""Changes of a step: another input, another option, a state from another time.

A wrong update is compared with each of these. One list serves every optimizer, since it only
changes what a step reads; what a rule alone may get wrong is in its `changes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from .. import causes as bugs
from ..case.schema import Group
from ..floating_point import BF16, Enclosure, U, all_inside
from .specification import Change, Segment, SegmentStep

_WORDS = {
    bugs.GRADIENT_TIMES_W: "the gradient times W",
    bugs.GRADIENT_OVER_W: "the gradient over W",
    bugs.LOCAL_GRADIENT_ONLY: "one rank's gradient",
}


def changes(step: SegmentStep) -> Iterator[Change]:
    """Iterate over everything that a step may have done otherwise."""
    yield from _of_gradient(step)
    yield from _of_options(step)
    yield from _of_groups(step)
    yield from _of_states(step)
    yield from _of_formats(step)
    yield from step.rule.changes(step)


def _of_gradient(step: SegmentStep) -> Iterator[Change]:
    one, g = step.segment, step.elements.gradient
    others: list[tuple[str, str, torch.Tensor | None]] = [
        (bugs.GRADIENT_BEFORE_CLIPPING, "the gradient from before clipping", one.unclipped),
        (bugs.GRADIENT_OF_THE_PREVIOUS_STEP, "the gradient of the step before", one.previous),
        *(
            (bugs.ELEMENTS_IN_MEMORY_ORDER, "the gradient in the order of memory", gradient)
            for gradient in one.in_memory
        ),
        (bugs.GRADIENT_WITH_THE_WRONG_SIGN, "the gradient of the other sign", -g),
        ("", "the gradient rounded to bf16", g.bfloat16().double()),
        ("", "the gradient rounded to fp16", g.half().double()),
    ]
    for cause, words, gradient in others:
        if gradient is not None and bool((gradient != g).any()):
            yield step.change(cause, f"with {words} in place of the gradient", gradient=gradient)
    for cause, gradient in one.gradients():
        if bool((gradient != g).any()):
            words = _WORDS.get(cause, "another gradient")
            # A sum of local gradients, with a weight.
            error = step.elements.error + (2 + one.microbatches) * U * gradient.abs()
            words = f"with {words} in place of the gradient"
            yield step.change(cause, words, gradient=gradient, error=error)


def factors(segment: Segment) -> Iterator[tuple[str, float]]:
    """Iterate over factors that an option may have: numbers of ranks, and that of microbatches."""
    ranks = [(number, "ranks") for number in dict.fromkeys(segment.ranks)]
    for number, words in (*ranks, (segment.microbatches, "microbatches")):
        if number > 1:
            yield f"times {number}, a number of {words}", float(number)
            yield f"over {number}, a number of {words}", 1 / number


def _of_options(step: SegmentStep) -> Iterator[Change]:
    one, group, fields = step.segment, step.segment.group, step.rule.fields
    for rate in dict.fromkeys(one.rates):
        if rate != one.lr:
            words = f"with lr of another step ({rate:.6g})"
            yield step.change(bugs.LEARNING_RATE_OF_ANOTHER_STEP, words, step.with_(lr=rate))
    for words, factor in factors(one) if one.lr else ():
        yield step.change(bugs.OPTION_SCALED, f"with lr {words}", step.with_(lr=one.lr * factor))
    for name in ("weight_decay", "eps"):
        value = getattr(group, name)
        for words, factor in factors(one) if value and name in fields.group else ():
            scalars = step.with_(**{name: value * factor})
            yield step.change(bugs.OPTION_SCALED, f"with {name} {words}", scalars)
    if "weight_decay" in fields.group and group.weight_decay:
        yield from _of_decay(step)
    if "eps" in fields.group and group.eps:
        yield step.change("", "without eps", step.with_(eps=0.0))
    if {"beta1", "beta2"} <= set(fields.group) and group.beta1 != group.beta2:
        swapped = step.with_(beta1=group.beta2, beta2=group.beta1)
        yield step.change(bugs.BETAS_SWAPPED, "with beta1 and beta2 exchanged", swapped)
    if "nesterov" in fields.optimizer and one.options.momentum:
        other = msgspec.structs.replace(one.options, nesterov=not one.options.nesterov)
        cause, words = bugs.NESTEROV_ADDED, "in Nesterov's form, which is not asked for"
        if one.options.nesterov:
            cause, words = bugs.NESTEROV_LEFT_OUT, "in the form of plain momentum, not Nesterov's"
        yield step.change(cause, words, step.with_(options=other))


def _of_decay(step: SegmentStep) -> Iterator[Change]:
    decay = step.segment.group.weight_decay
    twice = step.with_(weight_decay=2 * decay)
    yield step.change(bugs.WEIGHT_DECAY_TWICE, "with weight decay twice", twice, rounds=3)
    without = step.with_(weight_decay=0.0)
    cause, words = bugs.WEIGHT_DECAY_MISSING, "without weight decay"
    if not step.rule.couples_decay:
        yield step.change(cause, words, without)
        yield from _of_decoupled_decay(step)
        return
    apart = "with weight decay decoupled from the gradient"
    if step.role != "parameter":
        if _is_apart(step, without):
            cause, words = bugs.DECOUPLED_INSTEAD_OF_L2, apart
        yield step.change(cause, words, without)
        return
    yield step.change(cause, words, without)
    right, plain = step.take(), step.take(without)
    if right is None or plain is None:
        return
    if not torch.equal(right.exact, plain.exact) or not _states_are_right(step):
        yield Change(bugs.DECOUPLED_INSTEAD_OF_L2, apart, partial(_shrunk, step, plain))
    if _states_are_right(step):
        words = "with weight decay twice, once decoupled from the gradient"
        yield Change(bugs.WEIGHT_DECAY_TWICE, words, partial(_shrunk, step, right))


def _states_are_right(step: SegmentStep) -> bool:
    made = ((state, step.take(role=name)) for name, state in step.elements.new.items())
    return all(all_inside(state, one) for state, one in made if one is not None)


def _of_decoupled_decay(step: SegmentStep) -> Iterator[Change]:
    s = step.scalars
    for cause, words, factor in (
        (
            bugs.WEIGHT_DECAY_TWICE,
            "with weight decay twice, one after the other",
            2 - s.lr * s.weight_decay,
        ),
        (
            bugs.WEIGHT_DECAY_WITHOUT_THE_LEARNING_RATE,
            "with weight decay that is not multiplied by lr",
            1 / s.lr if s.lr else 1.0,
        ),
    ):
        if factor != 1.0:
            changed = s._replace(weight_decay=s.weight_decay * factor)
            yield step.change(cause, words, changed, rounds=3)


def _is_apart(step: SegmentStep, without: object) -> bool:
    """Return True if the parameter shrank by itself, after a step without decay."""
    after = step.segment.parameter_after
    plain = None if after is None else step.take(without, role="parameter")
    if after is None or plain is None or all_inside(after, plain):
        return False
    return all_inside(after, _shrunk(step, plain))


def _shrunk(step: SegmentStep, made: Enclosure) -> Enclosure:
    """Enclose a parameter that shrank by lr weight_decay as well; three more roundings."""
    e, one = step.elements, step.segment
    less = one.lr * one.group.weight_decay * e.parameter
    error = 3 * e.format.u * (e.parameter.abs() + less.abs() + made.exact.abs())
    return Enclosure(made.exact - less, made.bound + error)


def _of_groups(step: SegmentStep) -> Iterator[Change]:
    """Options of other groups: each that differs alone, and all of them."""
    own, names = step.segment.group, step.rule.fields.group
    for group, rate in step.segment.others:
        values: dict[str, Any] = {name: getattr(group, name) for name in names} | {"lr": rate}
        mine = {name: getattr(own, name) for name in names} | {"lr": step.segment.lr}
        other = {name: value for name, value in values.items() if value != mine[name]}
        for name, value in other.items():
            cause = bugs.OPTIONS_OF_ANOTHER_GROUP
            if name == "weight_decay" and not own.weight_decay:
                cause = bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS
            yield step.change(cause, f"with {name} of {_named(group)}", step.with_(**{name: value}))
        if len(other) > 1:
            words = f"with {', '.join(other)} of {_named(group)}"
            yield step.change(bugs.OPTIONS_OF_ANOTHER_GROUP, words, step.with_(**other))


def _named(group: Group) -> str:
    return f"another group ({group.pattern!r})"


def _of_states(step: SegmentStep) -> Iterator[Change]:
    e, role, rule = step.elements, step.role, step.rule
    if any(bool(state.any()) for state in e.old.values()):
        zeros = {name: torch.zeros_like(state) for name, state in e.old.items()}
        yield step.change(bugs.MOMENTS_RESET, "with states of 0", old=zeros)
    for cause, other in rule.swaps(role):
        if other in e.old:
            words = f"with the old {other} in place of {role}"
            yield step.change(cause, words, old={**e.old, role: e.old[other]})
    if rule.itself:
        return  # it computes its new states, and is not given them
    stale = bugs.MOMENTS_OF_THE_PREVIOUS_STEP
    held = [name for name in e.new if name in e.old and name != role]
    for names in ([held] if len(held) > 1 else []) + [[name] for name in held]:
        words = f"with {' and '.join(names)} from before this step"
        new = {name: e.old[name] if name in names else state for name, state in e.new.items()}
        if any(not torch.equal(e.old[name], e.new[name]) for name in names):
            yield step.change(stale, words, new=new)


def _of_formats(step: SegmentStep) -> Iterator[Change]:
    e, observed, cause = step.elements, step.segment.observed, bugs.ROUNDED_TO_BF16
    if e.format.narrow or step.rule.itself:
        return
    if torch.equal(observed, observed.bfloat16().double()):  # which few fp32 values are
        yield Change(cause, "rounded to bf16", partial(_in_bf16, step))
    rounded = {name: state.bfloat16().double() for name, state in e.new.items()}
    yield step.change(cause, "with states rounded to bf16", new=rounded)
    if step.role == "parameter":
        parameter = e.parameter.bfloat16().double()
        yield step.change(cause, "with the parameter rounded to bf16", parameter=parameter)


def _in_bf16(step: SegmentStep) -> Enclosure | None:
    """Enclose a role that is computed and stored in bf16, around a number of bf16."""
    made = step.take(format=BF16)
    if made is None:
        return None
    near = made.exact.bfloat16().double()
    return Enclosure(near, made.bound + (near - made.exact).abs())
