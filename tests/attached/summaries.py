"""What a rank tells of a step, written by hand."""

from __future__ import annotations

from typing import Any

from zerocheck.attached.record.step_record import ShardPiece, StepSummary


def summary(*pieces: ShardPiece, rank: int = 0, world_size: int = 2, **given: Any) -> StepSummary:
    """A rank that holds these pieces, and tells nothing but what is given."""
    values = {"options": (), "before": (), "after": (), **given}
    return StepSummary(
        rank=rank, world_size=world_size, number=1, what="ranks", pieces=pieces, **values
    )
