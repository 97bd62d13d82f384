"""Stages of a pipeline by torch's schedules, and by hand; tensor parallelism inside of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from scenarios import answer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import zerocheck
from zerocheck.attached.record.holdings import local

WIDTH, LENGTH, MICROBATCHES = 8, 4, 4
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "v": ScheduleZBVZeroBubble,
}


def part(number: int, stages: int, *, named: bool = False) -> nn.Module:
    """A stage: a norm and two layers. named: by names that no other stage has.

    Its output is no view: torch's zero-bubble schedules detach it in place.
    """
    torch.manual_seed(number)
    layers = [
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Linear(2 * WIDTH, WIDTH),
        nn.Tanh(),
    ]
    first = number * len(layers) if named else 0
    names = (str(first + n) for n in range(len(layers)))
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


def whole(stages: int, *, tied: bool = False) -> nn.Module:
    """All stages, by the names that they have if they are `named`. tied: a weight of both."""
    parts = (part(number, stages, named=True) for number in range(stages))
    model = nn.Sequential(OrderedDict(pair for each in parts for pair in each.named_children()))
    if tied:
        model[5].weight = model[1].weight
    return model


def in_parts(model: nn.Module, tp: Any, **output: bool) -> None:
    norm, up, down, _ = model.named_children()
    plan: Any = {
        norm[0]: SequenceParallel(),
        up[0]: ColwiseParallel(input_layouts=Shard(1)),
        down[0]: RowwiseParallel(output_layouts=Shard(1), **output),
    }
    parallelize_module(model, tp, plan)


def mean_square(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if out.shape != target.shape:  # this rank has a part of the positions; the sum is over all
        rank = dist.get_rank() % 2
        target = target.chunk(2, 1)[rank]
        return (out - target).square().mean() / 2
    return (out - target).square().mean()


def plant(fault: str, stage: Any, first: bool) -> None:
    """What is wrong in a stage of torch's pipelines."""
    if fault == "divided twice":
        divide = stage.scale_grads
        stage.scale_grads = lambda count: divide(count * count)
    elif fault == "activations of another microbatch" and not first:
        replace_received(stage, "_retrieve_recv_activations", lambda one, before: before or one)
    elif fault == "gradients scaled on the way" and first:
        replace_received(
            stage, "_retrieve_recv_grads", lambda one, _: tuple(1.001 * each for each in one)
        )


def replace_received(stage: Any, name: str, change: Callable[[Any, Any], Any]) -> None:
    receive, before = getattr(stage, name), []

    def changed(number: int) -> Any:
        received = receive(number)
        before.append(tuple(one.detach().clone().requires_grad_() for one in received))
        return change(received, before[0] if number == 1 else None)

    setattr(stage, name, changed)


def children(model: nn.Module) -> list[Any]:
    return [*model.children()]


def change_gradients(model: nn.Module, mesh: Any, fault: str) -> None:
    """What a script does to them after the backward, and should not; or should, of what is tied."""
    if fault == "tied":
        dist.all_reduce(children(model)[1].weight.grad, group=mesh.get_group("pp"))
    for parameter in model.parameters() if fault == "norm in parts" else ():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
            mine = local(gradient).clone()
            parameter.grad = DTensor.from_local(mine, mesh["tp"], [Replicate()])


def clip(models: list[nn.Module], mesh: Any, fault: str) -> None:
    """By the norm over all stages."""
    mine = [p for model in models for p in model.parameters()]
    norm = nn.utils.get_total_norm([p.grad for p in mine if p.grad is not None])
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    if fault != "norm of a stage":
        dist.all_reduce(square, group=mesh.get_group("pp"))
    nn.utils.clip_grads_with_norm_(mine, 0.05, square.sqrt())


def stages(
    schedule: str,
    *,
    directory: str,
    sizes: dict[str, int],
    wrap: str = "none",
    fault: str = "",
    names: str = "",
    clipped: bool = False,
    declared: bool = True,
) -> dict[str, Any]:
    """Two steps of a pipeline of two ranks.

    declared: with its dimension in `mesh=`; names: "named" where those of parameters differ between
    stages, "whole" where the reference is all stages besides.
    """
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    place = mesh.get_local_rank("pp")
    numbers = {"v": [place, 3 - place], "gpipe": [place], "1f1b": [place]}.get(
        schedule, [place, place + 2]
    )
    count = 2 * len(numbers)
    makes = [partial(part, number, count, named=bool(names)) for number in numbers]
    models = [make() for make in makes]
    for number, model in enumerate(models):
        if "tp" in sizes:
            in_parts(model, mesh["tp"])
        if wrap == "fsdp2":
            fully_shard(model, mesh=mesh["dp"])
        elif wrap == "fsdp1":
            models[number] = FullyShardedDataParallel(
                model, process_group=mesh.get_group("dp"), device_id=torch.device("cpu")
            )
        elif wrap == "ddp":
            models[number] = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    group = mesh.get_group("pp")
    device = torch.device("cpu")
    parts = [
        PipelineStage(model, number, count, device, group=group)
        for model, number in zip(models, numbers, strict=True)
    ]
    run = SCHEDULES[schedule](
        parts if len(parts) > 1 else parts[0],
        MICROBATCHES,
        loss_fn=mean_square,
        scale_grads=fault != "losses are summed",
    )
    plant(fault, parts[0], place == 0)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    given: Any = {"mesh": mesh}
    if not declared:
        given = {"group": mesh.get_group("dp")} if "dp" in sizes else {}
    tied = fault.startswith("tied")
    whole_ = partial(whole, count, tied=tied) if names == "whole" else None
    if tied:
        children(models[0])[1].load_state_dict(children(part(0, count))[1].state_dict())
    checks = [
        zerocheck.attach(
            m, o, reference=whole_ or make, directory=directory, on_violation="warn", **given
        )
        for m, o, make in zip(models, optimizers, makes, strict=True)
    ]
    draw = torch.Generator().manual_seed(mesh.get_local_rank("dp") if "dp" in sizes else 0)
    first, last = 0 in numbers, count - 1 in numbers
    for _ in range(2):
        shape = 2 * MICROBATCHES, LENGTH, WIDTH
        x, target = (torch.randn(shape, generator=draw) for _ in range(2))
        if "tp" in sizes:
            x = x.chunk(2, 1)[mesh.get_local_rank("tp")].contiguous()
        for check in checks:
            check.before()
        run.step(*([x] if first else []), **({"target": target} if last else {}))
        change_gradients(models[0], mesh, fault)
        if clipped:
            clip(models, mesh, fault)
        for optimizer, check in zip(optimizers, checks, strict=True):
            optimizer.step()
            if fault != "not cleared" or check is checks[0]:
                optimizer.zero_grad()
            check.after()
    return {**answer(checks[-1]), "summary": "\n".join(check.summary for check in checks)}


def stages_by_hand(*, directory: str, fault: str = "") -> dict[str, Any]:
    """Two stages on two ranks, which the script sends between."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    place = mesh.get_local_rank("pp")
    model = part(place, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model,
        optimizer,
        reference=partial(part, place, 2),
        directory=directory,
        on_violation="warn",
        mesh=mesh,
    )
    draw = torch.Generator().manual_seed(0)
    buffer = torch.empty(2, LENGTH, WIDTH)
    for _ in range(2):
        outputs = []
        with check.step():
            for number in range(2):
                x = torch.randn(2, LENGTH, WIDTH, generator=draw)
                if place == 0:
                    out = model(x)
                    dist.send(out.detach(), 1)
                    gradient = torch.empty_like(out)
                    dist.recv(gradient, 1)
                    if not (fault == "a microbatch is dropped" and number):
                        out.backward(gradient)
                elif fault == "a buffer is used again":
                    dist.recv(buffer, 0)
                    given = buffer.detach().requires_grad_()
                    outputs.append(model(given).square().mean().div(2))
                    dist.send(torch.zeros_like(x), 0)
                else:
                    given = torch.empty_like(x)
                    dist.recv(given, 0)
                    model(given.requires_grad_()).square().mean().div(2).backward()
                    assert given.grad is not None
                    dist.send(given.grad, 0)
            for output in outputs:
                output.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {**answer(check), "summary": check.summary}


def tensor_parallel(*, directory: str, average: Any) -> dict[str, Any]:
    """Two steps on a mesh of tensor parallelism alone; the model returns a DTensor in parts."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = part(0, 1)
    in_parts(model, mesh, use_local_output=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model,
        optimizer,
        reference=partial(part, 0, 1),
        semantics=zerocheck.Semantics(average=average),
        directory=directory,
        on_violation="warn",
        mesh=mesh,
    )
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        with check.step():
            x = torch.randn(2, LENGTH, WIDTH, generator=draw)
            out = model(distribute_tensor(x, mesh, [Shard(1)]))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {**answer(check), "summary": check.summary}
