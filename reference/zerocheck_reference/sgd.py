"""One step of stochastic gradient descent, written from the equations.

With heavy-ball momentum after Polyak, "Some methods of speeding up the convergence of iteration
methods" (1964), or in the form of Nesterov after Sutskever, Martens, Dahl & Hinton, "On the
importance of initialization and momentum in deep learning" (ICML 2013). Where the papers leave a
choice, it is the documented one of torch.optim.SGD: the decay is added to the gradient (L2), the
learning rate multiplies the buffer and is not in it, and the first buffer is the gradient itself.
There is no dampening.

With g the gradient (negated to maximize) and mu the momentum:

    d     <- g + weight_decay p
    b     <- mu b + d                                        (at the first step d; without mu no b)
    p     <- p - lr d           without momentum
    p     <- p - lr b           with momentum
    p     <- p - lr (d + mu b)  with momentum, of Nesterov
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._check import flag, real
from .optimizer import OptimizerState


@dataclass(frozen=True, kw_only=True)
class SGDOptions:
    """The scalars of SGD, dimensionless, for one group of parameters.

    lr            learning rate, in [0, inf)
    momentum      what remains of the buffer at a step, in [0, 1); 0 is without a buffer
    weight_decay  added to the gradient times the parameter, in [0, inf)
    nesterov      step along the gradient plus the momentum times the new buffer
    maximize      ascend instead of descend

    Raises ValueError for a value outside of these, NaN included, and for nesterov without momentum.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        real("lr", self.lr)
        real("momentum", self.momentum, high=1.0)
        real("weight_decay", self.weight_decay)
        flag("nesterov", self.nesterov)
        flag("maximize", self.maximize)
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is True with momentum 0 (allowed: with a momentum above 0)")

    def initial(self, parameter: Tensor) -> SGDState:
        """Return the state before the first step: a copy of `parameter`, and no buffer."""
        if not parameter.dtype.is_floating_point:
            raise ValueError(f"parameter is {parameter.dtype} (allowed: a real floating dtype)")
        return SGDState(parameter.detach().clone())

    def check(self, state: OptimizerState) -> None:
        """Raise ValueError unless `state` is a sound one of SGD and fits these options."""
        check_sgd_state(_of_sgd(state), self)

    def after(self, state: OptimizerState, gradient: Tensor) -> SGDState:
        """Return the state after one step."""
        return sgd_step(_of_sgd(state), gradient, self)


class SGDState(NamedTuple):
    """All that SGD knows of one parameter, or of any number of them as one flat vector.

    parameter        p, after the steps so far
    momentum_buffer  b; None before the first step, and without momentum

    The tensors have one shape and one floating dtype.
    """

    parameter: Tensor
    momentum_buffer: Tensor | None = None

    def copy(self) -> SGDState:
        """Return a state that shares no memory with this one."""
        buffer = self.momentum_buffer
        return SGDState(
            self.parameter.detach().clone(), None if buffer is None else buffer.detach().clone()
        )


def _of_sgd(state: OptimizerState) -> SGDState:
    if not isinstance(state, SGDState):
        raise ValueError(f"the state is {type(state).__name__} (allowed: SGDState)")
    return state


def check_sgd_state(state: SGDState, options: SGDOptions) -> None:
    """Raise ValueError unless `state` is sound and fits the options."""
    p, buffer = state.parameter, state.momentum_buffer
    if not p.dtype.is_floating_point:
        raise ValueError(f"parameter is {p.dtype} (allowed: a real floating dtype)")
    if buffer is None:
        return
    if options.momentum == 0:
        raise ValueError("momentum_buffer is a tensor with momentum 0 (allowed: None)")
    if buffer.shape != p.shape or buffer.dtype != p.dtype:
        raise ValueError(
            f"momentum_buffer is {buffer.dtype} of shape {tuple(buffer.shape)} "
            f"(allowed: as the parameter, {p.dtype} of shape {tuple(p.shape)})"
        )


@torch.no_grad()
def sgd_step(state: SGDState, gradient: Tensor, options: SGDOptions) -> SGDState:
    """The state after one step from `state` with `gradient` (equations at the top of this file).

    `gradient` has the parameter's shape. It is converted to the dtype of the state, in which
    everything is computed: float32 to train, float64 to know the step exactly. Every operation is
    elementwise, so a flat vector of a whole model is as good as one tensor. Nothing is changed in
    place and the result shares no memory with the arguments.

    ValueError for tensors that do not fit each other, a gradient of a wider dtype than the state
    (it would be rounded), or a buffer without momentum.
    """
    check_sgd_state(state, options)
    p = state.parameter
    if gradient.shape != p.shape or torch.promote_types(gradient.dtype, p.dtype) != p.dtype:
        raise ValueError(
            f"gradient is {gradient.dtype} of shape {tuple(gradient.shape)} "
            f"(allowed: shape {tuple(p.shape)} and a dtype that {p.dtype} holds exactly)"
        )
    d = gradient.to(p.dtype)
    d = -d if options.maximize else d.clone()
    if options.weight_decay != 0:
        d = d + options.weight_decay * p
    if options.momentum == 0:
        return SGDState(p - options.lr * d)
    old = state.momentum_buffer
    buffer = d if old is None else options.momentum * old + d
    direction = d + options.momentum * buffer if options.nesterov else buffer
    return SGDState(p - options.lr * direction, buffer)
