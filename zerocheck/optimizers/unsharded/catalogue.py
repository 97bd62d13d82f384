"""Optimizers of torch that are their own reference, with their states and options.

LBFGS is not there, which calls the model several times a step, and SparseAdam, which takes sparse
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ...case.schema import Group, Optimizer
from ..specification import OptionFields, StateRole
from ..state_shape import COLUMNS, ROWS, WHOLE, StateShape
from .optimizer import Unsharded

_OF_ADAM = OptionFields(("lr", "beta1", "beta2", "eps", "weight_decay"), ("maximize",))
_BY_BETA2 = OptionFields(("lr", "beta2", "eps", "weight_decay"), ("maximize",))


def _of_adam(group: Group, options: Optimizer) -> dict[str, Any]:
    return {
        "betas": (group.beta1, group.beta2),
        "eps": group.eps,
        "weight_decay": group.weight_decay,
    }


def _of_adadelta(group: Group, options: Optimizer) -> dict[str, Any]:
    return {"rho": group.beta2, "eps": group.eps, "weight_decay": group.weight_decay}


def _of_rprop(group: Group, options: Optimizer) -> dict[str, Any]:
    return {}


def _of_asgd(group: Group, options: Optimizer) -> dict[str, Any]:
    return {"weight_decay": group.weight_decay}


def _of_adafactor(group: Group, options: Optimizer) -> dict[str, Any]:
    """Return its options. Without an eps torch takes that of the first parameter's dtype."""
    return {"eps": (group.eps, 1e-3), "weight_decay": group.weight_decay}


_FACTORS: Mapping[StateRole, StateShape] = {"row_var": ROWS, "col_var": COLUMNS}


def _shape_of_adafactor(role: StateRole, dims: int) -> StateShape | None:
    """Return the shape of a mean of squares: a matrix has those of its rows and of its columns."""
    if dims > 1:
        return _FACTORS.get(role)
    return WHOLE if role == "variance" else None


@lru_cache(maxsize=64)
def _product_of_momenta(beta1: float, decay: float, count: int) -> float:
    """Return the product of NAdam's momenta, rounded to fp32 after each step as torch does."""
    product = torch.tensor(1.0)
    for number in range(1, count + 1):
        product *= beta1 * (1.0 - 0.5 * 0.96 ** (number * decay))
        if product == 0:
            break
    return float(product)


def _of_nadam_in_all(group: Mapping[str, Any], count: int) -> dict[str, torch.Tensor]:
    decay = group.get("momentum_decay", 4e-3)
    return {"mu_product": torch.tensor(_product_of_momenta(group["betas"][0], decay, count))}


def _of_asgd_in_all(group: Mapping[str, Any], count: int) -> dict[str, torch.Tensor]:
    """Return eta and mu after some steps with one learning rate, as torch computes them."""
    if not count:
        return {"eta": torch.tensor(group["lr"]), "mu": torch.tensor(1.0)}
    lr, lambd = group["lr"], group.get("lambd", 1e-4)
    eta = lr / ((1 + lambd * lr * count) ** group.get("alpha", 0.75))
    mu = 1 / max(1, count - group.get("t0", 1e6))
    return {"eta": torch.tensor(eta), "mu": torch.tensor(mu)}


_MEANS: tuple[StateRole, ...] = ("exp_avg", "exp_avg_sq")

UNSHARDED: tuple[Unsharded, ...] = (
    Unsharded(
        "nadam",
        torch.optim.NAdam,
        _MEANS,
        _OF_ADAM,
        _of_adam,
        scalar_states=_of_nadam_in_all,
        scalar_names=("mu_product",),
    ),
    Unsharded("radam", torch.optim.RAdam, _MEANS, _OF_ADAM, _of_adam),
    Unsharded("adamax", torch.optim.Adamax, ("exp_avg", "exp_inf"), _OF_ADAM, _of_adam),
    Unsharded(
        "adadelta", torch.optim.Adadelta, ("square_avg", "acc_delta"), _BY_BETA2, _of_adadelta
    ),
    Unsharded(
        "rprop",
        torch.optim.Rprop,
        ("prev", "step_size"),
        OptionFields(("lr",), ("maximize",)),
        _of_rprop,
    ),
    Unsharded(
        "asgd",
        torch.optim.ASGD,
        ("ax",),
        OptionFields(("lr", "weight_decay"), ("maximize",)),
        _of_asgd,
        scalar_states=_of_asgd_in_all,
        scalar_names=("eta", "mu"),
    ),
    Unsharded(
        "adafactor",
        torch.optim.Adafactor,
        (*_FACTORS, "variance"),
        OptionFields(("lr", "eps", "weight_decay"), ("maximize",)),
        _of_adafactor,
        state_shape=_shape_of_adafactor,
    ),
)
"""All of them, by their kind in cases."""
