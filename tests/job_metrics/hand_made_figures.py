"""Figures of a job in which nothing is wrong, made by hand."""

from __future__ import annotations

from zerocheck.job_metrics.records import CollectiveFigures, ModelSize, RankMemory, TimedStep

MIB = 1 << 20
SIZE = ModelSize(layers=10, tensors=20, gathered=100 * MIB, largest=8 * MIB, sharded=True)
MEMORY = RankMemory(parameters=25 * MIB, gradients=25 * MIB, states=50 * MIB, activations=90 * MIB)
STEP = TimedStep(
    step=5,
    seconds=1.0,
    forward=0.3,
    update=0.2,
    copied=0.0,
    waited=0.2,
    link=0.15,
    overlap=0.5,
    idle=(0.05, 0.0, 0.1, 0.05),
    collectives=(
        CollectiveFigures(
            kind="all_gather", calls=11, bytes=16 * MIB, largest=16 * MIB, waited=0.1
        ),
        CollectiveFigures(
            kind="reduce_scatter", calls=6, bytes=16 * MIB, largest=16 * MIB, waited=0.1
        ),
    ),
    tokens=0,
    tokens_per_second=None,
    microbatches=1,
    memory=(MEMORY,) * 4,
)
