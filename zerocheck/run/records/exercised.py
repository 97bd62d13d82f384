"""Features that a judged case exercised: an obligation that they can break could have failed in it.

A case has a feature by its fields alone. If the gradient of all its parameters is 0, it says
nothing of an option that changes how gradients are reduced; if the norm does not reach the maximum,
nothing of clipping. Such a case does not count for the feature.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...case.features import FEATURES, features
from ...protocol.verdicts import Judgement, Obligation
from .records import CaseFinished

_OF_DIMENSION: Mapping[str, Obligation] = {
    "world": "gradient",
    "model": "gradient",
    "data": "gradient",
    "training": "gradient",
    "sharding": "gradient",
    "optimizer": "update",
    "start": "update",
    "resume": "roundtrip",
}
"""Obligation that a feature of this dimension can break, but for those of _OF_FEATURE."""

_OF_FEATURE: Mapping[str, Obligation | None] = {
    "clip": "clip",
    "clip-inf": "clip",
    "clip-tight": "clip",
    "clip-loose": None,  # the norm is not to reach the maximum
    "overflow": None,  # the gradient is not finite, and the step is to be skipped
    "block-batch-norm": "buffers",
    "resume-killed": "durability",
    "resume-flip": "damage",
    "resume-truncate": "damage",
    "resume-remove": "damage",
    "resume-mix": "damage",
}
"""Feature -> obligation that it can break; None: several, each in another case."""


def able(judgement: Judgement) -> frozenset[Obligation]:
    """Return the obligations that could have failed: those violated, and most that hold."""
    return frozenset(
        one
        for one, status in judgement.statuses.items()
        if status == "violated" or (status == "holds" and one not in judgement.vacuous)
    )


def idle(record: CaseFinished) -> dict[str, Obligation | None]:
    """Return the features that the case had and did not exercise.

    Each with the obligation that could not fail: None where no obligation could. An obligation that
    the run did not ask for counts as one that could. Empty for a case that was not judged.
    """
    judgement = record.judgement
    if judgement is None:
        return {}
    could = able(judgement)
    if not could:
        return dict.fromkeys(features(record.case))
    vacuous = {one for one, status in judgement.statuses.items() if status == "holds"} - could
    return {name: one for name in features(record.case) if (one := _broken_by(name)) in vacuous}


def _broken_by(feature: str) -> Obligation | None:
    if feature in _OF_FEATURE:
        return _OF_FEATURE[feature]
    return _OF_DIMENSION.get(FEATURES[feature].dimension)
