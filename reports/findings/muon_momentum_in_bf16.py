"""torch's Muon divides a momentum buffer in bf16 by its norm. torch only."""

import os
import sys

import torch

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))


def norm_of_the_buffer(dtype: torch.dtype) -> float:
    """Norm of the momentum buffer after one step: that of the gradient, times 1 - momentum."""
    gradient = torch.linspace(-1.0, 1.0, 6 * 25, dtype=torch.float32).view(6, 25)
    parameter = torch.nn.Parameter(torch.zeros(6, 25, dtype=dtype))
    parameter.grad = gradient.to(dtype)
    optimizer = torch.optim.Muon([parameter], nesterov=False)
    optimizer.step()
    return float(optimizer.state[parameter]["momentum_buffer"].float().norm())


wide, narrow = norm_of_the_buffer(torch.float32), norm_of_the_buffer(torch.bfloat16)
print("torch", torch.__version__)
print("norm of the buffer in fp32:", round(wide, 3))
print("norm of the buffer in bf16:", round(narrow, 3))
sys.exit(0 if abs(wide - narrow) < 0.01 else 1)
