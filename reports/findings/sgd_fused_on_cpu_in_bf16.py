"""torch's fused SGD on the CPU does not update parameters in bf16 or fp16. torch only."""

import os
import sys

import torch

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))


def moved(fused: bool) -> int:
    """How many of 40 elements differ after one step with a gradient of ones."""
    parameter = torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, fused=fused, foreach=False).step()
    return int((parameter.detach() != 1.0).sum())


expected, got = moved(fused=False), moved(fused=True)
print("torch", torch.__version__)
print("elements that moved, for-loop:", expected)
print("elements that moved, fused:   ", got)
sys.exit(0 if got == expected else 1)
