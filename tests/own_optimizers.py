"""Optimizer classes that users bring: some that can be judged, and some that cannot."""

from __future__ import annotations

import os
import time

import torch
from torch.distributed.fsdp import fully_shard

import zerocheck


class Lion(torch.optim.Optimizer):
    """Elementwise, without a step count."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group, *group["betas"])

    def update(self, p, group, beta1, beta2):
        state = self.state[p]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p)
        m = state["exp_avg"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((m * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
        m.lerp_(p.grad, 1 - beta2)


class Normalized(torch.optim.Optimizer):
    """Of whole parameters; counts its steps in an int, and has an option that is None."""

    def __init__(self, params, lr=1e-3, momentum=0.9, restart=None):
        super().__init__(params, {"lr": lr, "momentum": momentum, "restart": restart})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["momentum"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["momentum"].mul_(group["momentum"]).add_(p.grad)
                self.move(p, state["momentum"], group["lr"] / state["step"] ** 0.5)

    def move(self, p, buffer, rate):
        p.sub_(buffer / (buffer.norm() + 1e-8), alpha=rate)


class OfShards(Normalized):
    """The mistake: the norm is that of the local shard."""

    def move(self, p, buffer, rate):
        mine = buffer._local_tensor
        p._local_tensor.sub_(mine / (mine.norm() + 1e-8), alpha=rate)


class Derived(torch.optim.AdamW):
    """Of torch's own, with a state and an option more."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p, 0.5)


def right(model, case, mesh):
    """FSDP2 with the optimizer of the case."""
    fully_shard(model, mesh=mesh)
    return zerocheck.Built(model, Normalized(zerocheck.groups(model, case)))


def wrong(model, case, mesh):
    """FSDP2 with the mistake."""
    fully_shard(model, mesh=mesh)
    return zerocheck.Built(model, OfShards(zerocheck.groups(model, case)))


def fixing(model, case, mesh):
    """FSDP2 that says itself which optimizer it has."""
    return right(model, case, mesh)


fixing.fixed = {"optimizer": f"{__file__}:Normalized"}


class Plain(torch.optim.Optimizer):
    """Base of classes that cannot be judged."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, self.state[p], group)

    def one(self, p, state, group):
        p.sub_(p.grad, alpha=group["lr"])


class Bits(Plain):
    def one(self, p, state, group):
        state.setdefault("m", torch.zeros(p.shape, dtype=torch.int8))
        super().one(p, state, group)


class BitsOfMany(Plain):
    """An 8-bit optimizer: what is small stays in fp32."""

    def one(self, p, state, group):
        state.setdefault("m", torch.zeros_like(p, dtype=None if p.numel() < 4096 else torch.int8))
        super().one(p, state, group)


class Quantized(torch.Tensor):
    """Tensor that says that it is fp32, and has its values in another form."""


class BitsWithin(Plain):
    def one(self, p, state, group):
        made = torch.zeros_like(p)
        state.setdefault("m", made if p.numel() < 4096 else made.as_subclass(Quantized))
        super().one(p, state, group)


class MoreOfMany(Plain):
    def one(self, p, state, group):
        if p.numel() >= 4096:
            state.setdefault("scale", torch.zeros_like(p))
        super().one(p, state, group)


class Rows(Plain):
    def one(self, p, state, group):
        state.setdefault("rows", torch.zeros(p.shape[:1]))
        state.setdefault("all", {})
        super().one(p, state, group)


class Halves(Plain):
    def one(self, p, state, group):
        state.setdefault("half", torch.zeros(p.shape[0] // 2))
        super().one(p, state, group)


class FirstDims(Plain):
    def one(self, p, state, group):
        if p.dim() == 2:
            state.setdefault("rows", torch.zeros(p.shape[0]))
        super().one(p, state, group)


class Factored(Plain):
    """Adafactor's form: rows and columns without dims of size 1, and a number of each matrix."""

    keepdim = False

    def one(self, p, state, group):
        square = p.grad * p.grad
        if p.dim() < 2:
            held = state.setdefault("square", torch.zeros_like(p)).lerp_(square, 0.1)
        else:
            means = square.mean(-1, self.keepdim), square.mean(-2, self.keepdim)
            row = state.setdefault("row", torch.zeros_like(means[0])).lerp_(means[0], 0.1)
            column = state.setdefault("column", torch.zeros_like(means[1])).lerp_(means[1], 0.1)
            if not self.keepdim:
                row, column = row.unsqueeze(-1), column.unsqueeze(-2)
            held = row * column / (row.mean(-2, keepdim=True) + 1e-30)
            state["scale"] = p.norm() / max(p.numel(), 1) ** 0.5
        p.sub_(p.grad / (held.sqrt() + 1e-8), alpha=group["lr"])


class KeepsDims(Factored):
    keepdim = True


class Named(Plain):
    def one(self, p, state, group):
        state.setdefault("buffer", torch.zeros_like(p))


class CountsInGroup(Plain):
    def step(self, closure=None):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        super().step()


class Corrected(Plain):
    """Elementwise; one count in the group for all of its parameters, as collections have it."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step()

    @torch.no_grad()
    def one(self, p, state, group):
        if not state:
            state["mean"] = torch.zeros_like(p)
        state["mean"].lerp_(p.grad, 0.1)
        p.sub_(state["mean"] / (1 - 0.9 ** group["step"]), alpha=group["lr"])


class CountsInBoth(Corrected):
    def one(self, p, state, group):
        state["step"] = group["step"]


class CountsTwice(Plain):
    def one(self, p, state, group):
        state["step"] = state.get("step", 0) + 2


class NeedsClosure(Plain):
    def step(self, closure):
        return closure()


class NeedsRate(Plain):
    def __init__(self, params, lr):
        super().__init__(params, lr)


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        """Do nothing."""


class Random(Plain):
    def one(self, p, state, group):
        p.data.add_(int.from_bytes(os.urandom(2), "big"))


class ByGlobalNorm(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        norm = sum(float(p.grad.norm()) ** 2 for p in every) ** 0.5
        for p in every:
            p.sub_(p.grad / norm)


class Fails(Plain):
    def one(self, p, state, group):
        raise RuntimeError("no luck")


class WithoutBf16(Plain):
    def one(self, p, state, group):
        if p.dtype == torch.bfloat16:
            raise TypeError("fp32 alone")
        super().one(p, state, group)


class Wide(Plain):
    def one(self, p, state, group):
        state.setdefault("average", torch.zeros(p.shape)).add_(p.grad.float().square())
        super().one(p, state, group)


class OddlySlow(Plain):
    """Right where it is inspected, and without an end for a parameter of three elements."""

    def one(self, p, state, group):
        if p.numel() == 3:
            time.sleep(3600)
        if p.numel() == 5:
            os._exit(7)
        if p.numel() == 7:
            raise ValueError("seven")
        super().one(p, state, group)


NOT_A_CLASS = 3
