"""Coverage of a run: pairs of features wanted and exercised, and why the rest were not.

Counted from the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from ...case.covering import Pairs
from ...case.features import FEATURES, OF_INNER_AXES, OF_STEPS, features
from ...protocol.verdicts import VACUOUS, Obligation
from .exercised import idle
from .records import CaseFinished, Coverage

FEW = 3
"""Cases; what fewer of them exercised is named."""

COULD_NOT_FAIL = "could not fail"
"""First words of the reason why a feature that cases had is not exercised."""

REFUSED_ONLY, CRASHED_ONLY = "only in refused cases", "only in cases that crashed or hung"
"""First words of the reason where no case that had the feature was judged."""

_OF_MODELS = frozenset(
    {name for name, row in FEATURES.items() if row.dimension == "model"}
    | {"batch-of-one", "length-of-one", "masked"}
)
"""Features that are not drawn where the model is the user's own."""


class CoveredPairs:
    """Features and pairs of features of one implementation, case by case.

    `wanted` None: its journal does not say what was wanted.
    """

    def __init__(self, wanted: Coverage | None = None) -> None:
        self.wanted = wanted
        self.exercised: Counter[str] = Counter()
        """Cases by feature that exercised it, but for features that the implementation ignores."""
        self._idle: dict[str, Obligation | None] = {}
        """Feature that only such cases had in which the obligation could not fail."""
        self._undone: dict[str, str] = {}
        """Feature of cases that came to no verdict -> why."""
        self._resumed = False
        self._judged = 0
        self._could_not_fail = 0
        self._broken = 0
        self._refused: dict[str, int] = {}

    @cached_property
    def _pairs(self) -> Pairs:
        return Pairs(self.wanted.features if self.wanted is not None else ())

    @cached_property
    def _supported(self) -> int:
        """Pairs that were wanted before the first case, as bits."""
        return int(self.wanted.supported or "0", 16) if self.wanted is not None else 0

    def add(self, record: CaseFinished) -> None:
        """Count one case. A crash or hang exercised nothing: it was not judged."""
        judged = record.judgement is not None
        in_vain = idle(record)
        self._resumed |= bool(record.case.resume)
        if judged:
            spared = {*self.ignored, *in_vain}
            self.exercised.update(name for name in features(record.case) if name not in spared)
        else:
            ended = REFUSED_ONLY if record.status == "unsupported" else CRASHED_ONLY
            why = record.reason if record.status == "unsupported" else record.title
            for name in features(record.case):
                self._undone.setdefault(name, f"{ended}: {why}" if why else ended)
        self._idle.update(in_vain)
        if not self._supported:
            return
        pairs = self._pairs.of(record.case) & self._supported
        if judged:
            counting = self._pairs.without(in_vain)
            self._judged |= pairs & counting
            self._could_not_fail |= pairs & ~counting
        elif record.status == "unsupported" or record.known:
            reason = f"known issue: {record.title}" if record.known else record.reason
            reason = reason or "no reason given"
            self._refused[reason] = self._refused.get(reason, 0) | pairs
        else:
            self._broken |= pairs

    @property
    def names(self) -> tuple[str, ...]:
        """Features that count here; those of checkpoints only where a case had one."""
        return tuple(FEATURES) if self._resumed else OF_STEPS

    @property
    def ignored(self) -> frozenset[str]:
        """Features of options that the implementation does not obey."""
        return frozenset(self.wanted.ignored if self.wanted is not None else ())

    @property
    def counted(self) -> bool:
        """True if pairs are wanted at all: a run of random cases only promises none."""
        return bool(self._supported) or bool(self.wanted is not None and self.wanted.refused)

    @property
    def refused(self) -> dict[str, int]:
        """Pairs that each reason rules out, as bits.

        Refused before anything ran, or while cases were built.
        """
        reasons: dict[str, int] = {}
        if self.wanted is not None:
            reasons = {refused.reason: int(refused.pairs, 16) for refused in self.wanted.refused}
        taken = self._judged
        for reason, pairs in self._refused.items():
            reasons[reason] = reasons.get(reason, 0) | pairs & ~taken
            taken |= pairs
        return {reason: pairs for reason, pairs in reasons.items() if pairs}

    @property
    def supported_count(self) -> int:
        """Number of pairs that the implementation supports."""
        return (self._judged | self.left_out | self.could_not_fail).bit_count()

    @property
    def covered_count(self) -> int:
        """Number of supported pairs that a judged case had."""
        return self._judged.bit_count()

    @property
    def refused_count(self) -> int:
        """Number of pairs that the implementation refuses."""
        return sum(pairs.bit_count() for pairs in self.refused.values())

    @property
    def left_out(self) -> int:
        """Supported pairs that no judged case had, as bits."""
        gone = self._could_not_fail
        for pairs in self._refused.values():
            gone |= pairs
        return self._supported & ~self._judged & ~gone

    @property
    def could_not_fail(self) -> int:
        """Supported pairs that only such cases had in which nothing could fail, as bits."""
        return self._could_not_fail & ~self._judged

    @property
    def left_out_pairs(self) -> list[tuple[str, str]]:
        """Pairs of names of the features in `left_out`."""
        return list(self._pairs.named(self.left_out))

    @property
    def not_exercised(self) -> dict[str, str]:
        """Reason by feature why no judged case exercised it."""
        return {name: self._why(name) for name in self.names if not self.exercised[name]}

    @property
    def not_drawn(self) -> list[str]:
        """Features that no judged case exercised and others could have, those of axes first."""
        reasons = ("not drawn", "left out", COULD_NOT_FAIL, REFUSED_ONLY, CRASHED_ONLY)
        names = [name for name, why in self.not_exercised.items() if why.startswith(reasons)]
        return sorted(names, key=lambda name: name not in OF_INNER_AXES)

    @property
    def seldom_exercised(self) -> dict[str, int]:
        """Number of cases by feature, of features that fewer than FEW cases exercised."""
        return {name: count for name, count in self.exercised.items() if 0 < count < FEW}

    def _why(self, name: str) -> str:
        if name in self.ignored:
            return "ignored by it"
        if self.wanted is not None and self.wanted.model and name in _OF_MODELS:
            return f"the model is {self.wanted.model}"
        if name in self._idle:
            obligation = self._idle[name]
            return f"{COULD_NOT_FAIL}: {VACUOUS[obligation] if obligation else 'nothing could'}"
        if not self.counted or name not in self._pairs.names:
            return self._undone.get(name, "not drawn")
        pairs = self._pairs.with_feature(name)
        if self.left_out & pairs:
            return "left out"
        most = max(self.refused.items(), key=lambda of: (of[1] & pairs).bit_count(), default=None)
        if most is not None and most[1] & pairs:
            return f"refused: {most[0]}"
        return "not possible here"

    def sentence(self, implementation: str) -> str:
        """Return a sentence on pairs that were left out, and why; empty if none were.

        `"ddp: 12 of 3,410 supported pairs of features were left out, e.g. dropout with world-16
        (--max-cases 30)"`.
        """
        left = self.left_out
        if not left:
            return ""
        first = " with ".join(reversed(next(self._pairs.named(left))))
        broken = (left & self._broken).bit_count()
        reasons = []
        if self.wanted is not None and self.wanted.max_cases is not None:
            reasons.append(f"--max-cases {self.wanted.max_cases}")
        if broken:
            reasons.append(f"{broken:,} stand in cases that crashed or hung")
        why = f" ({'; '.join(reasons)})" if reasons else ""
        return (
            f"{implementation}: {left.bit_count():,} of {self.supported_count:,} supported pairs "
            f"of features were left out, e.g. {first}{why}"
        )

    def line(self, implementation: str) -> str:
        """Return one line for the end of a run; empty where no pairs were wanted."""
        if not self.counted:
            return ""
        parts = [
            f"pairs {self.covered_count:,} of {self.supported_count:,} supported covered",
            *([f"{idle:,} could not fail"] if (idle := self.could_not_fail.bit_count()) else []),
            f"{self.refused_count:,} refused",
            f"{len(self.ignored)} features ignored",
        ]
        seldom = self.seldom_exercised
        if seldom:
            parts.append(f"fewer than {FEW} cases had {some(seldom)}")
        return f"{implementation}: {'; '.join(parts)}"


def some(names: Iterable[str], most: int = 4) -> str:
    """Format names as `"a, b, c, d and 3 more"`."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
