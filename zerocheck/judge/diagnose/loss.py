"""Which known cause explains wrong losses? Each is computed and compared bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

Losses = Sequence[Sequence[float]]

SENTENCES = {
    "samples of another rank": "; it is that of another rank's samples",
    "samples of another microbatch": "; it is that of another microbatch's samples",
    "evaluation mode": "; it is that of a model in evaluation mode",
}


def causes(observed: Losses, expected: Losses, evaluated: Losses | None) -> tuple[str, ...]:
    """All causes that explain every wrong loss. evaluated: the losses in evaluation mode."""
    wrong = [
        (rank, number)
        for rank, (seen, wanted) in enumerate(zip(observed, expected, strict=True))
        for number, (a, b) in enumerate(zip(seen, wanted, strict=False))
        if a != b and not (math.isnan(a) and math.isnan(b))
    ]
    if not wrong:
        return ()
    found = []
    own = [set(losses) for losses in expected]
    if all(observed[rank][number] in own[rank] for rank, number in wrong):
        found.append("samples of another microbatch")
    others = [set().union(*(own[:rank] + own[rank + 1 :])) for rank in range(len(own))]
    if all(observed[rank][number] in others[rank] for rank, number in wrong):
        found.append("samples of another rank")
    if evaluated is not None and all(
        observed[rank][number] == evaluated[rank][number] for rank, number in wrong
    ):
        found.append("evaluation mode")
    return tuple(found)
