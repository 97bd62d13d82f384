"""Communication hooks of DDP: the dtype in which one reduces, or why its gradient is not judged.

Hooks that torch brings with it compress on purpose. Those that halve the width are judged with the
roundings of that dtype; what others give is an approximation. A hook of the user's own has to give
the mean, like no hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .forwards import closure

OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."
NARROW = {
    "fp16_compress_hook": "torch.float16",
    "bf16_compress_hook": "torch.bfloat16",
    "fp16_compress_wrapper_hook": "torch.float16",
    "bf16_compress_wrapper_hook": "torch.bfloat16",
}
"""Hooks that reduce in another dtype, and those around a hook that does the rest."""

GIVES_THE_MEAN = ("allreduce_hook", "noop_hook")
"""Hooks that approximate nothing. noop_hook reduces nothing either, which is found."""


def reduced_by_hook(model: nn.Module) -> tuple[str, str]:
    """Return the dtype that hooks of DDP reduce in, and why there is none to judge; "" for none."""
    narrow = ""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            for hook, _ in getattr(module, "_comm_hooks", ()):
                for name in _names(hook):
                    if name not in (*NARROW, *GIVES_THE_MEAN):
                        words = f"{name}, a communication hook of DDP, approximates the gradient"
                        return "", words
                    narrow = narrow or NARROW.get(name, "")
    return narrow, ""


def _names(hook: Any) -> Iterator[str]:
    """Yield the name of a hook of torch, and of those that it is around."""
    if getattr(hook, "__module__", "").startswith(OF_TORCH):
        yield getattr(hook, "__name__", "")
        for inner in closure(hook):
            yield from _names(inner)
