"""Parts shared by several faults. None of them is a fault: each takes the right step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.textbook.sharded_optimizer import ShardedOptimizer
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..contract import Microbatch, Step


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

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        """Take one step of one parameter."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _Scaled(Microbatch):
    """Microbatch whose loss is scaled before the backward; the loss that is observed is not."""

    times: float
    over: float

    def loss(self, call: Any) -> torch.Tensor:
        return super().loss(call) * self.times / self.over


def scaled(step: Step, *, times: float = 1.0, over: float = 1.0) -> Step:
    """Return the step with every loss multiplied by `times` and divided by `over`."""
    given = [field.name for field in fields(Microbatch)]
    return replace(
        step,
        microbatches=[
            _Scaled(**{name: getattr(one, name) for name in given}, times=times, over=over)
            for one in step.microbatches
        ],
    )


@dataclass(frozen=True, kw_only=True)
class CallbackMicrobatch(Microbatch):
    """Microbatch that calls `callback` before it begins."""

    callback: Callable[[], None]

    def loss(self, call: Any) -> torch.Tensor:
        self.callback()
        return super().loss(call)


def with_callback(step: Step, callback: Callable[[], None]) -> Step:
    """Return the step, with `callback` called before each microbatch."""
    given = [field.name for field in fields(Microbatch)]
    return replace(
        step,
        microbatches=[
            CallbackMicrobatch(**{name: getattr(one, name) for name in given}, callback=callback)
            for one in step.microbatches
        ],
    )


class WithOptimizer(Zero1):
    """ZeRO-1 with its optimizer replaced by `kind`, over the same pieces."""

    kind: ClassVar[type[ShardedOptimizer]] = ShardedOptimizer

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        optimizer = self.optimizer
        self.optimizer = self.kind(case, optimizer.owned, optimizer.group, optimizer.device)


class ClipsInParts(ShardedOptimizer):
    """Clipping of the textbook sharders, split into parts that a fault can replace."""

    def local(self, p: float) -> torch.Tensor:
        """Return the norm over this rank's pieces, 0-d fp64."""
        pieces = [one.gradient.double() for one in self.owned]
        nothing = torch.zeros(1, dtype=torch.float64, device=self.device)
        whole = torch.cat(pieces) if pieces else nothing
        norm: torch.Tensor = torch.linalg.vector_norm(whole, p)
        return norm

    def total(self, p: float) -> torch.Tensor:
        """Return the norm over the pieces of all ranks, 0-d fp64."""
        norm = self.local(p)
        if p == 2.0:
            return self.summed(norm)
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self.group)
        return norm

    def summed(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the root of the sum over ranks of the square."""
        square = norm.square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def factor(self, max_norm: float, norm: torch.Tensor) -> torch.Tensor:
        """Return the factor that clipping multiplies the gradient by."""
        return torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the gradient of all pieces."""
        for one in self.owned:
            one.gradient.mul_(factor)

    def clip(self, max_norm: float, norm_type: float) -> float:
        norm = self.total(norm_type).float()
        self.scale(self.factor(max_norm, norm))
        return float(norm)


class AdamWInParts(ShardedOptimizer):
    """AdamW written out, split into parts that a fault can replace."""

    def step(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                with torch.no_grad():
                    self.update(parameter, self.state(parameter, group), group)

    def state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the moments of a piece, made at the first step."""
        state: dict[str, torch.Tensor] = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for role in ("exp_avg", "exp_avg_sq"):
                state[role] = torch.zeros_like(parameter)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def update(
        self, p: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        """Take one step of one piece."""
        assert p.grad is not None
        beta1, beta2 = self.betas(group)
        state["step"] += 1
        step = self.count(state)
        gradient = self.decay(p, -p.grad if group["maximize"] else p.grad, group)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["amsgrad"]:
            v = torch.maximum(state["max_exp_avg_sq"], v, out=state["max_exp_avg_sq"])
        root = (1 - beta2**step) ** 0.5
        p.addcdiv_(
            m, self.denominator(v, root, group["eps"]), value=-group["lr"] / (1 - beta1**step)
        )

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """Return beta1 and beta2."""
        beta1, beta2 = group["betas"]
        return beta1, beta2

    def count(self, state: dict[str, torch.Tensor]) -> float:
        """Return the number of this step in the bias corrections, from 1."""
        return float(state["step"])

    def decay(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Decay the piece; return the gradient for the moments."""
        p.mul_(1 - group["lr"] * group["weight_decay"])
        return gradient

    def denominator(self, v: torch.Tensor, root: float, eps: float) -> torch.Tensor:
        """Return sqrt(v / c2) + eps, where root = sqrt(c2)."""
        return (v.sqrt() / root).add_(eps)
