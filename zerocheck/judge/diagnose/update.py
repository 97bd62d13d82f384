"""Causes of a wrong update: the optimizer's step with one thing changed, each compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ... import causes as bugs
from ...causes.registry import said
from ...floating_point import Enclosure
from ...optimizers.changes import changes
from ...optimizers.specification import Change, Segment, SegmentStep, UpdateRule
from ...protocol.verdicts import Explanation
from ..compare import compare

MOST_CHANGES = 8
"""Changes that a sentence names."""


def fitting(rule: UpdateRule, segments: Iterable[Segment]) -> tuple[Change, ...]:
    """Return the changes of a step that give every element of all segments: pieces of tensors."""
    left: dict[tuple[str, str], Change] | None = None
    for segment in segments:
        found: dict[tuple[str, str], Change] = {}
        step = SegmentStep(rule, segment)
        right = step.take()
        for change in changes(step):
            key = change.cause, change.words
            if key in found or (left is not None and key not in left):
                continue
            made = change.made()
            if made is None or (right is not None and torch.equal(made.exact, right.exact)):
                continue  # what it changes is not read for this role
            wide = Enclosure(made.exact, made.bound + segment.wider)
            if compare(segment.observed, wide)[1] is None:
                found[key] = change
        left = found
        if not left:
            break
    return tuple((left or {}).values())


def in_words(found: Sequence[Change]) -> str:
    """Return what the changes say; those of no known bug only where there are no others."""
    known = [one for one in found if one.cause] or found
    return ", or ".join([one.words for one in known][:MOST_CHANGES])


def explanation(role: str, names: Sequence[str]) -> Explanation:
    """Return what the causes say of a role."""
    words = dict(zip(names, names, strict=True)) | said(names)
    return Explanation.of(names, words, f"{role} is wrong", ": ")


def unchanged(role: str, names: Sequence[str]) -> Explanation:
    """Return what there is to say of a role that kept its values. names: of causes that give them.

    Moments that are 0 still, or a rate of 0, leave it as it was too.
    """
    text = f"{role} was not updated"
    alone = explanation(role, names).sentences
    return Explanation(text, (bugs.NEVER_UPDATED, *names), {bugs.NEVER_UPDATED: text, **alone})


def copies(
    segments: Iterable[Segment], before: Iterable[torch.Tensor], right: Iterable[Enclosure]
) -> str:
    """Return words if the values are those from before the step, or the right ones rounded.

    before: values of the role before the step; right: what it should be.
    """
    same = narrow = True
    unknown = False
    for segment, old, wanted in zip(segments, before, right, strict=True):
        observed = segment.observed
        unknown = unknown or bool(observed.isnan().any())
        same = same and torch.equal(observed, old)
        narrow = narrow and _rounded(observed, wanted)
    if unknown:
        return "is NaN in part: memory that nobody wrote"
    if same:
        return "has the value from before the step: it is not updated"
    return "is the right one rounded to bf16" if narrow else ""


def _rounded(observed: torch.Tensor, right: Enclosure) -> bool:
    if not torch.equal(observed, observed.bfloat16().double()):
        return False
    low = (right.exact - right.bound).float().bfloat16().double()
    high = (right.exact + right.bound).float().bfloat16().double()
    return bool(((observed >= low) & (observed <= high)).all())
