"""Parts shared by several faults. None of them is a fault: each takes the right step.

A fault is mostly one method. Here the methods of what a sharder consists of, such as its optimizer
and its loss scaler, become methods of the sharder, and a step has points where it can be changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.textbook.adapter import Sharder
from ..adapters.textbook.bucket import Bucket
from ..adapters.textbook.checkpoint.chunk import Chunk
from ..adapters.textbook.checkpoint.directory import FoundCheckpoint
from ..adapters.textbook.checkpoint.training import SavedTraining
from ..adapters.textbook.flat import ShardedBuffer
from ..adapters.textbook.loss_scaling import LossScaler
from ..adapters.textbook.reduction import Reduction
from ..adapters.textbook.sharded_optimizer import OwnedPiece, ShardedOptimizer
from ..adapters.textbook.unit import FlatParameter
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Implementation, Loader, Microbatch, Step, StepReport
from ..contract.implementation import Moment
from ..optimizers import states_of

Part = TypeVar("Part")
Result = TypeVar("Result")
Options = dict[str, Any]
"""Parameter group of an optimizer of torch."""


def method_of(part: str, method: Callable[..., Result]) -> Callable[..., Result]:
    """Return a method that calls the one of a part of its owner."""

    def own(owner: object, *arguments: Any) -> Result:
        return method(getattr(owner, part), *arguments)

    return own


def lend(owner: object, part: Part, *names: str, **renamed: str) -> Part:
    """Replace methods of a part by those of its owner, under the same names or as `renamed`."""
    for name, own in {**dict(zip(names, names, strict=True)), **renamed}.items():
        setattr(part, name, getattr(owner, own))
    return part


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Freeze parameters for a while."""
    parameters = list(parameters)
    for parameter in parameters:
        parameter.requires_grad_(False)
    yield
    for parameter in parameters:
        parameter.requires_grad_(True)


def average(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace a tensor by its mean over the ranks of a group."""
    dist.all_reduce(tensor, group=group)
    tensor.div_(dist.get_world_size(group))


def exchange_last_shards(flat: ShardedBuffer, tensor: Tensor) -> None:
    """Exchange the last two shards of a tensor that is partitioned like a flat buffer."""
    last = flat.partition.world_size - 1
    one = tensor[flat.partition.shard(last)]
    other = tensor[flat.partition.shard(max(0, last - 1))]
    before = one.clone()
    one.copy_(other)
    other.copy_(before)


class Plantable(Implementation):
    """Implementation with points where a fault changes it: once it was made, after each step."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.plant()

    def plant(self) -> None:
        """Change what the constructor has made."""

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        self.end_step()
        return report

    def end_step(self) -> None:
        """Change what a step has computed."""


class StartsAnew(Plantable):
    """Implementation that keeps the initial state that it has after it was planted."""

    fixed: ClassVar[Mapping[str, Any]] = {"start": {"step": 0, "moments": "zero", "zeros": ()}}

    def restore(self, full: object) -> None:
        """Do nothing: the initial state was loaded before."""


class SharderInParts(Plantable, Sharder):
    """Textbook sharder with the methods of its optimizer and its loss scaler as its own."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        lend(self, self.optimizer, "step", "clip", "restore_counts")
        lend(self, self.scaler, "unscale", "agreed", "divide", update="update_scale")

    step = method_of("optimizer", ShardedOptimizer.step)
    clip = method_of("optimizer", ShardedOptimizer.clip)
    restore_counts = method_of("optimizer", ShardedOptimizer.restore_counts)
    unscale = method_of("scaler", LossScaler.unscale)
    agreed = method_of("scaler", LossScaler.agreed)
    divide = method_of("scaler", LossScaler.divide)
    update_scale = method_of("scaler", LossScaler.update)

    def states(self) -> Sequence[dict[str, Tensor]]:
        """Return the optimizer's states, by piece."""
        return list(self.optimizer.optimizer.state.values())


class Zero1InParts(SharderInParts, Zero1):
    """ZeRO-1 in parts, with points before and after its reduction."""

    def _reduce(self) -> None:
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            self.before_reduction(bucket, gradients)
        super()._reduce()
        for one in self.optimizer.owned:
            self.after_reduction(one)

    def before_reduction(self, bucket: Bucket, gradients: Tensor) -> None:
        """Change this rank's gradients of a bucket."""

    def after_reduction(self, one: OwnedPiece) -> None:
        """Change the reduced gradient of an owned piece."""


class Zero2InParts(Plantable, Zero2):
    """ZeRO-2 with the methods of its reduction as its own."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        lend(self, self.reduction, "add")

    add = method_of("reduction", Reduction.add)


class Zero3InParts(Plantable, Zero3):
    """ZeRO-3 with the methods of its flat parameters as its own, each with the flat parameter."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        for flat in self.flats:
            for name in ("fill", "wait", "release", "reduce"):
                setattr(flat, name, partial(getattr(self, name), flat))

    def fill(self, flat: FlatParameter) -> dist.Work | None:
        """Launch the all-gather of the shards."""
        return FlatParameter.fill(flat)

    def wait(self, flat: FlatParameter) -> bool:
        """Wait until the parameters can be read; return True if they were on their way."""
        arrives = flat._work is not None
        FlatParameter.wait(flat)
        return arrives

    def release(self, flat: FlatParameter) -> None:
        """Give back the memory of the gathered parameters."""
        FlatParameter.release(flat)

    def reduce(self, flat: FlatParameter, reduction: Reduction) -> None:
        """Launch the reduce-scatter of the local gradients, and let go of them."""
        FlatParameter.reduce(flat, reduction)


class CheckpointInParts(Sharder):
    """Textbook sharder with points in its saves and loads."""

    def written(self) -> Iterator[Chunk]:
        for chunk in super().written():
            yield from self.save_chunk(chunk)

    def save_chunk(self, chunk: Chunk) -> Iterable[Chunk]:
        """Return what is written in place of a chunk."""
        return [chunk]

    def training_facts(self, loader: Loader) -> SavedTraining:
        facts = super().training_facts(loader)
        positions = {name: self.position(count) for name, count in facts.loader.items()}
        return structs.replace(facts, loader=positions)

    def position(self, count: int) -> int:
        """Return what is written in place of a position in the data."""
        return count

    def take_tensors(self, found: FoundCheckpoint, training: SavedTraining) -> None:
        super().take_tensors(found, training)
        if training.world_size != self.everyone.size():
            self.reshard(training.world_size)

    def reshard(self, saved: int) -> None:
        """Change what was read from the checkpoint of another number of ranks, `saved`."""

    def load(self, directory: str, loader: Loader) -> None:
        super().load(directory, loader)
        self.end_load()

    def end_load(self) -> None:
        """Change what a load has restored."""

    def moments(self) -> Iterator[tuple[OwnedPiece, Tensor]]:
        """Iterate over the optimizer states of what the rank owns, each with its piece."""
        for one in self.optimizer.owned:
            state = self.optimizer.optimizer.state.get(one.parameter, {})
            roles = states_of(self.case.optimizer)
            yield from ((one, state[role]) for role in roles if role in state)


class ClippingInParts(SharderInParts):
    """Textbook sharder with its clipping split into parts that a fault can replace."""

    def counted(self) -> Sequence[OwnedPiece]:
        """Return the pieces whose norm counts."""
        return self.optimizer.owned

    def local(self, p: float) -> Tensor:
        """Return the norm over this rank's pieces, 0-d fp64."""
        pieces = [one.gradient.double().view(-1) for one in self.counted()]
        nothing = torch.zeros(1, dtype=torch.float64, device=self.optimizer.device)
        norm: Tensor = torch.linalg.vector_norm(torch.cat(pieces) if pieces else nothing, p)
        return norm

    def total(self, p: float) -> Tensor:
        """Return the norm over the pieces of all ranks, 0-d fp64."""
        return self.summed(self.local(p)) if p == 2.0 else self.largest(self.local(p))

    def summed(self, norm: Tensor) -> Tensor:
        """Return the root of the sum over ranks of the square."""
        square = norm.square()
        dist.all_reduce(square, group=self.optimizer.group)
        return square.sqrt()

    def largest(self, norm: Tensor) -> Tensor:
        """Return the maximum over ranks."""
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self.optimizer.group)
        return norm

    def factor(self, max_norm: float, norm: Tensor) -> Tensor:
        """Return the factor that clipping multiplies the gradient by."""
        return torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradient of all pieces."""
        for one in self.optimizer.owned:
            one.gradient.mul_(factor)

    def clip(self, max_norm: float, norm_type: float) -> float:
        norm = self.total(norm_type).float()
        self.scale(self.factor(max_norm, norm))
        return float(norm)


class ClipsInParts(ClippingInParts, Zero1):
    """ZeRO-1 with its clipping in parts."""


class UpdatesInParts(Zero1InParts):
    """ZeRO-1 with its optimizer written out, one piece after the other."""

    def step(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            for parameter in group["params"]:
                if parameter.grad is not None:
                    with torch.no_grad():
                        self.update(parameter, group)

    def update(self, p: Tensor, group: Options) -> None:
        """Take one step of one piece."""
        raise NotImplementedError


class AdamWInParts(UpdatesInParts):
    """ZeRO-1 with AdamW split into parts that a fault can replace."""

    def state(self, p: Tensor) -> dict[str, Tensor]:
        """Return the moments of a piece, made at the first step."""
        state: dict[str, Tensor] = self.optimizer.optimizer.state[p]
        if not state:
            state["step"] = torch.zeros(())
            for role in ("exp_avg", "exp_avg_sq"):
                state[role] = torch.zeros_like(p)
            if self.case.optimizer.amsgrad:
                state["max_exp_avg_sq"] = torch.zeros_like(p)
        return state

    def update(self, p: Tensor, group: Options) -> None:
        assert p.grad is not None
        state, (beta1, beta2) = self.state(p), self.betas(group)
        state["step"] += 1
        gradient = self.decay(p, -p.grad if group["maximize"] else p.grad, group)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["amsgrad"]:
            v = torch.maximum(state["max_exp_avg_sq"], v, out=state["max_exp_avg_sq"])
        self.move(p, m, v, group)

    def move(self, p: Tensor, m: Tensor, v: Tensor, group: Options) -> None:
        """Move the piece by its moments."""
        beta1, beta2 = self.betas(group)
        count = self.count(self.state(p))
        denominator = self.denominator(v, (1 - beta2**count) ** 0.5, group["eps"])
        p.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**count))

    def betas(self, group: Options) -> tuple[float, float]:
        """Return beta1 and beta2."""
        beta1, beta2 = group["betas"]
        return beta1, beta2

    def count(self, state: dict[str, Tensor]) -> float:
        """Return the number of this step in the bias corrections, from 1."""
        return float(state["step"])

    def decay(self, p: Tensor, gradient: Tensor, group: Options) -> Tensor:
        """Decay the piece; return the gradient for the moments."""
        p.mul_(1 - group["lr"] * group["weight_decay"])
        return gradient

    def denominator(self, v: Tensor, root: float, eps: float) -> Tensor:
        """Return sqrt(v / c2) + eps, where root = sqrt(c2)."""
        return (v.sqrt() / root).add_(eps)


class OneByOne(torch.optim.Optimizer):
    """Optimizer that updates one parameter after the other, as users write it."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group["lr"])

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], rate: float) -> None:
        """Take one step of one parameter."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _Wrapped(Microbatch):
    """Microbatch whose loss is computed by `wrap`, from what computes it."""

    wrap: Callable[[Callable[[], Tensor]], Tensor]

    def loss(self, call: Any) -> Tensor:
        return self.wrap(lambda: super(_Wrapped, self).loss(call))


def _wrapped(step: Step, wrap: Callable[[Callable[[], Tensor]], Tensor]) -> Step:
    names = [field.name for field in fields(Microbatch)]
    microbatches = [
        _Wrapped(**{name: getattr(one, name) for name in names}, wrap=wrap)
        for one in step.microbatches
    ]
    return replace(step, microbatches=microbatches)


def with_loss(step: Step, change: Callable[[Tensor], Tensor]) -> Step:
    """Return the step with every loss changed; what is observed is the loss before that."""
    return _wrapped(step, lambda loss: change(loss()))


def scaled(step: Step, *, times: float = 1.0, over: float = 1.0) -> Step:
    """Return the step with every loss multiplied by `times` and divided by `over`."""
    return with_loss(step, lambda loss: loss * times / over)


def with_callback(step: Step, callback: Callable[[], None]) -> Step:
    """Return the step, with `callback` called before each microbatch."""

    def wrap(loss: Callable[[], Tensor]) -> Tensor:
        callback()
        return loss()

    return _wrapped(step, wrap)


def when_reduced(step: Step, change: Callable[[], None]) -> Step:
    """Return the step, with `change` called where gradients are reduced, before they are read."""

    def reached(moment: Moment) -> None:
        if moment == "reduced":
            change()
        step.reached(moment)

    return replace(step, reached=reached)
