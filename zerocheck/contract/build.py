"""Short form of the contract, for code that looks like torch: a model and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..case.capabilities import Capability
from ..case.schema import Case
from ..case.segments import in_background
from ..compat import FlatHandle, flat_parameters, local_index, reduces_unused, release
from ..errors import Unsupported, UsageError
from ..optimizers import optimizer_of
from ..optimizers.trial import template_of
from . import checkpoint, flat
from .groups import case_group, check_options, group_of, optimized
from .implementation import Call, Implementation, Kept, Loader, Microbatch, Saving, Step, StepReport
from .names import named_buffers, named_parameters, register, renaming
from .optimizers import Applied, Optimizers, has_gradients, set_learning_rate
from .refusals import check_built, refused_infinity_norm, torch_refusals
from .shard import Index, Shard
from .states import Full, States
from .user_optimizers import UserOptimizers, changed, gradients_of, reduced
from .versions import fresh, newest
from .wrapper_limits import (
    by_mesh,
    check_damage,
    check_torch_faults,
    check_wrapped,
    ddp_in,
    sends_buffers,
    uses_partly,
)


@dataclass(frozen=True, kw_only=False)
class Built:
    """Return value of `build(model, case, mesh)`.

    model       the wrapped model that is called in training
    optimizer   an optimizer over its parameters, or a list of several: of torch, with the groups of
                `zerocheck.groups`; a wrapper around one; or an object of your own with `step()`
    accumulate  accumulate(last: bool) -> context for the forward and backward of a microbatch;
                default: no_sync() or set_requires_gradient_sync(False) until the last one
    clip        clip(max_norm, norm_type) -> total norm; default: the clip_grad_norm_ of the model,
                as FSDP1 has one, else torch's
    states      states() -> dict of parameter to its optimizer state, of those that this rank
                updates, read and restored there; default: the state of the torch optimizers that
                are found in `optimizer`. Torch's checkpoints do not see them: make it a class, with
                `save` and `load`
    names       names(wrapped name) -> name in the unwrapped model; default: found by the modules
    scaler      scales the losses if the case asks for it (`training.loss_scale`): used as
                torch.amp.GradScaler is; say so in `capabilities`, or no such case is drawn
    rewrap      rewrap() -> the model wrapped again, called after parameters were unfrozen; needed
                for DDP, which reduces only what was trainable when it was made
    roles       key in an optimizer's state of each role that has another name there, such as
                {"exp_avg": "state1", "exp_avg_sq": "state2"}; also "step"
    forward_backward
                forward_backward(microbatches): runs the forward and backward of all microbatches of
                a step, as the schedule of a pipeline does. Ranks of the last stage call
                `microbatch.loss(lambda *inputs: outputs)` for each. Gradients are the mean over
                microbatches. Default: one after the other
    """

    model: nn.Module
    optimizer: Any
    accumulate: Callable[[bool], AbstractContextManager[Any]] | None = None
    clip: Callable[[float, float], torch.Tensor | float] | None = None
    states: Callable[[], Mapping[torch.Tensor, Mapping[str, Any]]] | None = None
    names: Callable[[str], str] | None = None
    scaler: torch.amp.GradScaler | None = None
    rewrap: Callable[[], nn.Module] | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    forward_backward: Callable[[Sequence[Microbatch]], None] | None = None


class BuiltImplementation(Implementation):
    """Implementation made from `build`, as those of torch's own wrappers are.

    It weights losses by tokens where `semantics.weight` says so, scales them by `Built.scaler`, and
    unfreezes parameters. Its checkpoints are those of torch.distributed.checkpoint. What a subclass
    may do in another way: `called`, `accumulating`, `backward`, `clip`, `set_learning_rates`,
    `unfreeze`, `shards`, `restore`, `save` with `load`, `export`. `self.built` is what `build`
    returned, `self.case` the case.
    """

    capabilities: ClassVar[Collection[Capability]] = frozenset({"unfreeze"})
    """Add "loss_scale" where `build` gives a scaler."""
    keeps: ClassVar[Collection[Kept]] = ("data", "rng")

    avoids_torch_faults: bool = True
    """Listed faults of torch, for which this code is not to blame, are avoided: `save` and `export`
    go round them, and cases that show others are unsupported. What tests torch itself is False."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Wrap the model and make its optimizer."""
        raise NotImplementedError

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        self.names = frozenset(name for name, _ in model.named_parameters())
        register(model)
        with torch_refusals():
            built = self.build(model, case, mesh)
        if not isinstance(built, Built):
            raise UsageError(
                f"build must return zerocheck.Built(model, optimizer), got {type(built).__name__}"
            )
        check_built(built.model, case, own_clip=_own_clip(built) is not None)
        if reduces_unused(built.model):
            self.semantics = replace(self.semantics, unused="zero")
        if sends_buffers(built.model) and self.semantics.buffers == "local":
            self.semantics = replace(self.semantics, buffers="rank0")
        _refuse_extras(built, case)
        if case.optimizer.user is not None:  # it is the user's optimizer that is checked
            self.avoids_torch_faults = True
        self.case = case
        self.flats: list[FlatHandle] = flat_parameters(built.model)
        check_wrapped(built.model, case, self.flats)
        if self.avoids_torch_faults:
            check_torch_faults(case, self.flats)
            if type(self).load is BuiltImplementation.load:
                check_damage(case)
        if uses_partly(self.flats, case):
            self.semantics = replace(self.semantics, unused="zero")
        self.use(built, mesh)

    def use(self, built: Built, mesh: DeviceMesh) -> None:
        """Take the optimizers of what was built, and find the states in them."""
        case = self.case
        self.built = built
        parameters = built.model.parameters()
        self.optimizers = Optimizers(built.optimizer, parameters, reduced=reduced(built))
        self._applied: Applied = {}
        wanted = optimizer_of(case.optimizer)
        inner = {
            type(one): template_of(one, built.roles, wanted) for one in self.optimizers.innermost
        }
        templates = {kind: state for kind, state in inner.items() if state is not None}
        self.states = States(self.optimizers, wanted, built.states, built.roles, templates)
        self._group_of = {id(p): group_of(case, name) for name, p in optimized(built.model, case)}
        self._opaque = UserOptimizers.of(self.optimizers, self.states, built, mesh)
        check_options(self.optimizers.groups(), self._group_of, case)
        self._opaque.check(case)
        self.hides = self._opaque.hidden
        self._places: dict[str, tuple[tuple[int, ...], Index | None]] = {}
        local = dict(named_parameters(built.model, built.names))
        self._sharded = {name: its for name, its in local.items() if isinstance(its, DTensor)}
        self.whole = self.names <= local.keys()
        """False if this rank has a stage, or some of the experts."""
        own_export = type(self).export is not BuiltImplementation.export
        self.exports = own_export or self.whole  # torch's get_state_dict has the rank's own

    def train_step(self, step: Step) -> StepReport:
        if step.unfreeze:
            self.unfreeze(step.unfreeze)
        optimizers, scaler = self.optimizers, self.built.scaler
        training = self.case.training
        scale = 1.0 if scaler is None else scaler.get_scale()
        optimizers.zero_grad(self.built.model, set_to_none=training.set_to_none)
        self.set_learning_rates(step.lr)
        with optimizers.applied() as self._applied:
            (self.built.forward_backward or self.forward_backward)(step.microbatches)
        if self._opaque.reduces:
            return self._step_that_reduces(step)
        if scaler is not None:
            for one in optimizers.given:
                scaler.unscale_(one)
        step.reached("reduced")
        norm: float | None = None
        if training.clip is not None:
            norm = self.clip(training.clip, float(training.norm))
            step.reached("clipped")
        if scaler is None:
            optimizers.step()
            return StepReport(grad_norm=norm)
        for one in optimizers.given:
            if len(optimizers.given) == 1 or has_gradients(one):  # else torch raises
                scaler.step(one)
        scaler.update()
        return StepReport(grad_norm=norm, skipped=scaler.get_scale() < scale, loss_scale=scale)

    def _step_that_reduces(self, step: Step) -> StepReport:
        """Update by a `step()` that may reduce gradients too: gradients are read after it."""
        before = gradients_of(self.built.model)
        self.optimizers.step()
        exposed = changed(before, gradients_of(self.built.model))
        step.reached("reduced")
        return StepReport(reduced=exposed)

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> None:
        """Run the forward and the backward of each microbatch of a step."""
        count = len(microbatches)
        for index, microbatch in enumerate(microbatches):
            with self.accumulating(last=index == count - 1):
                loss = microbatch.loss(self.called)
                if loss.requires_grad:  # else everything is frozen
                    self.backward(loss, microbatch.weight, count)

    @property
    def called(self) -> Call:
        """Callable that is given the inputs of a microbatch."""
        return self.built.model

    def backward(self, loss: torch.Tensor, weight: float, count: int) -> None:
        """Run the backward of a microbatch. count: number of microbatches of the step."""
        self._objective(loss, weight, count).backward()  # type: ignore[no-untyped-call]

    def _objective(self, loss: torch.Tensor, weight: float, count: int) -> torch.Tensor:
        """Return the scalar to call backward on: the loss by weight and share, scaled."""
        if self.semantics.weight == "token" and weight != 1.0:
            loss = loss * weight
        divisor = count * (self.case.axes.data_parallel_size if self.semantics.in_losses else 1)
        if divisor > 1:
            loss = loss / divisor
        return loss if self.built.scaler is None else self.built.scaler.scale(loss)

    def unfreeze(self, names: Collection[str]) -> None:
        """Unfreeze parameters from now on; names of the unwrapped model."""
        for name, parameter in named_parameters(self.built.model, self.built.names):
            for one in (parameter, self._sharded.get(name)) if name in names else ():
                if one is not None:
                    one.requires_grad_(True)
        if self.built.rewrap is not None:
            self.built = replace(self.built, model=self.built.rewrap())

    def shards(self) -> Iterator[Shard]:
        for one in self.flats:
            yield from flat.shards_of(one, self.states)
        for name, parameter in self._parameters():
            shape, index = self._place(name, parameter)
            yield Shard(name, "parameter", _local(parameter), shape, index)
            if not parameter.requires_grad:
                continue
            grad = self._applied.get(parameter, parameter.grad)
            if grad is not None:
                yield Shard(name, "gradient", _local(grad), shape, index)
            elif self.optimizers.holder_of(parameter) is not None:
                yield Shard(name, "gradient", None, shape, index)
            # Else another rank updates it, and this one may free its gradient.
            for role, tensor in self.states.moments(parameter):
                yield Shard(name, role, _local(tensor), shape, index)
            count = self.states.count(parameter)
            if count is not None:
                yield Shard(name, "step", _local(count), ())
        for name, buffer in named_buffers(self.built.model, self.built.names):
            yield Shard(name, "buffer", _local(buffer), tuple(buffer.shape))

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over (name in the unwrapped model, parameter) outside of flat parameters."""
        held = {id(one.tensor) for one in self.flats}
        held |= {id(p) for one in self.flats for p in (one.originals or {}).values()}
        for name, parameter in named_parameters(self.built.model, self.built.names):
            if id(parameter) in held:
                continue
            # A module of FSDP2 that stays gathered has a copy in place of what is updated.
            updated = self._sharded.get(name)
            gathered = updated is not None and not isinstance(parameter, DTensor)
            yield name, updated if updated is not None and gathered else parameter

    def restore(self, full: Full) -> None:
        self._opaque.check_restores()
        with torch.no_grad():
            for one in self.flats:
                flat.restore(one, full, self.states)
            for name, parameter in self._parameters():
                index = self._place(name, parameter)[1]
                _local(parameter).copy_(_part(full[name, "parameter"], index))
                if parameter.requires_grad:
                    self.states.restore(parameter, full, name, partial(_put, full, name, index))

    def save(self, directory: str, loader: Loader) -> Saving | None:
        """Save `get_state_dict` by `dcp.save`, in the background by `dcp.async_save`."""
        built = self._checkpointed()
        states = checkpoint.other_states(loader, built.scaler)
        if self.avoids_torch_faults:
            directory = fresh(directory)
        with torch_refusals():
            return checkpoint.save(
                built.model,
                self.optimizers.holding,
                states,
                directory,
                background=in_background(self.case),
                avoids_torch_faults=self.avoids_torch_faults,
                parted=not self.whole,
            )

    def load(self, directory: str, loader: Loader) -> None:
        built = self._checkpointed()
        states = checkpoint.other_states(loader, built.scaler)
        if self.avoids_torch_faults:
            directory = newest(directory)
        optimizers = self.optimizers.holding
        checkpoint.load(built.model, optimizers, states, directory, parted=not self.whole)
        checkpoint.take_over(states, loader, built.scaler)

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """Export `get_state_dict` of whole tensors, which rank 0 has."""
        built = self._checkpointed()
        return checkpoint.export(
            built.model,
            self.optimizers.holding,
            self.names,
            built.names or renaming(built.model),
            avoids_torch_faults=self.avoids_torch_faults,
        )

    def _checkpointed(self) -> Built:
        """Return `built`, or raise Unsupported if torch's state-dict API does not cover it."""
        if self.built.states is not None:
            raise Unsupported(
                "torch's get_state_dict does not see the states of Built.states; save(), load() "
                "and export() of its own are needed"
            )
        self._opaque.check_checkpointed()
        if self.avoids_torch_faults and self.flats and not by_mesh(self.built.model):
            raise Unsupported(
                "FSDP1 without device_mesh gives ShardedTensors, which torch's get_state_dict and "
                "dcp do not go together with: give it device_mesh=mesh, or save() and load() of "
                "your own"
            )
        return self.built

    def close(self) -> None:
        for one in self.flats:
            release(one)
        self.flats.clear()
        self._places.clear()
        self._sharded.clear()
        del self.built, self.optimizers, self.states

    def _place(self, name: str, parameter: torch.Tensor) -> tuple[tuple[int, ...], Index | None]:
        if not isinstance(parameter, DTensor):
            return tuple(parameter.shape), None
        place = self._places.get(name)
        if place is None:
            place = (tuple(parameter.shape), local_index(parameter))
            self._places[name] = place
        return place

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context for forward and backward of one microbatch; `last`: of the step.

        Default: no reduction (`no_sync`, `set_requires_gradient_sync(False)`) until the last one.
        """
        if self.built.accumulate is not None:
            return self.built.accumulate(last)
        model: Any = self.built.model
        if hasattr(model, "set_requires_gradient_sync"):
            if self.case.training.microbatches > 1:
                model.set_requires_gradient_sync(last)
        elif not last and hasattr(model, "no_sync"):
            return cast(AbstractContextManager[Any], model.no_sync())
        return nullcontext()

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clip the reduced gradient and return its total norm before. Norm type: 2.0 or inf.

        Default: that of the model, if it has one, since it knows its shards; else
        `torch.nn.utils.clip_grad_norm_` over all parameters, which is right where they are whole on
        every rank or DTensors.
        """
        norm: torch.Tensor | float
        own = _own_clip(self.built)
        if own is not None:
            with refused_infinity_norm(self.case):
                norm = own(max_norm, norm_type)
        else:
            norm = torch.nn.utils.clip_grad_norm_(
                self.built.model.parameters(), max_norm, norm_type=norm_type
            )
        # Of an infinity norm each rank's DTensor holds its own part, and float() takes that.
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def set_learning_rates(self, rates: Sequence[float]) -> None:
        """Give each parameter group its learning rate of this step.

        Raises UsageError for a group with parameters that the case gives different rates.
        """
        for group in self.optimizers.scheduled():
            number = case_group(group, self._group_of, rates)
            if number is not None:
                set_learning_rate(group, rates[number])


def _own_clip(built: Built) -> Callable[[float, float], torch.Tensor | float] | None:
    return built.clip or getattr(built.model, "clip_grad_norm_", None)


_DECLARED = (
    "semantics",
    "fixed",
    "options",
    "capabilities",
    "axes",
    "stage",
    "stays_gathered",
    "without",
)
"""Attributes of a function that its class takes over."""


def from_function(
    build: Callable[[nn.Module, Case, DeviceMesh], Built], name: str = ""
) -> type[BuiltImplementation]:
    """Make the class, of this name, for a bare `build` function or a partial of one.

    Attributes `semantics`, `fixed`, `options`, `capabilities`, `axes`, `stage`, `stays_gathered`
    and `supports` of the function become those of the class.
    """
    members: dict[str, Any] = {"build": lambda self, *given: build(*given)}
    for attribute in _DECLARED:
        if hasattr(build, attribute):
            members[attribute] = getattr(build, attribute)
    if hasattr(build, "supports"):
        members["supports"] = staticmethod(build.supports)
    return type(name or getattr(build, "__name__", "Build"), (BuiltImplementation,), members)


def _refuse_extras(built: Built, case: Case) -> None:
    """Raise Unsupported where the case requires more than `build` returned, or torch offers."""
    several = isinstance(built.optimizer, list | tuple) and len(built.optimizer) > 1
    if several and case.training.overflow_in is not None and built.scaler is not None:
        raise Unsupported(
            "torch's GradScaler skips the step of each optimizer by its own gradients alone"
        )
    if case.training.loss_scale is not None and built.scaler is None:
        raise Unsupported("build gave no Built.scaler, and the case scales its losses")
    wraps = ddp_in(built.model) is not None
    if case.training.unfreeze is not None and wraps and built.rewrap is None:
        raise Unsupported(
            "DDP does not reduce what is unfrozen after it was made, and build gave no Built.rewrap"
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor, detached. A private field: `to_local` may wait or differentiate."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    return tensor.detach()


def _put(full: Full, name: str, index: Index | None, into: torch.Tensor, role: str) -> None:
    _local(into).copy_(_part(full[name, role], index))


def _part(whole: torch.Tensor, index: Index | None) -> torch.Tensor:
    if index is None:
        return whole
    return whole.reshape(-1)[index] if isinstance(index, slice) else whole[index]


__all__ = ["Built", "BuiltImplementation", "from_function"]
