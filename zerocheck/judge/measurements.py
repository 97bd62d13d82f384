"""Obligations of MEMORY, from the bytes that the ranks of one case held and sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from ..case.schema import Case
from ..protocol.measurements import Measured
from ..protocol.replies import MemoryReply
from ..protocol.verdicts import Judgement, Obligation, Status, Violation
from .footprint import measured_bytes
from .obligation import Measurements
from .obligations import OF_A_MEASUREMENT


def judge_measured(
    case: Case, replies: Sequence[MemoryReply], *, digest: bool = False
) -> Judgement:
    """Judge the measurements of a case's ranks. replies[r]: that of rank r.

    With `digest`, or if anything is violated, the hash of all that was measured is taken.
    """
    measured = [reply.measured for reply in replies]
    statuses: dict[Obligation, Status] = {}
    violations: list[Violation] = []
    vacuous: list[Obligation] = []
    for one in OF_A_MEASUREMENT:
        obligation = one.name
        (checked,) = one.check(Measurements(case, measured))
        statuses[obligation] = (
            "violated" if checked.violation else "holds" if checked.exercised else "not exercised"
        )
        if checked.violation is not None:
            violations.append(checked.violation)
        elif checked.exercised and checked.vacuous:
            vacuous.append(obligation)
    return Judgement(
        statuses=statuses,
        violations=tuple(sorted(violations, key=lambda one: one.step)),
        digest=_digest(measured) if digest or violations else "",
        semantics=replies[0].semantics,
        vacuous=tuple(vacuous),
        measured_bytes=measured_bytes(case, measured),
    )


def _digest(measured: Sequence[Measured]) -> str:
    plain = [msgspec.to_builtins(one) for one in measured]
    for one in plain:
        one.pop("pools")  # what an allocator reserves depends on what ran before
    return hashlib.blake2b(msgspec.msgpack.encode(plain), digest_size=16).hexdigest()


def merged(parts: Sequence[Judgement]) -> Judgement:
    """Merge several judgements of one case, of different obligations, into one."""
    first, *others = parts
    for other in others:
        first = msgspec.structs.replace(
            first,
            statuses={**first.statuses, **other.statuses},
            share={**first.share, **other.share},
            violations=tuple(
                sorted((*first.violations, *other.violations), key=lambda one: one.step)
            ),
            further=(*first.further, *other.further),
            digest=first.digest + other.digest,
            vacuous=(*first.vacuous, *other.vacuous),
            estimated=tuple(dict.fromkeys((*first.estimated, *other.estimated))),
            measured_bytes=first.measured_bytes or other.measured_bytes,
        )
    return first
