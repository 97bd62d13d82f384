"""Real observations, which tests may change."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import torch

from zerocheck.case.schema import Case
from zerocheck.judge.case import judge
from zerocheck.protocol.observations import RankObservation, Recorded
from zerocheck.protocol.verdicts import Judgement


@dataclass
class Observed:
    """What was observed of one case, copied out of the arenas, free to be tampered with."""

    case: Case
    seen: list[RankObservation]
    tensors: dict[tuple[int, Recorded], torch.Tensor]

    def judge(self) -> Judgement:
        """The judge's verdict on it as it is now."""
        return judge(self.case, self.seen, lambda rank, record: self.tensors[rank, record])

    def without_gradients(self) -> Observed:
        """The same from an implementation that shows its state alone."""
        seen = [
            msgspec.structs.replace(
                one, records=tuple(r for r in one.records if r.role != "gradient")
            )
            for one in self.seen
        ]
        return replace(self, seen=seen)

    def records(self, role: str, point: str, step: int) -> list[tuple[int, Recorded]]:
        """All records of a role at a point, with their ranks."""
        return [
            key
            for key in self.tensors
            if (key[1].role, key[1].point, key[1].step) == (role, point, step)
        ]

    def places(self, role: str, point: str, step: int, name: str) -> list[tuple[int, torch.Tensor]]:
        """(first flat element, view) of every shard of a tensor, on all ranks."""
        found = []
        for rank, record in self.records(role, point, step):
            offset = 0
            for entry in self.seen[rank].manifests[record.manifest]:
                size = entry.stop - entry.start if entry.present else 0
                if entry.name == name and size:
                    data = self.tensors[rank, record][offset : offset + size]
                    found.append((entry.start, data))
                offset += size
        return found
