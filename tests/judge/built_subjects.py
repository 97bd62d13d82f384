"""User code as `build` functions: wrapped optimizers, several of them, and some of one's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from zerocheck.case.schema import Case
from zerocheck.contract import Built, Semantics, groups


def _sharded(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Outer(torch.optim.Optimizer):
    """An optimizer around another one, with its parameter groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def wrapped(model: nn.Module, case: Case, mesh: Any) -> Built:
    return Built(_sharded(model, mesh), Outer(torch.optim.AdamW(groups(model, case))))


def wrapped_with_states(model: nn.Module, case: Case, mesh: Any) -> Built:
    """`states` and `restore` must mean the same states."""
    optimizer = Outer(torch.optim.AdamW(groups(_sharded(model, mesh), case)))
    return Built(model, optimizer, states=lambda: optimizer.inner.state)


def own_clip(model: nn.Module, case: Case, mesh: Any) -> Built:
    """torch's function returns a DTensor, of which each rank holds a part."""
    _sharded(model, mesh)

    def clip(limit: float, kind: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), limit, kind)

    return Built(model, torch.optim.AdamW(groups(model, case)), clip=clip)


def two_optimizers(model: nn.Module, case: Case, mesh: Any) -> Built:
    every = [group for group in groups(_sharded(model, mesh), case) if group["params"]]
    first = {**every[0], "params": every[0]["params"][:1]}
    rest = [{**every[0], "params": every[0]["params"][1:]}, *every[1:]]
    return Built(model, [torch.optim.AdamW([first]), torch.optim.AdamW(rest)])


def tensor_rate(model: nn.Module, case: Case, mesh: Any) -> Built:
    every = [group for group in groups(_sharded(model, mesh), case) if group["params"]]
    for group in every:
        group.update(lr=torch.tensor(group["lr"]), foreach=False, fused=False)
    return Built(model, torch.optim.AdamW(every))


def fsdp1(model: nn.Module, case: Case, mesh: Any, use_orig_params: bool = True) -> Built:
    wrapped = FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(groups(wrapped, case))
    return Built(wrapped, optimizer, clip=wrapped.clip_grad_norm_)


fsdp1_flat = partial(fsdp1, use_orig_params=False)


def fsdp1_without_clip(model: nn.Module, case: Case, mesh: Any, torchs: bool = False) -> Built:
    built = fsdp1(model, case, mesh)
    parameters = list(built.model.parameters())
    clip = partial(nn.utils.clip_grad_norm_, parameters) if torchs else None
    return replace(built, clip=clip)


fsdp1_clipped_by_rank = partial(fsdp1_without_clip, torchs=True)


class Zero1:
    """ZeRO-1 of a tutorial: a rank updates some parameters and sends them. Its states are in a
    closure, where nobody sees them."""

    def __init__(
        self,
        params: list[nn.Parameter],
        *,
        average: bool = True,
        decays: int = 1,
        unsent: int = -1,
        shows: bool = False,
        to_owners: bool = False,
        frees: str = "",
        **options: Any,
    ) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        own = [p for n, p in enumerate(params) if n % world == rank]
        local = torch.optim.AdamW(own, **options) if own else None
        if shows:
            self.local = local

        def step() -> None:
            for n, p in enumerate(params):
                if p.grad is not None and to_owners:
                    dist.reduce(p.grad, n % world)
                elif p.grad is not None:
                    dist.all_reduce(p.grad)
                if p.grad is not None and average:
                    p.grad /= world
                if frees == ("own" if n % world == rank else "others'"):
                    p.grad = None
            for p in own * (decays - 1):
                p.data.mul_(1 - options["lr"] * options["weight_decay"])
            if local is not None:
                local.step()
            for n, p in enumerate(params):
                if n % world != unsent:
                    dist.broadcast(p.data, src=n % world)

        def zero_grad() -> None:
            for p in params:
                p.grad = None

        self.step, self.zero_grad = step, zero_grad


def zero1(model: nn.Module, case: Case, mesh: Any, **bug: Any) -> Built:
    (group,) = groups(model, case)
    options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    return Built(model, Zero1(group["params"], **options, **bug))


class FlatZero1(Zero1):
    """It reduces copies of the gradients, so that nobody sees the reduced ones either."""

    def __init__(self, params: list[nn.Parameter], **options: Any) -> None:
        super().__init__(params, **options)
        inside = self.step

        def step() -> None:
            before = [p.grad for p in params]
            for p in params:
                p.grad = None if p.grad is None else p.grad.clone()
            inside()
            for p, grad in zip(params, before, strict=True):
                p.grad = grad

        self.step = step


def flat_zero1(model: nn.Module, case: Case, mesh: Any, **bug: Any) -> Built:
    (group,) = groups(model, case)
    options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    return Built(model, FlatZero1(group["params"], **options, **bug))


to_owners = partial(zero1, to_owners=True)
summed_by_owners = partial(zero1, to_owners=True, average=False)
summed = partial(zero1, average=False)
frees_others = partial(zero1, to_owners=True, frees="others'")
frees_others_and_shows = partial(frees_others, shows=True)
frees_others_and_sums = partial(frees_others, average=False)
frees_its_own = partial(zero1, to_owners=True, shows=True, frees="own")
decays_twice = partial(zero1, decays=2)
forgets = partial(zero1, unsent=1)
shows = partial(zero1, shows=True)
flat_decays_twice = partial(flat_zero1, decays=2)


def own_over_ddp(model: nn.Module, case: Case, mesh: Any) -> Built:
    """Gradients are reduced by DDP; only the optimizer is one's own."""
    (group,) = groups(model, case)
    local = torch.optim.AdamW([group])

    class Own:
        step = staticmethod(local.step)

    return Built(DistributedDataParallel(model, process_group=mesh.get_group()), Own())


ROLES = {"exp_avg": "state1", "exp_avg_sq": "state2", "step": "count"}


class OtherNames(torch.optim.Optimizer):
    """AdamW in fp32 whose states have other names, and a count that is an int."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, state1=torch.zeros_like(p), state2=torch.zeros_like(p))
                state["count"] += 1
                m, v, count = state["state1"], state["state2"], state["count"]
                p.mul_(1 - lr * group["weight_decay"])
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (v.sqrt() / (1 - beta2**count) ** 0.5).add_(group["eps"])
                p.addcdiv_(m, root, value=-lr / (1 - beta1**count))


def other_names(model: nn.Module, case: Case, mesh: Any) -> Built:
    keep = ("params", "lr", "betas", "eps", "weight_decay")
    every = [{name: g[name] for name in keep} for g in groups(_sharded(model, mesh), case)]
    return Built(model, OtherNames([g for g in every if g["params"]]), roles=ROLES)


def momentum(model: nn.Module, case: Case, mesh: Any) -> Built:
    return Built(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def unnamed(model: nn.Module, case: Case, mesh: Any) -> Built:
    return Built(model, OtherNames(model.parameters()))


class Sign(OtherNames):
    """AdamW's states, and another update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


def sign(model: nn.Module, case: Case, mesh: Any) -> Built:
    return Built(model, Sign(model.parameters()), roles=ROLES)


def own_options(model: nn.Module, case: Case, mesh: Any) -> Built:
    return Built(model, torch.optim.AdamW(model.parameters(), lr=0.0625))


def unbuilt(model: nn.Module, case: Case, mesh: Any) -> None:
    """It forgets to return what it built."""


def nothing(model: nn.Module, case: Case, mesh: Any) -> Built:
    return Built(model, object())


class RowsAdamW(torch.optim.Optimizer):
    """It reduces in `step()`, and has states of the rows that this rank updates."""

    def __init__(self, params: Any, *, decays: int = 1) -> None:
        super().__init__(params, {})
        self.decays = decays

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.clone()
                dist.all_reduce(grad)
                grad /= world
                size = -(-p.shape[0] // world)
                rows = slice(min(rank * size, p.shape[0]), min((rank + 1) * size, p.shape[0]))
                state, grad, mine = self.state[p], grad[rows], p[rows]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(mine))
                    state["exp_avg_sq"] = torch.zeros_like(mine)
                state["step"] += 1
                m, v, count = state["exp_avg"], state["exp_avg_sq"], state["step"]
                for _ in range(self.decays):
                    mine.mul_(1 - lr * group["weight_decay"])
                m.lerp_(grad, 1 - beta1)
                v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = (v.sqrt() / (1 - beta2**count) ** 0.5).add_(group["eps"])
                mine.addcdiv_(m, root, value=-lr / (1 - beta1**count))
                for other in range(world):
                    part = p.data[other * size : (other + 1) * size]
                    if part.numel():
                        dist.broadcast(part, src=other)


def rows(model: nn.Module, case: Case, mesh: Any, **bug: Any) -> Built:
    return Built(model, RowsAdamW(groups(model, case), **bug))


rows_decay_twice = partial(rows, decays=2)


class Wrapper(torch.optim.Optimizer):
    """Of AdamW over what this rank owns, in an attribute of no usual name."""

    def __init__(self, params: Any, *, follows: bool = True) -> None:
        self.local: torch.optim.Optimizer | None = None
        self.follows = follows
        super().__init__(params, {"lr": 1e-3})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = {**param_group, "params": param_group["params"][rank :: world + 1]}
        mine["params"] += param_group["params"][world :: world + 1] if rank == 0 else []
        if self.local is None:
            self.local = torch.optim.AdamW([mine])
        else:
            self.local.add_param_group(mine)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.local is not None
        for outer, inner in zip(self.param_groups, self.local.param_groups, strict=True):
            if self.follows:
                inner["lr"] = outer["lr"]
        self.local.step()
        world = dist.get_world_size()
        for group in self.param_groups:
            for n, p in enumerate(group["params"]):
                dist.broadcast(p.data, src=n % (world + 1) % world)


def wrapper(model: nn.Module, case: Case, mesh: Any, **bug: Any) -> Built:
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group())
    return Built(wrapped, Wrapper(groups(wrapped, case), **bug))


deaf_wrapper = partial(wrapper, follows=False)


def wrapper_with_states(model: nn.Module, case: Case, mesh: Any) -> Built:
    built = wrapper(model, case, mesh)
    return replace(built, states=lambda: built.optimizer.local.state)


class InBackward:
    """torch's recipe: an AdamW for each parameter, stepped when its gradient is there."""

    def __init__(self, every: list[dict[str, Any]], decays: int = 1) -> None:
        self.optimizers = {}
        self.decays = decays
        for group in every:
            for p in group["params"]:
                self.optimizers[p] = torch.optim.AdamW([dict(group, params=[p])])
                p.register_post_accumulate_grad_hook(self.update)

    def update(self, p: torch.Tensor) -> None:
        optimizer = self.optimizers[p]
        (group,) = optimizer.param_groups
        for _ in range(self.decays - 1):
            p.data.mul_(1 - group["lr"] * group["weight_decay"])
        optimizer.step()
        optimizer.zero_grad()

    def step(self) -> None:
        """All is done."""


def in_backward(model: nn.Module, case: Case, mesh: Any, **bug: Any) -> Built:
    return Built(model, InBackward(groups(_sharded(model, mesh), case), **bug))


in_backward_twice = partial(in_backward, decays=2)


for _zero in (zero1, flat_zero1):
    _zero.semantics = Semantics()  # type: ignore[attr-defined]
