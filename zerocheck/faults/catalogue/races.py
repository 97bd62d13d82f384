"""Faults that show sometimes: their effect depends on timing."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

RACES = [
    fault(
        "races:BucketReused", "zero2", "gradient",
        "a bucket is filled again while it is still being reduced", "DS PR#5606",
        features=("delays", "microbatches", "bucket-small"), microbatches=3, sometimes=0.35,
    ),
    fault(
        "races:PingpongReset", "zero2", "gradient",
        "the index of a double buffer is reset while both are being sent", "DS PR#7805",
        features=("delays", "microbatches", "bucket-small"), microbatches=3, sometimes=0.33,
    ),
    fault(
        "races:PrefetchNotAwaited", "zero3", "loss",
        "a unit that was gathered ahead is not waited for", "DS PR#5606",
        bugs.UNINITIALISED_MEMORY, features=("delays",), sometimes=0.58,
    ),
]  # fmt: skip
