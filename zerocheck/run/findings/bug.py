"""Bug of a run: all failing cases that it explains, and what is said of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...case.schema import Case
from ...protocol.verdicts import MEMORY, Obligation, Status, Violation
from ..known_issues.entries import KnownIssue, joined
from ..records.exercised import able
from ..records.records import CaseFinished, Finding
from .consequences import independent
from .contrast import WrongCase


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """Smallest case that was found to fail in the same way.

    finished: its result in fresh rank processes; violation: None for a crash or hang; size,
    extent, groups: see Finding; tries, seconds: of the search; spent: the cost of the tries
    (see shrink.py).
    """

    finished: CaseFinished
    violation: Violation | None
    size: str
    extent: str
    groups: tuple[str, ...]
    tries: int
    spent: float
    seconds: float
    parted: Parted | None = None
    """Violation of a variant with distinct numbers, where a gradient is wrong."""


class Parted(NamedTuple):
    """Violation of a variant whose numbers tell causes apart; see parting.py.

    where: its numbers in words, such as "on 3 ranks with 4 microbatches".
    """

    where: str
    violation: Violation

    def sentence(self, causes: Collection[str], said: Collection[str] = ()) -> str:
        """Return what it shows, with its numbers: by these causes, or by attribution.

        said: sentences that need not be repeated; "" if nothing else is known.
        """
        texts = [self.violation.attribution]
        if self.violation.explained_by(causes):
            texts.insert(0, self.violation.narrowed(causes).explanation)
        text = next((text for text in texts if not any(text in line for line in said)), "")
        return f"{self.where}: {text}" if text else ""


class HeldCase(NamedTuple):
    """Case and the obligations that hold in it, though they could have failed."""

    implementation: str
    case: Case
    status: Status
    obligations: frozenset[Obligation]

    @classmethod
    def of(cls, finished: CaseFinished) -> HeldCase:
        """Return what holds in a finished case; no obligation does if it was not judged."""
        judgement = finished.judgement
        held = frozenset[Obligation]()
        if judgement is not None:
            statuses = judgement.statuses
            held = frozenset(one for one in able(judgement) if statuses[one] == "holds")
        return cls(finished.implementation, finished.case, finished.status, held)

    def could_show(self, bug: Bug) -> bool:
        """Return True if the case holds, though what the bug violates could have failed in it."""
        if self.implementation != bug.implementation:
            return False
        if bug.violation is None:
            return self.status == "holds"
        return bug.violation.obligation in self.obligations


@dataclass
class Bug:
    """Bug: all failing cases that it explains.

    causes: those that explain every one of them; a small world size makes causes coincide, so
    each further case can only rule some out. issue: the listed known issue that it is; refuted:
    causes that only seemed to explain it; listed: what explains the cases, where that is refuted;
    merged: number of the bug that it turned out to be.
    """

    implementation: str
    status: Status
    violation: Violation | None
    causes: tuple[str, ...]
    first: CaseFinished
    issue: KnownIssue | None = None
    cases: int = 1
    confirmed: int = 0
    tries: int = 0
    otherwise: Counter[str] = field(default_factory=Counter)
    """Outcomes of tries in fresh rank processes that did not show it, counted."""
    case_file: str = ""
    shrunk: Shrunk | None = None
    extent: str = ""
    """Why it is not known, where it was to be found and was not."""
    words: tuple[str, ...] = ()
    """Other declared semantics under which every one of these cases holds."""
    headline: str = ""
    """Result of a run with traced collectives on a crash or hang."""
    suspicion: str = ""
    """Possible cause of a failure that no fresh rank processes showed. It fails no run."""
    shown: list[WrongCase] = field(default_factory=list)
    """Cases that show it."""
    parted: Parted | None = None
    refuted: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    merged: int | None = None
    left_out: int = 0
    """Cases that were not run, since every case crashed in this way."""

    @property
    def fingerprint(self) -> str:
        """Join implementation, obligation, role and cause to a key without numbers."""
        if self.issue is not None:
            return self.issue.fingerprint
        if self.violation is None:
            return joined(self.implementation, self.status, self.first.error)
        violation = self.violation
        # A known issue is matched by what explains its failing cases.
        causes = "+".join(self.listed or self.causes)
        return joined(self.implementation, violation.obligation, violation.role, causes)

    @property
    def replayed(self) -> CaseFinished:
        """Smallest known case, which is the one to replay."""
        return self.first if self.shrunk is None else self.shrunk.finished

    @property
    def _estimated(self) -> bool:
        """True if the bound that the replayed case violates is estimated."""
        violation, judgement = self.violation, self.replayed.judgement
        return (
            violation is not None
            and judgement is not None
            and violation.obligation in judgement.estimated
        )

    def _follows(self) -> tuple[Obligation, ...]:
        obligations: list[Obligation] = []
        for finished in (self.first, self.replayed):
            violations = () if finished.judgement is None else finished.judgement.violations
            sources = {violation.obligation for violation in independent(violations)}
            obligations += [v.obligation for v in violations if v.obligation not in sources]
        return tuple(dict.fromkeys(obligations))

    @property
    def shown_violation(self) -> Violation | None:
        """Violation of the case to replay, with the causes that are left; None for a crash."""
        violation = self.violation if self.shrunk is None else self.shrunk.violation
        return None if violation is None else violation.narrowed(self.causes)

    @property
    def title(self) -> str:
        """Title of the finding, one plain sentence.

        All its numbers are of the case to replay, unless it begins with another one.
        """
        violation = self.shown_violation
        if violation is None:
            text = f"the ranks {self.status}"
            text += f": {self.first.error}" if self.first.error else ""
            traced = self.headline if self.shrunk is None else self.replayed.headline
            return traced or self.first.title or text
        if not self.causes:
            return violation.attribution.split("; ")[0] or violation.explanation
        refuted = not violation.explained_by(self.causes)  # on 2 ranks it looked like another bug
        elsewhere = self.parted.sentence(self.causes) if refuted and self.parted is not None else ""
        return elsewhere or violation.explanation

    def _variant(self) -> str:
        """Return what the variant shows that is not said of the shown case; "" for nothing."""
        violation = self.shown_violation
        if self.parted is None or violation is None:
            return ""
        return self.parted.sentence(self.causes, (self.title, violation.attribution))

    @property
    def slug(self) -> str:
        """Fingerprint as a file name, without the place of the implementation."""
        short = self.fingerprint.replace(self.implementation, self.implementation.split(":")[-1])
        return re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")[:100]

    def narrow(
        self, causes: tuple[str, ...], finished: CaseFinished, violation: Violation | None
    ) -> bool:
        """Keep the causes and words that are left; return True if the report of the bug changes.

        A case that distinguishes causes becomes the one to replay.
        """
        if violation is None:
            return False
        words = tuple(word for word in self.words if word in words_of(finished, violation))
        fewer_words, self.words = len(words) < len(self.words), words
        return self._narrow_causes(causes, finished, violation) or fewer_words

    def _narrow_causes(
        self, causes: tuple[str, ...], finished: CaseFinished, violation: Violation
    ) -> bool:
        fewer = len(causes) < len(self.causes) or not {*causes} <= {*self.causes}
        was = self.violation
        harmless = was is not None and was.mild and not violation.mild
        vague = was is not None and causes and not was.causes and violation.causes
        if harmless or vague or (was is not None and was.faint and not violation.faint):
            # With clipping inactive a wrong norm harms nothing; here it did. Or it says more.
            self.violation, self.first, self.causes = violation, finished, causes
            self._unconfirmed()
            return True
        self.causes = causes
        if not fewer or violation.causes != causes:
            return False
        self.violation, self.first = violation, finished
        self._unconfirmed()
        return True

    def similar(self, finished: CaseFinished) -> Iterator[Violation]:
        """Iterate over the violations of a case of the bug's obligation and role."""
        violations = () if finished.judgement is None else finished.judgement.violations
        wanted = self.violation
        if wanted is None:
            return
        for violation in independent(violations):
            if (violation.obligation, violation.role) == (wanted.obligation, wanted.role):
                yield violation

    def reproduce(
        self, causes: tuple[str, ...], finished: CaseFinished, violation: Violation | None
    ) -> None:
        """Reproduce a further case of a bug that could not be reproduced so far."""
        self.causes, self.first, self.violation = causes, finished, violation
        self._unconfirmed()

    def _unconfirmed(self) -> None:
        self.confirmed = self.tries = 0
        self.otherwise.clear()

    def finding(self, number: int) -> Finding:
        """Return the record of this bug as known now. number: its place among the bugs."""
        shrunk, case = self.shrunk, self.replayed.case
        user, optimizer = case.model.user, case.optimizer.user
        return Finding(
            number=number,
            fingerprint=self.fingerprint,
            implementation=self.implementation,
            status=self.status,
            title=self.title,
            case_number=self.first.number,
            obligation=None if self.violation is None else self.violation.obligation,
            violation=self.shown_violation,
            variant=self._variant(),
            causes=self.causes,
            reason=self.replayed.reason,
            detail=self.replayed.detail,
            follows=self._follows(),
            confirmed=self.confirmed,
            tries=self.tries,
            otherwise=dict(self.otherwise),
            cases=self.cases,
            case_file=self.case_file,
            size="" if shrunk is None else shrunk.size,
            extent=self.extent if shrunk is None else shrunk.extent,
            groups=() if shrunk is None else shrunk.groups,
            known=None if self.issue is None else self.issue.record,
            model=user.factory if user is not None else "",
            optimizer=optimizer.location if optimizer is not None else "",
            estimated=self._estimated,
            words=self.words,
            place=self.replayed.place,
            left_out=self.left_out,
            suspicion=self.suspicion,
            merged=self.merged,
        )


def words_of(finished: CaseFinished, violation: Violation | None) -> tuple[str, ...]:
    """Return other declared semantics under which a case holds; none for obligations of memory."""
    if violation is None or finished.judgement is None or violation.obligation in MEMORY:
        return ()
    return finished.judgement.words
