"""What users bring: one sharder that is right, and others that break in every way."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerocheck
from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.faults.accumulation import NotDividedByGa
from zerocheck.faults.update import DecayOnExcluded


def build(model, case, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))


def declared(model, case, mesh):
    return build(model, case, mesh)


declared.stage = 3


def not_averaged(model, case, mesh):
    built = build(model, case, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return built


class Sharder(zerocheck.BuiltImplementation):
    """Right, and the base of those that are not."""

    def build(self, model, case, mesh):
        return build(model, case, mesh)


class NoSaving(Zero1):
    """No checkpoints."""

    save = zerocheck.Implementation.save


class KilledInStep1(Sharder):
    def train_step(self, step):
        if step.index == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(step)


class Aborts(Sharder):
    def train_step(self, step):
        if dist.get_rank() == 0:
            os.abort()
        return super().train_step(step)


class Exits(Sharder):
    def train_step(self, step):
        raise SystemExit(0)


class Hangs(Sharder):
    """Rank 0 calls one collective more than the others."""

    def train_step(self, step):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1))
        return super().train_step(step)


class ReducesOtherSizes(Sharder):
    def train_step(self, step):
        dist.all_reduce(torch.zeros(1 if dist.get_rank() else 64))
        return super().train_step(step)


class RaisesOnOneRank(Sharder):
    def train_step(self, step):
        if dist.get_rank() == 1:
            raise ArithmeticError("rank 1 has had enough")
        return super().train_step(step)


class ConstructorRaises(Sharder):
    def build(self, model, case, mesh):
        raise LookupError("no such layer")


class RaisesWithClip(Sharder):
    """Everything else is right."""

    def build(self, model, case, mesh):
        if case.training.clip is not None:
            raise LookupError("no clip")
        return build(model, case, mesh)


class Refuses(Sharder):
    def build(self, model, case, mesh):
        raise zerocheck.Unsupported("this machine is too small")


class RefusesOnOneRank(Sharder):
    """The others wait for it."""

    def build(self, model, case, mesh):
        if dist.get_rank() == 0:
            raise zerocheck.Unsupported("nothing for rank 0")
        dist.all_reduce(torch.zeros(1))
        return super().build(model, case, mesh)


IN_FP32 = Zero1.capabilities - {"precision"}


class SupportsNoEmbedding(Zero1):
    """Says so at once, takes everything else, and obeys none of the sharding options."""

    options = ()
    capabilities = IN_FP32

    @classmethod
    def supports(cls, case):
        if case.training.norm == "inf":
            return "no inf-norm"
        return "no embeddings" if case.model.stem == "embedding" else None


class RefusesDropoutWhenBuilt(Zero1):
    capabilities = IN_FP32

    def __init__(self, model, case, mesh):
        if any(block.dropout for block in case.model.blocks):
            raise zerocheck.Unsupported("no dropout")
        super().__init__(model, case, mesh)


class SupportsRaises(Sharder):
    @classmethod
    def supports(cls, case):
        raise ArithmeticError("supports() fails")


class WrongShape(Sharder):
    def shards(self):
        for shard in super().shards():
            if shard.name == "head.weight" and shard.index is not None:
                yield zerocheck.Shard(shard.name, shard.role, shard.tensor, shard.shape, None)
            else:
                yield shard


class Slow(Sharder):
    """Long enough to be interrupted, with signs of life."""

    def train_step(self, step):
        for _ in range(20):
            time.sleep(0.02)
            sum(range(10_000))
        return super().train_step(step)


class NoBuild(zerocheck.BuiltImplementation):
    pass


class NoStep:
    def shards(self):
        return []


number = 7


def two_arguments(model, case):
    return None


class Hidden(Sharder):
    """Shows no gradient: never says where it is reduced."""

    def train_step(self, step):
        return super().train_step(replace(step, reached=lambda moment: None))


class HiddenNotAveraged(Hidden):
    def build(self, model, case, mesh):
        return not_averaged(model, case, mesh)


class NeverClips(Sharder):
    """Shows the reduced gradient, and forgets to clip."""

    def train_step(self, step):
        case, self.case = (
            self.case,
            msgspec.structs.replace(
                self.case, training=msgspec.structs.replace(self.case.training, clip=None)
            ),
        )
        try:
            return super().train_step(step)
        finally:
            self.case = case


class HiddenNeverClips(Hidden, NeverClips):
    """The same, and shows no gradient at all."""


class ReturnsNoReport(Sharder):
    def train_step(self, step):
        super().train_step(step)


class Misspells(Sharder):
    def train_step(self, step):
        step.reached("reducd")


class GradientsOfFrozen(Sharder):
    """Names a gradient that does not exist for frozen parameters too: allowed."""

    def shards(self):
        for shard in super().shards():
            yield shard
            if shard.role == "parameter" and not self.trains(shard.name):
                yield zerocheck.Shard(shard.name, "gradient", None, shard.shape, shard.index)

    def trains(self, name):
        return dict(self.built.model.named_parameters())[name].requires_grad


def not_averaged_in_microbatches(model, case, mesh):
    """The wrong average, where there are several microbatches only."""
    wrong = case.training.microbatches > 1
    return (not_averaged if wrong else build)(model, case, mesh)


class HangsInMicrobatches(Hangs):
    """Right with one microbatch, hangs with several."""

    def train_step(self, step):
        return (Hangs if len(step.microbatches) > 1 else Sharder).train_step(self, step)


class RaisesInMicrobatches(Sharder):
    """Right with one microbatch, raises with several."""

    def train_step(self, step):
        if len(step.microbatches) > 1:
            raise LookupError(f"no microbatch {len(step.microbatches)}")
        return super().train_step(step)


class Plain(zerocheck.Implementation):
    """DDP's arithmetic by hand. Knows nothing of weights, loss scaling and unfreezing."""

    def __init__(self, model, case, mesh):
        self.model, self.case, self.world = model, case, mesh.size()
        self.optimizer = torch.optim.AdamW(zerocheck.groups(model, case))

    def train_step(self, step):
        self.optimizer.zero_grad()
        for group, rate in zip(self.optimizer.param_groups, step.lr, strict=True):
            group["lr"] = rate
        for microbatch in step.microbatches:
            (microbatch.loss(self.model) / len(step.microbatches)).backward()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                total = parameter.grad.contiguous()
                dist.all_reduce(total)
                parameter.grad.copy_(total / self.world)
        step.reached("reduced")
        self.optimizer.step()
        return zerocheck.StepReport()

    def shards(self):
        for name, parameter in self.model.named_parameters():
            shape = tuple(parameter.shape)
            yield zerocheck.Shard(name, "parameter", parameter.detach(), shape)
            if parameter.requires_grad:
                yield zerocheck.Shard(name, "gradient", parameter.grad, shape)
            for role, value in self.optimizer.state.get(parameter, {}).items():
                yield zerocheck.Shard(name, role, value, tuple(value.shape))
        for name, buffer in self.model.named_buffers():
            yield zerocheck.Shard(name, "buffer", buffer, tuple(buffer.shape))

    fixed = {"training": {"clip": None}}  # noqa: RUF012
    semantics = zerocheck.Semantics(unused="zero")


class Misdeclared(Plain):
    capabilities = frozenset({"loss_scaling"})


class OldName(Plain):
    handles = ("loss_scale",)


class Scaled(Sharder):
    """A short form with torch's scaler."""

    capabilities = frozenset({"loss_scale", "unfreeze"})

    def build(self, model, case, mesh):
        scale = case.training.loss_scale
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        return replace(super().build(model, case, mesh), scaler=scaler)


def not_averaged_from_3_ranks(model, case, mesh):
    return (not_averaged if mesh.size() >= 3 else build)(model, case, mesh)


def not_averaged_where_uneven(model, case, mesh):
    uneven = any(
        len(parameter) % mesh.size() for parameter in model.parameters() if parameter.dim()
    )
    return (not_averaged if uneven else build)(model, case, mesh)


def not_averaged_if_used_twice(model, case, mesh):
    calls = case.model.calls or ()
    return (not_averaged if len(set(calls)) < len(calls) else build)(model, case, mesh)


class TwoFaults(DecayOnExcluded, NotDividedByGa):
    """A wrong gradient with several microbatches, a wrong update with groups without decay."""


class NotAveragedOfOneModel(Sharder):
    fixed = {  # noqa: RUF012
        "model": {"stem": "dense", "inputs": 5, "blocks": (), "frozen": ()},
        "training": {"clip": 0.003, "norm": "2"},
    }

    def build(self, model, case, mesh):
        return not_averaged(model, case, mesh)


def plain_ddp(model, case, mesh):
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    return zerocheck.Built(wrapped, torch.optim.AdamW(zerocheck.groups(wrapped, case)))


def sends_buffers(model, case, mesh):
    """Buffers of rank 0 are sent before each forward, and nothing says so."""

    def send(module: torch.nn.Module, args: object) -> None:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)

    built = plain_ddp(model, case, mesh)
    built.model.broadcast_buffers = False
    built.model.register_forward_pre_hook(send)
    return built
