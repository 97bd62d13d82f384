"""torch's fused AdamW on the CPU mixes up elements of a gradient with other strides. torch only."""

import os
import sys

import torch

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))


def step(fused: bool) -> torch.Tensor:
    """exp_avg after one step, of a transposed parameter whose gradient is contiguous."""
    parameter = torch.nn.Parameter(torch.ones(3, 2).t())
    parameter.grad = torch.arange(6.0).view(2, 3)
    optimizer = torch.optim.AdamW([parameter], fused=fused, foreach=False)
    optimizer.step()
    exp_avg: torch.Tensor = optimizer.state[parameter]["exp_avg"]
    return exp_avg


expected, got = step(fused=False), step(fused=True)
print("torch", torch.__version__)
print("exp_avg, for-loop:", [[round(x, 3) for x in row] for row in expected.tolist()])
print("exp_avg, fused:   ", [[round(x, 3) for x in row] for row in got.tolist()])
sys.exit(0 if torch.allclose(expected, got) else 1)
