"""Template of a step, which ZeRO-1, -2 and -3 fill in.

Stages differ in what they partition (`_partition`), how they reduce gradients (`_reduce`, or
`_end_microbatch` for each microbatch), and how they publish updated parameters (`_publish`).
Additions of production have modules of their own: precision.py, loss_scaling.py, replicas of the
model in reduction.py, and checkpoint/.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from ...case.schema import Case
from ...contract import Shard, Step, StepReport
from ...contract.implementation import Stage
from ...protocol.layout import Layout
from ..shared.meshes import every_rank, shard_group
from .checkpoint.resumable import Resumable
from .layout import layout_of_stage
from .loss_scaling import LossScaler
from .precision import WideGradient, cast_call, reason_to_reject, semantics_of
from .reduction import Replicas
from .sharded_optimizer import ShardedOptimizer


class Sharder(Resumable):
    """One rank of a stage; on a mesh with a replicate axis, of one of its replicas.

    A trainable parameter that the forward does not use has the gradient 0, so it still decays: its
    place in the flat buffer cannot be skipped. Frozen parameters never change. Those that are
    unfrozen later are in a flat buffer, and the optimizer has no gradient of them until then.
    """

    stage: Stage
    exchanges = ("zero1", "zero2", "zero3")
    capabilities = frozenset({"loss_scale", "unfreeze", "precision", "past_wrapper"})
    axes = frozenset({"replicate", "shard"})

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return reason_to_reject(case)

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return the memory layout and collectives of a rank; exact for every case."""
        return layout_of_stage(cls.stage, model, case, rank)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        self.model, self.case = model, case
        self.call = cast_call(model, case)
        self.group, self.everyone = shard_group(mesh), every_rank(mesh)
        self.world_size = self.group.size()
        self.replicas = Replicas(mesh)
        self.semantics = self.replicas.semantics(semantics_of(self.semantics, case))
        self._hooks: list[RemovableHandle] = []
        self._partition()
        flats = self.flat_buffers()
        self.wide = [
            WideGradient(flat, flat.gradient) for flat in flats if flat.gradient is not None
        ]
        owned = [one for wide in self.wide for one in wide.owned()]
        self.optimizer = ShardedOptimizer(case, owned, self.group, mesh.device_type)
        self.scaler = LossScaler(case, self.group, mesh.device_type)
        self.reduced = False
        for place, flat in enumerate(flats):
            for number, parameter in enumerate(flat.parameters):
                if parameter.requires_grad:
                    self._listen(place, number)

    # The hooks that a stage fills in; `_publish` and `flat_buffers` are declared in checkpoint/.

    def _partition(self) -> None:
        """Make the flat buffers, each with this rank's shard of its reduced gradient."""
        raise NotImplementedError

    def _listen(self, place: int, number: int) -> None:
        """Hook the gradient of a trainable parameter: `number` of the flat buffer at `place`."""

    def _clear_gradients(self) -> None:
        """Set the sums of gradients to 0 before a step."""
        for flat in self.flat_buffers():
            if flat.gradient is not None:
                flat.gradient.zero_()

    def _begin_microbatch(self) -> None:
        """Prepare for a forward."""

    def _backward(self, loss: torch.Tensor) -> None:
        """Run the backward of a microbatch."""
        loss.backward()  # type: ignore[no-untyped-call]

    def _end_microbatch(self) -> None:
        """Reduce the gradients of a microbatch, if each is reduced."""

    def _reduce(self) -> None:
        """Reduce the gradients of all microbatches; a stage that has reduced each needs no more.

        Then they are averaged over replicas, and in mixed precision widened for the optimizer.
        """
        flats = self.flat_buffers()
        self.replicas.average(f.gradient for f in flats if f.gradient is not None and f.reduces)
        for wide in self.wide:
            wide.widen()
        self.reduced = True

    # The step.

    def train_step(self, step: Step) -> StepReport:
        """Forward and backward of each microbatch, reduce, clip, update of the shard, publish."""
        self._unfreeze(step.unfreeze)
        self._clear_gradients()
        scale = self.scaler.scale
        for microbatch in step.microbatches:
            self._begin_microbatch()
            loss = microbatch.loss(self.call)
            if loss.requires_grad:
                loss = self.scaler.objective(loss, microbatch, len(step.microbatches))
                self._backward(loss)
            self._end_microbatch()
        self._reduce()
        self.scaler.unscale(self.optimizer.given())
        step.reached("reduced")
        norm = None
        training = self.case.training
        if training.clip is not None:
            norm = self.optimizer.clip(training.clip, float(training.norm))
            step.reached("clipped")
        if not self.scaler.overflow:
            self.optimizer.step(step.lr)
        for wide in self.wide:
            wide.release()
        self._publish()
        self.scaler.update()
        return StepReport(grad_norm=norm, skipped=self.scaler.overflow, loss_scale=scale)

    def _unfreeze(self, names: Collection[str]) -> None:
        """Let these parameters train from now on."""
        for place, flat in enumerate(self.flat_buffers()):
            for number in flat.unfreeze(names):
                self._listen(place, number)
        self.optimizer.unfreeze(names)

    # The state.

    def shards(self) -> Iterator[Shard]:
        """Iterate over parameters, masters, gradients, states, buffers, and padding."""
        for flat in self.flat_buffers():
            yield from flat.shards()
        if self.reduced:
            yield from self.optimizer.gradients()
        yield from self.optimizer.shards()
        for name, parameter in self.replicated():
            yield Shard(name, "parameter", parameter.detach(), tuple(parameter.shape))
        for name, buffer in self.model.named_buffers():
            yield Shard(name, "buffer", buffer, tuple(buffer.shape))

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Start in mid-training from whole tensors."""
        for name, parameter in self.replicated():
            parameter.detach().copy_(full[name, "parameter"])
        for flat in self.flat_buffers():
            flat.restore(full)
        self.optimizer.restore(full)

    def close(self) -> None:
        """Take the hooks off the model; drop shards, gradients and moments."""
        self.end_saving()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.optimizer.close()
        for flat in self.flat_buffers():
            flat.close()
        self.wide.clear()
        del self.model, self.call
