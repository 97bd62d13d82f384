"""Casts of FSDP and of DDP's hooks: which a model has, and the same in a model that is not wrapped.

FSDP2's units, and those of FSDP1, cast their parameters and the inputs of their calls to one dtype,
and reduce gradients in another one. The gradient of a microbatch is in the first, as the cast's
backward gives it, and is cast to the second before ranks are summed. FSDP1 casts buffers too, once
and for good, at its first forward. Hooks of DDP cast gradients alone: comm_hooks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._pytree import tree_map

from ...compat import casts, precision_policy
from ...contract.names import unwrapped
from .comm_hooks import reduced_by_hook
from .dtypes import dtype_of

UNITS = (FSDPModule, FullyShardedDataParallel)
WHY = "FSDP computes in another dtype than the parameters have"


class Casts(msgspec.Struct, frozen=True):
    """Casts of all units of a model.

    compute, reduce: names of dtypes, such as "torch.bfloat16"; units: names of the modules whose
    floating-point inputs are cast, as in the unwrapped model; buffers: dtype that floating-point
    buffers are cast to, or an empty text.
    """

    compute: str
    reduce: str
    units: tuple[str, ...]
    buffers: str = ""


def casts_of(model: nn.Module) -> tuple[Casts | None, str]:
    """Return the casts, None without any; and why they cannot be repeated, or an empty text."""
    if not casts(model):
        return _of_hooks(model)
    units, policies = [], []
    for path, module in model.named_modules():
        if not isinstance(module, UNITS):
            continue
        policy = precision_policy(module)
        names = ("param_dtype", "reduce_dtype", "buffer_dtype")  # FSDP2 has no third
        policies.append(tuple(getattr(policy, name, None) for name in names))
        if policy is None:
            continue
        if policy.cast_forward_inputs or getattr(policy, "cast_root_forward_inputs", False):
            units.append(unwrapped(f"{path}.").rstrip("."))
        if path and getattr(policy, "output_dtype", None) not in (None, policy.param_dtype):
            return None, f"{WHY}, and a unit inside casts what it returns"
        if getattr(policy, "keep_low_precision_grads", False):
            return None, f"{WHY}, and keeps gradients in it"
    own = {parameter.dtype for parameter in model.parameters()}
    if len({*policies}) > 1 or len(own) > 1:
        return None, f"{WHY}, in several ways"
    if not _wraps_all(model):
        return None, f"{WHY}, in a part of the model"
    (compute, reduce, buffers), (kept,) = policies[0], own
    if buffers and any(getattr(one, "_ignored_buffer_names", ()) for one in model.modules()):
        return None, f"{WHY}, and leaves out buffers of modules that it ignores"
    compute = compute or kept
    kinds = str(compute), str(reduce or compute)
    return Casts(*kinds, tuple(units), str(buffers or "")), ""


def _of_hooks(model: nn.Module) -> tuple[Casts | None, str]:
    reduce, why = reduced_by_hook(model)
    if not reduce:
        return None, why
    own = {parameter.dtype for parameter in model.parameters()}
    if len(own) > 1:
        return None, "a communication hook of DDP casts gradients of parameters of several dtypes"
    return Casts(str(*own), reduce, ()), ""


def _wraps_all(model: nn.Module) -> bool:
    """Return True if the outermost unit has all parameters of the model."""
    outermost = next(one for one in model.modules() if isinstance(one, UNITS))
    return len({*outermost.parameters()}) == len({*model.parameters()})


@contextmanager
def casting(
    model: nn.Module, made: Casts, bare: Callable[[str], str]
) -> Iterator[dict[str, torch.Tensor]]:
    """Cast the inputs of the units of an unwrapped model; gives its parameters, cast.

    bare: a module's name without wrappers that the reference does not have. Gradients of what is
    given go on to the parameters.
    """
    dtype = dtype_of(made.compute)

    def cast(tree: Any) -> Any:
        def one(leaf: Any) -> Any:
            floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if floating else leaf

        return tree_map(one, tree)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast(args), cast(kwargs)

    units = {bare(name) for name in made.units}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if bare(unwrapped(f"{name}.").rstrip(".")) in units:
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(handle.remove)
        yield {name: parameter.to(dtype) for name, parameter in model.named_parameters()}


@contextmanager
def casting_buffers(model: nn.Module, dtype: str) -> Iterator[None]:
    """Replace floating-point buffers by copies in a dtype within the context, "" for none."""
    if not dtype:
        yield
        return
    there = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]
    copies = {id(buffer): buffer.to(dtype_of(dtype), copy=True) for _, _, buffer in there}
    try:
        for module, name, buffer in there:
            module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in there:
            module._buffers[name] = buffer
