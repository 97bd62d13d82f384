"""Observe one step: copy the state around it, and the gradient where the optimizer takes it.

Hooks are there from the beginning of a checked step to its end, and at no other time. An error in
one of them is kept for `observed`, and never reaches the training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from ..contract.names import unwrapped
from ..contract.shard import Shard
from ..drive.recorder import entry_of
from ..errors import UsageError
from ..judge import vectors
from ..protocol.observations import Entry
from .call_state import OF_CUDNN, Numbers, draws_in_cudnn
from .casts import Casts, casts_of
from .clip_hooks import ClipHooks
from .forwards import Forward, Forwards
from .guard import ErrorGuard
from .holdings import (
    Holding,
    computes_on,
    count_of,
    groups_of,
    holdings,
    local,
    shards_changed_by_forwards,
    shards_of,
    versions_of,
    words_for,
)
from .model_hooks import HookWatch
from .optimizers import group_options, states_of
from .published_copies import master_parts
from .step_record import (
    AFTER,
    BEFORE,
    GroupOptions,
    Key,
    MasterParts,
    Observed,
    ShardPiece,
    StepSummary,
)
from .zero_engine import zero_engine

ADDED_TO = (
    "gradients of before the step are added to: is optimizer.zero_grad() missing, or called in "
    "another step?"
)


class Watch:
    """Observation of one step of a live model, from `start` to `observed` or `stop`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rank: int,
        world_size: int,
        number: int,
        listens: Numbers | None = None,
        unjudged: str = "",
    ) -> None:
        """Prepare the observation of a step.

        listens: record the calls of the model, for the reference, with the numbers of its modules
        when the check was attached; unjudged: why the gradient cannot be judged in any step.
        """
        self._model = model
        self._optimizer = optimizer
        self._engine = zero_engine(model)
        self._masters: list[MasterParts] = []
        self._casts: Casts | None = None
        self.number = number
        self._where = (rank, world_size)
        self._hooks = ExitStack()
        self._guard = ErrorGuard()
        self._listens = None if listens is None else Forwards(model, self._guard, listens)
        self._script_hooks = HookWatch(self._guard)
        self._backwards = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._unjudged = unjudged
        self._pieces: list[ShardPiece] = []
        self._numbers: dict[Entry, int] = {}
        self._counts: list[list[float | None]] = []
        self._values: dict[Key, torch.Tensor] = {}
        self._options: tuple[GroupOptions, ...] = ()
        self._clips = ClipHooks(self._guard, self._gradients, self._engine)
        self._ran = 0
        self._depth = 0
        self._versions: dict[Entry, int] = {}
        self._scaling = self._skipped = False
        self._scale = 1.0
        self._finite: bool | None = None

    def start(self) -> None:
        """Copy the state, and hook into the optimizer, clipping and GradScaler."""
        with self._guard():
            self._start()
        if self._guard.error is not None:
            self.stop()

    def _start(self) -> None:
        found = holdings(self._model)
        groups = groups_of(self._optimizer)
        for holding in found:
            for shard in holding.shards("parameter", holding.held):
                self._add(shard, holding, groups)
        self._state(BEFORE, found)
        if self._engine is not None:
            self._masters.append(master_parts(self._engine))
            self._options = self._groups()  # it takes groups away while it steps the others
        self._early = [float(group["lr"]) for group in self._optimizer.param_groups]
        before = self._optimizer.register_step_pre_hook(self._entered)
        after = self._optimizer.register_step_post_hook(self._left)
        self._hooks.callback(before.remove)
        self._hooks.callback(after.remove)
        if self._listens is not None:
            self._listen(self._listens, found)
        for owner, name, make in self._wrappers():
            self._hooks.enter_context(_replaced(owner, name, make))

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
            self._ran = -(-self._ran // max(1, len(engine.masters)))
            self._masters.append(master_parts(engine))
        if self._ran > 1:
            raise UsageError(
                f"the optimizer took {self._ran} steps within one checked step (allowed: 1); put "
                "check.step() around one update"
            )
        found = holdings(self._model)
        self._state(AFTER, found)
        # Of a step that the optimizer did not take, nothing comes after.
        changed = versions_of(found).items() - self._versions.items() if self._ran else set()
        rank, world_size = self._where
        forwards: list[Forward] = []
        if self._listens is not None:
            forwards = self._listens.counted()
            reason = self._listens.reason or self._listens.gradients.reason
            self._unjudged = self._unjudged or reason
        self._listens = None
        options = self._options or self._groups()
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        summary = StepSummary(
            rank=rank,
            world_size=world_size,
            number=self.number,
            what=words_for(self._model, self._optimizer),
            pieces=tuple(self._pieces),
            options=tuple(
                _with_rates(one, self._optimizer.param_groups[n], (self._early[n], rates[n]))
                for n, one in enumerate(options)
            ),
            before=tuple(self._counts[0]),
            after=tuple(self._counts[1]),
            ran=self._ran,
            scaling=self._scaling,
            skipped=self._skipped,
            finite=self._finite,
            loss_scale=self._scale,
            forwards=len(forwards),
            unjudged=self._unjudged or self._nothing_to_judge(forwards),
            clips=tuple(self._clips.clips),
            masters=tuple(self._masters),
            casts=self._casts,
            hooks=self._script_hooks.changing,
            late=tuple(sorted({entry.name for entry, _ in changed})),
        )
        device = str(computes_on(self._model))
        norms, model = self._clips.norms, self._model
        return Observed(summary, self._values, forwards, self._buffers, device, norms, model)

    def _listen(self, listens: Forwards, found: Sequence[Holding]) -> None:
        """Record the inputs of the gradient, or why it cannot be judged."""
        self._hooks.enter_context(self._script_hooks.watching(self._model))
        self._hooks.enter_context(listens.hooked())
        self._hooks.enter_context(
            _replaced(torch.autograd, "backward", partial(self._observed_backward, listens, found))
        )
        self._buffers = {
            unwrapped(name): buffer.detach().clone() for name, buffer in self._model.named_buffers()
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

        def backward(*args: Any, **named: Any) -> Any:
            with self._guard():
                first = not self._backwards and self._engine is None
                grads = [holding.held.grad for holding in found] if first else []
                self._backwards += 1
                if any(grad is not None and bool(local(grad).any()) for grad in grads):
                    self._unjudged = ADDED_TO
            return observed(*args, **named)

        return backward

    def _nothing_to_judge(self, forwards: list[Forward]) -> str:
        if not self._ran and not self._skipped:
            return "the optimizer took no step"
        if self._finite is False:
            return "the gradient is not finite"
        return "" if forwards else "no call of the model came to a backward"

    def _add(self, shard: Shard, holding: Holding, groups: dict[int, int]) -> None:
        entry, tensor = entry_of(shard), shard.tensor
        assert tensor is not None
        group = groups.get(id(holding.held), -1) if holding.held.requires_grad else -1
        group = group if holding.group is None else holding.group
        self._numbers[entry] = len(self._pieces)
        self._pieces.append(ShardPiece(entry, tuple(tensor.shape), str(tensor.dtype), group))

    def _state(self, when: str, found: Iterable[Holding]) -> None:
        states = states_of(self._optimizer)
        counts: list[float | None] = [None] * len(self._pieces)
        for holding in found:
            count = count_of(holding, states)
            for role, shard in shards_of(holding, states):
                number = self._numbers.get(entry_of(shard))
                if number is None:
                    raise UsageError(
                        f"{holding.name} is another part of its tensor after the step than before "
                        "it; attach again when the model is wrapped again"
                    )
                counts[number] = count
                self._put(f"{when}.{role}", number, shard.tensor)
        self._counts.append(counts)

    def _put(self, what: str, number: int, tensor: torch.Tensor | None) -> None:
        if tensor is not None:  # from a GPU: on its current stream, which the script's own loop has
            self._values[what, number] = vectors.copy(tensor.detach().reshape(-1))

    def _gradients(self, what: str, only: Collection[int] | None = None) -> list[int]:
        """Copy the gradients; returns the numbers of their pieces. only: ids of parameters."""
        numbers = []
        clipped = {one for clip in self._clips.clips for one in clip.pieces}
        for holding in holdings(self._model):
            grad = holding.held.grad
            if grad is None or (only is not None and id(holding.held) not in only):
                continue
            for shard in holding.shards("gradient", grad):
                number = self._numbers[entry_of(shard)]
                if what == "gradient" or number not in clipped:
                    self._put(what, number, shard.tensor)
                elif what == "clipped":  # a second time
                    self._put("reclipped", number, shard.tensor)
                numbers.append(number)
        return numbers

    def _entered(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Pre-hook of `step`; returns other arguments where there is a closure."""
        with self._guard():
            # The step of a subclass calls that of its parent, which has the hooks too.
            self._depth += 1
            if self._depth > 1:
                return None
            self._ran += 1

            def observed(one: Any) -> Any:
                return self._after_closure(optimizer, one) if callable(one) else one

            closure = kwargs.get("closure")
            if callable(closure) or any(callable(one) for one in args[1:]):
                positional = (args[0], *(observed(one) for one in args[1:]))
                return positional, {**kwargs, **({"closure": observed(closure)} if closure else {})}
            self._take(optimizer)
        return None

    def _after_closure(self, optimizer: Any, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the closure of `step`: its gradient is that of the optimizer's update."""

        def observed(*args: Any, **named: Any) -> Any:
            result = closure(*args, **named)
            with self._guard():
                self._take(optimizer)
            return result

        return observed

    def _take(self, optimizer: Any) -> None:
        """Copy the gradients, and the options of the groups, right before the update."""
        if self._engine is None:
            self._options = self._groups()
            self._gradients("gradient")
            for shard in shards_changed_by_forwards(self._model):
                self._put(f"{BEFORE}.parameter", self._numbers[entry_of(shard)], shard.tensor)
        else:
            these = {id(one) for group in optimizer.param_groups for one in group["params"]}
            self._gradients("gradient", these)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:  # a fused optimizer, which a GradScaler tells what to do
            self._skipped = bool(found_inf != 0)
            self._finite = not self._skipped
            scale = getattr(optimizer, "grad_scale", None)
            if scale is not None:
                self._scale = float(scale)
                self._unscale()

    def _unscale(self) -> None:
        """Divide the gradients by the loss scale as the kernel is about to do, in fp32."""
        for key, gradient in self._values.items():
            if key[0] == "gradient":
                self._values[key] = (gradient.float() / self._scale).to(gradient.dtype)

    def _left(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            with self._guard():
                self._versions = versions_of(holdings(self._model))

    def _groups(self) -> tuple[GroupOptions, ...]:
        return group_options(self._optimizer)

    def _wrappers(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        yield from self._clips.wrappers()
        yield torch.amp.GradScaler, "step", self._noting_scaler

    def _noting_scaler(self, original: Any) -> Any:
        def noting(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if optimizer is not self._optimizer or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            ran = self._ran
            with self._guard():
                self._scaling = True
                self._scale = float(scaler.get_scale())
            result = original(scaler, optimizer, *args, **kwargs)
            with self._guard():
                if self._ran == ran:
                    self._skipped = True
                    self._gradients("gradient")
                if self._finite is None:
                    found = [one for (what, _), one in self._values.items() if what == "gradient"]
                    self._finite = all(bool(one.isfinite().all()) for one in found)
            return result

        return noting


def _with_rates(
    options: GroupOptions, group: dict[str, Any], near: tuple[float, ...]
) -> GroupOptions:
    known = (*near, float(group.get("initial_lr", options.lr)))
    others = tuple(dict.fromkeys(rate for rate in known if rate != options.lr))
    return msgspec.structs.replace(options, rates=others)


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace owner.name by make(original) within the context. owner: an object, or a cell."""
    original = getattr(owner, name)
    own = vars(owner).get(name) if hasattr(owner, "__dict__") else original
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
