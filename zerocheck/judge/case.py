"""Judge of one case: induction over its steps.

Base case: the initial state is the model's. Step: from the state that the implementation itself
held before, the reference takes the one step, and what the implementation held after must lie in
the enclosure. So errors never compound, and the first wrong step is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace

from ..case.schema import Case
from ..case.segments import is_one_forward
from ..models.blocks import DTYPES
from ..protocol.observations import RankObservation
from ..protocol.verdicts import Judgement
from . import shares, vectors
from .assemble import Fetch
from .attribution.guard import guarded
from .attribution.loaded import start_state
from .context import CaseContext, StepContext
from .diagnose.axes import order_of_pieces
from .diagnose.named import named
from .local import as_on_a_rank
from .obligation import ObligationCheck
from .obligations import OF_A_STEP, publish
from .obligations.loss import LOSS
from .rank_device import ran_on
from .state import State


def judge(
    case: Case,
    observations: Sequence[RankObservation],
    fetch: Fetch,
    *,
    digest: bool = False,
    brief: bool = False,
) -> Judgement:
    """Judge what all ranks observed of a case.

    observations[r]: the reply of rank r; fetch(rank, record): the tensor that a record points to.
    With `digest`, or if anything is violated, the hash of all observations is taken. brief: the
    first violation raises Refuted, and no cause is looked for.
    """
    with as_on_a_rank(ran_on(observations)), torch.no_grad(), vectors.reused():
        return CaseJudge(case, observations, fetch, brief=brief).judgement(digest=digest)


class CaseJudge(CaseContext):
    """Judge of one case, or of one training segment of a resumed case."""

    def judgement(self, *, digest: bool) -> Judgement:
        """Return the verdict on every obligation of a step."""
        if self.owned(self.first - 1, "state"):
            before = State.observed(self.observation, self.first - 1)
            self.judge_start(before)
            self._judge_steps(before)
        if "ownership" not in self.verdicts.violations:
            stage = self.declaration.stage
            self.verdicts.note("ownership", 0.0, shares.check(self.observation, self.case, stage))
        of = self.tolerance.obligations
        if self.updates.estimated:
            of = {*of, "update"}
        return self.verdicts.judgement(self.observation, estimated=of, digest=digest)

    def judge_start(self, before: State) -> None:
        """Judge the state before the first step: that of the model, or the restored one."""
        assert self.start is not None
        start, self.start = self.start, None
        dtype = DTYPES.get(self.semantics.compute, torch.float32)
        violation = publish.check_start(before, *start, self.layout, dtype)
        if violation is not None:
            roles = ("parameter", *dict.fromkeys((*start.moments, *before.moments)))
            known = self.observation, self.case, roles
            text = guarded(lambda: start_state(before, start, *known))
            violation = replace(violation, attribution=text)
        if self.case.axes.has("tp") and named():
            violation = order_of_pieces(
                violation, before.parameter, start[0], self.layout, self.case
            )
        self.verdicts.note("publish", 0.0, violation)

    def _of(self, step: StepContext) -> Sequence[ObligationCheck[StepContext]]:
        """Return the obligations of a step: of the forward that ends a case, its loss alone."""
        return (LOSS,) if is_one_forward(self.case, step.index) else OF_A_STEP

    def _judge_steps(self, before: State) -> None:
        violation = publish.check(self.observation, before, step=self.first - 1, case=self.case)
        self.verdicts.note("publish", 0.0, violation)
        earlier: list[torch.Tensor] | None = None
        used = [False] * len(self.layout.places)
        for index in range(self.first, self.end + 1):
            step = StepContext(self, index, before, earlier=earlier, used_before=used)
            earlier = None
            for obligation in self._of(step):
                if not obligation.needs or step.updated:
                    for checked in obligation.check(step):
                        self.verdicts.add(obligation.name, checked)
            if not step.updated:
                return
            if step.forward_holds:
                here = step.passes.used.any(0).tolist()
                used = [one or other for one, other in zip(used, here, strict=True)]
            earlier, before = before.per_rank, step.settled
            step.leave()
