"""One step of AdamW, written from the equations.

Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), Algorithm 2, with
the schedule multiplier eta_t inside the learning rate; AMSGrad after Reddi, Kale & Kumar, "On the
Convergence of Adam and Beyond" (arXiv 1904.09237), Algorithm 2. Where the papers leave a choice,
it is the documented one of torch.optim.AdamW: the decay is multiplied by the learning rate and
comes first, epsilon is added after the bias correction, the AMSGrad maximum is taken before it.

With g the gradient (negated to maximize), t the number of this step, counted from 1:

    p     <- p (1 - lr weight_decay)
    m     <- beta1 m + (1 - beta1) g
    v     <- beta2 v + (1 - beta2) g^2
    vmax  <- max(vmax, v)                                        (AMSGrad; else vmax stands for v)
    p     <- p - lr / (1 - beta1^t) * m / (sqrt(vmax) / sqrt(1 - beta2^t) + eps)

Without `decoupled` it is Adam, of Kingma & Ba, "Adam: A Method for Stochastic Optimization" (arXiv
1412.6980), with L2 regularization: the first line is g <- g + weight_decay p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._check import flag, real, whole
from .optimizer import OptimizerState


@dataclass(frozen=True, kw_only=True)
class AdamWOptions:
    """The scalars of AdamW, dimensionless, for one group of parameters.

    lr            learning rate, in [0, inf)
    beta1, beta2  decay of the first and second moment per step, in [0, 1)
    eps           added to the denominator, in [0, inf)
    weight_decay  decay, in [0, inf); decoupled it is multiplied by lr
    amsgrad       keep the maximum of the second moment and divide by its root
    maximize      ascend instead of descend
    decoupled     the decay shrinks the parameter; else it is added to the gradient, as in Adam

    Raises ValueError for a value outside of these, NaN included.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False
    decoupled: bool = True

    def __post_init__(self) -> None:
        real("lr", self.lr)
        real("beta1", self.beta1, high=1.0)
        real("beta2", self.beta2, high=1.0)
        real("eps", self.eps)
        real("weight_decay", self.weight_decay)
        flag("amsgrad", self.amsgrad)
        flag("maximize", self.maximize)
        flag("decoupled", self.decoupled)

    def initial(self, parameter: Tensor) -> AdamWState:
        """Return the state before the first step."""
        return initial_state(parameter, amsgrad=self.amsgrad)

    def check(self, state: OptimizerState) -> None:
        """Raise ValueError unless `state` is a sound one of AdamW and fits these options."""
        check_state(_of_adamw(state), amsgrad=self.amsgrad)

    def after(self, state: OptimizerState, gradient: Tensor) -> AdamWState:
        """Return the state after one step."""
        return adamw_step(_of_adamw(state), gradient, self)


def _of_adamw(state: OptimizerState) -> AdamWState:
    if not isinstance(state, AdamWState):
        raise ValueError(f"the state is {type(state).__name__} (allowed: AdamWState)")
    return state


class AdamWState(NamedTuple):
    """All that AdamW knows of one parameter, or of any number of them as one flat vector.

    parameter       p, after `step` steps
    exp_avg         m, moving average of the gradient
    exp_avg_sq      v, moving average of the squared gradient
    step            steps taken so far
    max_exp_avg_sq  vmax, with AMSGrad; otherwise None

    The tensors have one shape and one floating dtype.
    """

    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int
    max_exp_avg_sq: Tensor | None = None

    def copy(self) -> AdamWState:
        """Return a state that shares no memory with this one."""
        return AdamWState(
            self.parameter.detach().clone(),
            self.exp_avg.detach().clone(),
            self.exp_avg_sq.detach().clone(),
            self.step,
            None if self.max_exp_avg_sq is None else self.max_exp_avg_sq.detach().clone(),
        )


def initial_state(parameter: Tensor, *, amsgrad: bool = False) -> AdamWState:
    """The state before the first step: a copy of `parameter`, moments zero, step 0.

    `parameter` has any shape and a real floating dtype, which the moments share; ValueError
    otherwise.
    """
    flag("amsgrad", amsgrad)
    if not parameter.dtype.is_floating_point:
        raise ValueError(f"parameter is {parameter.dtype} (allowed: a real floating dtype)")
    copy = parameter.detach().clone()
    return AdamWState(
        parameter=copy,
        exp_avg=torch.zeros_like(copy),
        exp_avg_sq=torch.zeros_like(copy),
        step=0,
        max_exp_avg_sq=torch.zeros_like(copy) if amsgrad else None,
    )


def check_state(state: AdamWState, *, amsgrad: bool) -> None:
    """Raise ValueError unless `state` is sound and fits the option `amsgrad`."""
    whole("step", state.step)
    p = state.parameter
    if not p.dtype.is_floating_point:
        raise ValueError(f"parameter is {p.dtype} (allowed: a real floating dtype)")
    if amsgrad != (state.max_exp_avg_sq is not None):
        given = "None" if state.max_exp_avg_sq is None else "a tensor"
        raise ValueError(
            f"max_exp_avg_sq is {given} with amsgrad={amsgrad} "
            "(allowed: a tensor with amsgrad, None without)"
        )
    for role in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        tensor: Tensor | None = getattr(state, role)
        if tensor is not None and (tensor.shape != p.shape or tensor.dtype != p.dtype):
            raise ValueError(
                f"{role} is {tensor.dtype} of shape {tuple(tensor.shape)} "
                f"(allowed: as the parameter, {p.dtype} of shape {tuple(p.shape)})"
            )


def bias_correction(beta: float, step: int) -> float:
    """1 - beta**step, for beta in [0, 1) and step >= 1, to a few units of float64's round-off.

    The plain expression cancels when beta is close to 1: at beta = 1 - 1e-6 and step 1 it has lost
    six digits. expm1 of step log(beta) has not, as its argument is negative and its relative
    condition number there is below 1.
    """
    return 1.0 if beta == 0.0 else -math.expm1(step * math.log(beta))


@torch.no_grad()
def adamw_step(state: AdamWState, gradient: Tensor, options: AdamWOptions) -> AdamWState:
    """The state after one step from `state` with `gradient` (equations at the top of this file).

    `gradient` has the parameter's shape. It is converted to the dtype of the state, in which
    everything is computed: float32 to train, float64 to know the step exactly. Scalars are
    computed in float64. Every operation is elementwise, so a flat vector of a whole model is as
    good as one tensor. Nothing is changed in place and the result shares no memory with the
    arguments.

    ValueError for tensors that do not fit each other, a gradient of a wider dtype than the state
    (it would be rounded), a step that is no int >= 0, or a missing or needless max_exp_avg_sq.
    """
    check_state(state, amsgrad=options.amsgrad)
    p, m, v, vmax = state.parameter, state.exp_avg, state.exp_avg_sq, state.max_exp_avg_sq
    if gradient.shape != p.shape or torch.promote_types(gradient.dtype, p.dtype) != p.dtype:
        raise ValueError(
            f"gradient is {gradient.dtype} of shape {tuple(gradient.shape)} "
            f"(allowed: shape {tuple(p.shape)} and a dtype that {p.dtype} holds exactly)"
        )
    g = gradient.to(p.dtype)
    if options.maximize:
        g = -g
    t = state.step + 1
    step_size = options.lr / bias_correction(options.beta1, t)
    root_correction = math.sqrt(bias_correction(options.beta2, t))

    if options.decoupled:
        p = p * (1.0 - options.lr * options.weight_decay)
    else:
        g = g + options.weight_decay * p
    m = options.beta1 * m + (1.0 - options.beta1) * g
    v = options.beta2 * v + (1.0 - options.beta2) * (g * g)
    if vmax is not None:
        vmax = torch.maximum(vmax, v)
    denominator = (v if vmax is None else vmax).sqrt() / root_correction + options.eps
    # Product before quotient: the other way round, an underflow of the quotient is multiplied by
    # a step size that may be large.
    p = p - (step_size * m) / denominator
    return AdamWState(p, m, v, t, vmax)
