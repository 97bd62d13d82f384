"""Patterns: fields that give a case the features asked for, since few drawn cases have them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .codec import to_plain
from .drawing import CaseMaker, attempts
from .features import features
from .options import defaults
from .reductions import differing, simpler
from .schema import Case

TRIED = 2_000
"""Cases drawn to find some with the features."""

DRAWN = 8
"""Cases with the features, of which patterns are made."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Case with certain features, and the nested fields that give them."""

    case: Case
    fields: dict[str, Any]


def patterns_of(wanted: Collection[str], maker: CaseMaker) -> list[Pattern]:
    """Return patterns of the cases that a maker makes; the smallest cases come first.

    The same for the same arguments; empty if no case that was tried has the features.
    """
    names = frozenset(wanted)
    drawn = islice(attempts(maker, seed=0), TRIED)
    having = (case for case in drawn if case is not None and names <= {*features(case)})
    small, large = [], []
    for case in islice(having, DRAWN):
        smallest = _smallest(case, names, maker)
        paths = differing(smallest, _smallest(smallest, frozenset(), maker))
        small.append(Pattern(smallest, _fields(smallest, paths)))
        large.append(Pattern(case, _fields(case, paths)))
    return list({pattern.case: pattern for pattern in (*small, *large)}.values())


def _smallest(case: Case, wanted: frozenset[str], maker: CaseMaker) -> Case:
    """Return the smallest case with the features that reductions of the case lead to."""
    search = simpler(case, kept=maker.fixed_paths)
    try:
        candidate = next(search)
        while True:
            fits = candidate.mesh in maker.meshes and wanted <= {*features(candidate)}
            candidate = search.send(fits)
    except StopIteration as ended:
        smallest: Case = ended.value
        return smallest


def _fields(case: Case, paths: Collection[str]) -> dict[str, Any]:
    """Return nested fields of the case; of a field in a list, the whole list."""
    plain = to_plain(case)
    fields: dict[str, Any] = {}
    for path in paths:
        section, _, name = path.partition("[")[0].partition(".")
        if name:
            fields.setdefault(section, {})[name] = plain[section].get(name, defaults().get(name))
        else:
            fields[section] = plain[section]
    return fields
