"""Ways in which people train, each for a few checked steps. Each returns what was said of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from wrong_reductions import after_backward, multiplied

import zerocheck
from zerocheck.attached.record.holdings import local
from zerocheck.attached.session import Attached

Wrap = Callable[[nn.Module], nn.Module]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 3))


MADE: list[nn.Module] = []
"""The model that `referenced` trains."""


def trained_net() -> nn.Module:
    return MADE[0]


def other_net() -> nn.Module:
    made = net()
    made[2] = nn.ReLU()
    return made


def flat_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def unsharded_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=True,
    )


def original_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def hybrid_fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    return fully_shard(model, mesh=mesh)


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


def narrow_fsdp2(model: nn.Module) -> nn.Module:
    """As recipes have it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model[0], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def bf16_fsdp2(model: nn.Module) -> nn.Module:
    """Reduced in bf16 too, with outputs in fp32, as accelerate has it."""
    bf16 = torch.bfloat16
    inner = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
    outer = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, output_dtype=torch.float32)
    fully_shard(model[0], mp_policy=inner)
    return fully_shard(model, mp_policy=outer)


def narrow_fsdp1(model: nn.Module, **more: Any) -> nn.Module:
    bf16 = torch.bfloat16
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
        **more,
    )


def ignoring_fsdp1(model: nn.Module) -> nn.Module:
    """Leaves the buffers of a module in the middle as they are."""
    return narrow_fsdp1(model, ignored_modules=[model[3]])


def reduced_fsdp2(model: nn.Module) -> nn.Module:
    """Computes in fp32, and reduces in bf16."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    fully_shard(model[0], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def partly_narrow_fsdp2(model: nn.Module) -> nn.Module:
    """One unit casts, its outputs back too."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model[0], mp_policy=policy)
    return fully_shard(model)


def compiled_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(torch.compile(model, backend="eager"))


def fp16_hooked(model: nn.Module) -> nn.Module:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def fp16_wrapped(model: nn.Module) -> nn.Module:
    ddp = DistributedDataParallel(model)
    exact = default_hooks.allreduce_hook
    ddp.register_comm_hook(None, default_hooks.fp16_compress_wrapper(exact))
    return ddp


def wrapped_power_sgd(model: nn.Module) -> nn.Module:
    ddp = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    hook: Any = powerSGD_hook.powerSGD_hook
    ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(hook))
    return ddp


def own_hooked(model: nn.Module) -> nn.Module:
    """A hook as users write them."""

    def mean(_, bucket):  # type: ignore[no-untyped-def] # DDP refuses annotations as text
        halves = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(halves, async_op=True).get_future().then(lambda one: one.value()[0])

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, mean)
    return ddp


def power_sgd(model: nn.Module) -> nn.Module:
    ddp = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def compiled_whole(model: nn.Module) -> nn.Module:
    """DDP within torch.compile. accelerate's `unwrap_model` takes DDP out of it, and a Trainer that
    smooths labels or saves calls that."""
    compiled: Any = torch.compile(DistributedDataParallel(model), backend="eager")

    def unwrap(*_: Any) -> None:
        compiled._orig_mod = model

    compiled.register_forward_hook(unwrap)
    return compiled


WRAPS: dict[str, Wrap] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "compiled_ddp": compiled_ddp,
    "compiled_whole": compiled_whole,
    "fp16_hooked": fp16_hooked,
    "fp16_wrapped": fp16_wrapped,
    "wrapped_power_sgd": wrapped_power_sgd,
    "own_hooked": own_hooked,
    "power_sgd": power_sgd,
    "fsdp1": original_fsdp1,
    "flat_fsdp1": flat_fsdp1,
    "unsharded_fsdp1": unsharded_fsdp1,
    "fsdp2": fsdp2,
    "hybrid_fsdp2": hybrid_fsdp2,
    "narrow_fsdp2": narrow_fsdp2,
    "bf16_fsdp2": bf16_fsdp2,
    "narrow_fsdp1": narrow_fsdp1,
    "ignoring_fsdp1": ignoring_fsdp1,
    "reduced_fsdp2": reduced_fsdp2,
    "partly_narrow_fsdp2": partly_narrow_fsdp2,
}


def answer(check: Attached, message: str = "") -> dict[str, Any]:
    judgement = check.last
    if judgement is None:
        return {"last": None, "taken": check.taken, "message": message}
    return {
        "statuses": judgement.statuses,
        "share": judgement.share,
        "violations": [
            {
                "obligation": v.obligation,
                "role": v.role,
                "causes": v.causes,
                "ranks": v.ranks,
                "tensors": v.tensors,
            }
            for v in judgement.violations
        ],
        "taken": check.taken,
        "tier": judgement.tier,
        "estimated": judgement.estimated,
        "unjudged": judgement.unjudged,
    }


def batch(width: int = 6, *, alike: bool = False) -> torch.Tensor:
    """Samples of this rank, or of all ranks."""
    seed = 3 if alike else 3 + dist.get_rank()
    return torch.randn(5, width, generator=torch.Generator().manual_seed(seed))


def steps(
    wrap: str = "ddp",
    *,
    count: int = 3,
    directory: str,
    dtype: str = "float32",
    clip: bool = True,
    evaluates: bool = False,
    sharded: bool = False,
    sgd: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Plain steps; `evaluates`: a forward without a backward before each; sharded: states are; sgd:
    in place of AdamW."""
    kind: Any = torch.optim.SGD if sgd else torch.optim.AdamW
    model = WRAPS[wrap](net().to(getattr(torch, dtype)))
    if sharded:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), kind, lr=1e-2, **options
        )
    else:
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1, **options)
    check = zerocheck.attach(model, optimizer, steps=range(1, count + 1), directory=directory)
    for number in range(count):
        if evaluates:
            with torch.no_grad():
                model(batch().to(getattr(torch, dtype)))
        with check.step():
            out = model(batch().to(getattr(torch, dtype)))
            (out.float().square().mean() * (number + 1)).backward()
            if clip and isinstance(model, FullyShardedDataParallel):
                model.clip_grad_norm_(0.1)
            elif clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return answer(check)


def several(wrap: str, *, directory: str, skips: bool = False) -> dict[str, Any]:
    """A list of two optimizers; skips: none of them has the last bias."""
    model = WRAPS[wrap](net())
    parameters = list(model.parameters())
    rest = parameters[2:-1] if skips else parameters[2:]
    optimizers = [torch.optim.AdamW(parameters[:2]), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]
    check = zerocheck.attach(
        model, optimizers, reference=net, directory=directory, on_violation="warn"
    )
    for _ in range(2):
        with check.step():
            model(batch()).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    return answer(check)


def not_finite(wrap: str, *, directory: str, one_skips: bool = False) -> dict[str, Any]:
    """NaN in an output of rank 1, in step 2; one_skips: that rank leaves the update out."""
    made = net()

    def spoil(_: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if number == 1 and dist.get_rank() == 1 else output

    class Spoiled(nn.Tanh):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return spoil(self, x, super().forward(x))

    Spoiled.__name__ = "Tanh"
    made[2] = Spoiled()
    model = made if wrap == "plain_alike" else WRAPS[wrap](made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def factory() -> nn.Module:
        unwrapped = net()
        unwrapped[2] = Spoiled()
        return unwrapped

    check = zerocheck.attach(
        model, optimizer, reference=factory, directory=directory, on_violation="warn"
    )
    found = []
    for number in range(3):  # of `spoil`
        with check.step():
            model(batch(alike=one_skips)).square().mean().backward()
            if not (one_skips and number == 1 and dist.get_rank() == 1):
                optimizer.step()
            model.zero_grad()
        found.append(answer(check))
    return {"steps": found, "summary": check.summary}


def two_groups(*, directory: str, name: str = "AdamW", **options: Any) -> dict[str, Any]:
    """Own learning rates, one of them a tensor, betas and decays; a frozen and an unused one."""
    model = net()
    model[1].bias.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    groups = [
        {"params": [*model[0].parameters(), model.unused], "betas": (0.8, 0.95), "eps": 1e-3},
        {"params": [*model[1].parameters(), *model[3].parameters()], "weight_decay": 0.0},
    ]
    optimizer = getattr(torch.optim, name)(groups, lr=torch.tensor(1e-2), **options)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    check = zerocheck.attach(wrapped, optimizer, steps=(1, 2, 3), directory=directory)
    for _ in range(3):
        check.before()
        wrapped(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        check.after()
    return answer(check)


def scaled(*, directory: str, overflows: bool, fused: bool = False, unskipped: bool = False) -> Any:
    """Under a GradScaler; the second step overflows on rank 1; unskipped: it is taken anyway."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    check = zerocheck.attach(
        model, optimizer, steps=(1, 2, 3), directory=directory, on_violation="warn"
    )
    found = []
    for number in range(3):
        with check.step():
            loss = model(batch()).square().mean()
            if overflows and number == 1 and dist.get_rank() == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if unskipped and number == 1:
                nothing = torch.zeros(1)
                state = scaler._per_optimizer_states[id(optimizer)]
                state["found_inf_per_device"] = {torch.device("cpu"): nothing}
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(answer(check))
    return {"steps": found, "scale": scaler.get_scale()}


def local_norm(*, directory: str) -> dict[str, Any]:
    """torch's clip_grad_norm_ on FSDP1: each rank clips by the norm of its own shard."""
    model = original_fsdp1(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(model, optimizer, directory=directory, on_violation="warn")
    with check.step():
        model(batch()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return answer(check)


def random_net() -> nn.Sequential:
    """With dropout: its masks must be those of the run."""
    model = net()
    model[2] = nn.Dropout(0.4)
    return model


class Buffered(nn.Module):
    """Computes with buffers: factors that bf16 rounds, and a mean that every call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.linspace(0.1, 1.7, 10))
        self.register_buffer("mean", torch.zeros(10))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.flatten(0, -2).mean(0) / 2)
            self.calls += 1
        return (x * self.factors + self.mean).to(x.dtype)


def buffered_net() -> nn.Sequential:
    return nn.Sequential(*[*net()][:3], Buffered(), net()[3])


def deep_net() -> nn.Sequential:
    """Without biases: that of a head has a gradient of which every bit is known."""
    torch.manual_seed(1)
    norm = nn.LayerNorm(24, elementwise_affine=False)
    deep = [one for _ in range(8) for one in (nn.Linear(24, 24, bias=False), norm, nn.GELU())]
    return nn.Sequential(nn.Linear(6, 24, bias=False), norm, *deep, nn.Linear(24, 3, bias=False))


def other_names() -> nn.Module:
    return nn.ModuleDict({"layer": net()})


def broken() -> nn.Module:
    if dist.get_rank() == 1:
        raise FileNotFoundError("no weights on this machine")
    return net()


def referenced(
    wrap: str = "ddp",
    *,
    directory: str,
    fault: str = "",
    factory: str = "net",
    autocast: bool = False,
    scales: bool = False,
    stale: bool = False,
    beside: str = "",
    alike: bool = False,
) -> dict[str, Any]:
    """Two microbatches, reduced each, and their gradient judged. fault: what is wrong, if any;
    beside: what the loss uses beside the outputs; alike: all ranks have the same samples."""
    made = {"random_net": random_net, "deep_net": deep_net, "buffered_net": buffered_net}.get(
        factory, net
    )()
    MADE[:] = [made]
    inner: list[torch.Tensor] = []
    made[1].register_forward_hook(lambda *given: inner.append(given[-1]))
    model = WRAPS[wrap](made)
    torch.manual_seed(11 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, enabled=scales)
    check = zerocheck.attach(
        model,
        optimizer,
        reference=globals()[factory],
        steps=(1, 2),
        directory=directory,
        on_violation="warn",
    )
    message = io.StringIO()
    number = microbatch = 0

    def spoil() -> None:
        factors = {"short": 0.8, "world": dist.get_world_size()}
        if number and microbatch and fault in factors:
            multiplied(model, factors[fault])
        if number and microbatch and fault == "not finite":
            multiplied(model, torch.nan)

    for number in range(2):
        if stale:
            model(batch()).sum().backward()
        with redirect_stderr(message), after_backward(spoil), check.step():
            for microbatch in range(2):
                alone = nullcontext()
                if fault == "local":
                    alone = model.no_sync()
                if fault == "cleared" and number:
                    optimizer.zero_grad()
                with alone, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    out = model(batch(alike=alike) + microbatch)
                loss = out.float().square().mean() / 2
                if beside == "weights":
                    parts = [
                        p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()
                    ]
                    loss = loss + 0.1 * sum(part.square().sum() for part in parts)
                elif beside == "inner":
                    loss = loss + inner[-1].abs().mean()
                elif beside == "others":  # a temperature of the loss, and targets
                    loss = loss * torch.nn.Parameter(torch.ones(())) + 0.0 * (out.detach().sum())
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if fault != "kept":
                optimizer.zero_grad()
    return {**answer(check, message.getvalue()), "summary": check.summary}


def recorded_gradient(*, directory: str, begins: int) -> dict[str, Any]:
    """Steps 1 and 6 are checked, with a reference; from `begins` on gradients are W times right."""
    model = fsdp2(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model,
        optimizer,
        reference=net,
        steps=(1, 6),
        every=None,
        directory=directory,
        recorder="1GiB",
    )
    for number in range(1, 7):
        with check.step():
            for microbatch in range(2):
                (model(batch() + microbatch).square().mean() / 2).backward()
            for parameter in model.parameters():
                if number >= begins:
                    local(parameter.grad).mul_(dist.get_world_size())
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return answer(check)


def recorder_of_one_rank(*, directory: str) -> dict[str, Any]:
    """The disk of rank 1 fails at step 3; step 6 is checked, and wrong from step 5 on."""
    model = WRAPS["ddp"](net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model,
        optimizer,
        steps=(6,),
        every=None,
        directory=directory,
        recorder="1GiB",
        on_violation="warn",
    )
    message = io.StringIO()
    for number in range(1, 8):
        with redirect_stderr(message), check.step():
            model(batch()).square().mean().backward()
            optimizer.step()
            if number >= 5:
                for parameter in model.parameters():
                    parameter.data.mul_(0.999)
            optimizer.zero_grad()
        recorder: Any = check._recorded.recorder
        if number == 2 and dist.get_rank() == 1:
            recorder.place = recorder.place / "none" / "\0"
    return {"message": message.getvalue(), "wrong": check.wrong}


class Odd(nn.Module):
    """It is called with something that fails when it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, given: list[Any]) -> torch.Tensor:
        return self.net(given[0])


class Fails(dict[str, Any]):
    def values(self) -> Any:
        raise RuntimeError("not to be looked at")


def samples_that_fail(*, directory: str) -> dict[str, Any]:
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(model, optimizer, directory=directory)
    check.epoch(0)
    message = io.StringIO()
    for _ in range(3):
        with redirect_stderr(message), check.step():
            odd = [Fails()] if dist.get_rank() == 1 else []
            model([torch.ones(3, 6), *odd]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"message": message.getvalue(), "taken": check.taken}
