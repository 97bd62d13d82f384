"""Known issues from a TOML file: faults that a run may show without failing.

The header of `known_issues.toml` next to this file explains the format. An entry names a finding by
its fingerprint; the other fields keep it from covering another fault under the same conditions. A
violation is a known issue only if each of its parts is. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from ...case.codec import merged
from ...case.features import FEATURES, feature, features
from ...case.schema import Case
from ...case.segments import segments_of
from ...case.validity import check
from ...catalogue import LIBRARIES, check_spelling, family
from ...causes.registry import current, find
from ...errors import UsageError, did_you_mean, unknown
from ...foreign_text import toml_of
from ...machine.devices import CPU, CUDA, kind_of
from ...protocol.verdicts import OBLIGATIONS, Obligation, Violation
from ..records.records import CaseFinished, KnownReference
from .releases import ALL, Releases, Versions, measured_of, specifiers
from .scope import check_kinds, is_of, most_bytes, ranks_of

OURS = Path(__file__).with_name("known_issues.toml")
"""Issues of the built-in implementations."""

NONE = "none"
"""In place of a file: without ours."""

_BROKEN = ("crashed", "hung")
ROLES = frozenset(
    (
        *("parameter", "master", "gradient", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
        *(
            "momentum_buffer",
            "exp_inf",
            "sum",
            "square_avg",
            "acc_delta",
            "prev",
            "step_size",
            "ax",
        ),
        *("buffer", "padding", "norm", "loss", "loss_scale", "checkpoint", "data", "rng"),
        *("optimizer", "bucket", "gathered", "activation", "other", "unexplained"),
        *("working", "gathering", "reducing"),
        *("all_gather", "all_reduce", "reduce_scatter", "reduce", "broadcast", "barrier"),
        *("gather", "scatter", "send", "recv", "all_to_all"),
    )
)
"""Roles of violations, which come before the causes in a fingerprint."""

_TABLES = ("issue", "measured", "avoid")
_ENTRY = re.compile(r"^\s*\[\[\s*issue\s*\]\]", re.MULTILINE)


class _IssueEntry(msgspec.Struct, forbid_unknown_fields=True):
    """Entry of the file, unchanged."""

    fingerprint: str
    reason: str
    features: list[str] = []
    roles: list[str] = []
    tensors: list[str] = []
    ranks: str = ""
    surplus: list[str] = []
    error: str = ""
    says: str | list[str] = ""
    torch: str | list[str] = ""
    deepspeed: str | list[str] = ""
    device: str = ""
    link: str = ""
    fixed: str = ""
    page: str = ""
    sometimes: bool = False
    case: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class KnownIssue:
    """Known issue. Fields as in the file; source: its file and entry, for messages.

    versions: of the libraries that have it; device: "cpu" or "cuda" if it shows on no other kind;
    sometimes: it depends on the moment, so that no case shows it for sure; case: one that shows it;
    avoid: what to do, of the file's table [avoid].
    """

    fingerprint: str
    reason: str
    source: str
    features: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    ranks: str = ""
    surplus: tuple[str, ...] = ()
    error: str = ""
    says: tuple[str, ...] = ()
    versions: Versions = ALL
    device: str = ""
    link: str = ""
    fixed: str = ""
    page: str = ""
    sometimes: bool = False
    case: Case | None = None
    avoid: str = ""

    @property
    def implementation(self) -> str:
        """Name of the implementation, from the fingerprint."""
        return self.fingerprint.split(" / ")[0]

    @property
    def obligation(self) -> Obligation | None:
        """Obligation from the fingerprint; None for a crash or hang."""
        part = self.fingerprint.split(" / ")[1]
        return next((obligation for obligation in OBLIGATIONS if obligation == part), None)

    @property
    def hangs(self) -> bool:
        """True for a known hang: each case that shows it costs seconds of patience."""
        return self.fingerprint.split(" / ")[1] == "hung"

    @property
    def record(self) -> KnownReference:
        """Journal record of the issue."""
        return KnownReference(
            fingerprint=self.fingerprint,
            reason=self.reason,
            source=self.source,
            link=self.link,
            page=self.page,
            avoid=self.avoid,
            features=self.features,
        )

    def of(self, implementation: str, *, anywhere: bool) -> KnownIssue:
        """Return the same issue of other code. anywhere: in cases without its features too."""
        rest = self.fingerprint.split(" / ")[1:]
        needed = () if anywhere else self.features
        return replace(self, fingerprint=" / ".join((implementation, *rest)), features=needed)

    def shows_on(self, device: str) -> bool:
        """Return True if it shows on a device as it is asked for, such as "cuda:1"."""
        return self.device in ("", kind_of(device))

    def known_in(self, releases: Releases) -> bool:
        """Return True if these releases have the issue, as far as the entry says."""
        return self.versions.include(releases)

    def unmeasured(self, releases: Releases) -> str:
        """Return the library whose release was not measured for this entry; empty if it was."""
        return self.versions.unmeasured(releases, self.implementation)

    def covers(self, case: Case) -> bool:
        """Return True if the case has all features of the entry."""
        return all(FEATURES[name].present(case) for name in self.features)

    def matches(self, finished: CaseFinished, violation: Violation | None) -> bool:
        """Return True if this failure of a case is the issue. violation: None for a crash or hang.

        With a fault injected into it the implementation has its issues all the same. An error in a
        step shows in a step after a load too, if the ranks there are such that it does.
        """
        if self.implementation not in family(finished.implementation):
            return False
        if violation is None:
            text = f"{finished.title}\n{finished.reason}\n{finished.detail}"
            same = self.fingerprint == joined(self.implementation, finished.status, finished.error)
            same = same and all(words in text for words in self.says)
        else:
            same = self._names(violation, violation.obligation) or (
                violation.in_step is not None and self._names(violation, violation.in_step)
            )
            same = same and self._fits(finished.case, violation)
        return same and any(self.covers(segment) for segment in segments_of(finished.case))

    def _fits(self, case: Case, violation: Violation) -> bool:
        """Return True if tensors, ranks and bytes of the violation are those of the issue."""
        extra = (violation.observed or 0.0) - (violation.expected or 0.0)
        return (
            (not self.tensors or all(is_of(self.tensors, case, t) for t in violation.tensors))
            and (not self.ranks or ranks_of(self.ranks, case) == violation.ranks)
            and (not self.surplus or extra <= most_bytes(self.surplus, case))
            and self.error in violation.error
        )

    def _names(self, violation: Violation, obligation: Obligation) -> bool:
        """Return True if the causes named here are among the violation's, or both have none."""
        role = violation.role
        if any(fnmatchcase(role, pattern) for pattern in self.roles):
            role = "".join(self.fingerprint.split(" / ")[2:3])
        start = joined(self.implementation, obligation, role)
        if not violation.causes or self.fingerprint == start:
            return not violation.causes and self.fingerprint == start
        named = self.fingerprint.removeprefix(f"{start} / ")
        return named != self.fingerprint and set(named.split("+")) <= set(violation.causes)


def matching(
    issues: Iterable[KnownIssue], finished: CaseFinished, violation: Violation | None
) -> list[KnownIssue]:
    """Return the issues that match a failure of a case.

    None where any part of a violation is no issue.
    """
    issues = tuple(issues)
    if violation is None or not violation.parts:
        return [issue for issue in issues if issue.matches(finished, violation)]
    parts = [matching(issues, finished, part) for part in violation.parts]
    return list(dict.fromkeys(chain.from_iterable(parts))) if all(parts) else []


def joined(*parts: str) -> str:
    """Join parts to a fingerprint; empty ones and repetitions are left out."""
    return " / ".join(dict.fromkeys(part for part in parts if part))


def load(given: Iterable[str]) -> tuple[KnownIssue, ...]:
    """Load the entries of the files, then ours, unless `none` is among the names.

    Raises UsageError, with file, entry and line, for what cannot be used.
    """
    names = list(dict.fromkeys(given))
    found = [issue for name in names if name != NONE for issue in read(Path(name))]
    return (*found, *(() if NONE in names else ours()))


@cache
def ours() -> tuple[KnownIssue, ...]:
    """Return the entries that come with zerocheck."""
    return read(OURS)


def read(path: Path) -> tuple[KnownIssue, ...]:
    """Read the entries of one file. Raises UsageError as `load` does."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read known issues {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    try:
        raw = toml_of(text)
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    for name in raw:
        if name not in _TABLES:
            raise UsageError(
                f"{path}: unknown field {name!r}{did_you_mean(name, _TABLES)}; a file of known "
                "issues holds [[issue]] entries, [measured] and [avoid]"
            )
    try:
        measured = measured_of(raw.get("measured", {}))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    entries = raw.get("issue", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path}: each entry starts with [[issue]], in two brackets")
    lines = [text.count("\n", 0, found.end()) + 1 for found in _ENTRY.finditer(text)]
    issues = []
    for number, entry in enumerate(entries, 1):
        line = f" (line {lines[number - 1]})" if len(lines) == len(entries) else ""
        source = f"{'ours' if path == OURS else path}, entry {number}"
        try:
            issues.append(_issue(entry, source, measured))
        except UsageError as error:
            raise UsageError(f"{path}, entry {number}{line}: {error}") from None
    return _with_advice(path, issues, raw.get("avoid", {}))


def _with_advice(path: Path, issues: list[KnownIssue], avoid: Any) -> tuple[KnownIssue, ...]:
    """Give each issue what the table says of its fault. avoid: {page or reason: what to do}."""
    if not isinstance(avoid, dict) or not all(isinstance(text, str) for text in avoid.values()):
        raise UsageError(f"{path}: [avoid] maps the page of a fault, or its reason, to a sentence")
    faults = {issue.record.fault for issue in issues}
    for name in avoid:
        if name not in faults:
            raise UsageError(
                f"{path}: [avoid]: no entry has the page or reason {name!r}"
                f"{did_you_mean(name, sorted(faults))}"
            )
    return tuple(replace(issue, avoid=avoid.get(issue.record.fault, "")) for issue in issues)


def _issue(raw: dict[str, Any], source: str, measured: Mapping[str, tuple[str, ...]]) -> KnownIssue:
    fields = _IssueEntry.__struct_fields__
    for name in raw:
        if name not in fields:
            raise UsageError(
                f"unknown field {name!r}{did_you_mean(name, fields)} (fields: {', '.join(fields)})"
            )
    for name in ("fingerprint", "reason"):
        if not raw.get(name):
            raise UsageError(f"it lacks the field {name!r}")
    try:
        entry = msgspec.convert(raw, _IssueEntry)
    except msgspec.ValidationError as error:
        raise UsageError(_in_words(str(error))) from None
    fingerprint = _checked_fingerprint(entry.fingerprint)
    for name in entry.features:
        feature(name)
    says = (entry.says,) if isinstance(entry.says, str) else tuple(entry.says)
    says = tuple(words for words in says if words)
    if says and entry.fingerprint.split(" / ")[1] not in _BROKEN:
        raise UsageError(
            "`says` is for crashes and hangs; a violation is identified by its cause, and by "
            "`tensors`, `roles`, `ranks`, `surplus` or `error`"
        )
    check_kinds((*entry.tensors, *entry.surplus), entry.ranks)
    having = {library: getattr(entry, library) for library in LIBRARIES}
    having = {
        library: specifiers(library, given) for library, given in having.items() if given != ""
    }
    issue = KnownIssue(
        fingerprint=fingerprint,
        reason=entry.reason,
        source=source,
        features=tuple(entry.features),
        roles=tuple(entry.roles),
        tensors=tuple(entry.tensors),
        ranks=entry.ranks,
        surplus=tuple(entry.surplus),
        error=entry.error,
        says=says,
        versions=Versions(having, measured),
        device=_device(entry.device),
        link=entry.link,
        fixed=entry.fixed,
        page=entry.page,
        sometimes=entry.sometimes,
        case=_case(entry),
    )
    if issue.hangs and not issue.features:
        raise UsageError(
            "a hang needs `features`: cases that have them are left out, for each would cost "
            "seconds of waiting"
        )
    return issue


def _in_words(message: str) -> str:
    """Move the field of a msgspec message to its front: `reason: expected str, got int`."""
    text, _, place = message.replace("`", "").partition(" - at $.")
    return f"{place}: {text[0].lower()}{text[1:]}" if place else text


def _checked_fingerprint(given: str) -> str:
    """Return a fingerprint with today's texts of its causes.

    Raises UsageError for a part that is unknown, with the nearest right spelling.
    """
    implementation, *parts = given.split(" / ")
    check_spelling(implementation)
    if not parts:
        raise UsageError(
            f"fingerprint {given!r} names an implementation only; a finding prints its fingerprint"
        )
    if parts[0] not in (*OBLIGATIONS, *_BROKEN):
        raise unknown("part of a fingerprint", parts[0], (*OBLIGATIONS, *_BROKEN))
    obligation, *rest = parts
    if obligation in _BROKEN or not rest:
        return given
    causes = " / ".join(rest).split("+")
    role = []
    if not all(map(find, causes)) and (rest[0] in ROLES or len(rest) > 1):
        role = rest[:1]
        causes = " / ".join(rest[1:]).split("+") if len(rest) > 1 else []
    shown = ["+".join(map(current, causes))] if causes else []
    return " / ".join((implementation, obligation, *role, *shown))


def _device(given: str) -> str:
    if given not in ("", CPU, CUDA):
        raise unknown("device of a known issue", given, (CPU, CUDA))
    return given


def _case(entry: _IssueEntry) -> Case | None:
    if entry.case is None:
        return None
    case = merged(Case(), entry.case, source="case")
    check(case)
    lacking = [name for name in entry.features if name not in features(case)]
    if lacking:
        raise UsageError(f"its case lacks {', '.join(lacking)} of the entry's features")
    return case
