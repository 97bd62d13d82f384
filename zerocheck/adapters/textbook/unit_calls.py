"""Calls of the units of ZeRO-3: hooks on the model, the next unit, what is over.

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

from .adapter import Sharder
from .call_order import CallOrder
from .unit import Unit


class UnitSharder(Sharder):
    """Base of ZeRO-3: calls its methods before and after each call of a unit, and in the backward.

    The model may be called without gradients, and a checkpoint calls units again in the backward.
    """

    units: list[Unit]
    root: Unit
    """Parameters that are in no other unit."""

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

    def _before(self, unit: Unit, ahead: Collection[Unit]) -> None:
        """Prepare for a call of a unit; ahead: units of the calls expected after it."""
        raise NotImplementedError

    def _after(self, unit: Unit, ahead: Collection[Unit]) -> None:
        """End a call of a unit in the forward; ahead: units of the calls expected after it."""
        raise NotImplementedError

    def _before_backward(self, number: int) -> None:
        """Prepare for the backward of call `number`; that of later calls is over."""
        raise NotImplementedError

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

    def close(self) -> None:
        """Drop the units, too."""
        super().close()
        self.units.clear()
        del self.root, self.order


def _hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` in the backward, before the node that made the tensor.

    A view forgets its hooks when it is written to (`output += x`), its base does not.
    """
    base = tensor._base
    source = base if base is not None and base.requires_grad else tensor
    source.register_hook(hook)  # type: ignore[no-untyped-call]
