"""ZeRO-3: parameters are partitioned too (section 5.3 of the ZeRO paper, `P_os+g+p`).

    forward     a unit is all-gathered before use and released after it       P elements
    backward    it is gathered again, last unit first                         P elements
                its gradients are reduce-scattered when it is done            P elements
    AdamW       each rank updates its shard; there is nothing to publish

While one unit computes, the next ones are gathered and the gradients of the last one are reduced.
The root unit (whatever no other unit holds) stays gathered from the forward to the end of the
backward.

When is the backward of a unit over? Autograd runs nodes in the reverse of the order in which the
forward made them. So when the gradient of the output of call k is there, the backward of call
k + 1 and of all later calls is over, and a unit is done if its first call was a later one. This
needs no counting of gradients: it holds for a unit that is called twice and for parameters that
were not used, and it depends on the calls alone, so all ranks launch the same collectives in the
same order. Every rank must call the same units in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from ...case.schema import Case
from ...case.shapes import unfrozen
from ...contract import Semantics, Shard, Step, StepReport
from ...contract.implementation import UNCOMPILED
from ...contract.layout import Layout
from ..collectives import zero3 as predicted_calls
from ..collectives.writing import with_collectives
from ..limits import same_units
from ..meshes import every_rank, shard_group
from ..units import unit_modules
from .bucket import Named, of_one_dtype
from .bytes import zero3_layout
from .checkpoint.resumable import Resumable
from .flat import FlatParameter
from .loss_scaling import LossScaler
from .master import (
    WideMaster,
    compute_dtype,
    gradient_dtype,
    lowered_call,
    refused,
    semantics_of,
)
from .reduction import Reduction
from .replicas import Replicas
from .sharded_adamw import ShardedAdamW


class FlatUnit(NamedTuple):
    """Parameters that become one flat parameter."""

    name: str
    named: Named
    learns: bool


def unit_parts(model: nn.Module, case: Case, modules: list[nn.Module]) -> list[list[FlatUnit]]:
    """Return the flat parameters of each unit, and of the root unit, which is the last."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    paths = {module: path for path, module in model.named_modules()}
    units = [(paths[m], [(names.pop(p), p) for p in list(m.parameters())]) for m in modules]
    units.append(("root", [(name, p) for p, name in names.items()]))
    later = unfrozen(case)
    found = []
    for path, named in units:
        trainable = [pair for pair in named if pair[1].requires_grad]
        frozen = [pair for pair in named if not pair[1].requires_grad]
        found.append(
            [
                FlatUnit(name, part, half is trainable or part[0][0] in later)
                for name, half in ((path, trainable), (f"{path}.frozen", frozen))
                for part in of_one_dtype(half)
            ]
        )
    return found


class Unit:
    """Module with its flat parameters: for each dtype one that trains, and one of the rest."""

    def __init__(self, flats: Iterable[FlatParameter]) -> None:
        self.flats = list(flats)
        self.first_call = -1

    @property
    def gathered(self) -> bool:
        """True if the parameters are gathered, or on their way."""
        return any(flat.gathered for flat in self.flats)

    def gather(self) -> None:
        """Launch the all-gathers, unless that is done."""
        for flat in self.flats:
            flat.gather()

    def wait(self) -> None:
        """Wait until the parameters can be read."""
        for flat in self.flats:
            flat.wait()

    def release(self) -> None:
        """Give back the memory of the gathered parameters."""
        for flat in self.flats:
            flat.release()


class Zero3(Resumable):
    """One rank of ZeRO-3; on a mesh of two axes, of one of its replicas.

    Every microbatch is reduced, and the results are summed in the shard. The sum is averaged over
    replicas once. A trainable parameter that the forward does not use has the gradient 0, so it
    still decays. Frozen parameters are sharded and gathered like others and never change; if they
    are unfrozen later, the optimizer has no gradient of them until then.
    """

    semantics = Semantics(accumulate="reduce_each", unused="zero", buffers="local", weight="token")
    stage = 3
    options = ("wrap", "bucket", "reshard", "prefetch")
    handles = UNCOMPILED

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return refused(case) or same_units(case)

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return the memory layout and collectives of a rank; exact for every case."""
        modules = unit_modules(model, case.sharding)
        held = zero3_layout(model, case, rank, modules, unit_parts(model, case, modules))
        return with_collectives(held, predicted_calls.zero3(model, case), case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        self.model = model
        self.call = lowered_call(model, case)
        self.case = case
        self.semantics = semantics_of(self.semantics, case)
        self.group, self.everyone = shard_group(mesh), every_rank(mesh)
        self.replicas = Replicas(mesh)
        if mesh.ndim > 1:
            self.semantics = replace(self.semantics, accumulate="reduce_shards")
        modules = unit_modules(model, case.sharding)
        self.units, self.root = self._make_units(modules)
        self.flats = [flat for unit in (*self.units, self.root) for flat in unit.flats]
        owned = [one for flat in self.flats for one in flat.owned()]
        for widened in self._widened():
            widened.release()
        self.optimizer = ShardedAdamW(case, owned, self.group, mesh.device_type)
        self.scaler = LossScaler(case, self.group, mesh.device_type)
        self.reduction = Reduction(self.group)
        self.reduced = False
        self._calls: list[Unit] = []  # of this forward, in order
        self._expected: list[Unit] = []  # the calls of the forward before, for prefetching
        self._open: list[int] = []  # numbers of the calls whose backward is not over
        self._in_backward = False
        self._hooks = [
            model.register_forward_pre_hook(self._before_model),
            model.register_forward_hook(self._after_model),
        ]
        for module, unit in zip(modules, self.units, strict=True):
            self._hooks.append(module.register_forward_pre_hook(partial(self._before, unit)))
            self._hooks.append(module.register_forward_hook(partial(self._after, unit)))

    def _make_units(self, modules: list[nn.Module]) -> tuple[list[Unit], Unit]:
        """Make a unit for each module, and the root unit for the rest. Shards the parameters."""
        *units, root = [
            Unit(self._flat(part) for part in parts)
            for parts in unit_parts(self.model, self.case, modules)
        ]
        return units, root

    def _flat(self, part: FlatUnit) -> FlatParameter:
        return FlatParameter(
            part.name,
            part.named,
            self.group,
            learns=part.learns,
            dtype=compute_dtype(self.case),
            gradients=gradient_dtype(self.case, part.named[0][1]),
        )

    def train_step(self, step: Step) -> StepReport:
        """Forward and backward with all collectives inside, clip, update of the shard."""
        self._unfreeze(step.unfreeze)
        for flat in self.flats:
            if flat.gradient is not None:
                flat.gradient.zero_()
        scale = self.scaler.scale
        for microbatch in step.microbatches:
            self._start()
            loss = microbatch.loss(self.call)
            if loss.requires_grad:
                loss = self.scaler.objective(loss, microbatch, len(step.microbatches))
                self._backward(loss)
            self._finish()
        self.replicas.average(one for flat in self.flats for one in flat.reduced())
        for flat in self.flats:
            if flat.widened is not None and flat.pieces and flat.parameters[0].requires_grad:
                flat.widened.widen()
        self.reduced = True
        self.scaler.unscale(self.optimizer.given())
        step.reached("reduced")
        norm = None
        training = self.case.training
        if training.clip is not None:
            norm = self.optimizer.clip(training.clip, float(training.norm))
            step.reached("clipped")
        if not self.scaler.overflow:
            self.optimizer.step(step.lr)
        for widened in self._widened():
            widened.release()
        self._publish()
        self.scaler.update()
        return StepReport(grad_norm=norm, skipped=self.scaler.overflow, loss_scale=scale)

    def _widened(self) -> list[WideMaster]:
        """Return the gradients cast for AdamW."""
        return [flat.widened for flat in self.flats if flat.widened is not None]

    def _publish(self) -> None:
        """Round the masters to the gathered dtype, in mixed precision."""
        for flat in self.flats:
            flat.refresh()

    def _unfreeze(self, names: Collection[str]) -> None:
        """Let these parameters train from now on."""
        for flat in self.flats:
            flat.unfreeze(names)
        self.optimizer.unfreeze(names)

    # The forward.

    def _start(self) -> None:
        """Reset the state of the last forward, except its order of calls."""
        for unit in (*self.units, self.root):
            unit.release()
            unit.first_call = -1
        self._expected, self._calls, self._open = self._calls, [], []

    def _before_model(self, *_: Any) -> None:
        self.root.gather()
        self.root.wait()

    def _before(self, unit: Unit, *_: Any) -> None:
        """Gather a unit before its call, and launch the all-gathers of the next calls."""
        unit.gather()
        if torch.is_grad_enabled() and not self._in_backward:
            number = len(self._calls)
            if unit.first_call < 0:
                unit.first_call = number
            self._calls.append(unit)
            self._open.append(number)
            for later in self._ahead(number):
                later.gather()
        unit.wait()

    def _after(self, unit: Unit, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Release a unit after its call, and hook its output for the backward."""
        if self._in_backward:
            return  # a checkpoint runs the forward once more: the backward needs the unit now
        ahead: list[Unit] = []
        if torch.is_grad_enabled():
            number = len(self._calls) - 1
            ahead = self._ahead(number)
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    _hook(tensor, partial(self._before_backward, number))
        if self.case.sharding.reshard and unit not in ahead:
            unit.release()

    def _ahead(self, number: int) -> list[Unit]:
        """Return the units of the calls expected after call `number`, as in the last forward."""
        if self._expected[number : number + 1] != self._calls[number:]:
            return []
        return self._expected[number + 1 : number + 1 + self.case.sharding.prefetch]

    def _after_model(self, *_: Any) -> None:
        """Release what was gathered in vain, and everything if no backward will follow."""
        if self._in_backward:
            return
        if not torch.is_grad_enabled():
            self.root.release()
        if self.case.sharding.reshard or not torch.is_grad_enabled():
            for unit in self.units:
                unit.release()

    # The backward.

    def _backward(self, loss: torch.Tensor) -> None:
        self._in_backward = True
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._in_backward = False

    def _before_backward(self, number: int, _: torch.Tensor) -> None:
        """Reduce finished units and gather the next ones, before the backward of a call.

        Memory first: what is over is released before more is gathered. Then the all-gathers, which
        are needed soon, then the reduce-scatters, which are needed at the end.
        """
        if not self._open or number > self._open[-1]:
            return  # a second output of a call that has begun
        first = max(0, number - self.case.sharding.prefetch)
        ahead = self._calls[first : number + 1][::-1]
        done = self._close_calls(number, ahead)
        for unit in ahead:
            unit.gather()
        for unit in done:
            self._reduce(unit)
        self._calls[number].wait()

    def _close_calls(self, number: int, keep: list[Unit]) -> list[Unit]:
        """Close the calls after `number`; return the units whose backward is over.

        Released are those units, and units between two of their calls if the case reshards; but
        none of `keep`.
        """
        done = []
        while self._open and self._open[-1] > number:
            last = self._open.pop()
            unit = self._calls[last]
            if last == unit.first_call:
                done.append(unit)
            if unit not in keep and (last == unit.first_call or self.case.sharding.reshard):
                unit.release()
        return done

    def _reduce(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.reduce(self.reduction)

    def _finish(self) -> None:
        """Reduce the remaining units after a backward, the root last, and release everything.

        Units that were not called have no gradient on any rank, so there is nothing to reduce.
        """
        for unit in (*self._close_calls(-1, []), self.root):
            self._reduce(unit)
            unit.release()
        self.reduction.finish()

    # The state.

    def flat_buffers(self) -> list[FlatParameter]:
        """Return the flat parameters of all units."""
        return self.flats

    def shards(self) -> Iterator[Shard]:
        """Iterate over slices of parameters, gradient and moments, whole buffers, and padding."""
        for flat in self.flats:
            yield from flat.shards()
        if self.reduced:
            yield from self.optimizer.gradients()
        yield from self.optimizer.shards()
        for name, buffer in self.model.named_buffers():
            yield Shard(name, "buffer", buffer, tuple(buffer.shape))

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Start in mid-training from whole tensors."""
        for flat in self.flats:
            flat.restore(full)
        self.optimizer.restore(full)

    def close(self) -> None:
        """Take the hooks off the model; drop shards, gradients and moments."""
        self.end_saving()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.reduction.clear()
        self.optimizer.close()
        for flat in self.flats:
            flat.close()
        self._calls, self._expected, self._open = [], [], []
        self.units.clear()
        self.flats.clear()
        del self.root, self.model, self.call


def _hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` in the backward, before the node that made the tensor.

    A view forgets its hooks when it is written to (`output += x`), its base does not.
    """
    base = tensor._base
    source = base if base is not None and base.requires_grad else tensor
    source.register_hook(hook)  # type: ignore[no-untyped-call]
