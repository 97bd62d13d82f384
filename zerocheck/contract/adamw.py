"""Test that an optimizer is AdamW, run alone on one whole tensor before any case."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, cast
from unittest import mock

import torch

from ..errors import UsageError
from ..optimizers import STATES

SHAPE = (64, 128)
"""Shape of the tensor that is tried: large enough for libraries that quantize larger states
only."""
STEPS = 3
LR = 2.0**-6
OPTIONS: Mapping[str, Any] = {
    "lr": LR,
    "betas": (0.875, 0.9375),
    "eps": 2.0**-20,
    "weight_decay": 2.0**-3,
}
"""Options of the optimizer that is tried, as far as it takes them. All are exact in fp32."""
CLOSE = 2.0**-10
"""Largest error of an update, relative to AdamW's. Round-off gives less than 2^-18: a few units
of 2^-24 of the update, and half an ulp of a parameter below 1/4 (2^-27) against a step of LR. Other
optimizers, and AdamW with another term, are off by a tenth or more. It sorts; it is no verdict."""

OTHERS = "until other optimizers are supported, zerocheck judges AdamW"


def template_of(optimizer: torch.optim.Optimizer, keys: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the state that the optimizer makes of one parameter.

    None for AdamW and Adam of torch, whose state is known, and for a class that cannot be made from
    its own defaults.

    keys: as in `States`. Adam is accepted: L2 in place of decoupled decay is a cause that the judge
    names. Raises UsageError for an optimizer that is not AdamW.
    """
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass of it
        return None
    name = kind.__name__
    if f"{kind.__module__}.".startswith("torch.optim."):
        raise UsageError(f"Built.optimizer is {name}; {OTHERS}")
    tried = _tried(cast(Any, kind), frozenset(optimizer.defaults))
    if tried is None:
        return None
    state, off, compiled = tried
    check_state(state, name, keys)
    if compiled:
        raise UsageError(
            f"Built.optimizer is {name}, whose step calls torch.compile: how its kernels round is "
            f"up to Inductor, so that there is no bound to judge it by; {OTHERS} that is not "
            "compiled"
        )
    if off > CLOSE:
        raise UsageError(
            f"Built.optimizer is {name}, which is not AdamW: alone, on one tensor, its update "
            f"after {STEPS} steps is off by {100 * off:.2g}% of AdamW's; {OTHERS}"
        )
    return dict(state)


def check_state(state: Mapping[str, Any], name: str, keys: Mapping[str, str]) -> None:
    """Raise UsageError for a state of an optimizer `name` that is not AdamW's, or not in fp32."""
    wanted = [keys.get(role, role) for role in STATES[:2]]
    missing = [key for key in wanted if not isinstance(state.get(key), torch.Tensor)]
    if missing:
        held = ", ".join(map(repr, state)) or "nothing"
        raise UsageError(
            f"Built.optimizer is {name}, whose state has {held}, and no {' or '.join(missing)}; "
            f"{OTHERS}. If it is AdamW by other names, say which: "
            'Built(..., roles={"exp_avg": ..., "exp_avg_sq": ..., "step": ...})'
        )
    for key in wanted:
        tensor = state[key]
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.dtype not in (torch.float32, torch.bfloat16):
            what = f"of dtype {tensor.dtype}" if plain else f"a {type(tensor).__name__}"
            raise UsageError(
                f"Built.optimizer is {name}, whose {key} is {what}: quantized states are not "
                f"supported; {OTHERS} with states in torch.float32 or torch.bfloat16"
            )


@cache
def _tried(
    kind: type[torch.optim.Optimizer], defaults: frozenset[str]
) -> tuple[dict[str, Any], float, bool] | None:
    """Try a few steps: (state, largest error of an update, True if it called torch.compile).

    The error is relative to AdamW's update. None if the class cannot be made or fails alone.

    defaults: names of the options of a group.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.empty(SHAPE).uniform_(-0.25, 0.25, generator=generator)
    gradients = [torch.empty(SHAPE).normal_(generator=generator) for _ in range(STEPS)]
    parameter = torch.nn.Parameter(start.clone())
    known = inspect.signature(kind).parameters
    options = {name: OPTIONS[name] for name in OPTIONS if name in known and name in defaults}
    compiled: list[object] = []
    with torch.enable_grad(), mock.patch.object(torch, "compile", partial(_uncompiled, compiled)):
        try:
            optimizer = kind([parameter], **options)
            training = getattr(optimizer, "train", None)
            if callable(training):  # as schedule-free ones want it
                training()
            for gradient in gradients:
                parameter.grad = gradient.clone()
                optimizer.step()
            state = dict(optimizer.state[parameter])
            group = {**dict.fromkeys(OPTIONS), **optimizer.param_groups[0]}
        except Exception:
            return None
    return state, _off(start, gradients, parameter.detach(), group), bool(compiled)


def _uncompiled(asked: list[object], function: Any = None, **options: Any) -> Any:
    """Stand-in for torch.compile that records a call, and compiles nothing."""
    asked.append(function)
    return (lambda given: given) if function is None else function


def _off(
    start: torch.Tensor,
    gradients: list[torch.Tensor],
    after: torch.Tensor,
    group: Mapping[str, Any],
) -> float:
    """Largest error of the path from `start` to `after`, relative to the longest of AdamW.

    Infinite where an option of that name is something else than AdamW's.
    """
    try:
        (beta1, beta2), eps = group["betas"] or (0.9, 0.999), float(group["eps"] or 0.0)
        lr, decay = float(group["lr"]), float(group["weight_decay"] or 0.0)
    except (TypeError, ValueError):
        return math.inf
    p = start.double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step, gradient in enumerate(gradients, 1):
        g = gradient.double()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        root = (v / (1 - beta2**step)).sqrt() + eps
        p = p * (1 - lr * decay) - lr / (1 - beta1**step) * m / root
    way = (p - start).abs().max()
    return float((after.double() - p).abs().max() / way)
