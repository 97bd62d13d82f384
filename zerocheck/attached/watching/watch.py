"""Observe one step: copy the state around it, and the gradient where the optimizer takes it.

Hooks are there from the beginning of a checked step to its end, and at no other time. An error in
one of them is kept for `observed`, and never reaches the training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import msgspec
import torch
from torch import nn

from ...compat import in_backward
from ...contract.names import unwrapped
from ...contract.shard import Shard
from ...drive.recorder import entry_of
from ...errors import UsageError
from ...judge import vectors
from ...judge.compare import all_finite, same_bits
from ...protocol.observations import Entry
from ..checks.after_clipping import times
from ..checks.not_finite import OutputWatch, not_finite
from ..checks.published_copies import master_parts
from ..record.axes import Axes
from ..record.call_state import OF_CUDNN, Numbers, draws_in_cudnn
from ..record.casts import Casts, casts_of
from ..record.forwards import Forward, Forwards
from ..record.guard import ErrorGuard, replaced
from ..record.holdings import (
    Holding,
    computes_on,
    count_of,
    holdings,
    local,
    reduced,
    shards_changed_by_forwards,
    shards_of,
    versions_of,
    whole,
    words_for,
)
from ..record.model_hooks import HookWatch
from ..record.optimizers import JobOptimizers, group_options
from ..record.ranks_own import left_out
from ..record.step_record import (
    ACCUMULATED,
    AFTER,
    BEFORE,
    ELSEWHERE,
    FROZEN,
    NO_OPTIMIZER,
    GroupOptions,
    Key,
    MasterParts,
    NotFinite,
    Observed,
    OptimizerStep,
    OuterChange,
    ShardPiece,
    StepSummary,
)
from ..record.zero_engine import zero_engine
from .clip_hooks import ClipHooks
from .exchanges import ExchangeWatch
from .moved_buffers import BufferWatch
from .used_gradients import UsedGradients

IN_BACKWARD = (
    "the {} takes its step within the backward, where attach cannot look at the gradient (allowed: "
    "optimizer.step() after the backward); `zerocheck run` checks such an optimizer"
)
EXCHANGES = (
    "the script calls {}, so the gradient of a rank depends on other ranks in a way that attach "
    "does not know: pass the device mesh as mesh=, and a model that does not use it as reference="
)
BEYOND = (
    "the script calls {}, with more ranks than axes of mesh= that split sequence, experts, "
    "parameters or layers have (its dimensions: {}), so the gradient of a rank depends on ranks "
    "in a way that attach does not know: declare with axes= what they split"
)
ADDED_TO = (
    "gradients of before the step are added to: is optimizer.zero_grad() missing, or called in "
    "another step?"
)

INNER = "inner"
"""In place of AFTER: the state between the steps of an inner optimizer and the one around it."""

MOVED = (
    "the script changes parameters within the step before a backward, as SAM does, so the gradient "
    "is not that of the parameters with which the step begins"
)


class Watch:
    """Observation of one step of a live model, from `start` to `observed` or `stop`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: JobOptimizers,
        *,
        rank: int,
        world_size: int,
        number: int,
        used: UsedGradients,
        axes: Axes,
        listens: Numbers | None = None,
        divides: bool = False,
    ) -> None:
        """Prepare the observation of a step.

        used: gradients of the updates before; listens: record the calls of the model, for the
        reference, with the numbers of its modules when the check was attached; divides: the
        schedule of a pipeline divides gradients by the number of microbatches.
        """
        self._model = model
        self._axes = axes
        self._optimizers = optimizers
        self._owners = optimizers.owners
        self._used = used
        self._unoptimized: set[int] = set()
        self._steps = [_OptimizerWatch(type(one).__name__) for one in optimizers]
        self._versions: dict[Entry, int] = {}
        self._moved = False
        self._engine = zero_engine(model)
        self._masters: list[MasterParts] = []
        self._casts: Casts | None = None
        self.number = number
        self._where = (rank, world_size)
        self._hooks = ExitStack()
        self._guard = ErrorGuard()
        self._listens = None
        if listens is not None:
            self._listens = Forwards(
                model,
                self._guard,
                listens,
                in_parts=axes.of("sequence") is not None,
                in_stages=axes.stages > 1,
            )
        self._outputs = OutputWatch(model, self._guard)
        self._moved_buffers = BufferWatch(model)
        self._exchanges = ExchangeWatch(model, self._guard, axes.exchanging)
        self._script_hooks = HookWatch(self._guard)
        self._backwards = 0
        self._kept: list[str] = []
        self._aside: list[str] = []
        self._outside = 0
        self._reduces = False
        self._settled: set[int] = set()
        self._buffers: dict[str, torch.Tensor] = {}
        self._unjudged = ""
        self._divides = divides
        self._pieces: list[ShardPiece] = []
        self._numbers: dict[Entry, int] = {}
        self._counts: list[list[float | None]] = []
        self._values: dict[Key, torch.Tensor] = {}
        self._clips = ClipHooks(self._guard, self._gradients, self._engine, model)
        self._scaling = False
        self._scale = 1.0

    def start(self) -> None:
        """Copy the state, and hook into the optimizer, clipping and GradScaler."""
        with self._guard():
            self._start()
        if self._guard.error is not None:
            self.stop()

    def _start(self) -> None:
        found = holdings(self._model, self._axes.parts)
        apart = left_out(self._model, self._where[1] // self._axes.stages)
        groups, elsewhere = self._optimizers.group_numbers, self._optimizers.elsewhere
        for holding in found:
            group = _group_of(holding, groups, elsewhere)
            if group == NO_OPTIMIZER:
                self._unoptimized.add(id(holding.held))
            for shard in holding.shards("parameter", holding.held):
                whole = id(holding.held) in self._axes.whole
                self._add(shard, group, id(holding.held) in apart, whole)
        if self._engine is None:
            known = {id(one) for one in self._model.parameters()}
            known |= {id(holding.held) for holding in found}
            theirs = (one for group in self._optimizers.groups for one in group["params"])
            self._outside = sum(id(one) not in known for one in theirs)
        self._state(BEFORE, found)
        if self._engine is not None:
            self._masters.append(master_parts(self._engine))
        self._versions = versions_of(found)
        self._early = [float(group["lr"]) for group in self._optimizers.groups]
        for optimizer, step in zip(self._optimizers, self._steps, strict=True):
            # An engine takes groups away while it steps the others.
            step.options = group_options([optimizer])
            entered = optimizer.register_step_pre_hook(partial(self._entered, step))
            left = optimizer.register_step_post_hook(partial(self._left, step))
            self._hooks.callback(entered.remove)
            self._hooks.callback(left.remove)
        for outer, optimizer, step in zip(
            self._optimizers.given, self._optimizers, self._steps, strict=True
        ):
            if outer is not optimizer:
                step.outer = type(outer).__name__
                noting = partial(self._noting_outer, step)
                self._hooks.enter_context(replaced(outer, "step", noting))
        self._hooks.enter_context(self._outputs.hooked())
        self._hooks.enter_context(self._moved_buffers.hooked())
        if self._listens is not None:
            self._listen(self._listens, found)
        moved = partial(self._noting_moved, found)
        self._hooks.enter_context(replaced(torch.autograd, "backward", moved))
        for owner, name, make in self._wrappers():
            self._hooks.enter_context(replaced(owner, name, make))

    def stop(self) -> None:
        """Take the hooks off and forget everything."""
        with self._guard():
            self._hooks.close()
        self._values = {}

    def observed(self) -> Observed:
        """Take the hooks off, copy the state after the step, and return the observation.

        Raises UsageError for a step that is more than one update, and what went wrong in a hook.
        """
        self._hooks.close()
        if self._guard.error is not None:
            raise self._guard.error
        engine = self._engine
        if engine is not None:  # its optimizer steps the partitions one after the other
            for step in self._steps:
                step.ran = -(-step.ran // max(1, len(engine.masters)))
            self._masters.append(master_parts(engine))
        for step in self._steps:
            if step.ran > 1:
                kind = step.name if len(self._steps) > 1 else "optimizer"
                raise UsageError(
                    f"the {kind} took {step.ran} steps within one checked step (allowed: 1): it "
                    "steps once too often, or check.step() is around several updates"
                )
        forwards = [] if self._listens is None else self._listens.counted()
        divided = max(1, len(forwards)) if self._divides else 1
        self._keep_changed(divided)
        found = holdings(self._model, self._axes.parts)
        self._state(AFTER, found)
        self._take_inner()
        versions = versions_of(found)
        # Of a step that the optimizer did not take, nothing comes after.
        late = {
            entry.name
            for step in self._steps
            for entry, version in step.versions.items()
            if version != versions[entry]
        }
        rank, world_size = self._where
        if self._listens is not None:
            reason = self._listens.reason or self._listens.gradients.reason
            if self._exchanges.call:
                words = BEYOND if self._axes.lines else EXCHANGES
                reason = words.format(self._exchanges.call, ", ".join(self._axes.lines))
            self._unjudged = self._unjudged or reason
        self._listens = None
        options = [one for step in self._steps for one in step.options]
        groups = self._optimizers.groups
        rates = [float(group["lr"]) for group in groups]
        summary = StepSummary(
            rank=rank,
            world_size=world_size,
            number=self.number,
            what=f"{words_for(self._model, self._optimizers)}{self._axes.words}",
            pieces=tuple(self._pieces),
            options=tuple(
                _with_rates(one, groups[n], (self._early[n], rates[n]))
                for n, one in enumerate(options)
            ),
            before=tuple(self._counts[0]),
            after=tuple(self._counts[1]),
            steps=tuple(step.record for step in self._steps),
            scaling=self._scaling,
            loss_scale=self._scale,
            forwards=len(forwards),
            unjudged=self._unjudged or self._nothing_to_judge(forwards),
            not_finite=self._not_finite(forwards),
            clips=tuple(self._clips.clips),
            masters=tuple(self._masters),
            casts=self._casts,
            hooks=self._script_hooks.changing,
            late=tuple(sorted(late)),
            kept=tuple(dict.fromkeys(self._kept)),
            aside=tuple(dict.fromkeys(self._aside)),
            outside=self._outside,
            moved=self._moved_buffers.found(),
            reduces=self._reduces,
            stage=self._axes.stage,
            stages=self._axes.stages,
            divided=divided,
            alike=self._axes.alike,
            lines=self._axes.lines,
            axes={axis.name: len(axis.ranks) for axis in self._axes.every},
            outer=tuple(
                OuterChange(
                    step.outer,
                    step.name,
                    tuple(self._pieces[number].name for number in step.changed),
                )
                for step in self._steps
                if step.changed
            ),
        )
        device = str(computes_on(self._model))
        norms, model = self._clips.norms, self._model
        return Observed(summary, self._values, forwards, self._buffers, device, norms, model)

    def _listen(self, listens: Forwards, found: Sequence[Holding]) -> None:
        """Record the inputs of the gradient, or why it cannot be judged."""
        self._hooks.enter_context(self._script_hooks.watching(self._model))
        self._hooks.enter_context(listens.hooked())
        self._hooks.enter_context(self._exchanges.hooked())
        self._hooks.enter_context(
            replaced(torch.autograd, "backward", partial(self._observed_backward, listens, found))
        )
        self._hooks.enter_context(
            replaced(torch.autograd, "grad", partial(self._observed_grad, listens, found))
        )
        self._buffers = {
            unwrapped(name): whole(buffer).clone() for name, buffer in self._model.named_buffers()
        }
        self._casts, reason = casts_of(self._model)
        self._unjudged = reason or self._unjudged
        if self._engine is not None and self._engine.narrow:
            self._unjudged = "the engine computes in another dtype than its masters have"
        if draws_in_cudnn(self._model, computes_on(self._model).type):
            self._unjudged = OF_CUDNN

    def _observed_backward(
        self, listens: Forwards, found: Sequence[Holding], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap torch.autograd.backward; before the first of a step, gradients must be cleared."""
        observed = listens.gradients.observed(original)
        used = self._used

        def backward(*args: Any, **named: Any) -> Any:
            outermost = not listens.gradients.running
            own: list[Holding] = []
            with self._guard():
                own = self._cleared(found)
                if outermost:
                    used.before_backward(own)
            result = observed(*args, **named)
            if outermost:
                with self._guard():
                    used.after_backward(own)
                    self._end_of_backward(found)
            return result

        return backward

    def _observed_grad(
        self, listens: Forwards, found: Sequence[Holding], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap torch.autograd.grad, by which a schedule can go through a part of a backward."""
        observed = listens.gradients.in_two_parts(original)

        def grad(*args: Any, **named: Any) -> Any:
            with self._guard():
                self._cleared(found)
            return observed(*args, **named)

        return grad

    def _cleared(self, found: Sequence[Holding]) -> list[Holding]:
        """Return what optimizers have; before the first backward its gradients must be cleared."""
        own = [one for one in found if id(one.held) in self._owners and self._engine is None]
        new = [one.held.grad for one in own if not self._used.has(one) and not self._backwards]
        self._backwards += 1
        if any(grad is not None and bool(local(grad).any()) for grad in new):
            self._unjudged = ADDED_TO
        return own

    def _end_of_backward(self, found: Sequence[Holding]) -> None:
        """Copy the gradients that the backward left, in place of those of the one before."""
        self._exchanges.elements = 0
        if self._engine is not None:  # it reduces after the backward
            return
        final = {number for step in self._steps for number in step.pieces}
        clipped = {number for clip in self._clips.clips for number in clip.pieces}
        for number in clipped - final:
            self._values.pop((ACCUMULATED, number), None)
        try:
            for number, tensor in self._with_gradients(found):
                if number not in final | clipped:
                    self._put(ACCUMULATED, number, tensor)
        except ValueError:  # FSDP1 keeps gradients whole on each rank where it does not reduce them
            self._drop_accumulated()

    def _noting_moved(
        self, found: Sequence[Holding], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap torch.autograd.backward: note that parameters changed before it.

        A change between the backward and the step is one of the update, and may be wrong.
        """

        def backward(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            with self._guard():
                self._moved = self._moved or self._is_moved(found)
            return result

        return backward

    def _is_moved(self, found: Iterable[Holding]) -> bool:
        """Return True if parameters changed that no optimizer, and no forward, has changed."""
        changing = shards_changed_by_forwards(self._model, self._axes.parts, ())
        known = {number for step in self._steps for number in step.pieces}
        known |= {self._numbers[entry_of(shard)] for shard in changing}
        return any(
            version != self._versions[entry] and self._pieces[self._numbers[entry]].group >= 0
            for entry, version in versions_of(found).items()
            if self._numbers[entry] not in known
        )

    def _drop_accumulated(self, numbers: Collection[int] | None = None) -> None:
        for what, number in [*self._values]:
            if what == ACCUMULATED and (numbers is None or number in numbers):
                del self._values[what, number]

    def _reduced_after_backward(self) -> bool:
        """Return True if collectives after the backward had as many elements as the gradients."""
        left = [value for (what, _), value in self._values.items() if what == ACCUMULATED]
        return self._exchanges.elements >= sum(map(len, left)) > 0

    def _keep_changed(self, divided: int) -> None:
        """Unscale the gradients that the backward left, and drop those that did not change.

        divided: what the schedule of a pipeline divides them by after that.
        """
        self._unscale(ACCUMULATED)
        for what, number in [*self._values]:
            if what != ACCUMULATED:
                continue
            self._values[what, number].div_(divided)
            given = self._values.get(("reduced", number), self._values.get(("gradient", number)))
            accumulated = self._values[what, number]
            stayed = ("gradient", number) in self._values
            same = stayed and given is not None and times(given, accumulated, 1.0)
            if same or self._pieces[number].group < 0:
                del self._values[what, number]

    def _not_finite(self, forwards: Sequence[Forward]) -> tuple[NotFinite, ...]:
        groups = [one.record for one in self._steps for _ in one.options]
        steps = [groups[piece.group] if piece.group >= 0 else None for piece in self._pieces]
        return not_finite(self._values, self._pieces, steps, forwards, self._outputs.found())

    def _nothing_to_judge(self, forwards: list[Forward]) -> str:
        if not any(step.record.reached for step in self._steps):
            return "the optimizer took no step"
        if any(step.finite is False for step in self._steps):
            return "the gradient is not finite"
        return "" if forwards else "no call of the model came to a backward"

    def _add(self, shard: Shard, group: int, apart: bool, whole: bool) -> None:
        entry, tensor = entry_of(shard), shard.tensor
        assert tensor is not None
        self._numbers[entry] = len(self._pieces)
        dtype = str(tensor.dtype)
        self._pieces.append(ShardPiece(entry, tuple(tensor.shape), dtype, group, apart, whole))

    def _state(self, when: str, found: Iterable[Holding]) -> None:
        states = self._optimizers.states
        counts: list[float | None] = [None] * len(self._pieces)
        for holding in found:
            count = count_of(holding, states)
            for number in self._put_state(when, holding):
                counts[number] = count
        self._counts.append(counts)

    def _put_state(self, when: str, holding: Holding) -> Iterator[int]:
        """Copy a parameter and its states; yields the numbers of their pieces."""
        for role, shard in shards_of(holding, self._optimizers.states):
            number = self._numbers.get(entry_of(shard))
            if number is None:
                raise UsageError(
                    f"{holding.name} is another part of its tensor after the step than before "
                    "it; attach again when the model is wrapped again"
                )
            if when == AFTER and role == "parameter" and number in self._settled:
                self._compare_with(AFTER, number, shard.tensor)
            else:
                self._put(f"{when}.{role}", number, shard.tensor)
            yield number

    def _put(self, what: str, number: int, tensor: torch.Tensor | None) -> None:
        if tensor is not None:  # from a GPU: on its current stream, which the script's own loop has
            self._values[what, number] = vectors.copy(tensor.detach().reshape(-1))

    def _gradients(
        self, what: str, only: Collection[int] | None = None, without: Collection[int] = ()
    ) -> list[int]:
        """Copy the gradients; returns the numbers of their pieces. only, without: ids."""
        numbers = []
        clipped = {one for clip in self._clips.clips for one in clip.pieces}
        chosen = [
            holding
            for holding in holdings(self._model, self._axes.parts)
            if (only is None or id(holding.held) in only) and id(holding.held) not in without
        ]
        for number, tensor in self._with_gradients(chosen):
            if what == "gradient" or number not in clipped:
                self._put(what, number, tensor)
            elif what == "clipped":  # a second time
                self._put("reclipped", number, tensor)
            numbers.append(number)
        return numbers

    def _with_gradients(
        self, found: Iterable[Holding]
    ) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Yield (number of the piece, its gradient) for the parameters that have one."""
        for holding in found:
            grad = reduced(holding.held.grad, holding.held)
            for shard in () if grad is None else holding.shards("gradient", grad):
                yield self._numbers[entry_of(shard)], shard.tensor

    def _entered(self, step: _OptimizerWatch, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Pre-hook of `step`; returns other arguments where there is a closure."""
        with self._guard():
            # The step of a subclass calls that of its parent, which has the hooks too.
            step.depth += 1
            if step.depth > 1:
                if not in_backward() and step.pieces:  # which its own step may have changed
                    step.pieces = self._gradients("gradient", without=self._of_others(step))
                return None
            step.ran += 1
            if in_backward():
                raise UsageError(IN_BACKWARD.format(step.name))

            def observed(one: Any) -> Any:
                return self._after_closure(step, optimizer, one) if callable(one) else one

            closure = kwargs.get("closure")
            if callable(closure) or any(callable(one) for one in args[1:]):
                positional = (args[0], *(observed(one) for one in args[1:]))
                return positional, {**kwargs, **({"closure": observed(closure)} if closure else {})}
            self._take(step, optimizer)
        return None

    def _after_closure(
        self, step: _OptimizerWatch, optimizer: Any, closure: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap the closure of `step`: its gradient is that of the optimizer's update."""

        def observed(*args: Any, **named: Any) -> Any:
            result = closure(*args, **named)
            with self._guard():
                self._take(step, optimizer)
            return result

        return observed

    def _take(self, step: _OptimizerWatch, optimizer: Any) -> None:
        """Copy the gradients, and the options of the groups, right before the update."""
        if self._engine is None:
            step.options = group_options([optimizer])
            others = self._of_others(step)
            numbers = self._gradients("gradient", without=others)
            found = holdings(self._model, self._axes.parts)
            own = (one for one in found if id(one.held) not in others)
            if kept := self._used.added_to(own):
                self._kept += kept
                self._unjudged = ADDED_TO
            if self._moved:
                self._unjudged = MOVED
                self._copy(BEFORE, others)
            for shard in shards_changed_by_forwards(self._model, self._axes.parts, others):
                self._put(f"{BEFORE}.parameter", self._numbers[entry_of(shard)], shard.tensor)
            self._settle(BEFORE, found)
        else:
            these = {id(one) for group in optimizer.param_groups for one in group["params"]}
            these |= self._unoptimized
            numbers = self._gradients("gradient", these)
        # An engine steps its groups one by one.
        step.pieces = numbers if self._engine is None else [*step.pieces, *numbers]
        if self._reduced_after_backward():
            self._reduces = True
            self._drop_accumulated()
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:  # a fused optimizer, which a GradScaler tells what to do
            step.skipped = bool(found_inf != 0)
            step.finite = not step.skipped
            scale = getattr(optimizer, "grad_scale", None)
            if scale is not None:
                self._scale = float(scale)
                self._unscale("gradient", numbers)

    def _of_others(self, step: _OptimizerWatch) -> set[int]:
        """Return the ids of the parameters that other optimizers have."""
        number = self._steps.index(step)
        mine = {one for one, owner in self._owners.items() if owner != number}
        return mine | self._optimizers.elsewhere

    def _unscale(self, role: str, numbers: Collection[int] | None = None) -> None:
        """Divide gradients by the loss scale as the kernel is about to do, in fp32."""
        if self._scale == 1.0:
            return
        for (what, number), gradient in [*self._values.items()]:
            if what == role and (numbers is None or number in numbers):
                scaled = (gradient.float() / self._scale).to(gradient.dtype)
                self._values[what, number] = scaled

    def _left(self, step: _OptimizerWatch, *_: Any) -> None:
        step.depth -= 1
        if not step.depth and not in_backward():
            with self._guard():
                others = self._of_others(step)
                found = holdings(self._model, self._axes.parts)
                own = [one for one in found if id(one.held) not in others]
                step.versions = versions_of(own)
                if step.outer:
                    self._copy(INNER, others)
                if self._engine is None:
                    self._settle(AFTER, found)
                    if not step.skipped:
                        self._used.note(own)
                if self._listens is not None and all(one.ran for one in self._steps):
                    self._listens.updated()

    def _settle(self, when: str, found: Iterable[Holding]) -> None:
        """Copy what must not change in the optimizer's step, where that begins and ends.

        The script may change it before and after, as the average of weights that a teacher has.
        """
        groups = self._optimizers.group_numbers
        for holding in found:
            group = groups.get(id(holding.held), FROZEN)
            for shard in holding.shards("parameter", holding.held):
                number = self._numbers[entry_of(shard)]
                piece = self._pieces[number]
                if piece.group == FROZEN and group >= 0 and holding.held.grad is not None:
                    self._pieces[number] = msgspec.structs.replace(piece, group=group)
                elif piece.group in (FROZEN, NO_OPTIMIZER):
                    if when == BEFORE:
                        if number in self._settled:
                            continue  # another optimizer took its step
                        self._compare_with(BEFORE, number, shard.tensor)
                        self._settled.add(number)
                    self._put(f"{when}.parameter", number, shard.tensor)

    def _compare_with(self, when: str, number: int, tensor: torch.Tensor | None) -> None:
        """Note a piece that differs from what it was."""
        was = self._values.get((f"{when}.parameter", number))
        if was is not None and tensor is not None and not same_bits(was, local(tensor).reshape(-1)):
            self._aside.append(self._pieces[number].name)

    def _copy(self, when: str, without: Collection[int]) -> None:
        """Copy the states of parameters in the middle of the step. without: ids."""
        for holding in holdings(self._model, self._axes.parts):
            if id(holding.held) not in without:
                for _ in self._put_state(when, holding):
                    pass

    def _noting_outer(self, step: _OptimizerWatch, original: Callable[..., Any]) -> Any:
        """Wrap the step of an optimizer that is around another one."""

        @wraps(original)
        def noting(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            with self._guard():
                found = holdings(self._model, self._axes.parts)
                now = versions_of(found)
                for holding in found:
                    for shard in holding.shards("parameter", holding.held):
                        entry = entry_of(shard)
                        inner = self._values.get((f"{INNER}.parameter", self._numbers[entry]))
                        if inner is None or shard.tensor is None:
                            continue
                        if not same_bits(inner, local(shard.tensor).reshape(-1)):
                            step.versions[entry] = now[entry]
                            step.changed.append(self._numbers[entry])
            return result

        return noting

    def _take_inner(self) -> None:
        """Judge what an inner optimizer left, where the one around it changed that."""
        changed = {number for step in self._steps for number in step.changed}
        for what, number in [*self._values]:
            if what.startswith(INNER):
                value = self._values.pop((what, number))
                if number in changed:
                    self._values[what.replace(INNER, AFTER, 1), number] = value

    def _wrappers(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        yield from self._clips.wrappers()
        yield torch.amp.GradScaler, "step", self._noting_scaler

    def _noting_scaler(self, original: Any) -> Any:
        def noting(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = zip(self._optimizers, self._steps, strict=True)
            step = next((step for observed, step in pairs if observed is optimizer), None)
            if step is None or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            ran = step.ran
            with self._guard():
                self._scaling = True
                self._scale = float(scaler.get_scale())
            result = original(scaler, optimizer, *args, **kwargs)
            with self._guard():
                others = self._of_others(step)
                if step.ran == ran:
                    step.skipped = True
                    step.pieces += self._gradients("gradient", without=others)
                if step.finite is None:
                    step.finite = all(
                        all_finite(self._values["gradient", number]) for number in step.pieces
                    )
            return result

        return noting


@dataclass(eq=False)
class _OptimizerWatch:
    """Observation of one optimizer in the step: see OptimizerStep.

    depth: of the calls of `step`; options: of its groups, as it took its step; pieces: numbers of
    those of which it has the gradient; outer: name of the optimizer around it, or ""; changed:
    numbers of the pieces that this one changed; versions: of the parameters, after both.
    """

    name: str
    options: tuple[GroupOptions, ...] = ()
    ran: int = 0
    skipped: bool = False
    finite: bool | None = None
    depth: int = 0
    pieces: list[int] = field(default_factory=list)
    outer: str = ""
    changed: list[int] = field(default_factory=list)
    versions: dict[Entry, int] = field(default_factory=dict)

    @property
    def record(self) -> OptimizerStep:
        """Return what the record of the step has of it."""
        return OptimizerStep(self.name, len(self.options), self.ran, self.skipped, self.finite)


def _group_of(holding: Holding, groups: Mapping[int, int], elsewhere: Collection[int]) -> int:
    """Return the number of a parameter's group, or what is in its place."""
    if holding.group is not None:
        return holding.group
    if not holding.held.requires_grad:
        return FROZEN
    missing = ELSEWHERE if id(holding.held) in elsewhere else NO_OPTIMIZER
    return groups.get(id(holding.held), missing)


def _with_rates(
    options: GroupOptions, group: dict[str, Any], near: tuple[float, ...]
) -> GroupOptions:
    known = (*near, float(group.get("initial_lr", options.lr)))
    others = tuple(dict.fromkeys(rate for rate in known if rate != options.lr))
    return msgspec.structs.replace(options, rates=others)
