"""Points on curves of peak memory, for the page of `zerocheck memory --peaks`."""

from __future__ import annotations

from dataclasses import dataclass

from ...case.schema import Block, Case, Data, Model, Training
from ...protocol.layout import Term

BLOCKS = 4
SMALL, LARGE = 24, 96
"""Hidden width of every other block, so that `size` can tell them apart."""

CASE = Case(
    mesh=(2,),
    model=Model(
        inputs=32,
        width=32,
        blocks=tuple(Block(kind="mlp", hidden=(SMALL, LARGE)[n % 2]) for n in range(BLOCKS)),
        outputs=32,
    ),
    data=Data(batch=4, length=8),
    training=Training(steps=3),
)
"""Small: each point is run with data."""


@dataclass(frozen=True)
class Point:
    """Case on a curve.

    x: the parameter varied along the curve; predicted, measured: bytes of the peak; highest: the
    most of each term in the step, as measured.
    """

    implementation: str
    curve: str
    x: int
    predicted: int
    measured: int
    highest: dict[Term, int]

    @property
    def off(self) -> float:
        """Prediction error, relative to the measured peak."""
        return abs(self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class Terms:
    """Memory of an implementation at the end of the forward, and the peak of its step."""

    implementation: str
    checkpointed: bool
    activation: int
    lasting: int
    peak: int
