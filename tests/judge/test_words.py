"""Other declared semantics under which a violated case holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from observing import Observed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zerocheck.case.schema import Block, Case, Data, Model, Training
from zerocheck.contract import Built, BuiltImplementation, Semantics, groups
from zerocheck.contract.implementation import Step, StepReport
from zerocheck.judge.case import judge
from zerocheck.judge.words import alternatives, declared, with_words
from zerocheck.protocol.verdicts import Judgement, Violation

CASE = Case(
    mesh=(3,),
    seed=4,
    model=Model(inputs=5, width=8, outputs=3, blocks=(Block(kind="batch_norm"),)),
    data=Data(batch=2, length=3),
    training=Training(steps=2, microbatches=3),
)
TOKENS = msgspec.structs.replace(
    CASE,
    model=msgspec.structs.replace(CASE.model, stem="embedding", inputs=7),
    data=msgspec.structs.replace(CASE.data, masked=True),
)


class Undeclared(BuiltImplementation):
    """DDP with torch's defaults, which send the buffers of rank 0."""

    def build(self, model: nn.Module, case: Case, mesh: Any) -> Built:
        wrapped = DistributedDataParallel(model, process_group=mesh.get_group())
        return Built(wrapped, torch.optim.AdamW(groups(model, case)))


class Sends(Undeclared):
    """Sends the buffers of rank 0 by itself, and declares nothing."""

    def build(self, model: nn.Module, case: Case, mesh: Any) -> Built:
        built = super().build(model, case, mesh)
        built.model.broadcast_buffers = False  # type: ignore[assignment]
        return built

    def train_step(self, step: Step) -> StepReport:
        for buffer in self.built.model.buffers():
            dist.broadcast(buffer, 0)
        return super().train_step(step)


class Summed(Undeclared):
    semantics = Semantics(buffers="rank0")

    def train_step(self, step: Step) -> StepReport:
        def sum_(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        if step.index == self.case.training.first:
            self.built.model.register_comm_hook(None, sum_)  # type: ignore[operator]
        return super().train_step(step)


class Tokens(Undeclared):
    semantics = Semantics(buffers="rank0")

    def _objective(self, loss: Any, weight: float, count: int) -> Any:
        return super()._objective(loss * weight, 1.0, count)


class Halved(Undeclared):
    """Not a matter of words."""

    semantics = Semantics(buffers="rank0")

    def _objective(self, loss: Any, weight: float, count: int) -> Any:
        return super()._objective(loss * 0.6, weight, count)


def _judged(observe: Callable[..., Observed], kind: type, case: Case) -> Judgement:
    observed = observe(f"{kind.__module__}:{kind.__name__}", case)

    def fetch(rank: int, record: Any) -> Any:
        return observed.tensors[rank, record]

    def again(field: str, word: str) -> Judgement:
        return judge(case, declared(observed.seen, field, word), fetch, brief=True)

    return with_words(observed.judge(), case, again)


@pytest.mark.parametrize(
    ("kind", "case", "words"),
    [
        (Sends, CASE, ("buffers='rank0'",)),
        (Summed, CASE, ("average='sum'",)),
        (Tokens, TOKENS, ("weight='token'",)),
        (Halved, CASE, ()),
    ],
)
def test_the_word_that_explains_all_is_named(
    observe: Callable[..., Observed], kind: type, case: Case, words: tuple[str, ...]
) -> None:
    judgement = _judged(observe, kind, case)
    assert judgement.violations and judgement.words == words


def test_the_cause_stays(observe: Callable[..., Observed]) -> None:
    (violation, *_) = _judged(observe, Summed, CASE).violations
    assert "gradient x W" in violation.causes


def test_nothing_is_judged_again_where_nothing_is_violated(
    observe: Callable[..., Observed],
) -> None:
    observed = observe("ddp", CASE)
    judgement = observed.judge()

    def again(field: str, word: str) -> Judgement:
        raise AssertionError

    assert with_words(judgement, CASE, again) is judgement


def test_a_wide_bound_is_tried_only_where_a_cause_suggests_it() -> None:
    violation = Violation(
        obligation="gradient", step=0, role="gradient", tensors=(), ranks=(), explanation=""
    )
    fields = {field for field, _ in alternatives(CASE, Semantics(), [violation])}
    assert {"buffers", "average", "divide", "accumulate", "divide_ranks"} <= fields
    assert not {"reduce", "accumulate_dtype", "weight", "clip"} & fields
    rounded = msgspec.structs.replace(violation, causes=("reduced in bf16",))
    assert ("reduce", "bf16") in alternatives(CASE, Semantics(), [rounded])
    alone = msgspec.structs.replace(CASE, mesh=(1,))
    assert not {"average", "buffers"} & {f for f, _ in alternatives(alone, Semantics(), [])}
