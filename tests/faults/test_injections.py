"""Faults injected at the collectives: nothing else changes, and a user's own sharder takes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from borrowing import borrowed

sys.path.insert(0, str(Path(__file__).parent))

from cases import drawn

from zerocheck.case.schema import Case, Training
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial
from zerocheck.run.records.records import Outcome

SUBJECTS = Path(__file__).parent.parent / "run" / "subjects.py"

REDUCES_TO_OWNERS = """
import torch, torch.distributed as dist
import zerocheck
from subjects import Plain

class Coalesced(Plain):
    '''The arithmetic of DDP through the functional collectives, which return new tensors.'''

    def train_step(self, step):
        import torch.distributed._functional_collectives as functional
        self.optimizer.zero_grad()
        for microbatch in step.microbatches:
            (microbatch.loss(self.model) / len(step.microbatches)).backward()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                total = functional.all_reduce(parameter.grad, "sum", dist.group.WORLD)
                parameter.grad = functional.wait_tensor(total) / self.world
        step.reached("reduced")
        self.optimizer.step()
        return zerocheck.StepReport()
"""


@pytest.fixture(scope="module")
def pool(session_pool: Pool) -> Iterator[Pool]:
    with borrowed(session_pool, patience_s=3.0) as ranks:
        yield ranks


def ran(pool: Pool, name: str, case: Case) -> Outcome:
    return Trial(pool, name, case).outcome(digest=True)


def causes(outcome: Outcome, obligation: str) -> tuple[str, ...]:
    assert outcome.judgement is not None, outcome.reason
    return next(v.causes for v in outcome.judgement.violations if v.obligation == obligation)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name",
    ["ddp", "zero-redundancy", "fsdp1", "fsdp1-no-shard", "fsdp2", "zero1", "zero2", "zero3"],
)
def test_where_nothing_is_changed_every_bit_is_the_same(pool: Pool, name: str) -> None:
    held = 0
    for case, _ in islice(drawn(3, 1), 12):
        plain = ran(pool, name, case)
        if plain.status != "holds":
            assert ran(pool, f"{name}+nothing", case).status == plain.status
            continue
        injected = ran(pool, f"{name}+nothing", case)
        assert injected.status == "holds", (case, injected)
        assert plain.judgement and injected.judgement
        assert plain.judgement.digest == injected.judgement.digest
        held += 1
        if held == 2:
            return
    raise AssertionError(f"{name} held in {held} cases only")


def test_a_users_own_sharders_take_them(pool: Pool, tmp_path: Path) -> None:
    case = Case(mesh=(3,))
    own = f"{SUBJECTS}:build"
    assert ran(pool, own, case).status == "holds"
    assert causes(ran(pool, f"{own}+average-becomes-sum", case), "gradient") == ("gradient x W",)
    path = tmp_path / "functional.py"
    path.write_text(
        f"import sys; sys.path.insert(0, {str(SUBJECTS.parent)!r})\n{REDUCES_TO_OWNERS}"
    )
    functional = f"{path}:Coalesced"
    assert ran(pool, functional, case).status == "holds"
    assert ran(pool, f"{functional}+nothing", case).status == "holds"
    for name, cause in (
        ("double-average", "gradient / W"),
        ("first-step-local", "local gradient / W"),
    ):
        assert causes(ran(pool, f"{functional}+{name}", case), "gradient") == (cause,)
    assert ran(pool, f"{functional}+rank-left-out", case).status == "violated"
    assert ran(pool, f"{functional}+half-group", case).status == "violated"


def test_two_at_once_are_two_findings(pool: Pool) -> None:
    case = Case(mesh=(3,), training=Training(clip=1e-3))
    outcome = ran(pool, "fsdp2+average-becomes-sum+norm-local", case)
    assert causes(outcome, "gradient") == ("gradient x W",)
    assert causes(outcome, "clip") == ("local norm",)


def test_where_it_finds_nothing_the_case_is_unsupported(pool: Pool) -> None:
    for name, case, message in (
        ("ddp+gather-stale", Case(), "nothing to inject gather-stale into: no all-gathers"),
        ("fsdp2+norm-local", Case(), "no reduction of a norm between ranks"),
        ("fsdp2+average-becomes-sum", Case(mesh=(1,)), "needs 2 ranks or more"),
    ):
        outcome = ran(pool, name, case)
        assert outcome.status == "unsupported" and message in outcome.reason
