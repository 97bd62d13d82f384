"""Extent of a bug, in one sentence: the features it needs, its ranks, its parameters.

The features are those that shrinking could not remove: without any one of them the failure is gone.
Where cases that have them all hold nevertheless, contrast.py says what else the failing ones have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...case.features import BASIC, FEATURES, GROUPS, features
from ...case.reductions import value_at
from ...case.schema import Case
from ...case.shapes import empties, trainable
from ...machine.hosts import counts
from ...protocol.verdicts import RESUME, Violation
from .contrast import WrongCase, of_cases, of_tensors

_SHOWN = 3
"""Names that are spelled out before the rest is counted."""

_ORDINALS = {2: "second", 3: "third", 4: "fourth"}
_DIRECT: dict[str, tuple[str, ...]] = {
    "groups": ("some-decay", "groups"),
    "step": ("mid-training",),
    "side": ("side",),
    "clip": ("clip-tight", "clip-loose", "clip"),
}
"""Fields that several features tell of -> those that say it best."""

_PLAIN = Case()
_GROUP_OF = {"mesh": "world", "precision": "training"}
"""Sections of a case whose features stand in a group of another name."""


def size(case: Case) -> str:
    """Format the size of a case: `"2 ranks, 1 block, 1 step"`."""
    blocks, user = len(case.model.blocks), case.model.user
    ranks = " then ".join(" x ".join(map(str, segment.mesh)) for segment in case.resume)
    mesh = f" ({' x '.join(map(str, case.mesh))})" if case.axes.has("replicate") else ""
    number = len(counts(case.hosts, case.world_size))
    hosts = f" on {number} hosts" if number > 1 else ""
    return ", ".join(
        (
            _count(case.world_size, "rank") + mesh + (f" then {ranks}" if ranks else "") + hosts,
            _count(blocks, "block") if blocks else user.factory if user else "no blocks",
            _count(case.training.steps, "step"),
        )
    )


class Tried(NamedTuple):
    """Cases of the run and of the search, by whether they show the bug."""

    wrong: Sequence[WrongCase] = ()
    right: Sequence[Case] = ()
    """Cases that hold, though the obligation could have failed in them."""


NOTHING_TRIED = Tried()


def extent(
    case: Case,
    needed: Sequence[tuple[str, Case]],
    violation: Violation | None,
    *,
    from_world: bool = True,
    tried: Tried = NOTHING_TRIED,
) -> str:
    """Return one sentence on a case that cannot be reduced further.

    needed: paths that could not be taken back, each with the case in which it is, as from
    `reductions.left`; from_world: more ranks than these fail too.
    """
    # A checkpoint is wrong after any step.
    stepwise = violation is not None and violation.obligation not in RESUME
    first = violation.step if stepwise and violation is not None else 0
    needs = _needs(case, needed, first, from_world=from_world)
    such = _with_all(case, needed)
    wrong = [one.case for one in tried.wrong if such(one.case)]
    contrast = of_cases(wrong, [*filter(such, tried.right)])
    parts = [needs, contrast, *_places(case, violation, tried.wrong)]
    return "; ".join(part for part in parts if part)


def _with_all(case: Case, needed: Sequence[tuple[str, Case]]) -> Callable[[Case], bool]:
    """Return a test of whether another case has all that this one needs to fail."""
    names = {name for path, reset in needed for name in _direct(case, reset, path)}
    paths = {path for path, _ in needed}

    def such(other: Case) -> bool:
        return (
            names <= {*features(other)}
            and not ("mesh" in paths and other.world_size < case.world_size)
            and not any(
                path in paths and value_at(other, path) < value_at(case, path)
                for path in ("training.steps", "training.microbatches")
            )
        )

    return such


def groups(case: Case, needed: Sequence[tuple[str, Case]]) -> tuple[str, ...]:
    """Return the GROUPS of features that a case needs to fail, BASIC alone if it needs none.

    needed: as for `extent`. Two ranks, or two steps, are no feature.
    """
    plain = {
        "mesh": case.world_size <= _PLAIN.world_size and not case.axes.has("replicate"),
        "training.steps": case.training.steps <= _PLAIN.training.steps,
    }
    named: set[str] = set()
    for path, reset in needed:
        if not plain.get(path):
            section = re.split(r"[.\[]", path)[0]
            dimensions = {FEATURES[name].dimension for name in _direct(case, reset, path)}
            named |= dimensions or {_GROUP_OF.get(section, section)}
    return tuple(group for group in GROUPS if group in named) or (BASIC,)


def not_searched(tries: int, case: Case, violation: Violation | None) -> str:
    """Return the sentence for a search that came to the end of its budget."""
    text = f"what it needs is not all known, the search ended after {_count(tries, 'try')}"
    return "; ".join([text, *_places(case, violation)])


def _needs(case: Case, needed: Sequence[tuple[str, Case]], first: int, *, from_world: bool) -> str:
    """Return the sentence on the features that a case needs.

    first: the step that is wrong first, 0-based.
    """
    having: list[str] = []
    where: list[str] = []
    since: list[str] = []
    grouped = any(path == "optimizer.groups" for path, _ in needed)
    for path, reset in needed:
        value = value_at(case, path)
        if grouped and path.startswith("optimizer.groups["):
            continue  # its options differ from the other groups', which is what counts
        if path == "mesh" and case.axes.has("replicate") > reset.axes.has("replicate"):
            having.append("a mesh of two axes")
            continue
        if path == "mesh" and case.world_size == 2:
            continue
        if path == "mesh" and from_world:
            since.append(f"from {case.world_size} ranks on")
        elif path == "training.steps":
            if first > 0:
                continue  # named below
            since.append(f"with {value} steps or more")
        elif path == "training.microbatches":
            having.append("several microbatches" if value == 2 else f"{value} microbatches or more")
        elif path == "model.blocks" and len(value) > 1:
            having.append(f"{len(value)} blocks")
        else:
            text = _lost(case, reset, path) or f"{path} {_plain(value)}"
            (where if _is_clause(text) else having).append(text)
    parts = []
    if having:
        parts.append(f"with {_listed(having)}")
    if where:
        parts.append(f"where {_listed(where)}")
    parts += since
    if first > 0:
        parts.append(f"from the {_ORDINALS.get(first + 1, f'{first + 1}th')} step on")
    text = f"only {', '.join(parts)}" if parts else "with all options at their default"
    return f"{text}, on one rank already" if case.world_size == 1 else text


def _without(case: Case, reset: Case) -> list[str]:
    """Return the features of the case that the other has not, numbers of ranks aside."""
    others = set(features(reset))
    lost = [name for name in features(case) if name not in others]
    return [name for name in lost if not name.startswith("world-")]


def _direct(case: Case, reset: Case, path: str) -> list[str]:
    """Return the lost features that describe the field at `path` best."""
    lost = _without(case, reset)
    direct = [name for name in _DIRECT.get(path.rpartition(".")[2], lost) if name in lost]
    return direct[:1] or [name for name in lost if name.startswith("block-")][:1] or lost[:2]


def _lost(case: Case, reset: Case, path: str) -> str:
    """Describe in the words of features what the case has and the reset one has not."""
    direct = _direct(case, reset, path)
    # Several features may follow from one size; they were not tried apart.
    features = " or ".join(FEATURES[name].title for name in direct)
    if "sometimes-used" in _without(case, reset) and case.world_size > 1:
        return f"{FEATURES['sometimes-used'].title} ({features})"
    return features


def _is_clause(title: str) -> bool:
    return title.startswith(("the ", "each ")) and bool({"is", "does"} & set(title.split()))


def _places(case: Case, violation: Violation | None, wrong: Sequence[WrongCase] = ()) -> list[str]:
    """Return on which ranks the bug shows, and in which parameters or kind of parameters."""
    if violation is None:
        return []
    places = []
    ranks = violation.ranks
    if ranks and case.world_size > 1:
        if len(set(ranks)) == case.world_size:
            places.append("on every rank")
        else:
            word = "rank" if len(ranks) == 1 else "ranks"
            places.append(f"on {word} {_listed([str(rank) for rank in ranks])}")
    names = violation.tensors
    model = case.model
    learning = set(trainable(model)).difference(empties(model))
    if len(learning) > 1 and learning <= set(names):
        places.append("in all parameters")
    elif kind := of_tensors([*wrong, WrongCase(case, names)]):
        places.append(f"{kind} (here {_some(names)})")
    elif names:
        places.append(f"in {_some(names)}")
    return places


def _some(names: Sequence[str]) -> str:
    shown = list(names[:_SHOWN])
    more = len(names) - len(shown)
    return _listed([*shown, f"{more} more"] if more else shown)


def _listed(parts: Sequence[str]) -> str:
    """Join words as `"a, b and c"`."""
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)


def _count(number: int, what: str) -> str:
    if number == 1:
        return f"1 {what}"
    return f"{number} {'tries' if what == 'try' else what + 's'}"
