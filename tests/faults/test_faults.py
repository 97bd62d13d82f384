"""Every planted bug is caught, for the right reason, and its parent without the bug is not blamed.

All trials share one pool and are submitted ahead, so that ranks run while the last case is judged.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from borrowing import borrowed

sys.path.insert(0, str(Path(__file__).parent))

from cases import cases_for, repetitions
from slices import sliced

from zerocheck.case.features import FEATURES
from zerocheck.case.schema import Case
from zerocheck.faults.fault import Fault
from zerocheck.faults.registry import ALL, FAULTS, NAMED_FAULTS
from zerocheck.judge.attribution.guard import FAILED
from zerocheck.protocol.verdicts import MEMORY, OBLIGATIONS, Obligation, Violation
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial
from zerocheck.run.findings.consequences import independent
from zerocheck.run.records.records import Outcome

AHEAD = 12
"""Trials that are submitted before the oldest is judged."""

BROKEN = {"crashed", "hung"}

FEW = 4


def _by_turns() -> dict[str, Fault]:
    """Of each obligation one fault of every 16th cause, from one implementation after the other,
    and of two causes at least; all faults of obligations that have few. `zerocheck faults` runs
    all on many cases."""
    alike: dict[tuple[Obligation | None, tuple[str, ...], bool, str], list[str]] = {}
    few = Counter(fault.obligation for fault in FAULTS.values())
    for name, fault in FAULTS.items():
        own = name if few[fault.obligation] <= FEW else ""
        alike.setdefault((fault.obligation, fault.causes, fault.mild, own), []).append(name)
    turns = set()
    seen: Counter[Obligation | None] = Counter()
    for number, (key, own) in enumerate(alike.items()):
        if seen[key[0]] % 16 == 0 or seen[key[0]] == 1 or few[key[0]] <= FEW:
            turns.add(own[number // 8 % len(own)])
        seen[key[0]] += 1
    return {name: fault for name, fault in FAULTS.items() if name in turns}


CHOSEN = sliced(FAULTS, _by_turns())

WITHOUT = sliced([*CHOSEN], [*CHOSEN][::6])
"""Faults whose parents run the same cases."""

ENOUGH = sliced(2, 1)
"""Failing cases after which no more are run."""


@dataclass
class Shown:
    """What came of the cases of one fault: outcomes, and those of its parent (of WITHOUT alone), in
    their order."""

    fault: Fault
    cases: list[Case] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    parent: list[Outcome] = field(default_factory=list)

    @property
    def first(self) -> list[Violation]:
        """The first violation of each violated case."""
        judgements = [outcome.judgement for outcome in self.outcomes]
        return [independent(j.violations)[0] for j in judgements if j and j.violations]


@pytest.fixture(scope="module")
def pool(session_pool: Pool) -> Iterator[Pool]:
    with borrowed(session_pool, patience_s=2.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def shown(pool: Pool) -> dict[str, Shown]:
    """All faults on their cases, a round of cases after the other, until each has failed enough."""
    found = {name: Shown(fault) for name, fault in CHOSEN.items()}
    cases = {name: cases_for(fault) for name, fault in CHOSEN.items()}
    held: dict[tuple[str, Case, bool], list[Outcome]] = {}
    open_ = list(CHOSEN)
    while open_:
        round_ = [(found[name], case) for name in open_ if (case := next(cases[name], None))]
        for one, case in round_:
            one.cases.append(case)
        jobs = [
            (one.fault.where, case, _measured(one.fault), one.outcomes)
            for one, case in round_
            for _ in range(repetitions(one.fault))
        ]
        # Faults of one parent share many cases: they are run once.
        wanted = dict.fromkeys(
            (one.fault.parent, case, _measured(one.fault))
            for one, case in round_
            if one.fault.name in WITHOUT
        )
        jobs += [(*key, held.setdefault(key, [])) for key in wanted if key not in held]
        _run(pool, jobs)
        going = {one.fault.name for one, _ in round_}
        open_ = [name for name in open_ if name in going and not _enough(found[name])]
    for one in (found[name] for name in WITHOUT):
        measured = _measured(one.fault)
        one.parent = [held[one.fault.parent, case, measured][0] for case in one.cases]
    return found


def _measured(fault: Fault) -> bool:
    """Whether only a run that is measured shows it."""
    return fault.obligation in MEMORY


def _run(pool: Pool, jobs: Iterable[tuple[str, Case, bool, list[Outcome]]]) -> None:
    in_flight: deque[tuple[Trial, list[Outcome]]] = deque()
    for name, case, measured, into in jobs:
        if len(in_flight) == AHEAD:
            _land(in_flight)
        trial = Trial(pool, name, case, obligations=OBLIGATIONS if measured else None)
        in_flight.append((trial, into))
    while in_flight:
        _land(in_flight)


def _land(in_flight: deque[tuple[Trial, list[Outcome]]]) -> None:
    trial, into = in_flight.popleft()
    into.append(trial.outcome())


def _enough(one: Shown) -> bool:
    """Whether it failed often enough, once as badly as the catalogue says."""
    fault = one.fault
    as_bad = any(violation.mild == fault.mild for violation in one.first)
    return _failed(one) >= ENOUGH and (fault.obligation is None or as_bad)


def _failed(one: Shown) -> int:
    return sum(outcome.status in ("violated", "crashed", "hung") for outcome in one.outcomes)


@pytest.mark.parametrize("name", CHOSEN)
def test_caught(shown: dict[str, Shown], pool: Pool, name: str) -> None:
    one = shown[name]
    fault = one.fault
    statuses = [outcome.status for outcome in one.outcomes]
    assert _failed(one), f"not caught in {len(statuses)} cases: {statuses}"
    if fault.obligation is None:
        assert BROKEN & set(statuses)
        broken = [c for c, status in zip(one.cases, statuses, strict=True) if status in BROKEN]
        traced = [Trial(pool, fault.where, c, fresh=True, trace=True).outcome() for c in broken]
        assert any(set(fault.causes) <= set(outcome.causes) for outcome in traced)
        return
    assert not BROKEN & set(statuses), [o.reason for o in one.outcomes]
    assert {violation.obligation for violation in one.first} == {fault.obligation}
    assert any(violation.mild == fault.mild for violation in one.first)
    # What a race leaves behind depends on the moment: there one case that names it is enough.
    races = fault.sometimes < 1 or "delays" in fault.features
    for outcome in one.outcomes:
        violations = outcome.judgement.violations if outcome.judgement is not None else ()
        assert not any(FAILED in each.attribution for each in violations), violations
    found = (set(violation.causes) for violation in one.first)
    named = set.union(*found) if races else set.intersection(*found)
    assert set(fault.causes) <= named, [(v.causes, v.explanation) for v in one.first]


@pytest.mark.parametrize("name", [n for n, f in CHOSEN.items() if f.spares])
def test_what_is_right_is_not_blamed(shown: dict[str, Shown], name: str) -> None:
    fault = shown[name].fault
    for outcome in shown[name].outcomes:
        assert outcome.judgement is not None
        violated = {violation.obligation for violation in outcome.judgement.violations}
        assert not violated & set(fault.spares)
        assert all(violation.mild == fault.mild for violation in outcome.judgement.violations)


@pytest.mark.parametrize("name", WITHOUT)
def test_without_the_fault_all_holds(shown: dict[str, Shown], name: str) -> None:
    one = shown[name]
    for case, outcome in zip(one.cases, one.parent, strict=True):
        wrong = outcome.judgement.violations if outcome.judgement else outcome.reason
        assert outcome.status in ("holds", "unsupported"), (one.fault.parent, case, wrong)
    assert any(outcome.status == "holds" for outcome in one.parent)


@pytest.mark.parametrize("obligation", OBLIGATIONS)
def test_every_obligation_has_faults_that_it_flags_first(
    shown: dict[str, Shown], obligation: str
) -> None:
    firsts = [one for one in shown.values() if obligation in {v.obligation for v in one.first}]
    assert len(firsts) >= 2


def test_the_catalogue_names_what_exists() -> None:
    for name, fault in FAULTS.items():
        assert name == fault.name
        assert fault.obligation is None or fault.obligation in OBLIGATIONS
        assert set(fault.spares) <= set(OBLIGATIONS)
        assert set(fault.features) | set(fault.without) <= set(FEATURES)
        assert fault.summary and fault.source


def test_names_are_given_once() -> None:
    """The catalogue is a mapping: of two faults with one name it would keep the last."""
    assert len(ALL) == len(NAMED_FAULTS)
