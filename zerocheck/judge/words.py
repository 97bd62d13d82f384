"""Other words of the declared semantics under which a violated case holds.

Correct trainers differ, and what they mean by a step is declared. Before code is blamed, its case
is judged again under each other word, one field at a time: where everything holds then, the code
may be right, and only the declaration missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import get_args, get_type_hints

import msgspec

from .. import causes as bugs
from ..case.schema import Case
from ..causes.registry import CauseFamily
from ..contract.semantics import Semantics
from ..protocol.observations import RankObservation
from ..protocol.verdicts import EQUIVALENCE, RESUME, Judgement, Violation
from .precision import Computing

BY_CAUSE: Mapping[str, CauseFamily] = {
    "accumulate_dtype": bugs.ACCUMULATED_IN,
    "reduce": bugs.REDUCED_IN,
}
"""Fields whose words widen the bound by much, with the cause that suggests one.
Without that cause, a wide bound would excuse what has nothing to do with it."""


class Refuted(Exception):
    """Raised where a word does not make the case right: a violation remains under it."""


def with_words(
    judgement: Judgement, case: Case, again: Callable[[str, str], Judgement]
) -> Judgement:
    """Add to a judgement the words under which nothing of the case is violated.

    again(field, word): the judgement if that had been declared; it may raise Refuted.
    """
    steps = {*EQUIVALENCE, *RESUME}
    violations = [one for one in judgement.violations if one.obligation in steps]
    if not violations:
        return judgement
    found = []
    for field, word in alternatives(case, Semantics(**judgement.semantics), violations):  # type: ignore[arg-type]
        try:
            holds = not again(field, word).violations
        except Refuted:
            holds = False
        if holds:
            found.append(f"{field}={word!r}")
    return msgspec.structs.replace(judgement, words=tuple(found))


def declared(
    observations: Sequence[RankObservation], field: str, word: str
) -> list[RankObservation]:
    """Return the ranks' observations, as if they had declared another word."""
    replace = msgspec.structs.replace
    return [
        replace(
            one,
            declaration=replace(
                one.declaration, semantics={**one.declaration.semantics, field: word}
            ),
        )
        for one in observations
    ]


def alternatives(
    case: Case, semantics: Semantics, violations: Collection[Violation]
) -> Iterator[tuple[str, str]]:
    """Iterate over (field, word) of each other declaration that could matter in this case."""
    hints = get_type_hints(Semantics)
    for field in _fields(case, semantics):
        for word in get_args(hints[field]):
            if word == getattr(semantics, field):
                continue
            if word == "reduce_shards" and not case.axes.has("replicate"):
                continue
            family = BY_CAUSE.get(field)
            if family is None or any(family(format=word) in one.causes for one in violations):
                yield field, word


def _fields(case: Case, semantics: Semantics) -> Iterator[str]:
    """Fields whose words make a difference in this case."""
    training = case.training
    if case.world_size > 1:
        yield "buffers"
        yield "average"
    if case.data.masked:
        yield "weight"
    yield "unused"
    if Computing.of(semantics).cast is not None:
        yield "gradient_dtype"
    if training.microbatches > 1:
        yield "divide"
        if case.world_size > 1:
            yield "accumulate"
        yield "accumulate_dtype"
    if training.clip is not None:
        yield "clip"
    if case.world_size > 1:
        if semantics.average == "mean":
            yield "divide_ranks"
        yield "reduce"
