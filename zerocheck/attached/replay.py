"""Judges the bundle of a checked step again: one process, no ranks, no code of the user."""

from __future__ import annotations

from pathlib import Path

import torch

from ..judge.verdict import Judgement
from .bundle import Bundle, read
from .own import judge_own
from .text import violated_text
from .together import judge_together


class Replayed:
    """What the replay gave, beside what the bundle says."""

    def __init__(self, path: Path, bundle: Bundle, judgement: Judgement) -> None:
        self._path = path
        self.bundle = bundle
        self.judgement = judgement

    @property
    def text(self) -> str:
        """The finding, if there is one, and a sentence that compares."""
        said = [self.verdict]
        if self.judgement.violations:
            said.insert(0, violated_text(self.bundle.what, self.judgement, str(self._path)) + "\n")
        return "\n".join(said)

    @property
    def verdict(self) -> str:
        """One sentence."""
        was, now = self.bundle.judgement.violations, self.judgement.violations
        number = self.bundle.number
        if was == now:
            return f"reproduced: the same verdict on step {number} from what the bundle holds"
        if [one.obligation for one in was] == [one.obligation for one in now]:
            return f"reproduced: step {number} violates the same obligations"
        told = ", ".join(one.obligation for one in was)
        again = ", ".join(one.obligation for one in now) or "nothing"
        return f"not reproduced: step {number} violated {told}, now it violates {again}"

    @property
    def exit_code(self) -> int:
        """1 if something is violated, else 0."""
        return 1 if self.judgement.violations else 0


def replay(path: Path) -> Replayed:
    """Judge a bundle again. Raises UsageError for one that is not whole."""
    bundle, ranks = read(path)
    told = [judge_own(one) for one in ranks]

    def fetch(rank: int, what: str, number: int) -> torch.Tensor | None:
        return ranks[rank].values.get((what, number))

    return Replayed(path, bundle, judge_together(told, fetch))
