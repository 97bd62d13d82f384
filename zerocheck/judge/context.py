"""Contexts in which obligations are judged: a case, and one step of it, computed on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch

from ..case.schema import Case
from ..case.segments import end_of
from ..case.traits import estimated
from ..contract.groups import learning_rates
from ..contract.semantics import Semantics
from ..machine.devices import CPU
from ..models.network import build_model
from ..protocol.observations import Point, RankObservation
from ..protocol.verdicts import Violation
from . import hidden, skip, vectors
from .assemble import Fetch, Observation, RoleState
from .attribution.forwards import computed_with, other_parameters, with_a_module_of
from .attribution.known_vectors import flat_parameters
from .compare import all_finite
from .diagnose.loss import equal
from .estimate import EXACT, Tolerances
from .expected import Expected, expected
from .flat import FlatBuffer, flat_buffers
from .hidden_states import HiddenStates
from .layout import ParameterLayout
from .local import LocalRunner, Passes
from .owners import owners_copies
from .ownership import Ownership
from .pieces import in_pieces
from .precision import Computing, begun_in
from .rank_device import ran_on, states_of_device
from .recipe import UpdateRecipe
from .recovery import Recovery
from .state import StartState, State
from .step_replay import StepReplay
from .tolerance import StepTolerance
from .update import UpdateJudge
from .verdicts import Verdicts


class CaseContext:
    """One case, or one training segment of a resumed case, as its ranks observed it."""

    def __init__(
        self,
        case: Case,
        observations: Sequence[RankObservation],
        fetch: Fetch,
        *,
        brief: bool = False,
    ) -> None:
        self.case, self.brief = case, brief
        self.first, self.end = case.training.first, end_of(case)
        model = build_model(case)
        self.layout = ParameterLayout.of(model, case)
        self.observation = Observation(self.layout, observations, fetch, self.first, case.axes)
        self.declaration = observations[0].declaration
        self.semantics = Semantics(**self.declaration.semantics)  # type: ignore[arg-type]
        # Before the runner casts the model to its dtypes.
        self.start: StartState | None = StartState.of(
            case,
            model,
            self.layout,
            restored=observations[0].restored,
            rounded=begun_in(self.semantics),
        )
        """State that training begins with, until it was compared: it is as large as the model."""
        self.device = ran_on(observations)
        computing = Computing.of(self.semantics)
        runner = LocalRunner(model, case, self.layout, self.device, computing)
        self.replayed = StepReplay(case, self.observation, self.semantics, runner)
        masters = self.semantics.master != "none"
        self.ownership = Ownership(self.observation, case.hosts, masters=masters)
        self.updates = UpdateJudge(self.layout, UpdateRecipe.of(case))
        self.verdicts = Verdicts(observations, brief=brief)
        self.hidden_states: HiddenStates | None = None
        if "states" in self.declaration.hides:
            recipe = self.updates.recipe
            self.hidden_states = HiddenStates(self.layout, recipe, case, self.semantics)
            self.verdicts.tier = "parameters only"
        self.tolerance = StepTolerance(self.replayed, kernels_differ=estimated(case))

    def owned(self, step: int, point: Point) -> bool:
        """Return True if the shards tile their tensors here; otherwise none can be assembled."""
        if "ownership" in self.verdicts.violations:
            return False
        self.verdicts.note("ownership", 0.0, self.ownership.check(step, point))
        return "ownership" not in self.verdicts.violations

    def flat_buffers(self) -> Sequence[FlatBuffer]:
        """Return the flat buffers of the implementation."""
        return flat_buffers(self.observation.ranks, self.layout)


class StepContext:
    """One step: the states around it, its gradients, and what the reference computes for it.

    Everything is computed when it is first asked for, and held as long as the context is.
    """

    def __init__(
        self,
        judged: CaseContext,
        index: int,
        before: State,
        *,
        earlier: Sequence[torch.Tensor] | None,
        used_before: Sequence[bool],
    ) -> None:
        """Begin a step.

        before: the state that it starts from; earlier: what each rank computed with in the step
        before, if there was one; used_before: per parameter, whether a step before used it.
        """
        self.judged = judged
        self.index = index
        self.before = before
        self.earlier = earlier
        self.used_before = used_before
        self.forward_holds = False
        """True once the losses were found right; else nothing after the forward is comparable."""

    @property
    def case(self) -> Case:
        return self.judged.case

    @property
    def layout(self) -> ParameterLayout:
        return self.judged.layout

    @property
    def observation(self) -> Observation:
        return self.judged.observation

    @property
    def semantics(self) -> Semantics:
        return self.judged.semantics

    @property
    def tolerance(self) -> StepTolerance:
        return self.judged.tolerance

    @property
    def verdicts(self) -> Verdicts:
        return self.judged.verdicts

    @property
    def last(self) -> bool:
        """True for the last pass of a case, which has no update."""
        return self.index == self.judged.end

    # The forward and backward

    @property
    def losses(self) -> list[tuple[float, ...]]:
        """Observed losses, [rank][microbatch]."""
        return [rank.losses for rank in self.observation.steps(self.index)]

    @property
    def random(self) -> list[list[bytes]]:
        """Random states that dropout draws from, [rank][microbatch]."""
        return states_of_device(self.observation.random_states(self.index), self.judged.device)

    @cached_property
    def passes(self) -> Passes:
        """Forwards and backwards of the reference, from the state before."""
        passes = self.replay()
        if self.judged.device.type != CPU:
            self.verdicts.taken(passes, self.replay)
        self.tolerance.enter(self.index, self.before, passes)
        return passes

    @property
    def right_passes(self) -> Passes | None:
        """The passes, or None where the ranks' forward was another one."""
        return self.passes if self.forward_holds else None

    @property
    def replay(self) -> Callable[..., Passes]:
        """Run the forwards and backwards again, changed for a counterfactual: StepReplay.passes."""
        return partial(self.judged.replayed.passes, self.index, self.before)

    @property
    def rng_after(self) -> list[tuple[str, ...]]:
        """Hashes of the random states that each rank's forwards left."""
        return self.observation.rng_after(
            self.index, apart=self.case.axes.parts("batch") == self.case.axes.world_size
        )

    def evaluated(self) -> list[list[float]]:
        """Compute the losses in evaluation mode, [rank][microbatch]."""
        return self.judged.replayed.evaluated(self.index, self.before)

    def with_causes_of_parameters(self, violation: Violation) -> Violation:
        """Return a loss's violation, with the causes if other parameters explain it."""
        replayed, buffers = self.judged.replayed, self.judged.flat_buffers()
        found = replayed.of_other_parameters(self.index, self.before, violation, buffers)
        if not found.causes:
            mixed = with_a_module_of(self.before.per_rank, self.parameters_before, self.layout)
            found = replayed.of_a_module(self.index, self.before, found, mixed)
        if self.case.axes.has("tp"):
            tolerance = self.tolerance.initial.loss
            found = replayed.of_repeated_biases(self.index, self.before, found, tolerance)
        return found

    @cached_property
    def parameters_before(self) -> Sequence[Sequence[torch.Tensor]]:
        """Parameters that each rank had in earlier steps, the step before first."""
        earlier = [] if self.earlier is None else [self.earlier]
        for number in range(self.index - 3, self.judged.first - 2, -1):
            held = self.observation.held(number, "state", "parameter")
            if held is not None:
                earlier.append([held.as_of(rank) for rank in range(len(self.losses))])
        return earlier

    def provenance_of_parameters(self) -> str:
        """Return the parameters that wrong losses were computed with, in words, if it is found."""
        judged, tolerance = self.judged, self.tolerance.widest.loss
        others = other_parameters(
            self.before.per_rank,
            self.parameters_before,
            flat_parameters(build_model(self.case), self.layout),
            [buffer for buffer in judged.flat_buffers() if not buffer.whole],
            self.layout,
        )
        return computed_with(
            self.losses,
            self.passes.losses,
            others,
            lambda parameters: self.replay(parameters=parameters).losses,
            lambda one, other: equal(one, other, tolerance),
            tolerance,
        )

    # Gradients

    @cached_property
    def reduced(self) -> RoleState | None:
        """Observed reduced gradient, or None where it was not exposed."""
        if not self.judged.owned(self.index, "reduced"):
            return None
        held = self.observation.held(self.index, "reduced", "gradient")
        if held is not None and self.observation.unreduced(self.index) and not held.agree:
            held = None
        if held is None:
            self.verdicts.hidden_gradient()
        elif self.forward_holds and "owners" in self.judged.declaration.hides and not held.agree:
            held = owners_copies(held, self.expected().of, self.layout)
        return held

    @cached_property
    def clipped(self) -> RoleState | None:
        """Observed clipped gradient, or None where it was not exposed."""
        if not self.judged.owned(self.index, "clipped"):
            return None
        held = self.observation.held(self.index, "clipped", "gradient")
        if held is None:
            self.verdicts.hidden_gradient()
        return held

    @property
    def applied(self) -> RoleState | None:
        """Gradient that the optimizer was given, as observed; None where that was not exposed."""
        if self.reduced is None or self.case.training.clip is None:
            return self.reduced
        return self.clipped

    def discard_gradients(self) -> None:
        """Discard the local gradients, the largest part of the passes."""
        self.passes = self.passes.without_gradients()

    def previous(self, point: Point) -> torch.Tensor | None:
        """Return the gradient of the step before, with 0 for missing elements, or None."""
        if self.index == self.judged.first:
            return None
        at: Point = "reduced" if self.case.training.clip is None else point
        held = self.observation.held(self.index - 1, at, "gradient")
        return None if held is None else vectors.copy(held.whole).nan_to_num_(nan=0.0)

    def expected(self, tolerances: Tolerances = EXACT, passes: Passes | None = None) -> Expected:
        """Enclose the reduced gradient of the reference, or that of other passes."""
        return expected(
            passes or self.passes,
            self.layout,
            self.case,
            self.semantics,
            scales=self.observation.loss_scales(self.index),
            noise=tolerances.gradient,
        )

    # The state after

    @cached_property
    def agreed(self) -> bool:
        """True if all ranks took the same step; else there is no single state after it."""
        violation = skip.check_reports(self.observation.steps(self.index), step=self.index)
        if violation is not None:
            self.verdicts.note("update", 0.0, violation)
        return violation is None

    @cached_property
    def updated(self) -> bool:
        """True if there is a state after the step, of shards that tile their tensors."""
        return not self.last and self.agreed and self.judged.owned(self.index, "state")

    @cached_property
    def after(self) -> State:
        """State after the step."""
        after = State.observed(self.observation, self.index)
        self.verdicts.vacuity.moved(self.before, after)
        return after

    @cached_property
    def skipping(self) -> tuple[bool, Violation | None]:
        """True if there is no update to judge, and the violation where that is wrong."""
        return skip.check(
            self.before,
            self.after,
            self.layout,
            self.case,
            self.observation.steps(self.index),
            finite=self._finite(),
            step=self.index,
        )

    def _finite(self) -> bool | None:
        """Return True if the reduced gradient, observed or expected, is finite; None if unknown."""
        if self.reduced is not None:
            return all(all_finite(part) for part in self.reduced.parts)
        if not self.forward_holds:
            return None
        return all_finite(self.expected().enclosure.exact)

    @cached_property
    def recovery(self) -> Recovery | None:
        """Gradient recovered from states where the applied one was not exposed, if it can be."""
        recipe = self.judged.updates.recipe
        states = recipe.optimizer.states_with(recipe.options)
        if (
            not self.updated
            or self.skipping[0]
            or self.applied is not None
            or self.judged.hidden_states is not None
            or not all(rule.recovers for rule in recipe.optimizer.rules)
            or (states and states[0] not in self.after.present)
            or "ownership" in self.verdicts.violations
        ):
            return None
        rates = learning_rates(self.case, self.index)
        recovered = hidden.recover(recipe, self.before, self.after, self.layout, rates)
        return Recovery(recovered, self.layout, self.case, self.semantics, self.tolerance)

    @cached_property
    def recovered_clip(self) -> tuple[float, Violation | None] | None:
        """Clipping judged by the recovered gradient; None where it was not recovered or clipped."""
        recovery, shown = self.recovery, self.reduced
        if recovery is None or self.case.training.clip is None:
            return None
        vacuity = self.verdicts.vacuity
        if shown is not None:
            return recovery.clip(
                lambda _: hidden.as_shown(shown), vacuity, step=self.index, exposed=True
            )
        if not self.forward_holds:
            return None
        return recovery.clip(
            lambda tolerances: self.expected(tolerances).of, vacuity, step=self.index, exposed=False
        )

    @cached_property
    def settled(self) -> State:
        """State after the step, with the right one of unequal copies of an opaque optimizer."""
        return self.opaque[2] if self.opaque is not None else self.after

    @cached_property
    def opaque(self) -> tuple[float, Violation | None, State] | None:
        """Judged update of an optimizer that exposes no states; None for others."""
        states = self.judged.hidden_states
        if states is None or self.skipping[0]:
            return None
        known = self.forward_holds and self.case.training.clip is None
        return states.judged(
            self.before,
            self.after,
            self.applied,
            self.expected() if known else None,
            self.right_passes,
            step=self.index,
        )

    def leave(self) -> None:
        """Discard what is as large as all local gradients."""
        self.tolerance.leave()
        self.observation.forget(self.index - 1)
        if in_pieces(None, self.layout.size):
            # The arenas have it still; it is put together again where the diagnosis asks.
            self.observation.forget(self.index, ("reduced", "clipped"))
