"""Known faults that a run showed: the findings of one fault together, the most severe first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from msgspec.structs import replace

from ..case.features import FEATURES
from ..catalogue import LIBRARIES
from ..protocol.verdicts import MEMORY, RESUME, Obligation
from ..run.known_issues.entries import ours
from ..run.known_issues.releases import Releases, library_of, refuses
from ..run.records.records import Finding, KnownReference
from ..run.records.tally import Tally

SEVERITIES = (
    "silent: wrong numbers",
    "silent: wrong after a load",
    "crash, hang or refusal",
    "memory and communication",
)
"""Kinds of faults, the worst first."""

SILENT = 2
"""Number of kinds, from the first on, that let a training go on with wrong numbers."""


@dataclass
class KnownFault:
    """Fault of a library that entries of known issues list, and what showed of it.

    known: of the first finding; severity: number in SEVERITIES, of the worst finding; findings: in
    the order of discovery.
    """

    known: KnownReference
    severity: int
    findings: list[Finding] = field(default_factory=list)

    @property
    def cases(self) -> Counter[str]:
        """Cases of each implementation that show it."""
        counts: Counter[str] = Counter()
        for finding in self.findings:
            counts[finding.implementation] += finding.cases
        return counts

    @property
    def obligations(self) -> list[str]:
        """Obligations that its cases violate; a crash or hang by its name."""
        names = [one.obligation or one.status for one in self.findings]
        follow = [name for one in self.findings for name in one.follows]
        return list(dict.fromkeys([*names, *follow]))

    @property
    def conditions(self) -> list[str]:
        """Combinations of features, in words, of which a case must have one to show it.

        One that has all features of another says nothing more.
        """
        references = [one.known for one in self.findings if one.known is not None]
        sets = dict.fromkeys(one.features for one in references)
        least = [one for one in sets if not any(other and {*other} < {*one} for other in sets)]
        return [
            ", ".join(FEATURES[name].title if name in FEATURES else name for name in one)
            for one in least
            if one
        ]

    @property
    def links(self) -> list[str]:
        """Upstream threads."""
        references = (one.known for one in self.findings)
        return list(dict.fromkeys(one.link for one in references if one is not None and one.link))


def known_faults(counted: Tally) -> list[KnownFault]:
    """Return the faults that showed, by severity; of one severity in the order of discovery."""
    faults: dict[str, KnownFault] = {}
    for finding in counted.known:
        if finding.known is None:
            continue
        known = _of_today(finding.known)
        finding = replace(finding, known=known)
        severity = severity_of(known, finding.obligation)
        fault = faults.setdefault(known.fault, KnownFault(known, severity))
        fault.severity = min(fault.severity, severity)
        fault.findings.append(finding)
    return sorted(faults.values(), key=lambda fault: fault.severity)


def _of_today(known: KnownReference) -> KnownReference:
    """Return an entry of ours with what an older journal does not say: advice and features."""
    if known.avoid or known.features or not known.source.startswith("ours"):
        return known
    same = [one.record for one in ours() if one.fingerprint == known.fingerprint]
    near = [one.record for one in ours() if one.record.fault == known.fault]
    return same[0] if same else replace(known, avoid=near[0].avoid) if near else known


def severity_of(known: KnownReference, obligation: Obligation | None) -> int:
    """Return the number in SEVERITIES of an entry. obligation: None for a crash or hang."""
    if obligation is None or refuses(known.fingerprint):
        return 2
    if obligation in MEMORY:
        return 3
    return 1 if obligation in RESUME else 0


def faults_sentence(counted: Tally) -> str:
    """Return how many faults were reproduced, of what: "17 known issues ...".

    Empty where none did.
    """
    faults = known_faults(counted)
    if not faults:
        return ""
    count, silent = len(faults), sum(fault.severity < SILENT for fault in faults)
    libraries = _libraries(counted, faults)
    of = f" of {' and '.join(libraries)}" if libraries else ""
    text = f"{count} known issue{'s' if count > 1 else ''}{of} reproduced"
    if silent:
        text += " (silent)" if count == 1 else f" ({silent} silent)"
    return text


def _libraries(counted: Tally, faults: list[KnownFault]) -> list[str]:
    """Return the libraries, with versions, that listed faults of built-in implementations are of.

    None where an entry comes from a file of the user: it may speak of other code.
    """
    references = [one.known for fault in faults for one in fault.findings if one.known is not None]
    if counted.started is None or not all(one.source.startswith("ours") for one in references):
        return []
    releases = Releases.of(counted.started.environment)
    names = {library_of(name) for fault in faults for name in fault.cases}
    return [f"{LIBRARIES[name]} {releases.plain(name)}" for name in LIBRARIES if name in names]
