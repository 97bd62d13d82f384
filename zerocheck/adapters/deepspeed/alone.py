"""DeepSpeed as one rank without the others, for a simulation of memory: nobody sends it data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from ...case.option_set import OptionValue
from ...case.schema import Precision
from ..shared.simulation import SimulationTraits
from . import config
from .library import on_device
from .options import stored_as

BUCKET = 500_000_000
"""Elements of `reduce_bucket_size` and `allgather_bucket_size` where a config is silent."""

BF16 = Precision(compute="bf16", reduce="bf16")
"""Precision of `"bf16": {"enabled": true}` alone: gradients are summed and reduced in bf16."""

_APPLY: Any = nn.Module._apply

_ANSWERS: dict[str, Callable[[Any], Any]] = {
    "assert_ints_same_as_other_ranks": lambda ints: None,
    "is_invalid_grad_norm": lambda norm: False,
}
"""Functions that read what other ranks sent, and what they return without them."""

_ON_DEVICE: dict[str, Callable[..., Any]] = {
    "mask_nan_or_inf_with_val_inplace": lambda norm, device=None, val=-1.0: None
}
"""Functions that copy a number from the host, which a device without data cannot."""


def traits(
    options: Mapping[str, OptionValue] | None = None, *, offload: bool = True
) -> SimulationTraits:
    """Return the traits of a stage.

    options: those whose default in DeepSpeed is not ours; offload: it offloads what it shards.
    """
    return SimulationTraits(
        mixed=BF16,
        masters=True,
        bucket=BUCKET,
        whole_bucket=True,
        options=stored_as(dict(options or {})),
        offload=offload,
        alone=alone,
    )


@contextmanager
def alone(device: str) -> Iterator[None]:
    """Let engines work where collectives move nothing, on tensors with or without data.

    device: its type; another one than the CPU has no data.

    Linear layers are those of DeepSpeed's default. Gradients count as finite, whatever lies in
    their memory, or no step would be taken. Conversions of a model (`to`, `bfloat16`) set `.data`,
    as they do with data; torch swaps tensors that have none, and refuses where something refers to
    them.
    """
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.fp16 import unfused_optimizer
    from deepspeed.runtime.zero import (
        partition_parameters,
        partitioned_param_coordinator,
        stage3,
        stage_1_and_2,
    )

    zero = partition_parameters, partitioned_param_coordinator, stage_1_and_2, stage3
    answers = _ANSWERS if device == "cpu" else {**_ANSWERS, **_ON_DEVICE}
    replaced = [
        (module, name, answer)
        for module in (bf16_optimizer, unfused_optimizer, *zero)
        for name, answer in answers.items()
        if hasattr(module, name)  # of the release
    ]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)  # of the names of torch's collectives
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _converted))
        if device != "cpu":
            stack.enter_context(on_device(device))
        stack.enter_context(mock.patch.object(config, "memory_efficient_linear", True))
        # Which replaces it, and leaves it so.
        stack.enter_context(mock.patch.object(functional, "linear", functional.linear))
        for module, name, answer in replaced:
            stack.enter_context(mock.patch.object(module, name, answer))
        for kind in (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
            finite = _finite(kind.has_overflow)
            stack.enter_context(mock.patch.object(kind, "has_overflow", finite))
        yield


def _finite(look: Callable[..., bool]) -> Callable[..., bool]:
    """Return a check for overflows that looks, and finds none."""

    def checked(*given: Any, **more: Any) -> bool:
        look(*given, **more)
        return False

    return checked


def _converted(
    module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    if any(one.device.type == "meta" for one in module.parameters()):  # it gets memory
        return _APPLY(module, convert, recurse)  # type: ignore[no-any-return]
    for child in module.children() if recurse else ():
        _converted(child, convert)
    for parameter in module.parameters(recurse=False):
        parameter.data = convert(parameter.data)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = convert(buffer)
    return module
