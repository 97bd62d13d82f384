"""torch only: a GradScaler unscales offloaded gradients by a number that has not arrived yet.

    python gradscaler_of_offloaded_gradients.py

Gradients on the CPU are unscaled while the GPU is busy, each time with another scale. What is
multiplied with them is whatever lay in the pinned memory into which the inverse scale is copied.
Exits 1 while the fault is there, and 0 when it is gone; 2 without a GPU.
"""

import os
import sys

import torch

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

BUSY_CYCLES = 10**9
TRIES = 10


def unscaled(scale: float) -> float:
    """A gradient of `scale`, unscaled by it: 1.0 if all is right."""
    scaler = torch.amp.GradScaler("cuda", init_scale=scale)
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(torch.ones((), device="cuda"))
    parameter.grad = torch.full((), scale)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    scaler.unscale_(optimizer)
    found = parameter.grad.item()
    torch.cuda.synchronize()
    return found


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("needs a GPU")
        sys.exit(2)
    found = [unscaled(2.0**number) for number in range(1, TRIES + 1)]
    wrong = sum(value != 1.0 for value in found)
    print(f"torch {torch.__version__}: {wrong} of {TRIES} gradients of 1 are wrong: {found}")
    sys.exit(1 if wrong else 0)
