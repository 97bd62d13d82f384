"""Models whose ranks have parts of a sequence, or experts of their own: textbook forms of both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scenarios import answer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerocheck
from zerocheck.attached.record.holdings import local

HEADS, WIDTH, WORDS, LENGTH, BATCH = 4, 16, 11, 8, 2


def exchanged(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All-to-all of the parts along the first dimension."""
    parts = [one.contiguous() for one in x.unbind(0)]
    into = [torch.empty_like(one) for one in parts]
    dist.all_to_all(into, parts, group=group)
    return torch.stack(into)


class Exchange(torch.autograd.Function):
    """What is exchanged comes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        return exchanged(gradient[0], ctx.group), None


def swapped(x: torch.Tensor, cut: int, joined: int, group: Any, detached: bool) -> torch.Tensor:
    """All-to-all: cut along one dimension, put together along another one."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), cut))
    into: torch.Tensor = Exchange.apply(parts.detach() if detached else parts, group)
    return torch.cat([*into], joined)


class Attention(nn.Module):
    """Causal, by positions; with a group each rank has some heads of all positions (Ulysses)."""

    def __init__(self, group: Any, fault: str) -> None:
        super().__init__()
        self.group, self.detached = group, fault == "cut"
        self.half = fault == "half a graph"
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        split = (t.view(batch, length, HEADS, -1) for t in self.qkv(x).chunk(3, -1))
        q, k, v = split
        if self.group is not None:
            cuts = self.detached, self.detached or self.half, self.detached or self.half
            q, k, v = (
                swapped(t, 2, 1, self.group, c) for t, c in zip((q, k, v), cuts, strict=True)
            )
            every = [torch.empty_like(positions) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(every, positions, group=self.group)
            positions = torch.cat(every)
        seen = positions[:, None] >= positions[None, :]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)
        if self.group is not None:
            y = swapped(y, 1, 2, self.group, self.detached)
        return self.out(y.reshape(batch, length, -1))  # type: ignore[no-any-return]


class Stacked(nn.Module):
    """Experts as one parameter; the token at place i goes to expert i modulo their number."""

    def __init__(self, count: int, group: Any, fault: str) -> None:
        super().__init__()
        self.count, self.group, self.fault = count, group, fault
        whole = torch.randn(count, WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)) / 4
        self.weight = nn.Parameter(whole[mine(count, group)].clone())

    def each(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nwd,wde->nwe", x, self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, self.count, WIDTH)
        if self.group is None:
            return self.each(tokens).reshape(x.shape)
        shift = self.fault == "another expert"
        sent = swapped(tokens.roll(int(shift), 1), 1, 0, self.group, self.fault == "cut")
        return swapped(self.each(sent), 0, 1, self.group, self.fault == "cut").reshape(x.shape)


class Listed(Stacked):
    """Experts as numbered modules, of which a rank has some, from 0 on."""

    def __init__(self, count: int, group: Any, fault: str) -> None:
        super().__init__(count, group, fault)
        del self.weight
        torch.manual_seed(8)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
        self.experts = nn.ModuleList(every[mine(count, group)])

    def each(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([one(x[:, n]) for n, one in enumerate(self.experts)], 1)


def mine(count: int, group: Any) -> slice:
    if group is None:
        return slice(None)
    size, rank = count // dist.get_world_size(group), dist.get_rank(group)
    return slice(rank * size, (rank + 1) * size)


class Net(nn.Module):
    """Without a mesh: the plain model."""

    def __init__(
        self, mesh: DeviceMesh | None, kind: str, fault: str = "", order: str = "contiguous"
    ) -> None:
        super().__init__()
        self.order, self.fault = order, fault
        names = () if mesh is None else mesh.mesh_dim_names or ()
        groups = {one: mesh.get_group(one) for one in names} if mesh is not None else {}
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = Attention(groups.get("cp", groups.get("context")), fault)
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = {"stacked": Stacked, "listed": Listed, "": None}[kind]
        if self.moe is not None:
            self.moe = self.moe(4, groups.get("ep"), fault)
        self.dropout = nn.Dropout(0.5 if fault == "dropout" else 0.0)
        torch.manual_seed(1)
        self.head = nn.Linear(WIDTH, WORDS)

    def positions(self) -> torch.Tensor:
        group, every = self.attention.group, torch.arange(LENGTH)
        if group is None or self.order == "whole":
            return every
        here = cut(every, 0, dist.get_world_size(group), dist.get_rank(group), self.order)
        return (here - 1).clamp(min=0) if self.fault == "positions" else here

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        positions = self.positions()
        x = self.embed(words) + self.places(positions)
        x = self.dropout(self.norm(x + self.attention(x, positions)))
        if self.moe is not None:
            x = x + self.moe(x)
        return self.head(x)  # type: ignore[no-any-return]


def cut(whole: torch.Tensor, dim: int, ranks: int, rank: int, order: str) -> torch.Tensor:
    if order != "zigzag":
        return whole.chunk(ranks, dim)[rank].contiguous()
    parts = whole.chunk(2 * ranks, dim)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]], dim)


def wrapped(model: Net, wrap: str, mesh: DeviceMesh | None) -> nn.Module:
    """Wrap a model so that its experts are left out. mesh: of FSDP2, None for all ranks."""
    apart = [] if model.moe is None else [*model.moe.parameters()]
    if wrap == "none":
        return model
    if wrap == "ddp":
        ids = {id(one) for one in apart}
        names = [name for name, one in model.named_parameters() if id(one) in ids]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        return DistributedDataParallel(model)
    if wrap == "fsdp1":
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            ignored_modules=[] if model.moe is None else [model.moe],
        )
    return fully_shard(model, mesh=mesh, ignored_params={*apart})


def reduce_experts(model: Net, mesh: DeviceMesh, fault: str) -> None:
    """Sum the gradients of experts over their copies, and divide by the number of ranks."""
    assert model.moe is not None
    names = [name for name in mesh.mesh_dim_names or () if name != "ep"]
    divisor = dist.get_world_size() // (mesh["ep"].size() if fault == "over the others" else 1)
    for parameter in model.moe.parameters():
        if parameter.grad is None:
            continue
        if fault != "copies apart":
            for name in names:
                dist.all_reduce(parameter.grad, group=mesh.get_group(name))
        for _ in range({"undivided": 0, "divided twice": 2}.get(fault, 1)):
            parameter.grad /= divisor


def reduce_all(model: nn.Module) -> None:
    """What a wrapper does else."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def clip(model: Net, mesh: DeviceMesh, kind: str) -> None:
    """By the norm of all gradients in two calls of torch's function, or by a factor of one's own.

    kind: "joint", "twice" where that norm counts experts twice, or "by hand".
    """
    if kind == "by hand":
        for parameter in model.parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(0.37)
    elif kind:
        assert model.moe is not None
        experts = [*model.moe.parameters()]
        ids = {id(one) for one in experts}
        others = [one for one in model.parameters() if id(one) not in ids]
        squares = [
            nn.utils.get_total_norm([one.grad for one in some]) ** 2 for some in (others, experts)
        ]
        dist.all_reduce(squares[1], group=mesh.get_group("ep"))
        total = (squares[0] + (2 if kind == "twice" else 1) * squares[1]).sqrt()
        for some in (others, experts):
            nn.utils.clip_grads_with_norm_(some, 0.1, total)


def axes(
    sizes: dict[str, int],
    *,
    directory: str,
    kind: str = "",
    wrap: str = "fsdp2",
    order: str = "contiguous",
    declared: dict[str, str] | None = None,
    fault: str = "",
    clipped: str = "",
) -> dict[str, Any]:
    """Two steps on a mesh with these axes.

    declared: for `axes=`; fault: what is wrong in them; clipped: see `clip`.
    """
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    microbatches = 2 if {"dp", "cp"} <= {*sizes} else 1
    plain = Net(mesh, kind, fault, order)
    model = wrapped(plain, wrap, mesh["dp"] if fault == "reduced over dp alone" else None)
    if fault == "copies made apart" and plain.moe is not None:
        with torch.no_grad():
            plain.moe.weight.mul_(1.0 + mesh.get_local_rank("cp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said: dict[str, Any] = dict(declared or {})
    if order == "zigzag" and fault != "undeclared order":
        said["cp"] = zerocheck.SequenceAxis(order="zigzag")
    check = zerocheck.attach(
        model,
        optimizer,
        reference=lambda: Net(
            mesh if fault.startswith("reference") else None,
            kind,
            "dropout" if fault == "dropout" else "",
            "whole",
        ),
        directory=directory,
        on_violation="warn",
        mesh=mesh,
        axes=said,
    )
    along = "context" if "context" in sizes else "cp"
    ranks = sizes.get(along, 1)
    part = mesh.get_local_rank(along) if ranks > 1 else 0
    samples = dist.get_rank()
    if ranks > 1:  # ranks with parts of one sequence draw the same
        samples = min(dist.get_process_group_ranks(mesh.get_group(along)))
    draw = torch.Generator().manual_seed(3 + samples)
    for _ in range(2):
        with check.step():
            for microbatch in range(microbatches):
                words = torch.randint(WORDS, (BATCH, LENGTH), generator=draw)
                counted = torch.rand(BATCH, LENGTH, generator=draw) < 0.7
                last = microbatch == microbatches - 1
                for module in model.modules():
                    if isinstance(module, DistributedDataParallel):
                        module.require_backward_grad_sync = last
                out = model(cut(words, 1, ranks, part, order))
                losses = F.cross_entropy(
                    out.flatten(0, 1),
                    cut(words.roll(-1, 1), 1, ranks, part, order).flatten(),
                    reduction="none",
                )
                counts = cut(counted, 1, ranks, part, order).flatten()
                loss = (losses * counts).sum() / counted.sum() * ranks / microbatches
                loss.backward()
            if plain.moe is not None:
                reduce_experts(plain, mesh, fault)
            if wrap == "none":
                reduce_all(plain)
            clip(plain, mesh, clipped)
            optimizer.step()
            optimizer.zero_grad()
    return {**answer(check), "summary": check.summary}
