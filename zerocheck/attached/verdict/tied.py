"""Parameters that stages of a pipeline share: the gradient of each is the sum over them.

The model of `reference=` says what is tied if it is the whole one. Else a sum is accepted where
the values are equal before the step, and not required.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ... import causes as bugs
from ...protocol.verdicts import Violation
from ..record.ranks import AllRanks, agreed
from ..record.run_parameters import RunParameter
from ..record.step_record import BEFORE, RankVerdict, StepSummary
from .reduced_gradient import Judged


def declared(
    groups: Sequence[Sequence[str]], tensors: Sequence[RunParameter], ranks: AllRanks
) -> dict[str, list[str]]:
    """Return what the reference ties between stages, by name. groups: names that are one there."""
    every = ranks.gather(msgspec.msgpack.encode(groups))
    stages = {one.name: one.stage for one in tensors}
    tied: dict[str, list[str]] = {}
    for group in [names for one in every for names in msgspec.msgpack.decode(one)]:
        names = sorted(stages.keys() & group)
        if len({stages[name] for name in names}) > 1:
            tied |= dict.fromkeys(names, names)
    return agreed(tied, dict[str, list[str]], ranks)


def by_value(
    found: Judged, tensors: Sequence[RunParameter], verdicts: Sequence[RankVerdict], ranks: AllRanks
) -> dict[str, list[str]]:
    """Return what is tied between stages: each wrong tensor with those of the same values.

    Such as an embedding and a head, whose gradients the script sums. verdicts: on rank 0.
    """
    every = ranks.gather(msgspec.msgpack.encode([*found.wrong]))
    wrong = {name for names in map(msgspec.msgpack.decode, every) for name in names}
    values: dict[str, set[object]] = {}
    for one in verdicts if wrong else ():
        for piece, hashes in zip(one.summary.pieces, one.hashes, strict=True):
            place = (*piece.place[1:], hashes.get(f"{BEFORE}.parameter"))
            values.setdefault(piece.name, set()).add(place)
    shapes = {one.name: (tuple(one.shape), one.stage) for one in tensors}
    same: dict[str, list[str]] = {}
    for name in wrong:
        shape, stage = shapes[name]
        alike = [
            other
            for other, each in values.items()
            if each == values[name] and shapes[other][0] == shape and shapes[other][1] != stage
        ]
        if alike and wrong.issuperset(alike):
            same[name] = sorted((name, *alike))
    return agreed(same, dict[str, list[str]], ranks)


def not_summed(
    every: Sequence[Judged], tied: Mapping[str, Sequence[str]], summary: StepSummary
) -> Violation | None:
    """Return the violation of a parameter of several stages whose gradients are not summed."""
    name = next((name for one in every for name in one.wrong if name in tied), None)
    if name is None:
        return None
    others = " and ".join(other for other in tied[name] if other != name)
    return Violation(
        obligation="gradient",
        step=summary.number,
        role="gradient",
        tensors=tuple(tied[name]),
        ranks=tuple(
            rank for rank, one in enumerate(every) if not tied.keys().isdisjoint(one.wrong)
        ),
        explanation=f"the gradient of {name} is not the sum of its own and that of {others}, to "
        "which reference= ties it",
        causes=(bugs.TIED_APART,),
    )
