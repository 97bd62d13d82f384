"""Judge of one case: induction over its steps.

Base case: the initial state is the model's. Step: from the state that the implementation itself
held before, the reference takes the one step, and what the implementation held after must lie in
the enclosure. So errors never compound, and the first wrong step is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..case.schema import Case
from ..case.segments import end_of
from ..case.traits import cuts, estimated
from ..contract.groups import learning_rates
from ..contract.semantics import Semantics
from ..devices import CPU
from ..models.blocks import DTYPES
from ..models.network import build_model
from ..protocol.observations import Point, RankObservation
from ..protocol.verdicts import Judgement, Violation
from . import buffers as buffers_
from . import clip as clip_
from . import gradient as gradient_
from . import hidden, publish, shares, skip, vectors
from . import loss as loss_
from .assemble import Fetch, Observation, RoleState
from .compare import all_finite
from .diagnose.tensor_parallel import order_of_pieces
from .estimate import NOT_OFF, Off
from .flat import flat_buffers
from .hidden_states import HiddenStates
from .layout import ParameterLayout
from .local import LocalRunner, Passes, as_on_a_rank
from .noted import Noted
from .owners import owners_copies
from .ownership import Ownership
from .pieces import in_pieces
from .precision import Computing, begun_in
from .ran_on import own_states, ran_on
from .recovery import Recovery
from .replayed import StepReplay
from .state import StartState, State
from .tolerance import Tolerance
from .update import Update, UpdateJudge, UpdateRecipe


def judge(
    case: Case,
    seen: Sequence[RankObservation],
    fetch: Fetch,
    *,
    digest: bool = False,
    brief: bool = False,
) -> Judgement:
    """Judge what all ranks observed of a case.

    seen[r]: the reply of rank r; fetch(rank, record): the tensor that a record points to. With
    `digest`, or if anything is violated, the hash of all that was observed is taken. brief: the
    first violation raises Refuted, and no cause is looked for.
    """
    with as_on_a_rank(ran_on(seen)), torch.no_grad():
        return CaseJudge(case, seen, fetch, brief=brief).judgement(digest=digest)


class CaseJudge:
    """Judge over one case, or over one training segment of a resumed case."""

    def __init__(
        self, case: Case, seen: Sequence[RankObservation], fetch: Fetch, *, brief: bool = False
    ) -> None:
        self.case, self.brief = case, brief
        self.first, self.end = case.training.first, end_of(case)
        model = build_model(case)
        self.layout = ParameterLayout.of(model, case)
        replica = case.shards if len(case.mesh) > 1 else 0
        self.observation = Observation(self.layout, seen, fetch, self.first, replica)
        self.semantics = Semantics(**seen[0].declaration.semantics)  # type: ignore[arg-type]
        self.start = StartState.of(
            case,
            model,
            self.layout,
            restored=seen[0].restored,
            rounded=begun_in(self.semantics),
        )
        self.device = ran_on(seen)
        computing = Computing.of(self.semantics)
        runner = LocalRunner(model, case, self.layout, self.device, computing)
        self.replayed = StepReplay(case, self.observation, self.semantics, runner)
        masters = self.semantics.master != "none"
        self.ownership = Ownership(self.observation, case.hosts, masters=masters)
        self.updates = UpdateJudge(self.layout, UpdateRecipe.of(case))
        self.noted = Noted(seen, brief=brief)
        self.states: HiddenStates | None = None
        if "states" in seen[0].declaration.hides:
            self.states = HiddenStates(self.layout, self.updates.recipe, case, self.semantics)
            self.noted.tier = "parameters only"
        self.passes: Passes | None = None
        self.tolerance = Tolerance(self.replayed, kernels_differ=estimated(case))
        self.used_before = [False] * len(self.layout.places)

    def judgement(self, *, digest: bool) -> Judgement:
        """Return the verdict on every obligation of a step."""
        if self._owned(self.first - 1, "state"):
            self._induction()
        if "ownership" not in self.noted.violations:
            stage = self.observation.seen[0].declaration.stage
            self.noted.note("ownership", 0.0, shares.check(self.observation, self.case, stage))
        of = self.tolerance.obligations
        return self.noted.judgement(self.observation, estimated=of, digest=digest)

    def _induction(self) -> None:
        before = State.observed(self.observation, self.first - 1)
        self._base(before)
        del self.start  # as large as the state
        self.noted.note(
            "publish", 0.0, publish.check(self.observation, before, step=self.first - 1)
        )
        earlier: list[torch.Tensor] | None = None
        for step in range(self.first, self.end + 1):
            gradient = self._forward(step, before, earlier)
            earlier = None
            if step == self.end or not (self._agreed(step) and self._owned(step, "state")):
                return
            after = State.observed(self.observation, step)
            self.noted.vacuity.moved(before, after)
            after = self._update(step, before, after, gradient)
            self.noted.note(
                "publish", 0.0, publish.check(self.observation, after, step=step, before=before)
            )
            if self.passes is not None:
                used = self.passes.used.any(0).tolist()
                self.used_before = [a or b for a, b in zip(self.used_before, used, strict=True)]
            self.passes = None
            self.tolerance.leave()
            self.observation.forget(step - 1)
            if in_pieces(None, self.layout.size):
                # The arenas have it still; it is put together again where the diagnosis asks.
                self.observation.forget(step, ("reduced", "clipped"))
            earlier, before = before.own, after

    def _base(self, before: State) -> None:
        """Judge the state before the first step."""
        dtype = DTYPES.get(self.semantics.compute, torch.float32)
        violation = publish.check_start(before, *self.start, self.layout, dtype)
        if cuts(self.case):
            seen, wanted = before.parameter, self.start[0]
            violation = order_of_pieces(violation, seen, wanted, self.layout, self.case)
        self.noted.note("publish", 0.0, violation)

    def _forward(
        self, step: int, before: State, earlier: Sequence[torch.Tensor] | None
    ) -> RoleState | None:
        """Judge losses, buffers and the reduced gradient of a step; returns that gradient.

        earlier: what each rank computed with in the step before.
        """
        losses = [rank.losses for rank in self.observation.steps(step)]
        self.passes = None
        random = own_states(self.observation.random_states(step), self.device)
        apart = self.case.sharding.tensor_parallel
        self.noted.note("loss", 0.0, loss_.check_random(random, step=step, together=apart))
        passes = self.replayed.passes(step, before)
        if self.device.type != CPU:
            self.noted.taken(passes, lambda: self.replayed.passes(step, before))
        self.tolerance.enter(step, before, passes)

        def check(off: Off) -> tuple[float, Violation | None]:
            return 0.0, loss_.check(
                losses,
                passes.losses,
                off=off.loss,
                step=step,
                evaluated=lambda: self.replayed.evaluated(step, before),
                left=self.observation.left(step, apart=not cuts(self.case)),
                left_elsewhere=self.observation.left_elsewhere(step),
            )

        _, violation = self.tolerance.judged("loss", check)
        if violation is not None and earlier is not None:
            stale = self.replayed.passes(step, before, own=earlier)
            if loss_.same(losses, stale.losses, self.tolerance.widest.loss):
                self.noted.note("publish", 0.0, publish.stale(step, violation))
                return self._reduced(step)
        if violation and not (violation.causes or self.brief or "loss" in self.noted.violations):
            buffers = flat_buffers(self.observation.seen, self.layout)
            violation = self.replayed.of_other_parameters(step, before, violation, buffers)
            if cuts(self.case):
                off = self.tolerance.off
                violation = self.replayed.of_repeated_biases(step, before, violation, off.loss)
        self.noted.note("loss", 0.0, violation)
        if violation is not None:
            # The forward was another one, so its gradient is too: one bug, one finding.
            return self._reduced(step)
        self.passes = passes
        self.noted.vacuity.losses(passes.losses)
        self._buffers(step, before, passes)
        held = self._reduced(step)
        if held is not None:
            if "owners" in self.observation.seen[0].declaration.hides and not held.agree:
                held = owners_copies(held, self._expected(step, passes).of, self.layout)
            self._gradient(
                step, before, passes, held, lambda off: self._expected(step, passes, off)
            )
            if in_pieces(None, self.layout.size):
                self.passes = passes.without_gradients()
        return held

    def _expected(self, step: int, passes: Passes, off: Off = NOT_OFF) -> gradient_.Expected:
        scales = self.observation.loss_scales(step)
        return gradient_.expected(
            passes, self.layout, self.case, self.semantics, scales=scales, noise=off.gradient
        )

    def _hidden(self, step: int, before: State, after: State, shown: RoleState | None) -> None:
        """Judge a step whose gradient, or whose clipped gradient, was not shown.

        What the optimizer was given is recovered from exp_avg. shown: the reduced gradient.
        """
        if "exp_avg" not in after.present or "ownership" in self.noted.violations:
            return
        recovered = hidden.recover(before, after, self.layout, self.case, step=step)
        recovery = Recovery(recovered, self.layout, self.case, self.semantics, self.tolerance)
        if shown is not None:
            recovery.clip(lambda _: hidden.as_shown(shown), self.noted, step=step, seen=True)
        elif self.passes is not None:
            expected = partial(self._expected, step, self.passes)
            if self.case.training.clip is not None:
                recovery.clip(lambda off: expected(off).of, self.noted, step=step, seen=False)
            if "clip" not in self.noted.violations:
                wanted = recovery.expected(expected)
                self._gradient(step, before, self.passes, recovered.held, wanted)
        self._applied(step, before, after, recovered.held, error=recovered.error)

    def _gradient(
        self,
        step: int,
        before: State,
        passes: Passes,
        held: RoleState,
        expected: Callable[[Off], gradient_.Expected],
    ) -> None:
        """Judge a reduced gradient. expected: what it must be, for a given tolerance."""
        self.noted.vacuity.gradient(expected(self.tolerance.off).of.exact())
        if "gradient" in self.noted.violations and in_pieces(None, self.layout.size):
            return  # the diagnosis of a large model takes time

        def check(off: Off) -> tuple[float, Violation | None]:
            return gradient_.check(
                held,
                expected(off),
                passes,
                self.layout,
                self.case,
                self.semantics,
                step=step,
                again=lambda scale: self.replayed.passes(step, before, scale=scale),
                otherwise=lambda: self.replayed.passes(step, before, otherwise=True),
                previous=lambda: self._previous(step, "clipped"),
                unclipped_before=lambda: self._previous(step, "reduced"),
                used_before=self.used_before,
                loss_scale=self.observation.loss_scales(step)[0],
                buffers=lambda: flat_buffers(self.observation.seen, self.layout),
                left=self.observation.left(step, apart=not cuts(self.case)),
                noise=off.gradient,
                diagnose=not self.brief,
            )

        self.noted.note("gradient", *self.tolerance.judged("gradient", check))

    def _previous(self, step: int, point: Point) -> torch.Tensor | None:
        """Return the gradient of the step before, with 0 for missing elements, or None."""
        if step == self.first:
            return None
        at: Point = "reduced" if self.case.training.clip is None else point
        held = self.observation.held(step - 1, at, "gradient")
        return None if held is None else vectors.copy(held.whole).nan_to_num_(nan=0.0)

    def _reduced(self, step: int) -> RoleState | None:
        if not self._owned(step, "reduced"):
            return None
        held = self.observation.held(step, "reduced", "gradient")
        if held is not None and self.observation.own_gradients(step) and not held.agree:
            held = None
        if held is None:
            self.noted.hidden_gradient()
        return held

    def _buffers(self, step: int, before: State, passes: Passes) -> None:
        if not self.layout.buffers or step == self.end:
            return
        self.noted.vacuity.buffers(self.observation.buffers(step - 1), passes.buffers)

        def check(off: Off) -> tuple[float, Violation | None]:
            return 0.0, buffers_.check(
                self.observation.buffers(step),
                passes.buffers,
                self.semantics,
                step=step,
                before=self.observation.buffers(step - 1),
                local=(lambda: self.replayed.passes(step, before, local=True).buffers)
                if self.semantics.buffers != "local"
                else None,
                off=off.buffers,
            )

        self.noted.note("buffers", *self.tolerance.judged("buffers", check))

    def _update(self, step: int, before: State, after: State, gradient: RoleState | None) -> State:
        """Judge the update; returns the state after it, with the right one of unequal copies."""
        if self._skipped(step, before, after, gradient):
            return after
        applied = None if gradient is None else self._clip(step, gradient)
        if self.states is not None:
            known = self.passes is not None and self.case.training.clip is None
            return self.states.judged(
                before,
                after,
                applied,
                self._expected(step, self.passes) if known and self.passes is not None else None,
                self.passes,
                self.noted,
                step=step,
            )
        if applied is None:
            self._hidden(step, before, after, gradient)
        else:
            self._applied(step, before, after, applied, unclipped=gradient)
        return after

    def _agreed(self, step: int) -> bool:
        """Return True if all ranks took the same step; else there is no single state after it."""
        violation = skip.check_reports(self.observation.steps(step), step=step)
        if violation is not None:
            self.noted.note("update", 0.0, violation)
        return violation is None

    def _skipped(self, step: int, before: State, after: State, gradient: RoleState | None) -> bool:
        """Judge whether the step was rightly skipped. True if there is no update to judge."""
        finite = self._finite(step, gradient)
        seen = self.observation.steps(step)
        over, violation = skip.check(
            before, after, self.layout, self.case, seen, finite=finite, step=step
        )
        if over:
            self.noted.note("update", 0.0, violation)
        return over

    def _finite(self, step: int, gradient: RoleState | None) -> bool | None:
        """Return True if the reduced gradient, observed or expected, is finite; None if unknown."""
        if gradient is not None:
            return all(all_finite(part) for part in gradient.parts)
        if self.passes is None:
            return None
        return all_finite(self._expected(step, self.passes).enclosure.exact)

    def _applied(
        self,
        step: int,
        before: State,
        after: State,
        applied: RoleState,
        *,
        unclipped: RoleState | None = None,
        error: torch.Tensor | float = 0.0,
    ) -> None:
        """Judge the update, given the gradient that the optimizer used."""
        has = [place.name in applied.present for place in self.layout.places]
        share, violation = self.updates.check(
            Update(
                before,
                after,
                applied.whole,
                error,
                learning_rates(self.case, step),
                has,
                None if unclipped is None or unclipped is applied else unclipped.whole,
                lambda: self._previous(step, "clipped"),
            ),
            step=step,
        )
        self.noted.note("update", share, violation)

    def _clip(self, step: int, gradient: RoleState) -> RoleState | None:
        """Judge norm and clipping; return the gradient that the optimizer used."""
        if self.case.training.clip is None:
            return gradient
        if not self._owned(step, "clipped"):
            return None
        clipped = self.observation.held(step, "clipped", "gradient")
        if clipped is None:
            self.noted.hidden_gradient()
        clip_.check_step(
            gradient,
            clipped,
            self.observation,
            self.case,
            self.semantics,
            self.noted,
            step=step,
        )
        return clipped

    def _owned(self, step: int, point: str) -> bool:
        """Return True if the shards tile their tensors here; otherwise none can be assembled."""
        if "ownership" in self.noted.violations:
            return False
        self.noted.note("ownership", 0.0, self.ownership.check(step, point))  # type: ignore[arg-type]
        return "ownership" not in self.noted.violations
