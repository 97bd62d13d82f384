"""Faults in the whole state that a library exports."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import causes as bugs
from ..adapters.textbook.checkpoint.export import Whole
from ..adapters.textbook.flat import ShardedBuffer
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from .fault import fault


@fault("roundtrip", bugs.CHANGED_BY_SAVING, source="DS PR#6792", features=("resume",))
class ExportMutates(Zero1):
    """The exporter gathers into live memory."""

    def gathered(self, flat: ShardedBuffer, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for piece in flat.pieces:
            if piece.name in held:
                flat.shard[piece.inside] = held[piece.name]
        return super().gathered(flat, held)


@fault(
    "export", source="DS #1380", features=("resume", "uneven"),
    attributed=r"elements? further (back|on) in (its|their) flat buffers?",
)  # fmt: skip
class PaddingStrippedWrong(Zero3):
    """The padding at the end is removed from the front."""

    def split(self, flat: ShardedBuffer, role: str, whole: torch.Tensor) -> Whole:
        gap = flat.partition.padding(0, flat.partition.numel)
        ends = bool(gap) and gap[-1].stop == flat.partition.numel
        return super().split(
            flat, role, whole.roll(gap[-1].start - gap[-1].stop) if ends else whole
        )


@fault("export", bugs.PART_OF_IT_IS_0, source="DS PR#7585", features=("resume",))
class ExportOfOneRank(Zero1):
    """Exported moments are those of rank 0, and 0 elsewhere."""

    def owned_state(self, role: str) -> dict[str, torch.Tensor]:
        return super().owned_state(role) if self.group.rank() == 0 or role == "step" else {}


@fault("export", bugs.ROUNDED_TO_BF16, source="PT #104770", features=("resume",))
class ExportRounded(Zero2):
    """Parameters are exported in the compute dtype."""

    def split(self, flat: ShardedBuffer, role: str, whole: torch.Tensor) -> Whole:
        if role == "parameter":
            whole = whole.bfloat16().to(whole.dtype)
        return super().split(flat, role, whole)


@fault("export", bugs.LEFT_OUT, source="none known", features=("resume", "frozen"))
class ExportWithoutFrozen(Zero1):
    """Frozen parameters are left out of the export."""

    def replicated(self):  # type: ignore[no-untyped-def]
        return [] if getattr(self, "exporting", False) else super().replicated()

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        self.exporting = True
        try:
            return super().export()
        finally:
            self.exporting = False
