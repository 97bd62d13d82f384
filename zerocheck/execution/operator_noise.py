"""Round-off of every operator of a computation, moved at random, and what that changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from zerocheck_reference import unit_roundoff

from ..floating_point import NEXT

_EXACT = """
_to_copy _unsafe_view abs amax amin bernoulli cat clamp clamp_min clone col2im constant_pad_nd copy
embedding empty empty_like empty_strided fill flip full full_like gather im2col index index_select
lift_fresh_copy masked_fill max maximum min minimum neg new_empty new_full new_ones new_zeros ones
ones_like rand rand_like randn relu repeat roll scalar_tensor scatter select_backward select_scatter
sign slice_backward slice_scatter stack threshold_backward tril triu where zeros zeros_like
"""
EXACT = frozenset(f"aten::{name}" for name in _EXACT.split())
"""Operators that do not round."""
REPLICAS_EACH = 12
"""Runs from which the round-off of each element is estimated."""
MARGIN_EACH = 3.0
"""Factor on that estimate: see `judge/estimate.py`."""
_NORMS = ("aten::native_layer_norm_backward", "aten::native_group_norm_backward")


class CancellationNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that moves the backward of a normalization by round-off of the terms that it adds.

    The gradient of the input, with g the gradient of the output times the weight, is

        rstd * (g - mean(g) - x_hat * mean(g * x_hat))

    A kernel rounds each term, and together they may cancel: over a single element the result is 0,
    or a rounding of rstd * g, as the values and the order of operations have it. No movement of
    what goes in or comes out of the kernel shows that.
    """

    def __init__(self, replica: int) -> None:
        """Start the mode. replica: seed of the directions."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = torch.Generator().manual_seed(1_000 + replica)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _NORMS:
            named = dict(zip((one.name for one in func._schema.arguments), args, strict=False))
            if result[0] is not None:
                result[0].add_(self._noise(named, result[0]))
        return result

    def _noise(self, named: Any, result: torch.Tensor) -> torch.Tensor:
        grad, weight, rstd = named["grad_out"], named["weight"], named["rstd"]
        groups = named.get("group")
        if weight is not None:
            shape = weight.shape if groups is None else (1, -1, *[1] * (grad.dim() - 2))
            grad = grad * weight.reshape(shape)
        rows = grad.reshape(rstd.numel(), -1)  # of what has statistics of its own
        largest = (rows.abs().amax(1) * rstd.reshape(-1)).unsqueeze(1).expand_as(rows)
        unit = NEXT * unit_roundoff(result.dtype)
        noise = unit * largest.double().cpu() * self._signs(rows.shape)
        moved: torch.Tensor = noise.reshape(result.shape).to(result)
        return moved

    def _signs(self, shape: torch.Size) -> torch.Tensor:
        return torch.randint(0, 2, tuple(shape), generator=self._draw) * 2 - 1


class OperatorNoise(CancellationNoise):  # type: ignore[no-untyped-call]
    """Mode that moves each rounded result of an operator to a neighbouring number.

    Unlike what hooks on modules do, this reaches the operators between modules, and those of the
    backward. Results that share memory with an argument are left alone.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        schema = func._schema
        if schema.name in EXACT or any(one.alias_info is not None for one in schema.returns):
            return result
        return tree_map_only(torch.Tensor, self._moved, result)

    def _moved(self, result: torch.Tensor) -> torch.Tensor:
        if not result.is_floating_point():
            return result
        factor = 1 + NEXT * unit_roundoff(result.dtype) * self._signs(result.shape).double()
        return result.mul_(factor.to(result.dtype).to(result.device))


class PartedNoise(OperatorNoise):  # type: ignore[no-untyped-call]
    """Mode that moves products of matrices as those of sharded matrices are.

    Where the dimension that is summed over is sharded, each rank rounds its part of the sum, and
    the parts are added: one rounding of each part, next to that of the result.
    """

    def __init__(self, replica: int, *, parts: int = 1) -> None:
        """Start the mode. parts: of a sum, at most."""
        super().__init__(replica)
        self._parts = parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        first = _PRODUCTS.get(func._schema.name)
        if first is None or self._parts == 1:
            return result
        one, other = args[first : first + 2]
        unit = NEXT * unit_roundoff(result.dtype) * float(kwargs.get("alpha", 1))
        for here in torch.arange(one.shape[-1]).tensor_split(self._parts):
            part = one[..., here].double() @ other[..., here, :].double()
            result.add_((unit * part * self._signs(part.shape)).to(result.dtype))
        return result


_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Products of matrices, with the place of the first factor among their arguments."""


class StepNoise(PartedNoise):  # type: ignore[no-untyped-call]
    """Mode for a step of an optimizer: it moves what operators write in place too.

    An operator that adds a product rounds the product by itself where its loop is not vectorized,
    or is without fused multiply-add; the sum may cancel, so that its own round-off does not show
    that. So it is moved by round-off of the product as well. A 0-d tensor counts steps.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removesuffix("_")
        product = _product(name, args, kwargs)  # before an argument is written to
        result = func(*args, **kwargs)
        if name in EXACT or not isinstance(result, torch.Tensor) or not result.dim():
            return result
        if any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns):
            return result  # a view, of memory that may be an input of the step
        moved = self._moved(result)
        if product is not None and moved.is_floating_point():
            unit = NEXT * unit_roundoff(moved.dtype)
            moved.add_((unit * product * self._signs(moved.shape)).to(moved.dtype))
        return moved


def _product(name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the largest product that an operator rounds before it adds it, |.| in float64."""
    if name in ("aten::add", "aten::sub") and isinstance(args[1], torch.Tensor):
        added: torch.Tensor = args[1].double() * float(kwargs.get("alpha", 1))
        return added.abs()
    if name == "aten::lerp":
        start, end, weight = (one.double() if torch.is_tensor(one) else one for one in args[:3])
        found: torch.Tensor = (weight * (end - start)).abs()
        return found
    if name in ("aten::addcmul", "aten::addcdiv"):
        one, other = (tensor.double() for tensor in args[1:3])
        made: torch.Tensor = one * other if name == "aten::addcmul" else one / other
        return 2 * (float(kwargs.get("value", 1)) * made).abs()
    return None


def round_off(
    make: Callable[[], torch.Tensor],
    exact: torch.Tensor,
    mode: Callable[..., CancellationNoise] = OperatorNoise,
    pools: Sequence[int] = (),
) -> torch.Tensor:
    """Estimate how far each element of `make()` is from `exact` by round-off, float64.

    exact: what `make` returns without noise. From REPLICAS_EACH runs in which the result of every
    operator is moved to a neighbouring number, times MARGIN_EACH; at least the distance to a
    neighbouring number. mode: what moves them, of the number of a run.

    pools: sizes of the tensors that a flat `exact` consists of, where each of their elements is
    computed from all of a tensor. Many roundings add up in each, about alike, so that the estimate
    of an element is not less than the median of its tensor: of thousands of elements some move
    little in all of REPLICAS_EACH runs by chance (normally distributed, less than a third of a
    standard deviation with a chance of 0.26^12 = 1e-7 each), and right code was called wrong.
    """
    exact = exact.double()
    largest = NEXT * unit_roundoff(make().dtype) * exact.abs()
    for replica in range(REPLICAS_EACH):
        with mode(replica):
            moved = make()
        torch.maximum(largest, (moved.double() - exact).abs(), out=largest)
    for one in torch.split(largest, list(pools)) if pools else ():
        if one.numel():
            one.clamp_(min=float(one.median()))
    return MARGIN_EACH * largest
