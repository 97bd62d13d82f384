"""Causes of a wrong gradient tensor by tensor, where no one cause explains every wrong tensor."""

from __future__ import annotations

from ...protocol.verdicts import Explanation
from .evidence import Candidate, Evidence, explains, sentences_of, wrong_tensors
from .gradient import UNEXPLAINED, candidates


def causes_by_tensor(evidence: Evidence) -> list[tuple[tuple[str, ...], Explanation]]:
    """Find causes that explain some wrong tensors each: (names of tensors, causes).

    The last has no causes, if nothing explains a tensor by itself. Empty if nothing explains any.
    """
    wrong = wrong_tensors(evidence)
    places = [p for p in evidence.layout.places if bool(wrong[p.start : p.stop].any())]
    left = {
        place.name: evidence.layout.spread([place is one for one in evidence.layout.places])
        for place in places
    }
    found: list[tuple[tuple[str, ...], Explanation]] = []
    explained: list[tuple[Candidate, set[str]]] = []
    for candidate in candidates(evidence, wrong):
        names = {name for name, mask in left.items() if explains(candidate, evidence, mask)}
        if names:
            explained.append((candidate, names))
    while explained:
        names = max((names for _, names in explained), key=len)
        alike = [one for one, of in explained if of >= names]
        ordered = tuple(name for name in left if name in names)
        sentences = sentences_of(alike)
        found.append((ordered, Explanation.of(sentences, sentences)))
        for name in ordered:
            del left[name]
        rest = ((one, of - names) for one, of in explained)
        explained = [(one, of) for one, of in rest if of]
    if found and left:
        found.append((tuple(left), UNEXPLAINED))
    return found
