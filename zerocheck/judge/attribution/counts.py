"""Provenance of wrong step counts, and of other single numbers of a training."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch

from ..layout import ParameterLayout
from .facts import Fact, Facts
from .known_vectors import step_words
from .places import where

Count = float | None
"""Step count of a parameter; None: ranks disagree."""


def step_counts(
    observed: Sequence[Count],
    right: Sequence[Count],
    layout: ParameterLayout,
    others: Mapping[int, Sequence[Count]],
    step: int,
    verb: str,
    held: Container[str] | None = None,
) -> Facts:
    """Return facts on the wrong step counts, per parameter in layout order.

    others: those after other steps; step: the one that was due; verb: such as "was saved";
    held: names of those that the rank has, None: all.
    """
    counted = [
        p.trainable and p.stop > p.start and (held is None or p.name in held) for p in layout.places
    ]
    telling = layout.spread(counted)
    groups: dict[tuple[Count, Count, str], list[bool]] = {}
    for position, (has, due) in enumerate(zip(observed, right, strict=True)):
        if counted[position] and has != due:
            source = _of_steps(position, has, others, step)
            key = has, due, _related(has, due) or source
            groups.setdefault(key, [False] * len(layout.places))[position] = True
    facts = []
    for (has, due, words), flags in groups.items():
        mask = layout.spread(flags)
        number = "not the same on all ranks" if has is None else f"{has:g}"
        text = f"is {number}{words}, {_number(due)} {verb}"
        facts.append(
            Fact("the step count", where(mask, mask, telling, layout), text, text, sum(flags))
        )
    wrong = sum(map(sum, groups.values()))
    return Facts(tuple(facts), 0, wrong)


def related(has: float, due: float, factors: Mapping[float, str]) -> str:
    """Return the relation of a number to the right one, in words; empty if there is none.

    factors: those that have a reason, with its words.
    """
    for factor, words in factors.items():
        for made, how in ((due * factor, "times"), (due / factor, "divided by")):
            if has == made != due:
                return f" ({due:g} {how} {factor:g}, {words})"
    return _related(has, due)


def _related(has: Count, due: Count) -> str:
    if has is None or due is None or has == 0:
        return ""
    if abs(has - due) == 1:
        return ", one more" if has > due else ", one less"
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if float(torch.tensor(due).to(dtype)) == has:
            return f", {due:g} rounded to {name}"
    return ", negated" if has == -due else ""


def _number(count: Count) -> str:
    return "no single count" if count is None else f"{count:g}"


def _of_steps(position: int, has: Count, others: Mapping[int, Sequence[Count]], step: int) -> str:
    if not has:
        return ""
    found = [number for number, counts in others.items() if counts[position] == has]
    found = [number for number in found if number != step]
    if not found:
        return ""
    return f", that {step_words(min(found, key=lambda number: abs(number - step)), step)}"
