"""One rank's run of one case: build, restore, step after step, observe. No transport."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import fields
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from ..case.schema import Case
from ..case.segments import end_of, is_one_forward
from ..case.shapes import unfrozen
from ..case.traits import estimated
from ..contract.groups import learning_rates
from ..contract.implementation import MOMENTS, Implementation, Microbatch, Moment, Step, StepReport
from ..contract.refusals import refused_cast, refused_while_run
from ..contract.start import initial_state
from ..errors import Unsupported, UsageError, unknown
from ..execution.graph import GraphNotes
from ..machine.devices import CPU, processor
from ..models.batches import batch, loss_of, weight
from ..models.network import build_model
from ..models.overflow import Overflow
from ..protocol.observations import (
    CheckpointObservation,
    Declaration,
    RankObservation,
    StepObservation,
)
from ..protocol.replies import MemoryReply, StepsTaken
from .checkpoints import Checkpoints, RestoreState, exports, gist, kept
from .delays import Delays
from .forward_probe import ForwardProbe
from .measure import MemoryMeasurement
from .poison import poison_memory
from .randomness import ON_CPU, CarriedRandomness, RandomRecorder
from .recorder import GRADIENT_ROLES, Recorder, state_roles


class StepProgress(Protocol):
    """Receiver of a rank's progress."""

    def at(self, text: str) -> None: ...


class EndOfCase(BaseException):
    """Raised to end the last pass before its update. Not an error: let it pass."""


def restores(implementation: type[Implementation]) -> bool:
    """Return True if the implementation can start in mid-training."""
    return implementation.restore is not Implementation.restore


class Driver:
    """Driver of one implementation on one case, on this rank."""

    def __init__(
        self,
        implementation: type[Implementation],
        case: Case,
        mesh: DeviceMesh,
        *,
        rank: int,
        progress: StepProgress,
        checkpoints: Checkpoints | None = None,
        device: torch.device = ON_CPU,
    ) -> None:
        """Prepare. device: where the implementation gets the model, the state and the samples."""
        self.implementation = implementation
        self.case = case
        self.mesh = mesh
        self.rank = rank
        self.progress = progress
        self.checkpoints = checkpoints or Checkpoints(case)
        self.delays = Delays(case, rank)
        self.device = device
        self._random = CarriedRandomness(case, rank, device)
        self._rng_after = RandomRecorder(case, device)
        self._graphs: GraphNotes | None = None
        self._notes = True
        self._loss_of = loss_of(case)
        self._overflow = Overflow(case)
        self._model: weakref.ref[nn.Module] | None = None

    def bare(self) -> StepsTaken:
        """Take the steps like a user's loop: nothing observed, nothing poisoned."""
        subject, _ = self._built()
        for index in range(self.case.training.first, end_of(self.case)):
            subject.train_step(self._step(index, on_loss=None, reached=lambda _: None))
        subject.close()
        return StepsTaken()

    def built(self) -> StepsTaken:
        """Build the implementation and close it again."""
        self._built()[0].close()
        return StepsTaken()

    def observe_steps(self, recorder: Recorder) -> RankObservation:
        """Take all steps, then a last pass without an update, and record everything.

        That is a forward and backward, or the forward of one microbatch: see `is_one_forward`.
        """
        with ExitStack() as stack:
            stack.enter_context(poison_memory())
            subject, model_probe = self._built()
            if not estimated(self.case):  # its hooks would break the graphs of a compiled model
                stack.enter_context(model_probe.watching())
                self._graphs = GraphNotes()
            stack.enter_context(self._overflow.planted())  # the probe comes first
            self.progress.at("observing the initial state")
            first, end = self.case.training.first, end_of(self.case)
            recorder.take(first - 1, "state", subject.shards(), state_roles(self.case))
            recorder.lay(subject.shards())
            self.checkpoints.save_older(subject, recorder)
            steps: list[StepObservation] = []
            for index in range(first, end + 1):
                if index == self.case.training.steps:
                    self.progress.at("save()")
                    self.checkpoints.save(subject, recorder)
                steps.append(
                    self._observe(subject, recorder, model_probe, index, last=index == end)
                )
            self.checkpoints.finish()
            self.progress.at("close()")
            declaration = self._declaration(subject)
            subject.close()
        return RankObservation(
            declaration=declaration,
            manifests=recorder.manifests,
            records=tuple(recorder.records),
            steps=tuple(steps),
            restored=self._restored,
            random_states=self._random.states,
            memory=recorder.memory,
            checkpoint=self.checkpoints.observation(),
            device=str(self.device),
            processor=processor(self.device),
        )

    def load_checkpoint(self, recorder: Recorder) -> RankObservation:
        """Load a checkpoint that was killed or damaged; return its state or the error."""
        with ExitStack() as stack:
            stack.enter_context(poison_memory())
            subject, _ = self._built(load=False)
            self.progress.at("load()")
            try:
                self.checkpoints.load(subject)
            except (Exception, CheckpointException) as error:  # that of dcp is no Exception
                reason = self.refused(error)
                if reason is not None:  # of any case like it, and not of the checkpoint
                    raise Unsupported(reason) from error
                refused = CheckpointObservation(refused=gist(error))
                return RankObservation(checkpoint=refused)
            first = self.case.training.first
            recorder.take(first - 1, "state", subject.shards(), state_roles(self.case))
            declaration = self._declaration(subject)
            subject.close()
        return RankObservation(
            declaration=declaration,
            manifests=recorder.manifests,
            records=tuple(recorder.records),
            checkpoint=self.checkpoints.observation(),
            device=str(self.device),
            processor=processor(self.device),
        )

    def _declaration(self, subject: Implementation) -> Declaration:
        return Declaration(
            semantics=self._semantics(subject),
            stage=subject.stage,
            hides=tuple(subject.hides),
            keeps=kept(self.implementation.__name__, self.implementation),
            exports=exports(subject),
        )

    @staticmethod
    def _semantics(subject: Implementation) -> dict[str, str]:
        return {
            field.name: str(getattr(subject.semantics, field.name))
            for field in fields(subject.semantics)
        }

    def _built(self, *, load: bool = True) -> tuple[Implementation, ForwardProbe]:
        case = self.case
        model = build_model(case)
        self.checkpoints.scramble(model)
        state = None if self.checkpoints.loads else self._start_state(model)
        if self.device.type != CPU:  # made on the CPU, so that its bits are the same everywhere
            model = model.to(self.device)
        probe = ForwardProbe(model)
        self._model = weakref.ref(model)
        self._random.start()
        self.progress.at(f"{self.implementation.__name__}(model, case, mesh)")
        subject = self.implementation(model, case, self.mesh)
        if state is not None:
            self.progress.at("restore()")
            subject.restore(state)
        if self.checkpoints.loads and load:
            self.progress.at("load()")
            self.checkpoints.load(subject)
        self._restored = state is not None
        return subject, probe

    def refused(self, error: BaseException) -> str | None:
        """Return the reason why torch cannot run the case, which raised `error`, or None."""
        reason = refused_while_run(self.device, error, self.case)
        model = None if self._model is None else self._model()
        if reason is None and model is not None:
            return refused_cast(model, error, self.case)
        return reason

    def _start_state(self, model: nn.Module) -> RestoreState | None:
        """Return the state to restore, or None for a start at step 0.

        On a GPU, step counts are on the device where torch's AdamW has them: there for its fused
        kernel, on the CPU for the others.
        """
        if not restores(self.implementation):
            return None
        state = initial_state(self.case, model)
        if state is None:
            return None
        if self.device.type != CPU:
            stay = () if self.case.optimizer.kernel == "fused" else ("step",)
            state = {
                (name, role): value if role in stay else value.to(self.device)
                for (name, role), value in state.items()
            }
        return RestoreState(state, model)

    def _observe(
        self,
        subject: Implementation,
        recorder: Recorder,
        probe: ForwardProbe,
        index: int,
        *,
        last: bool,
    ) -> StepObservation:
        losses: dict[int, torch.Tensor] = {}
        probe.forget()
        again = self.case.axes.has("pp")  # a pipeline tries the loss for its shape first

        def on_loss(number: int, loss: torch.Tensor) -> None:
            losses[number if again else len(losses)] = loss
            if is_one_forward(self.case, index):
                raise EndOfCase

        def reached(moment: Moment) -> None:
            if moment not in MOMENTS:
                raise unknown("moment in step.reached", str(moment), MOMENTS)
            self.progress.at(f"step {index}, {moment}")
            recorder.take(index, moment, subject.shards(), GRADIENT_ROLES)
            if last:
                raise EndOfCase

        report: StepReport | None = None
        with suppress(EndOfCase):
            report = subject.train_step(self._step(index, on_loss=on_loss, reached=reached))
            if not isinstance(report, StepReport):
                raise UsageError(
                    f"train_step must return zerocheck.StepReport, got {type(report).__name__}"
                )
        if not last:
            self.progress.at(f"step {index}, after the update")
            recorder.take(index, "state", subject.shards(), state_roles(self.case))
        shown = StepReport() if report is None or last else report
        return StepObservation(
            tuple(float(losses[number]) for number in sorted(losses)),
            None if shown.grad_norm is None else float(shown.grad_norm),
            bool(shown.skipped),
            float(shown.loss_scale),
            reported=shown is report,
            misaligned=probe.misaligned,
            passed_through=tuple(sorted(probe.passed_through)),
            restrided=tuple(sorted(probe.restrided)),
            strides=probe.strides,
            tracked=tuple(sorted(probe.tracked)),
            viewed=tuple(sorted(probe.viewed)),
            cast=tuple(sorted(probe.cast)),
            random=self._random.taken(),
            rng_after=self._rng_after.taken(),
            reduced=bool(shown.reduced),
            recomputed=tuple(sorted(probe.recomputed)),
            graphs=self._graphs_of(probe),
        )

    def _graphs_of(self, probe: ForwardProbe) -> tuple[str, ...]:
        """Return the fingerprints of this step; none where they are incomplete."""
        fingerprints = () if self._graphs is None else self._graphs.taken()
        return () if probe.hooked else fingerprints

    def measure_memory(self) -> MemoryReply:
        """Take the steps like `bare`, and measure memory and collectives."""
        self._notes = False  # what it allocates would count
        measuring_ = MemoryMeasurement(self.implementation, self.case, self.rank, self.device)
        with measuring_.watching() as measuring:
            subject = self._built()[0]
            measuring.built(subject)
            for index in range(measuring.first, measuring.end):
                step = self._step(
                    index,
                    on_loss=measuring.on_loss,
                    reached=measuring.reached,
                    entered=measuring.entered,
                )
                measuring.begun(index, step)
                subject.train_step(step)
                del step
                measuring.taken()
            semantics = self._semantics(subject)
            self.progress.at("close()")
            subject.close()
            del subject
            measuring.closed()
        return MemoryReply(
            semantics=semantics, measured=measuring.result(), device=str(self.device)
        )

    def _step(
        self,
        index: int,
        *,
        on_loss: Callable[[int, torch.Tensor], None] | None,
        reached: Callable[[Moment], None],
        entered: Callable[[], None] = lambda: None,
    ) -> Step:
        return Step(
            index=index,
            microbatches=[
                self._microbatch(index, number, on_loss, entered)
                for number in range(self.case.training.microbatches)
            ],
            lr=learning_rates(self.case, index),
            reached=reached,
            unfreeze=unfrozen(self.case) if index == self.case.training.unfreeze else (),
        )

    def _microbatch(
        self,
        index: int,
        number: int,
        on_loss: Callable[[int, torch.Tensor], None] | None,
        begins: Callable[[], None],
    ) -> Microbatch:
        where = {"step": index, "rank": self.rank, "microbatch": number}
        drawn = batch(self.case, **where).on(self.device)

        def loss_of(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.progress.at(f"step {index}, microbatch {number}, after the forward")
            if self._notes:
                self._rng_after.note()
            loss = self._overflow.of_loss(self._loss_of(outputs, target), **where)
            if self._graphs is not None:
                self._graphs.note(loss)
            return loss

        def entered() -> None:
            begins()
            self._overflow.enter(**where)
            if self._notes:
                self._random.note()
            self.delays.pause()

        return Microbatch(
            inputs=drawn.inputs,
            keywords=drawn.keywords,
            target=drawn.target,
            seed=None if self._random.on else drawn.seed,
            loss_of=loss_of,
            on_loss=None if on_loss is None else partial(on_loss, number),
            entered=entered,
            weight=weight(self.case, **where),
            past_wrapper=self._past_wrapper,
        )

    @property
    def _past_wrapper(self) -> nn.Module | None:
        """The case's own module, where the loss calls it past its wrapper too."""
        if self._model is None or not self.case.data.past_wrapper:
            return None
        return self._model()
