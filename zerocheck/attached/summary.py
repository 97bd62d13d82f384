"""Count of the checked steps of a run, and the sentences at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..foreign_text import one_line
from ..protocol.verdicts import Judgement
from .text import first_of


@dataclass
class _Found:
    """One finding: the step in which it was found first, and in how many."""

    step: int
    text: str
    times: int = 1


@dataclass
class CheckedSteps:
    """Count of checked steps, and of what was found in them.

    checked, wrong: numbers of steps; alike: of those in which all ranks had the same samples;
    loads, wrong_loads: of checkpoints; exports, wrong_exports: of weights; wrong_samples: how
    often samples came again; stopped: why no further step is checked, or "".
    """

    checked: int = 0
    wrong: int = 0
    alike: int = 0
    loads: int = 0
    wrong_loads: int = 0
    exports: int = 0
    wrong_exports: int = 0
    wrong_samples: int = 0
    stopped: str = ""
    _share: float = 0.0
    _held: dict[str, None] = field(default_factory=dict)
    _unjudged: Counter[str] = field(default_factory=Counter)
    _reasons: dict[str, str] = field(default_factory=dict)
    _found: dict[str, _Found] = field(default_factory=dict)

    @property
    def all_wrong(self) -> int:
        """Number of all that is wrong."""
        return self.wrong + self.wrong_loads + self.wrong_exports + self.wrong_samples

    def add(self, judgement: Judgement, *, alike: bool = False) -> None:
        """Count a checked step. alike: all ranks computed with the same samples."""
        self.checked += 1
        self.alike += alike
        self.wrong += bool(judgement.violations)
        for obligation, status in judgement.statuses.items():
            if status == "holds":
                self._held.setdefault(obligation)
        self._share = max([self._share, *judgement.share.values()])
        for what, why in judgement.unjudged.items():
            # Behind a colon is what differs from step to step; that of the first is shown.
            kind = f"{what}: {why.partition(': ')[0]}"
            self._reasons.setdefault(kind, f"{what}: {why}")
            self._unjudged[kind] += 1

    def add_load(self, judgement: Judgement) -> None:
        """Count a load of a checkpoint, or an export."""
        if "export" in judgement.statuses:
            self.exports += 1
            self.wrong_exports += bool(judgement.violations)
        else:
            self.loads += 1
            self.wrong_loads += bool(judgement.violations)

    def add_findings(self, marks: Iterable[str], number: int, judgement: Judgement) -> None:
        """Count what is wrong. marks: fingerprints; number: of the first wrong step."""
        known = {id(self._found[one]): self._found[one] for one in marks if one in self._found}
        for one in known.values():
            one.times += 1
        if not known:
            first = first_of(judgement)
            found = _Found(number, f"{first.obligation}: {first.explanation}")
            self._found.update(dict.fromkeys(marks, found))

    def text(self, taken: int) -> str:
        """Return the sentences. taken: steps of the run."""
        lines = [f"zerocheck: {self.checked} of {taken} steps checked"]
        if self.wrong:
            lines[0] += f", {self.wrong} of them wrong"
        elif self.checked:
            held = ", ".join(self._held)
            lines[0] += f", all hold ({held}), at most {self._share:.0%} of a bound"
        if self.loads:
            lines[0] += f"; {self.wrong_loads} of {self.loads} loads wrong"
        if self.exports:
            lines[0] += f"; {self.wrong_exports} of {self.exports} exports wrong"
        for one in {id(found): found for found in self._found.values()}.values():
            again = f", and in {one.times - 1} more" if one.times > 1 else ""
            lines.append(f"  from step {one.step}{again}: {one_line(one.text)}")
        for kind, times in self._unjudged.items():
            lines.append(f"  not judged in {times} of them: {one_line(self._reasons[kind])}")
        if self.alike:
            lines.append(
                f"  all ranks computed with the same samples in {self.alike} of them: right for "
                "tensor parallelism alone; else they learn together what one would"
            )
        if self.stopped:
            lines.append(f"  {one_line(self.stopped)}")
        return "\n".join(lines)
