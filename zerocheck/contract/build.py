"""The short form of the contract, for code that looks like torch: a model and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..case.legs import in_background
from ..case.schema import Case
from ..compat import local_index, reduces_unused
from ..errors import Unsupported, UsageError
from . import checkpoint
from .implementation import Call, Implementation, Kept, Loader, Saving, Step, StepReport
from .names import unwrapped
from .refusals import check_built, torch_refusals
from .shard import Index, Role, Shard

MOMENT_ROLES: tuple[Role, ...] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True, kw_only=False)
class Built:
    """What `build(model, case, mesh)` returns.

    model       the wrapped model that is called in training
    optimizer   a torch optimizer over its parameters, with the groups of `zerocheck.groups`
    accumulate  accumulate(last: bool) -> context for the forward and backward of a microbatch;
                default: no_sync() or set_requires_gradient_sync(False) until the last one
    clip        clip(max_norm, norm_type) -> total norm; default: torch's clip_grad_norm_
    states      states() -> mapping of parameter to its optimizer state; default: optimizer.state
    names       names(wrapped name) -> name in the unwrapped model; default: wrapper prefixes cut
    scaler      scales the losses if the case asks for it (`training.loss_scale`): used as
                torch.amp.GradScaler is; say so in `handles`, or no such case is drawn
    rewrap      rewrap() -> the model wrapped anew, called after parameters were unfrozen; needed
                for DDP, which reduces only what was trainable when it was made
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    accumulate: Callable[[bool], AbstractContextManager[Any]] | None = None
    clip: Callable[[float, float], torch.Tensor | float] | None = None
    states: Callable[[], Mapping[torch.Tensor, Mapping[str, Any]]] | None = None
    names: Callable[[str], str] | None = None
    scaler: torch.amp.GradScaler | None = None
    rewrap: Callable[[], nn.Module] | None = None


class BuiltImplementation(Implementation):
    """An Implementation made from `build`; those that torch brings are made this way too.

    It weights losses by tokens where `semantics.weight` says so, scales them by `Built.scaler`, and
    unfreezes parameters. Its checkpoints are those of torch.distributed.checkpoint. What a subclass
    may do in another way: `called`, `accumulating`, `clip`, `set_learning_rates`, `unfreeze`,
    `shards`, `restore`, `save` with `load`, `export`. `self.built` is what `build` returned,
    `self.case` the case.
    """

    handles: ClassVar[Collection[str]] = ("unfreeze",)
    """Add "loss_scale" where `build` gives a scaler."""
    keeps: ClassVar[Collection[Kept]] = ("data", "rng")

    mended: ClassVar[bool] = True
    """`save` and `export` go round two listed faults of torch, for which this code is not to blame.
    What tests torch itself takes its checkpoints as they are."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Wrap the model and make its optimizer."""
        raise NotImplementedError

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        self.names = frozenset(name for name, _ in model.named_parameters())
        with torch_refusals():
            built = self.build(model, case, mesh)
        if not isinstance(built, Built):
            raise UsageError(
                f"build must return zerocheck.Built(model, optimizer), got {type(built).__name__}"
            )
        check_built(built.model, case, own_clip=built.clip is not None)
        if reduces_unused(built.model):
            self.semantics = replace(self.semantics, unused="zero")
        _refuse_extras(built, case)
        self.case = case
        self.built = built
        self._places: dict[str, tuple[tuple[int, ...], Index | None]] = {}

    def train_step(self, step: Step) -> StepReport:
        if step.unfreeze:
            self.unfreeze(step.unfreeze)
        optimizer, scaler = self.built.optimizer, self.built.scaler
        training = self.case.training
        scale = 1.0 if scaler is None else scaler.get_scale()
        optimizer.zero_grad(set_to_none=training.set_to_none)
        self.set_learning_rates(step.lr)
        count = len(step.microbatches)
        for index, microbatch in enumerate(step.microbatches):
            with self.accumulating(last=index == count - 1):
                loss = microbatch.loss(self.called)
                if loss.requires_grad:  # else everything is frozen
                    self._objective(loss, microbatch.weight, count).backward()  # type: ignore[no-untyped-call]
        if scaler is not None:
            scaler.unscale_(optimizer)
        step.reached("reduced")
        norm: float | None = None
        if training.clip is not None:
            norm = self.clip(training.clip, float(training.norm))
            step.reached("clipped")
        if scaler is None:
            optimizer.step()
            return StepReport(grad_norm=norm)
        scaler.step(optimizer)
        scaler.update()
        return StepReport(grad_norm=norm, skipped=scaler.get_scale() < scale, loss_scale=scale)

    @property
    def called(self) -> Call:
        """What is called with the inputs of a microbatch."""
        return self.built.model

    def _objective(self, loss: torch.Tensor, weight: float, count: int) -> torch.Tensor:
        """What the backward starts from: the loss by its weight, its share, and scaled."""
        if self.semantics.weight == "token" and weight != 1.0:
            loss = loss * weight
        divisor = count * (self.case.readers if self.semantics.in_losses else 1)
        if divisor > 1:
            loss = loss / divisor
        return loss if self.built.scaler is None else self.built.scaler.scale(loss)

    def unfreeze(self, names: Collection[str]) -> None:
        """Let parameters train from now on; names of the unwrapped model."""
        rename = self.built.names or unwrapped
        for wrapped, parameter in self.built.model.named_parameters():
            if rename(wrapped) in names:
                parameter.requires_grad_(True)
        if self.built.rewrap is not None:
            self.built = replace(self.built, model=self.built.rewrap())

    def shards(self) -> Iterator[Shard]:
        rename = self.built.names or unwrapped
        states = self.built.states() if self.built.states else self.built.optimizer.state
        for wrapped, parameter in self.built.model.named_parameters():
            name = rename(wrapped)
            shape, index = self._place(name, parameter)
            yield Shard(name, "parameter", _local(parameter), shape, index)
            if not parameter.requires_grad:
                continue
            grad = parameter.grad
            yield Shard(name, "gradient", None if grad is None else _local(grad), shape, index)
            state = states.get(parameter)
            if not state:
                continue
            for role in MOMENT_ROLES:
                if role in state:
                    yield Shard(name, role, _local(state[role]), shape, index)
            if "step" in state:
                yield Shard(name, "step", _local(torch.as_tensor(state["step"])), ())
        for wrapped, buffer in self.built.model.named_buffers():
            yield Shard(rename(wrapped), "buffer", _local(buffer), tuple(buffer.shape))

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        rename = self.built.names or unwrapped
        state = self.built.optimizer.state
        with torch.no_grad():
            for wrapped, parameter in self.built.model.named_parameters():
                name = rename(wrapped)
                index = self._place(name, parameter)[1]
                _local(parameter).copy_(_part(full[name, "parameter"], index))
                if not parameter.requires_grad:
                    continue
                entry = state[parameter]
                entry["step"] = beside_parameter(full[name, "step"], parameter)
                for role in MOMENT_ROLES:
                    if (name, role) in full:
                        moment = torch.zeros_like(parameter)
                        _local(moment).copy_(_part(full[name, role], index))
                        entry[role] = moment

    def save(self, directory: str, loader: Loader) -> Saving | None:
        """`dcp.save` of `get_state_dict`; `dcp.async_save` where the next leg wants it."""
        built = self._checkpointed()
        states = checkpoint.beside(loader, built.scaler)
        with torch_refusals():
            return checkpoint.save(
                built.model,
                built.optimizer,
                states,
                directory,
                background=in_background(self.case),
                mended=self.mended,
            )

    def load(self, directory: str, loader: Loader) -> None:
        built = self._checkpointed()
        states = checkpoint.beside(loader, built.scaler)
        checkpoint.load(built.model, built.optimizer, states, directory)
        checkpoint.take_over(states, loader, built.scaler)

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """`get_state_dict` of whole tensors, which rank 0 has."""
        built = self._checkpointed()
        rename = built.names or unwrapped
        return checkpoint.export(
            built.model, built.optimizer, self.names, rename, mended=self.mended
        )

    def _checkpointed(self) -> Built:
        """What was built, if torch's state-dict API can see all of it."""
        if self.built.states is not None:
            raise Unsupported(
                "torch's get_state_dict does not see the states of Built.states; save(), load() "
                "and export() of its own are needed"
            )
        return self.built

    def close(self) -> None:
        self._places.clear()
        del self.built

    def _place(self, name: str, parameter: torch.Tensor) -> tuple[tuple[int, ...], Index | None]:
        if not isinstance(parameter, DTensor):
            return tuple(parameter.shape), None
        place = self._places.get(name)
        if place is None:
            place = (tuple(parameter.shape), local_index(parameter))
            self._places[name] = place
        return place

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """The context for forward and backward of one microbatch; `last`: of the step.

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
        """Clip the reduced gradient, return its total norm before. Norm type: 2.0 or inf.

        Default: `torch.nn.utils.clip_grad_norm_` over all parameters, which is right where they
        are whole on every rank or DTensors.
        """
        if self.built.clip is not None:
            return float(self.built.clip(max_norm, norm_type))
        norm = torch.nn.utils.clip_grad_norm_(
            self.built.model.parameters(), max_norm, norm_type=norm_type
        )
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def set_learning_rates(self, rates: Sequence[float]) -> None:
        """Give each parameter group its learning rate of this step.

        Raises UsageError if the optimizer has other groups than the case.
        """
        own = self.built.optimizer.param_groups
        if len(own) != len(rates):
            raise UsageError(
                f"the optimizer has {len(own)} parameter groups, the case has {len(rates)}; "
                "build it with zerocheck.groups(model, case)"
            )
        for group, rate in zip(own, rates, strict=True):
            group["lr"] = rate


def from_function(
    build: Callable[[nn.Module, Case, DeviceMesh], Built],
) -> type[BuiltImplementation]:
    """The class for a bare `build` function.

    Attributes `semantics`, `fixed`, `options`, `handles` and `supports` of the function become
    those of the class.
    """
    members: dict[str, Any] = {"build": lambda self, *given: build(*given)}
    for name in ("semantics", "fixed", "options", "handles"):
        if hasattr(build, name):
            members[name] = getattr(build, name)
    if hasattr(build, "supports"):
        members["supports"] = staticmethod(build.supports)
    return type(build.__name__, (BuiltImplementation,), members)


def _refuse_extras(built: Built, case: Case) -> None:
    """Raise Unsupported where the case asks for more than `build` gave."""
    if case.training.loss_scale is not None and built.scaler is None:
        raise Unsupported("build gave no Built.scaler, and the case scales its losses")
    wraps = isinstance(built.model, DistributedDataParallel)
    if case.training.unfreeze is not None and wraps and built.rewrap is None:
        raise Unsupported(
            "DDP does not reduce what is unfrozen after it was made, and build gave no Built.rewrap"
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor, detached. The private field: `to_local` may wait or differentiate."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    return tensor.detach()


def beside_parameter(step: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a step count of the start state. One that is not on the CPU is of a kernel that
    wants it where its parameter is, which may be offloaded."""
    return step.clone() if step.device.type == "cpu" else step.to(parameter.device, copy=True)


def _part(whole: torch.Tensor, index: Index | None) -> torch.Tensor:
    if index is None:
        return whole
    return whole.reshape(-1)[index] if isinstance(index, slice) else whole[index]


__all__ = ["Built", "BuiltImplementation", "from_function"]
