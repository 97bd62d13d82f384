"""Context of a checked step on all ranks: their verdicts, and the holders of each shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ...protocol.verdicts import Obligation, Violation
from ..record.ranks_own import own_of_ranks
from ..record.step_record import Fetch, RankVerdict, ShardPiece, StepSummary
from .norms import Holder


class JointContext:
    """A checked step on all ranks.

    verdicts: of each rank on its own shards; fetch: asks a rank for one of its tensors.
    """

    def __init__(self, verdicts: Sequence[RankVerdict], fetch: Fetch) -> None:
        self.verdicts, self.fetch = verdicts, fetch

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.verdicts[0].summary.number

    @property
    def summaries(self) -> list[StepSummary]:
        """Observations of the ranks, without tensors."""
        return [one.summary for one in self.verdicts]

    @cached_property
    def holders(self) -> dict[tuple[object, ...], list[Holder]]:
        """Holders of each shard, by its place."""
        found: dict[tuple[object, ...], list[Holder]] = {}
        for rank, one in enumerate(self.verdicts):
            for number, piece in enumerate(one.summary.pieces):
                found.setdefault(piece.place, []).append((rank, number))
        return found

    @cached_property
    def own_of_ranks(self) -> tuple[str, ...]:
        """Names of parameters that differ between ranks by design."""
        return own_of_ranks(self.summaries, [one.hashes for one in self.verdicts])

    def piece(self, holder: Holder) -> ShardPiece:
        """Return the shard that a rank holds."""
        return self.verdicts[holder[0]].summary.pieces[holder[1]]

    def violation(self, obligation: Obligation, role: str, text: str, cause: str) -> Violation:
        """Return a violation in this step, of no tensor or rank yet."""
        return Violation(
            obligation=obligation,
            step=self.step,
            role=role,
            tensors=(),
            ranks=(),
            explanation=text,
            causes=(cause,),
        )
