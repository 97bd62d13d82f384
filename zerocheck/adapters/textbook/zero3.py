"""ZeRO-3: parameters are partitioned too (section 5.3 of the ZeRO paper, `P_os+g+p`).

    forward     a unit is all-gathered before use and released after it       P elements
    backward    it is gathered again, last unit first                         P elements
                its gradients are reduce-scattered when it is done            P elements
    optimizer   each rank updates its shard; there is nothing to publish

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

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...case.schema import Case
from ...contract import Semantics
from ..shared.limits import same_units
from ..shared.simulation import SimulationTraits
from .adapter import Sharder
from .reduction import Reduction
from .unit import CallOrder, FlatParameter, Unit, units_of


class Zero3(Sharder):
    """One rank of ZeRO-3. Every microbatch is reduced, and the results are summed in the shard.

    Frozen parameters are sharded and gathered like others. The model may be called without
    gradients, and a checkpoint calls units again in the backward.
    """

    units: list[Unit]
    root: Unit
    """Parameters that are in no other unit."""

    semantics = Semantics(accumulate="reduce_each", unused="zero", buffers="local", weight="token")
    stage = 3
    options = ("wrap", "bucket", "reshard", "prefetch")
    simulated = SimulationTraits(prefetch=1)

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return super().supports(case) or same_units(case)

    def _partition(self) -> None:
        """Keep a shard of the parameters and of the gradients of each unit."""
        *self.units, self.root = units_of(self.model, self.case, self.group)
        self.flats = [flat for unit in (*self.units, self.root) for flat in unit.flats]
        self.reduction = Reduction(self.group)
        self._follow_calls()

    def flat_buffers(self) -> list[FlatParameter]:
        """Return the flat parameters of all units."""
        return self.flats

    def _follow_calls(self) -> None:
        """Hook the model and the units."""
        self.order = CallOrder[Unit](self.case.sharding.prefetch)
        self._in_backward = False
        hooks = [(self.model, self._before_model, self._after_model)]
        for unit in self.units:
            hooks.append(
                (unit.module, partial(self._before_call, unit), partial(self._after_call, unit))
            )
        for module, before, after in hooks:
            self._hooks.append(module.register_forward_pre_hook(before))
            self._hooks.append(module.register_forward_hook(after))

    def _begin_microbatch(self) -> None:
        for unit in (*self.units, self.root):
            unit.release()
        self.order.start()

    def _backward(self, loss: torch.Tensor) -> None:
        self._in_backward = True
        try:
            super()._backward(loss)
        finally:
            self._in_backward = False

    def _before_model(self, *_: Any) -> None:
        self.root.gather()
        self.root.wait()

    def _before_call(self, unit: Unit, *_: Any) -> None:
        ahead: list[Unit] = []
        if torch.is_grad_enabled() and not self._in_backward:
            ahead = self.order.enter(unit)
        self._before(unit, ahead)

    def _after_call(self, unit: Unit, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._in_backward:
            return  # a checkpoint runs the forward once more: the backward needs the unit now
        ahead: list[Unit] = []
        if torch.is_grad_enabled():
            ahead = self.order.ahead()
            reached = partial(self._backward_reached, len(self.order.calls) - 1)
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    _hook(tensor, reached)
        self._after(unit, ahead)

    def _backward_reached(self, number: int, _: torch.Tensor) -> None:
        if self.order.is_open(number):  # else a second output of a call that has begun
            self._before_backward(number)

    def _after_model(self, *_: Any) -> None:
        """Release what was gathered in vain, and everything if no backward will follow."""
        if self._in_backward:
            return
        if not torch.is_grad_enabled():
            self.root.release()
        if self.case.sharding.reshard or not torch.is_grad_enabled():
            for unit in self.units:
                unit.release()

    def _before(self, unit: Unit, ahead: Collection[Unit]) -> None:
        """Gather a unit before its call, and launch the all-gathers of the calls expected next."""
        unit.gather()
        for later in ahead:
            later.gather()
        unit.wait()

    def _after(self, unit: Unit, ahead: Collection[Unit]) -> None:
        """Release a unit after its call."""
        if self.case.sharding.reshard and unit not in ahead:
            unit.release()

    def _before_backward(self, number: int) -> None:
        """Reduce finished units and gather the next ones, before the backward of a call.

        Memory first: what is over is released before more is gathered. Then the all-gathers, which
        are needed soon, then the reduce-scatters, which are needed at the end.
        """
        ahead = self.order.behind(number)
        done = self._close_calls(number, ahead)
        for unit in ahead:
            unit.gather()
        for unit in done:
            unit.reduce(self.reduction)
        ahead[0].wait()

    def _close_calls(self, number: int, keep: Collection[Unit]) -> list[Unit]:
        """Close the calls after `number`; return the units whose backward is over.

        Those units are released, and units between two of their calls if the case reshards; but
        none of `keep`.
        """
        done = []
        for unit, over in self.order.close(number):
            if over:
                done.append(unit)
            if unit not in keep and (over or self.case.sharding.reshard):
                unit.release()
        return done

    def _end_microbatch(self) -> None:
        """Reduce the remaining units after a backward, the root last, and release everything.

        Units that were not called have no gradient on any rank, so there is nothing to reduce.
        """
        for unit in (*self._close_calls(-1, ()), self.root):
            unit.reduce(self.reduction)
            unit.release()
        self.reduction.finish()

    def _publish(self) -> None:
        """Round the masters, if there are any, to what the next forward gathers."""
        for flat in self.flats:
            flat.refresh()

    def close(self) -> None:
        """Drop the units, the flat parameters, and the gradients in flight."""
        super().close()
        self.units.clear()
        del self.root, self.order
        self.flats.clear()
        self.reduction.clear()


def _hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` in the backward, before the node that made the tensor.

    A view forgets its hooks when it is written to (`output += x`), its base does not.
    """
    base = tensor._base
    source = base if base is not None and base.requires_grad else tensor
    source.register_hook(hook)  # type: ignore[no-untyped-call]
