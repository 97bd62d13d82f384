"""Stages of a pipeline: what a stage gets is, bit for bit, what the stage beside it sent.

The gradient of a stage is judged from what it was called with and what came back to its outputs. So
stages that are right by themselves, and exchange right values, are the whole model. Values are
compared without their order, which a schedule is free to choose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise

import msgspec

from ... import causes as bugs
from ...protocol.verdicts import Violation
from ..record.axes import JobAxis
from ..record.forwards import Crossing
from ..record.ranks import AllRanks
from ..record.repeatable import Digest, digest
from ..record.step_record import Observed
from ..same_model import pipeline_stages


class _Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of one rank: calls of the model; values in and out; gradients in and out.

    number: of the stage, where a schedule of torch numbers them, else of the rank on the axis;
    unjudged: its gradient is not judged; overwritten: calls whose input changed before their
    backward.
    """

    number: int
    rank: int
    unjudged: bool
    overwritten: int
    calls: int
    given: Digest
    sent: Digest
    returned: Digest
    back: Digest


def with_stages(observed: Observed, axis: JobAxis | None, ranks: AllRanks) -> Observed:
    """Return the step with the first wrong exchange between stages, on one rank of them.

    axis: of the stages. Every rank calls this.
    """
    if axis is None:
        return observed
    crossings = [one.crossing or Crossing(()) for one in observed.forwards]
    numbers = [] if observed.model is None else pipeline_stages(observed.model)
    mine = _Stage(
        number=numbers[0] if numbers else axis.place,
        rank=ranks.rank,
        unjudged=bool(observed.summary.unjudged),
        overwritten=sum(one.overwritten for one in crossings),
        calls=len(crossings),
        given=tuple(chain.from_iterable(one.given for one in crossings)),
        sent=tuple(chain.from_iterable(one.sent for one in crossings)),
        returned=digest(chain.from_iterable(one.returned.values() for one in observed.forwards)),
        back=tuple(chain.from_iterable(one.back for one in crossings)),
    )
    every = ranks.to_first(msgspec.msgpack.encode(mine), axis.ranks)
    stages = [msgspec.msgpack.decode(stage, type=_Stage) for stage in every]
    stages.sort(key=lambda stage: stage.number)
    if any(one.unjudged for one in stages):
        return observed
    return replace(observed, between=_wrong(stages, observed.summary.number))


def _wrong(stages: Sequence[_Stage], step: int) -> Violation | None:
    for one in stages:
        if one.overwritten:
            text = f"in stage {one.number} the inputs of {one.overwritten} of {one.calls} "
            text += "microbatches were overwritten before their backward"
            return _violation(text, (one.rank,), step)
    for before, after in pairwise(stages):
        if before.number + 1 != after.number:
            continue  # the stage between them is another model of the same rank
        names = f"stage {before.number}", f"stage {after.number}"
        ranks = before.rank, after.rank
        if before.calls != after.calls:
            counts = f"{before.calls} and {after.calls} microbatches"
            return _violation(f"{names[0]} and {names[1]} computed {counts}", ranks, step)
        wrong = Counter(after.given) - Counter(before.sent)
        if wrong:
            what = f"{names[1]} was called with what {names[0]} did not return"
            return _violation(_of(what, wrong, after.given), ranks[1:], step)
        wrong = Counter(before.returned) - Counter(after.back)
        if wrong:
            what = f"{names[0]} got gradients that {names[1]} did not send back"
            return _violation(_of(what, wrong, before.returned), ranks[:1], step)
    return None


def _of(text: str, wrong: Counter[int], every: Sequence[int]) -> str:
    return f"{text} ({wrong.total()} of {len(every)} tensors)"


def _violation(text: str, ranks: tuple[int, ...], step: int) -> Violation:
    return Violation(
        obligation="gradient",
        step=step,
        role="gradient",
        tensors=(),
        ranks=ranks,
        explanation=text,
        causes=(bugs.STAGES_EXCHANGE_OTHER_VALUES,),
    )
