"""Communication hooks of DDP: the dtype in which one reduces, or why its gradient is not judged.

Hooks that torch brings with it compress on purpose. Those that halve the width are judged with the
roundings of that dtype; what others give is an approximation. A hook of the user's own has to give
the mean, like no hook.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."
NARROW = {"fp16_compress_hook": "torch.float16", "bf16_compress_hook": "torch.bfloat16"}
GIVES_THE_MEAN = ("allreduce_hook", "noop_hook")
"""Hooks that approximate nothing. noop_hook reduces nothing either, which is found."""


def reduced_by_hook(model: nn.Module) -> tuple[str, str]:
    """Return the dtype that hooks of DDP reduce in, and why there is none to judge; "" for none."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            for hook, _ in getattr(module, "_comm_hooks", ()):
                name = getattr(hook, "__name__", "")
                if not getattr(hook, "__module__", "").startswith(OF_TORCH):
                    continue
                if name in NARROW:
                    return NARROW[name], ""
                if name not in GIVES_THE_MEAN:
                    return "", f"{name}, a communication hook of DDP, approximates the gradient"
    return "", ""
