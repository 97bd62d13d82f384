"""Records made by hand: what reports are tested with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from zerocheck.case.schema import Case, TrainingSegment
from zerocheck.protocol.verdicts import (
    EQUIVALENCE,
    RESUME,
    Judgement,
    Load,
    Obligation,
    Status,
    Violation,
)
from zerocheck.run.records.records import (
    CaseFinished,
    Environment,
    Finding,
    KnownReference,
    LeftOut,
    Record,
    RunFinished,
    RunStarted,
    StaleIssue,
)

ENVIRONMENT = Environment(
    zerocheck="0.1.0",
    torch="2.13.0",
    python="3.11.7",
    platform="Linux",
    cpu="a cpu",
    cores=2,
    cpu_capability="AVX2",
)

VIOLATION = Violation(
    obligation="gradient",
    step=1,
    role="gradient",
    tensors=("blocks.0.up.weight", "head.weight", "head.bias", "stem.bias"),
    ranks=(2,),
    explanation="the reduced gradient is not what the declared semantics say",
    element=(3, 5),
    observed=0.125,
    expected=0.03125,
    bound=3.1e-9,
    ratio=3.0e7,
    wrong=96,
    total=128,
    causes=("x GA", "x W"),
)

KNOWN = KnownReference(
    fingerprint="zero2 / gradient / x W",
    reason="upstream divides by nothing",
    source="known.toml, entry 2",
    link="https://example.org/7",
    page="reports/findings/a.md",
)

HOSTILE = "[red]x[/red] <b>&\x1b[31m\x00\ud800 | `` ``` # \u202e end"
"""Rich markup, HTML, terminal escapes, what XML cannot hold, Markdown, and a bidi override."""


def started(*implementations: str, planned: int = 4, **given: Any) -> RunStarted:
    """The first record of a run."""
    fields: dict[str, Any] = {
        "environment": ENVIRONMENT,
        "implementations": implementations or ("zero2",),
        "obligations": EQUIVALENCE,
        "profile": "quick",
        "seed": 0,
        "world_sizes": (2, 3),
        "planned": planned,
        "started": 1_700_000_000.0,
    }
    return RunStarted(**{**fields, **given})


def statuses(default: Status = "holds", **other: Status) -> dict[Obligation, Status]:
    """A verdict for every obligation."""
    return {obligation: other.get(obligation, default) for obligation in EQUIVALENCE}


def case(
    number: int = 0,
    implementation: str = "zero2",
    status: Status = "holds",
    *,
    share: float = 0.25,
    mesh: tuple[int, ...] = (2,),
    reason: str = "",
    known: tuple[Obligation, ...] = (),
    **verdicts: Status,
) -> CaseFinished:
    """A case that was judged, or, for other statuses, was not."""
    judgement = None
    if status in ("holds", "violated"):
        judgement = Judgement(
            statuses=statuses(**verdicts),
            share={obligation: share for obligation in EQUIVALENCE},
            semantics={"average": "mean"},
        )
    return CaseFinished(
        number=number,
        implementation=implementation,
        case=Case(mesh=mesh),
        status=status,
        judgement=judgement,
        reason=reason,
        seconds=0.5,
        judge_seconds=0.1,
        known=known,
    )


def finding(**given: Any) -> Finding:
    """A violated gradient."""
    fields: dict[str, Any] = {
        "number": 0,
        "fingerprint": "zero2 / gradient / x W",
        "implementation": "zero2",
        "status": "violated",
        "title": "the reduced gradient is 4 times too large",
        "case_number": 1,
        "obligation": "gradient",
        "violation": VIOLATION,
        "causes": ("x W",),
        "confirmed": 2,
        "tries": 2,
        "case_file": "zerocheck-report/findings/zero2-gradient.json",
    }
    return Finding(**{**fields, **given})


def hostile_finding() -> Finding:
    """A finding whose every text is hostile."""
    return finding(
        implementation=HOSTILE,
        title=HOSTILE,
        reason=HOSTILE,
        causes=(HOSTILE,),
        case_file=HOSTILE,
        violation=msgspec.structs.replace(
            VIOLATION, explanation=HOSTILE, role=HOSTILE, tensors=(HOSTILE,)
        ),
    )


def finished(exit_code: int = 0) -> RunFinished:
    """The last record of a run that came to its end."""
    return RunFinished(outcome="done", exit_code=exit_code, seconds=12.0)


def held(count: int = 2) -> list[Record]:
    """A run of one implementation in which all holds."""
    return [started(planned=count), *(case(i) for i in range(count)), finished()]


def failed() -> list[Record]:
    """A run with a violated, a crashed, an unsupported and a good case."""
    return [
        started("zero2", "ddp"),
        case(0, mesh=(3,)),
        case(1, "zero2", "violated", gradient="violated", update="not exercised", share=3.0e7),
        case(2, "ddp", "crashed", reason="rank 1: IndexError"),
        case(3, "ddp", "unsupported", reason="no empty parameters"),
        finding(),
        finding(
            number=1,
            fingerprint="ddp / crashed / IndexError",
            implementation="ddp",
            status="crashed",
            title="the ranks crashed: IndexError",
            obligation=None,
            violation=None,
            causes=(),
            reason="rank 1: IndexError\nrank 0 waited in all_reduce",
            detail="Traceback (most recent call last):\n  IndexError",
        ),
        finished(1),
    ]


def stale(**given: Any) -> StaleIssue:
    """A known issue of the gradient that no case showed."""
    fields: dict[str, Any] = {
        "implementation": "zero2",
        "known": KNOWN,
        "seen": "its own case holds",
        "advice": "remove known.toml, entry 2",
        "obligation": "gradient",
    }
    return StaleIssue(**{**fields, **given})


def known() -> list[Record]:
    """A run in which nothing fails but a known issue, and a known hang had cases left out."""
    hang = msgspec.structs.replace(KNOWN, fingerprint="zero2 / hung", reason="ranks mix up")
    return [
        started(left_out=(LeftOut(implementation="zero2", count=3, known=hang),)),
        case(0),
        case(
            1,
            status="violated",
            gradient="violated",
            publish="violated",
            known=("gradient", "publish"),
        ),
        finding(known=KNOWN, confirmed=0, tries=0),
        finished(),
    ]


def loaded(
    number: int = 0,
    *loads: Load,
    mesh: int = 3,
    onto: tuple[int, ...] = (2,),
    implementation: str = "zero2",
    last: Mapping[str, Any] | None = None,
    known: tuple[Obligation, ...] = (),
    **given: Any,
) -> CaseFinished:
    """A resumed case that was judged, or broke. last: fields of its last segment."""
    segments = [TrainingSegment(mesh=(size,)) for size in onto]
    segments[-1] = msgspec.structs.replace(segments[-1], **(last or {}))
    violated = dict.fromkeys((o for load in loads for o in load.violated), "violated")
    fields: dict[str, Any] = {
        "number": number,
        "implementation": implementation,
        "case": Case(mesh=(mesh,), resume=tuple(segments)),
        "status": "violated" if violated else "holds",
        "judgement": Judgement(
            statuses={**dict.fromkeys(RESUME, "holds"), **violated},  # type: ignore[arg-type]
            loads=loads,
        ),
        "known": known,
    }
    return CaseFinished(**{**fields, **given})


def resumed() -> list[Record]:
    """A run of two implementations that save and load: one holds, one has every other outcome."""
    last = {"killed": 0.5}
    one, two = Load(segment=1), Load(segment=2)
    wrong = Load(segment=2, violated=("continuation",))
    return [
        started("zero2", "ddp", obligations=RESUME, planned=12),
        loaded(0, one),
        loaded(1, one, two, onto=(2, 5)),
        loaded(2, one, Load(segment=1, gave="new"), last=last),
        loaded(3, one, Load(segment=1, gave="older"), last={**last, "over": True}),
        loaded(4, one, Load(segment=1, gave="none"), last={"damage": "flip"}),
        loaded(5, one, wrong, onto=(2, 5), implementation="ddp"),
        loaded(6, one, wrong, onto=(2, 5), implementation="ddp", known=("continuation",)),
        loaded(
            7,
            one,
            Load(segment=1, violated=("damage",), gave="wrong"),
            implementation="ddp",
            last={"damage": "flip"},
        ),
        loaded(8, implementation="ddp", status="crashed", judgement=None, begun=0),
        loaded(9, onto=(2, 5), implementation="ddp", status="hung", judgement=None, begun=2),
        loaded(10, implementation="ddp", status="unsupported", judgement=None),
        loaded(11, implementation="ddp", last=last, status="crashed", judgement=None, begun=2),
        finished(1),
    ]
