"""Features of options that adapters declare."""

from __future__ import annotations

from ...catalogue import option_sets
from ..option_set import OptionFeature, OptionSet
from ..schema import Case
from .row import Feature


def of_dimension(dimension: str) -> list[Feature]:
    """Return the features of all adapters' options in a dimension."""
    sets: tuple[OptionSet, ...] = option_sets()
    return [_row(one, row) for one in sets for row in one.features if row.dimension == dimension]


def _row(one: OptionSet, row: OptionFeature) -> Feature:
    def present(case: Case) -> bool:
        resumes = bool(case.resume) or row.dimension != "resume"
        return resumes and bool(row.present(one.values(case.options)))

    return Feature(row.name, row.title, row.dimension, present, one.named(row.option))
