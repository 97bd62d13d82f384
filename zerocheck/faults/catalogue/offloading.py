"""Faults that only offloaded, or compiled, cases show."""

from __future__ import annotations

from .fault import fault

OFFLOADING = [
    fault(
        "offloading:StaleHostGradient", "fsdp2", "update",
        "AdamW on the CPU does not wait for the gradient to be copied there",
        "comment in FSDP2's foreach_reduce", "gradient of the previous step",
        features=("offload", "several-steps"),
    ),
    fault(
        "offloading:CopiedBackBeforeUpdate", "fsdp2", "publish",
        "parameters are copied to the device before AdamW has updated them on the CPU",
        "seen in review", "parameters of the previous step", features=("offload", "several-steps"),
    ),
]  # fmt: skip

COMPILING = [
    fault(
        "compiling:CompiledLossTimesWorld", "fsdp2", "gradient",
        "the loss is multiplied by W where the model is compiled", "HF transformers #45994",
        "gradient x W", world=3, features=("compile",),
    ),
    fault(
        "compiling:CompiledUnreduced", "ddp", "gradient",
        "a compiled backward never reduces gradients", "seen in review", "local gradient only",
        world=3, features=("compile",), 
        without=("bucket-small", "static-graph", "block-batch-norm"),
    ),
]  # fmt: skip
