"""torch's fused SGD with momentum fails on a parameter whose gradient comes late. torch only."""

import os
import sys

import torch

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

print("torch", torch.__version__)
first, late = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
optimizer = torch.optim.SGD([first, late], lr=0.1, momentum=0.9, fused=True)
first.grad = torch.ones(4)
optimizer.step()
late.grad = torch.ones(4)  # it was frozen, or not used in the first step
try:
    optimizer.step()
except TypeError as error:
    print(f"second step: TypeError: {error}")
    sys.exit(1)
print("second step: done")
