"""Faults in the whole state that a library exports."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..adapters.textbook.checkpoint.export import Whole
from ..adapters.textbook.flat import ShardedBuffer
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3


class ExportMutates(Zero1):
    """The exporter gathers into live memory (DS PR#6792)."""

    def gathered(self, flat: ShardedBuffer, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for piece in flat.pieces:
            if piece.name in held:
                flat.shard[piece.inside] = held[piece.name]
        return super().gathered(flat, held)


class PaddingStrippedWrong(Zero3):
    """The padding at the end is removed from the front (DS #1380)."""

    def split(self, flat: ShardedBuffer, role: str, whole: torch.Tensor) -> Whole:
        gap = flat.partition.padding(0, flat.partition.numel)
        ends = bool(gap) and gap[-1].stop == flat.partition.numel
        return super().split(
            flat, role, whole.roll(gap[-1].start - gap[-1].stop) if ends else whole
        )


class ExportOfOneRank(Zero1):
    """Moments are those of rank 0, and 0 elsewhere. Flagged: part of it is 0."""

    def owned_state(self, role: str) -> dict[str, torch.Tensor]:
        return super().owned_state(role) if self.group.rank() == 0 or role == "step" else {}


class ExportRounded(Zero2):
    """Parameters are exported in the compute dtype (PT #104770). Flagged: rounded to bf16."""

    def split(self, flat: ShardedBuffer, role: str, whole: torch.Tensor) -> Whole:
        if role == "parameter":
            whole = whole.bfloat16().to(whole.dtype)
        return super().split(flat, role, whole)


class ExportWithoutFrozen(Zero1):
    """Frozen parameters are left out. Flagged: left out."""

    def replicated(self):  # type: ignore[no-untyped-def]
        return [] if getattr(self, "exporting", False) else super().replicated()

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        self.exporting = True
        try:
            return super().export()
        finally:
            self.exporting = False
