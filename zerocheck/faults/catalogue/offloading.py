"""Faults that only offloaded, or compiled, cases show."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

OFFLOADING = [
    fault(
        "offloading:StaleHostGradient", "fsdp2", "update",
        "AdamW on the CPU does not wait for the gradient to be copied there",
        "comment in FSDP2's foreach_reduce", bugs.GRADIENT_OF_THE_PREVIOUS_STEP,
        features=("offload", "several-steps"),
    ),
    fault(
        "offloading:CopiedBackBeforeUpdate", "fsdp2", "publish",
        "parameters are copied to the device before AdamW has updated them on the CPU",
        "seen in review", bugs.PARAMETERS_OF_THE_PREVIOUS_STEP,
        features=("offload", "several-steps"),
    ),
]  # fmt: skip

COMPILING = [
    fault(
        "compiling:CompiledLossTimesWorld", "fsdp2", "gradient",
        "the loss is multiplied by W where the model is compiled", "HF transformers #45994",
        bugs.GRADIENT_TIMES_W, world=3, features=("compile",),
    ),
    fault(
        "compiling:CompiledUnreduced", "ddp", "gradient",
        "a compiled backward never reduces gradients", "seen in review", bugs.LOCAL_GRADIENT_ONLY,
        world=3, features=("compile",), 
        without=("bucket-small", "static-graph", "block-batch-norm"),
    ),
]  # fmt: skip
