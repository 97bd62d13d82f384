"""Check of the gradient norm that ranks report when they clip: each element counts once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from ... import causes as bugs
from ... import floating_point
from ...floating_point import Format
from ...judge import bounds
from ...judge.diagnose.clip import Norm, norm_explanation
from ...protocol.verdicts import Violation
from ..record.step_record import Clip, RankVerdict

Holder = tuple[int, int]
"""(rank, number of the piece there)."""


@dataclass(frozen=True)
class Norms:
    """Judge of the reported norms, by the sums of squares of all ranks."""

    verdicts: Sequence[RankVerdict]

    def check(self) -> tuple[float, Violation | None]:
        """Return the share of the bound, and the violation or None."""
        calls = min(len(one.summary.clips) for one in self.verdicts)
        if any(len(one.summary.clips) != calls for one in self.verdicts):
            return 0.0, Violation(
                obligation="clip",
                step=self.verdicts[0].summary.number,
                role="norm",
                tensors=(),
                ranks=(),
                explanation="ranks clip different numbers of times",
                causes=(bugs.RANKS_DISAGREE,),
            )
        share = 0.0
        for call in range(calls):
            used, found = self._norm([one.summary.clips[call] for one in self.verdicts])
            if found is not None and (together := self._together(call)) is not None:
                used, found = self._norm(together)
            share = max(share, used)
            if found is not None:
                return share, found
        return share, None

    def _together(self, call: int) -> list[Clip] | None:
        """Return the clipping of all parameters that are clipped by one norm, list by list.

        None where no other call clips other parameters to the same limit by the same norm.
        """
        found = []
        several = False
        for one in self.verdicts:
            clips = one.summary.clips
            mine = clips[call]
            alike = [
                o
                for o in clips
                if (o.kind, o.max_norm, o.norm) == (mine.kind, mine.max_norm, mine.norm)
            ]
            pieces = [number for clip in alike for number in clip.pieces]
            if len(set(pieces)) < len(pieces):
                return None
            several |= len(alike) > 1
            found.append(replace(mine, pieces=tuple(pieces)))
        return found if several else None

    def _norm(self, clips: Sequence[Clip]) -> tuple[float, Violation | None]:
        if clips[0].kind not in ("2", "inf") or any(clip.others for clip in clips):
            return 0.0, None
        once: dict[tuple[object, ...], Holder] = {}
        for rank, clip in enumerate(clips):
            for number in clip.pieces:
                once.setdefault(self.verdicts[rank].summary.pieces[number].place, (rank, number))
        exact, relative, floor = self._true(clips[0].kind, [*once.values()])
        if not math.isfinite(exact):
            return 0.0, None
        bound = relative * exact + floor
        bad = [r for r, clip in enumerate(clips) if not abs(clip.norm - exact) <= bound]
        if not bad:
            used = max(abs(clip.norm - exact) for clip in clips)
            return used / bound if bound else 0.0, None
        clip = clips[bad[0]]
        norm = self._diagnosed(clips, bad[0], exact, len(once), relative, floor, once)
        explanation = norm_explanation([norm], clip.kind)
        finite = bound and math.isfinite(clip.norm)
        return 0.0, Violation(
            obligation="clip",
            step=self.verdicts[0].summary.number,
            role="norm",
            tensors=(),
            ranks=tuple(bad),
            explanation=explanation.text,
            observed=clip.norm,
            expected=exact,
            bound=bound,
            ratio=abs(clip.norm - exact) / bound if finite else None,
            causes=explanation.causes,
            sentences=explanation.sentences,
        )

    def _true(self, kind: str, holders: Sequence[Holder]) -> tuple[float, float, float]:
        """Return (norm, relative bound, absolute bound); see judge/clipping.py."""
        pieces = [self.verdicts[rank].summary.pieces[number] for rank, number in holders]
        numel = sum(torch.Size(piece.local).numel() for piece in pieces)
        if kind == "inf":
            return max((self._peak(h) for h in holders), default=0.0), 0.0, 0.0
        squares = [self.verdicts[rank].squares[number] for rank, number in holders]
        total = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
        relative = bounds.norm_relative(numel)
        formats = [Format.of(piece.torch_dtype) for piece in pieces]
        narrow = next((format for format in formats if format.narrow), None)
        if narrow is not None:
            part = math.fsum(s for s, f in zip(squares, formats, strict=True) if f.narrow)
            share = min(1.0, part / total * (1 + 4 * floating_point.U)) if total else 1.0
            relative = bounds.narrow_norm_relative(numel, share, len(self.verdicts), narrow)
        eta = max((format.eta for format in formats), default=floating_point.ETA)
        return math.sqrt(total), relative, math.sqrt(numel * eta)

    def _of_stages(self) -> dict[str, frozenset[str]]:
        """Return the parameters of each stage of a pipeline, and of all others."""
        names: dict[int, set[str]] = {}
        for one in self.verdicts if self.verdicts[0].summary.stages > 1 else ():
            mine = names.setdefault(one.summary.stage, set())
            mine.update(piece.name for piece in one.summary.pieces)
        every = frozenset().union(*names.values())
        found = {f"stage {stage}": frozenset(mine) for stage, mine in names.items()}
        found |= {f"all stages but {stage}": every - mine for stage, mine in names.items()}
        return found

    def _peak(self, holder: Holder) -> float:
        return self.verdicts[holder[0]].peaks[holder[1]]

    def _diagnosed(
        self,
        clips: Sequence[Clip],
        rank: int,
        exact: float,
        pieces: int,
        relative: float,
        floor: float,
        once: dict[tuple[object, ...], Holder],
    ) -> Norm:
        """Return a wrong norm with what its causes are derived from.

        A vector of one element has the norm of a whole one; so the reported sums are enough.
        """
        mine, clip = self.verdicts[rank], clips[rank]
        held = [[(r, number) for number in one.pieces] for r, one in enumerate(clips)]
        norms = [self._true(clip.kind, pieces)[0] for pieces in held]
        other, *_ = self._true("2" if clip.kind == "inf" else "inf", [*once.values()])
        holders: dict[str, list[Holder]] = {}
        for r, number in once.values():
            name = self.verdicts[r].summary.pieces[number].name
            holders.setdefault(name, []).append((r, number))
        return Norm(
            reported=clip.norm,
            exact=exact,
            whole=torch.tensor([other], dtype=torch.float64),
            shards=[torch.tensor([norm], dtype=torch.float64) for norm in norms],
            rank=rank,
            complete=len(held[rank]) == pieces,
            previous=None,
            relative=relative,
            floor=floor,
            by_dtype={},
            loss_scale=mine.summary.loss_scale,
            by_tensor={name: self._true(clip.kind, of)[0] for name, of in holders.items()},
            groups=self._of_stages(),
        )
