"""Releases of the libraries that known issues are of, and those that were measured.

An entry says which versions have the issue. What was looked at are the versions that its file calls
measured; of any other version an entry is unverified: it covers what shows, and is never stale.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ... import causes as bugs
from ...catalogue import LIBRARIES, extra_of
from ...errors import UsageError, unknown
from ..records.records import Environment


@dataclass(frozen=True)
class Releases:
    """Versions of the libraries of a run."""

    versions: Mapping[str, str]
    """Such as "2.13.0+cpu"; one that is not there is left out."""

    @classmethod
    def of(cls, environment: Environment) -> Releases:
        """Return the versions of a run's environment."""
        others = dict(one.split(" ") for one in environment.libraries.split(", ") if " " in one)
        return cls({**others, "torch": environment.torch})

    def plain(self, library: str) -> str:
        """Return the version of a library without its build, such as "2.13.0"; empty for none."""
        return self.versions.get(library, "").partition("+")[0]


def library_of(implementation: str) -> str:
    """Return the library whose release decides what an implementation does."""
    return extra_of(implementation) or "torch"


def refuses(fingerprint: str) -> bool:
    """Return True for an issue by which a checkpoint that is whole is refused, which all see."""
    return fingerprint.endswith(f" / {bugs.REFUSED}")


@dataclass(frozen=True)
class Versions:
    """Versions of libraries that have an issue.

    Both map a library to versions: those that have the issue, as one of several specifiers (PEP
    440), all where there are none; and those that were measured, all where there are none.
    """

    having: Mapping[str, tuple[SpecifierSet, ...]] = field(default_factory=dict)
    measured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((tuple(self.having), tuple(self.measured.items())))

    def include(self, releases: Releases) -> bool:
        """Return True if these releases have the issue. One that is not there decides nothing."""
        return all(
            any(one.contains(version, prereleases=True) for one in specifiers)
            for library, specifiers in self.having.items()
            if (version := releases.plain(library))
        )

    def unmeasured(self, releases: Releases, implementation: str) -> str:
        """Return the library, of those that matter to an implementation, that was not measured.

        Empty if it was.
        """
        library = library_of(implementation)
        known = self.measured.get(library, ())
        version = releases.plain(library)
        return library if known and version and version not in known else ""

    def __str__(self) -> str:
        """Return the versions in words, empty for all."""
        return ", ".join(
            f"{library} {' or '.join(filter(None, map(str, specifiers)))}"
            for library, specifiers in self.having.items()
            if any(map(str, specifiers))
        )


ALL = Versions()
"""All versions, of which none needs to be measured."""


def specifiers(library: str, given: str | list[str]) -> tuple[SpecifierSet, ...]:
    """Read a range of versions, or a list of them. Raises UsageError for what is neither."""
    texts = [given] if isinstance(given, str) else [f"=={version}" for version in given]
    try:
        return tuple(SpecifierSet(text) for text in texts)
    except InvalidSpecifier:
        raise UsageError(
            f"{library}: {given!r} is neither a list of versions nor a range "
            '(examples: ["2.13.0"], ">=2.11,<2.14")'
        ) from None


def measured_of(given: object) -> dict[str, tuple[str, ...]]:
    """Read the table of measured versions. Raises UsageError for what is no list of versions."""
    if not isinstance(given, dict):
        raise UsageError('measured: it is a table, such as [measured] with torch = ["2.13.0"]')
    found = {}
    for library, listed in given.items():
        if library not in LIBRARIES:
            raise unknown("library in [measured]", library, LIBRARIES)
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise UsageError(f'measured.{library}: it is a list of versions, such as ["2.13.0"]')
        try:
            found[library] = tuple(str(Version(one)) for one in listed)
        except InvalidVersion as error:
            raise UsageError(f"measured.{library}: {error}") from None
    return found
