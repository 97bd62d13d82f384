"""The gradient of a global batch: local passes of every rank and microbatch, and their average."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ._check import one_of, real
from .precision import round_to

Average = Literal["mean", "sum"]
Divide = Literal["loss", "gradient"]
Unused = Literal["skip", "zero"]


class LocalPass(NamedTuple):
    """One forward and backward of one rank on one microbatch.

    loss       0-d, detached, as the loss function returned it: not divided
    gradients  by the name in `model.named_parameters()` (a tied alias is not repeated), for every
               parameter that requires a gradient; None where it took no part in the loss
    """

    loss: Tensor
    gradients: dict[str, Tensor | None]


def local_pass(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    loss_weight: float = 1.0,
    loss_divisor: float = 1.0,
    loss_scale: float = 1.0,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> LocalPass:
    """Run `loss(model)`, multiply by its weight, divide, scale, go backward, harvest.

    What is 1 is left out. The gradients are those of the scaled loss: whoever scales it divides
    them by the scale.

    Just the operations of a training loop, in its order, so that the bits are those of a rank that
    runs the same (thread count and alignment of the parameters being equal). Gradients that the
    model held before are dropped, and none are left on it, whether this succeeds or not.

    parameters: `dict(model.named_parameters())`, for a caller that has it already: to collect them
    takes longer than the forward of a small model.

    `loss` returns a 0-d tensor that requires a gradient. ValueError otherwise, for a weight,
    divisor or scale outside (0, inf), or for a sparse gradient, which AdamW does not define.
    """
    real("loss_weight", loss_weight, low_open=True)
    real("loss_divisor", loss_divisor, low_open=True)
    real("loss_scale", loss_scale, low_open=True)
    named = dict(model.named_parameters()) if parameters is None else parameters
    _drop_gradients(named)
    try:
        with torch.enable_grad():
            value = loss(model)
            _check_loss(value)
            undivided = value.detach().clone()
            if loss_weight != 1.0:
                value = value * loss_weight
            if loss_divisor != 1.0:
                value = value / loss_divisor
            if loss_scale != 1.0:
                value = value * loss_scale
            value.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: parameter.grad for name, parameter in named.items() if parameter.requires_grad
        }
    finally:
        _drop_gradients(named)
    for name, gradient in gradients.items():
        if gradient is not None and gradient.layout != torch.strided:
            raise ValueError(f"the gradient of {name!r} is {gradient.layout} (allowed: dense)")
    return LocalPass(undivided, gradients)


def _drop_gradients(named: Mapping[str, nn.Parameter]) -> None:
    for parameter in named.values():
        parameter.grad = None


def _check_loss(value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"the loss is a {type(value).__name__} (allowed: a 0-d tensor)")
    if value.dim() != 0:
        raise ValueError(f"the loss has shape {tuple(value.shape)} (allowed: a 0-d tensor)")
    if not value.requires_grad:
        raise ValueError("the loss depends on no parameter that requires a gradient")


@torch.no_grad()
def average(
    passes: Sequence[Sequence[LocalPass]],
    *,
    average: Average = "mean",
    divide: Divide = "loss",
    unused: Unused = "skip",
    dtype: torch.dtype | None = None,
    like: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor | None]:
    """The reduced gradient by parameter name, from `passes` as [rank][microbatch].

    The gradients g_rm of N ranks with M microbatches are summed in float64, in the order of
    `passes`, divided once, and rounded once to `dtype` (default: their own):

        sum_rm g_rm / (N if average == "mean" else 1) / (M if divide == "gradient" else 1)

    With divide == "loss" the passes ran with `loss_divisor=M`, so 1/M is in them already. A None in
    some passes counts as zero. A parameter with None in all of them gives None for unused ==
    "skip" and zeros for "zero"; these have the shape, device and (if `dtype` is None) dtype of
    `like[name]`, which is needed only then.

    ValueError if ranks differ in their number of microbatches, passes in their names, gradients in
    their shape, for no passes at all, an unknown word, or a `like` that is missing.
    """
    one_of("average", average, ("mean", "sum"))
    one_of("divide", divide, ("loss", "gradient"))
    one_of("unused", unused, ("skip", "zero"))
    microbatches = check_rectangle("passes", passes)
    count = len(passes) if average == "mean" else 1
    count *= microbatches if divide == "gradient" else 1

    flat = [single for rank in passes for single in rank]
    names = flat[0].gradients.keys()
    for single in flat:
        if single.gradients.keys() != names:
            odd = sorted(single.gradients.keys() ^ names)
            raise ValueError(f"{', '.join(odd)}: in some passes only (allowed: in all or in none)")

    reduced: dict[str, Tensor | None] = {}
    for name in names:
        terms = [g for single in flat if (g := single.gradients[name]) is not None]
        if terms:
            reduced[name] = _mean(name, terms, count, dtype)
        elif unused == "skip":
            reduced[name] = None
        elif like is None or name not in like:
            raise ValueError(f"like has no {name!r}, whose shape no pass tells (needed for zeros)")
        else:
            reduced[name] = torch.zeros_like(like[name], dtype=dtype)
    return reduced


def check_rectangle(what: str, rows: Sequence[Sequence[object]]) -> int:
    """The number of microbatches, if every rank has the same one, at least 1; else ValueError."""
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1 or lengths[0] == 0:
        raise ValueError(
            f"{what} has {len(rows)} ranks with {lengths} microbatches "
            "(allowed: one rank or more, the same number of microbatches on each, at least 1)"
        )
    return lengths[0]


def _mean(name: str, terms: Sequence[Tensor], count: int, dtype: torch.dtype | None) -> Tensor:
    total = terms[0].double()
    for term in terms[1:]:
        if term.shape != total.shape:
            raise ValueError(
                f"the gradient of {name!r} has the shapes {tuple(total.shape)} and "
                f"{tuple(term.shape)} (allowed: one)"
            )
        total = total + term.double()
    return round_to(total / count, terms[0].dtype if dtype is None else dtype)
