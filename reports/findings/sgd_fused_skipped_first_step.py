"""torch's fused SGD keeps uninitialised momentum where its first step is skipped. torch only."""

import os
import sys

import torch

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))
# Memory that is not initialised holds NaN, so that it is seen.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True

parameter = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for factor in (float("inf"), 1.0):  # the first step overflows, and is skipped
    optimizer.zero_grad()
    scaler.scale((parameter * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
print("torch", torch.__version__)
print("parameter after a skipped step and one with a gradient of 1:", parameter.tolist())
sys.exit(0 if torch.equal(parameter.detach(), torch.full((4,), 0.9)) else 1)
