"""Faults that only offloaded cases show."""

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
