"""Contrast of wrong cases and tensors with right ones: what all of the wrong have, no right one.

The cases are those of the run in which the obligation could fail, and those that the search for the
smallest one asked for, which differ from a wrong one in a single field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, TypeVar

from ...case.features import FEATURES, features
from ...case.schema import Case
from ...case.shapes import (
    call_order,
    frozen_names,
    learning,
    parameter_dtypes,
    parameter_shapes,
    sometimes_used,
    transposed,
    unfrozen,
)
from ...case.tensor_parallel import plan_of, sharded_dim
from ...protocol.verdicts import Violation

T = TypeVar("T")

MOST_ANSWERS = 3
"""Properties that may be named side by side. More of them say that there are too few cases."""

LEAST_HOLDING = 2
"""Cases that hold, below which they say nothing."""


class WrongCase(NamedTuple):
    """Case that shows a bug, the tensors that are wrong in it, and in which step first."""

    case: Case
    tensors: tuple[str, ...] = ()
    step: int | None = None
    """None where it is not known, as of a crash."""

    @classmethod
    def of(cls, case: Case, violation: Violation | None) -> WrongCase:
        """Return the case with what is wrong in it."""
        return cls(case) if violation is None else cls(case, violation.tensors, violation.step)


Masks = Mapping[str, tuple[int, int]]
"""Property in words -> which of the wrong and which of the right have it, as bits."""


def of_cases(wrong: Collection[Case], right: Collection[Case]) -> str:
    """Return what tells the cases that fail from those that hold; "" if too few of either hold.

    `"in 9 of 31 cases, those with gradient clipping"`.
    """
    if len(right) < LEAST_HOLDING or not wrong:
        return ""
    count = f"in {len(wrong)} of the {len(wrong) + len(right)} cases tried"
    has = _masks(wrong, right, properties)
    lacks = {
        f"without {name.removeprefix('with ')}": (_all(wrong) & ~one, _all(right) & ~other)
        for name, (one, other) in has.items()
        if name.startswith("with ")
    }
    for masks in (has, {**has, **lacks}):
        found = _separating(masks, _all(wrong))
        if found:
            return f"{count}: those {found}"
    return f"{count}, which no feature tells from the others"


def of_tensors(cases: Iterable[WrongCase]) -> str:
    """Return what kind of parameters is wrong, if it is one kind in all cases; else "".

    `"in all biases"`. Parameters that learn and are not wrong are right.
    """
    wrong: list[tuple[Case, str]] = []
    right: list[tuple[Case, str]] = []
    for case, tensors, _ in cases:
        names = set(parameter_shapes(case.model))
        here = [name for name in tensors if name in names]
        wrong += [(case, name) for name in here]
        right += [(case, name) for name in learning(case) if here and name not in tensors]
    if not wrong or not right:
        return ""
    masks = _masks(wrong, right, lambda one: kinds(*one))
    found = [kind for kind, (here, there) in masks.items() if here == _all(wrong) and not there]
    several = len({name for _, name in wrong}) > 1
    return f"in all {found[0]}" if several and len(found) == 1 else ""


def properties(case: Case) -> Iterator[str]:
    """Yield the features of a case in words, and what is true of its numbers."""
    for name in features(case):
        if FEATURES[name].dimension != "world" or not name.startswith("world-"):
            yield f"with {FEATURES[name].title}"
    for least in range(2, case.world_size + 1):
        yield f"on {least} ranks or more"
    for least in range(3, case.training.microbatches + 1):
        yield f"with {least} microbatches or more"
    for least in range(2, case.training.steps + 1):
        yield f"with {least} steps or more"
    for least in range(2, len(case.model.blocks) + 1):
        yield f"with {least} blocks or more"
    if case.world_size & (case.world_size - 1):
        yield "on a number of ranks that is no power of two"


def kinds(case: Case, name: str) -> Iterator[str]:
    """Yield the kinds of parameters that one is of, as nouns."""
    model, ranks = case.model, case.axes.parts("parameters")
    shape = parameter_shapes(model)[name]
    elements = 1
    for size in shape:
        elements *= size
    yield {0: "0-d parameters", 1: "1-d parameters", 2: "matrices"}.get(
        len(shape), "parameters of 3 dims or more"
    )
    if shape and shape[0] < ranks:
        yield "parameters with a first dim below the number of ranks"
    if shape and shape[0] % ranks:
        yield "parameters whose first dim the ranks do not divide"
    if elements % ranks:
        yield "parameters whose number of elements the ranks do not divide"
    if elements == case.sharding.bucket:
        yield "parameters with as many elements as a bucket"
    if elements > case.sharding.bucket:
        yield "parameters with more elements than a bucket"
    if parameter_dtypes(model)[name] != "fp32":
        yield "bf16 parameters"
    for prefixes, words in (
        (_twice(case), "parameters of modules that are used twice"),
        (sometimes_used(model), "parameters that only some ranks use"),
        (transposed(model), "matrices that are stored transposed"),
        (unfrozen(case), "parameters that are unfrozen later"),
        (frozen_names(model), "frozen parameters"),
        (("head.",), "parameters of the head"),
        (("stem.",), "parameters of the stem"),
        (("blocks.",), "parameters of blocks"),
    ):
        if name.startswith(tuple(prefixes)):
            yield words
    if model.tied and name == "stem.weight":
        yield "tied parameters"
    for part, words in (
        (".bias", "biases"),
        ("norm", "parameters of norms"),
        ("experts.", "parameters of experts"),
    ):
        if part in name:
            yield words
    if case.axes.has("tp"):
        split = sharded_dim(plan_of(model, case.axes.size("tp")), name)
        yield f"parameters that the tp axis {'replicates' if split is None else 'shards'}"
    names = list(parameter_shapes(model))
    if name == names[-1]:
        yield "last parameters"
    if name == names[0]:
        yield "first parameters"


def _twice(case: Case) -> list[str]:
    calls = call_order(case.model)
    return [f"blocks.{index}." for index in set(calls) if calls.count(index) > 1]


def _masks(
    wrong: Collection[T], right: Collection[T], of: Callable[[T], Iterable[str]]
) -> dict[str, tuple[int, int]]:
    masks: dict[str, list[int]] = {}
    for side, items in enumerate((wrong, right)):
        for place, item in enumerate(items):
            for name in of(item):
                masks.setdefault(name, [0, 0])[side] |= 1 << place
    return {name: (one, other) for name, (one, other) in masks.items()}


def _all(items: Collection[object]) -> int:
    return (1 << len(items)) - 1


def _separating(masks: Masks, every: int) -> str:
    """Return the property, or two of them together, that all wrong and no right ones have.

    Of numbers the largest one says most, and of several properties that go together up to
    MOST_ANSWERS are named. "" if there is none, or more than that.
    """
    common = {name: right for name, (wrong, right) in masks.items() if wrong == every}
    alone = _tightest([name for name, right in common.items() if not right])
    if 0 < len(alone) <= MOST_ANSWERS:
        return " or ".join(alone)
    if alone:
        return ""
    # Of properties that the same cases have, the first one speaks for all.
    first = {right: name for name, right in reversed(common.items())}
    useful = _tightest([name for name in common if name in first.values()])
    pairs = [pair for pair in combinations(useful, 2) if not common[pair[0]] & common[pair[1]]]
    if 0 < len(pairs) <= MOST_ANSWERS:
        return " or ".join(f"{one} and {other}" for one, other in pairs)
    return ""


def _tightest(names: Sequence[str]) -> list[str]:
    """Return the names without "2 ranks or more" where there is "3 ranks or more"."""
    largest: dict[str, tuple[int, str]] = {}
    for name in names:
        words = name.split()
        number = next((int(word) for word in words if word.isdigit()), 0)
        key = " ".join("n" if word.isdigit() else word for word in words)
        if name.endswith("or more"):
            largest[key] = max(largest.get(key, (0, "")), (number, name))
        else:
            largest[name] = (0, name)
    return [name for _, name in largest.values()]
