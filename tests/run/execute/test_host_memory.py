"""Whether a large model fits is said before it is run, with what would."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from collected import Collect

from zerocheck.case.schema import (
    Case,
    Model,
    Optimizer,
    Start,
    Training,
    TrainingSegment,
    UserModel,
    UserParameter,
)
from zerocheck.errors import UsageError
from zerocheck.protocol.jobs import Job
from zerocheck.protocol.verdicts import MEMORY, Obligation
from zerocheck.ranks.pool import Pool
from zerocheck.run import engine
from zerocheck.run.execute import host_memory
from zerocheck.run.execute.trial import Trial
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.records.records import CaseFinished, Outcome

GB = 10**9


def _case(millions: int, world_size: int = 2, **training: object) -> Case:
    user = UserModel(
        factory="my.py:model", parameters=(UserParameter(name="w", shape=(millions, 10**6)),)
    )
    given = {"steps": 3} | training
    return Case(mesh=(world_size,), model=Model(user=user), training=Training(**given))  # type: ignore[arg-type]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What this host is made to have, in bytes."""
    answer = SimpleNamespace(memory=256 * GB, disk=1000 * GB)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: answer.memory)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: SimpleNamespace(free=answer.disk), raising=True
    )
    return answer


def test_a_billion_parameters_fit_where_their_ranks_do(host: SimpleNamespace) -> None:
    """Whatever number of microbatches: local gradients may lie in files."""
    host.memory = 28 * GB
    host_memory.check([_case(1000), _case(1000, microbatches=4)])
    assert host_memory.need(_case(1000)).memory == 1000 * 10**6 * (4 * 2 + 20)
    files = host_memory.need(_case(1000)).files
    assert host_memory.need(_case(1000, microbatches=4)).files == files + 1000 * 10**6 * 4 * 6
    assert host_memory.need(_case(1000, loss_scale=64.0)).files == files + 1000 * 10**6 * 8 * 2


def test_ranks_that_all_build_the_model_need_more_than_the_judge() -> None:
    case = msgspec.structs.replace(_case(1000, 16), start=Start(step=2))
    assert host_memory.need(case).memory == 10**9 * (16 * 16 + 20)


def test_of_several_hosts_each_has_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "has_launcher", lambda: True)
    case = msgspec.structs.replace(_case(1000, 8), hosts=(4, 4))
    assert host_memory.need(case).memory == 10**9 * (4 * 4 + 10)
    alone = msgspec.structs.replace(_case(1000, 8), hosts=(1,) * 8)
    assert host_memory.need(alone).memory == 10**9 * 20  # the judge


@pytest.mark.parametrize(
    ("case", "memory", "message"),
    [
        (_case(1000, 8), 40, r"my.py:model \(1,000 million parameters\) on 8 ranks needs about "
         r"52 GB of memory on this host, and 40 GB are available; --world-sizes 5 would need 40 "),
        (_case(1000, 1), 12, r"on 1 rank needs about 24 GB .* a model of 500 million parameters"),
        (_case(1000, 2, microbatches=4), 20, r"on 2 ranks with 4 microbatches needs about 28 GB"),
    ],
)  # fmt: skip
def test_what_does_not_fit(host: SimpleNamespace, case: Case, memory: int, message: str) -> None:
    host.memory = memory * GB
    with pytest.raises(UsageError, match=message):
        host_memory.check([_case(1), case])


def test_what_ranks_hold_needs_room_somewhere(host: SimpleNamespace) -> None:
    """3 steps: 4 states of 12 bytes and 4 gradients of 4; with clipping and amsgrad 7 more of 4.
    Then vectors of the judge."""
    case = _case(3000)
    assert host_memory.need(case).files == 3 * GB * (64 + 128)
    more = msgspec.structs.replace(
        _case(3000, clip=1.0), optimizer=msgspec.structs.replace(Optimizer(), amsgrad=True)
    )
    assert host_memory.need(more).files == 3 * GB * (64 + 28 + 128)
    host.disk = 575 * GB
    host.memory = 1151 * GB
    with pytest.raises(UsageError, match=r"over 3 steps, and .* take 576 GB, .* set TMPDIR"):
        host_memory.check([case])
    host.disk = 576 * GB
    host_memory.check([case])
    host.disk, host.memory = 0, 1152 * GB
    host_memory.check([case])


def test_a_small_model_is_not_asked_about(host: SimpleNamespace) -> None:
    host.memory = host.disk = 0
    host_memory.check([_case(16)])
    assert not host_memory.must_run_alone(_case(16))


def test_ranks_wait_where_there_is_no_memory_for_two(host: SimpleNamespace) -> None:
    case = _case(1000)
    needed = host_memory.need(case)
    host.memory = 2 * (needed.memory + needed.files)
    assert not host_memory.must_run_alone(case)
    host.memory -= 1
    assert host_memory.must_run_alone(case)


def test_no_case_runs_beside_one_that_is_judged(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: set[int] = set()
    most: list[int] = []
    submit, judged = Trial._submit, Trial.judged

    def submitted(trial: Trial, job: Job) -> object:
        under_way.add(id(trial))
        most.append(len(under_way))
        return submit(trial, job)

    def judged_then(trial: Trial, *given: object, **named: object) -> Outcome:
        outcome = judged(trial, *given, **named)  # type: ignore[arg-type]
        under_way.discard(id(trial))
        return outcome

    monkeypatch.setattr(Trial, "_submit", submitted)
    monkeypatch.setattr(Trial, "judged", judged_then)
    options = RunOptions(
        implementations=("zero2",), world_sizes=(2,), max_cases=8, report_dir=str(tmp_path)
    )
    for alone, together in ((False, engine.AHEAD + 1), (True, 1)):
        monkeypatch.setattr(engine, "must_run_alone", lambda case, alone=alone: alone)
        most.clear()
        collected = Collect()
        assert engine.run(options, [collected], ranks=pool) == 0
        assert len(collected.of(CaseFinished)) == 8 and max(most) == together


def test_nothing_is_submitted_behind_what_takes_more_or_has_further_jobs() -> None:
    ranks: Any = SimpleNamespace(submit=lambda *_, **__: None)

    def single(case: Case, obligations: tuple[Obligation, ...] = ()) -> bool:
        return Trial(ranks, "zero2", case, obligations=obligations).single

    small = Case()
    assert single(small) and single(small, MEMORY)
    assert not single(small, ("update", *MEMORY))
    assert not single(msgspec.structs.replace(small, resume=(TrainingSegment(),)))
    assert not single(_case(2))
