"""Faults in DeepSpeed's engine; they need its extra."""

from __future__ import annotations

from ... import causes as bugs
from .fault import FORWARD, fault

DEEPSPEED = [
    fault(
        "deepspeed:EngineDividesByNothing", "deepspeed1", "gradient",
        "the sum over ranks is not divided", "PT #162338", bugs.GRADIENT_TIMES_W, world=3,
    ),
    fault(
        "deepspeed:EnginePartitionOffByOne", "deepspeed1", "gradient",
        "the gradient of a partition begins one element too far", "DS PR#848, #851", bugs.SHIFTED,
        world=3,
    ),
    fault(
        "deepspeed:EngineGathersStale", "deepspeed2", "publish",
        "the updated partitions are not sent", "DS PR#7707; MG #3140",
        bugs.COPIES_OF_THE_PREVIOUS_STEP,
        spares=("ownership", "loss", "gradient"), world=2,
    ),
    fault(
        "deepspeed:EngineKeepsLastMicrobatch", "deepspeed3", "gradient",
        "each microbatch overwrites the gradient of those before it", "DS #7718",
        bugs.LAST_MICROBATCH_ONLY, spares=tuple(set(FORWARD) - {"gradient"}), world=3,
        microbatches=3,
    ),
    fault(
        "deepspeed:EngineForgetsMoments", "deepspeed2", "roundtrip",
        "a resumed training begins with new moments", "DS #2101", bugs.OPTIMIZER_STATE_LOST,
        features=("resume",),
    ),
    fault(
        "deepspeed:EngineExportsMoment", "deepspeed3", "export",
        "whoever asks for exp_avg is given exp_avg_sq", "none known", bugs.MOMENTS_SWAPPED,
        features=("resume",),
    ),
    fault(
        "deepspeed:EngineForgetsMasters", "deepspeed2", "roundtrip",
        "fp32 masters are made from parameters of bf16 on a load", "none known",
        bugs.ROUNDED_TO_BF16, features=("resume", "compute-bf16"),
    ),
    fault(
        "deepspeed:EngineKeepsCopy", "deepspeed3", "publish",
        "the parameters in bf16 are not made anew from their masters", "DS PR#4141",
        bugs.COPIES_OF_THE_PREVIOUS_STEP, features=("compute-bf16",),
    ),
    fault(
        "deepspeed:EngineSumsInBf16", "deepspeed1", "gradient",
        "microbatches are summed in bf16 though fp32 was asked for", "none known",
        bugs.ACCUMULATED_IN(format="bf16"), features=("compute-bf16", "reduce-wide"),
        microbatches=3,
    ),
]  # fmt: skip
