"""Extent of a bug, in one sentence: the features it needs, its ranks, its parameters.

The features are those that shrinking could not remove: without any one of them the failure is gone.
Where cases that have them all hold nevertheless, contrast.py says what else the failing ones have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NamedTuple

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


def size(case: Case, violation: Violation | None = None) -> str:
    """Format the size of a case: `"2 ranks, 1 block, 1 step"`.

    violation: what it shows, which may be in the forward and backward after the last step.
    """
    blocks, user = len(case.model.blocks), case.model.user
    ranks = " then ".join(" x ".join(map(str, segment.mesh)) for segment in case.resume)
    mesh = f" ({' x '.join(map(str, case.mesh))})" if case.axes.has("replicate") else ""
    number = len(counts(case.hosts, case.world_size))
    hosts = f" on {number} hosts" if number > 1 else ""
    steps = _count(case.training.steps, "step")
    if not case.resume and violation is not None and violation.step >= case.training.steps:
        steps += " and the forward and backward of the next"
    return ", ".join(
        (
            _count(case.world_size, "rank") + mesh + (f" then {ranks}" if ranks else "") + hosts,
            _count(blocks, "block") if blocks else user.factory if user else "no blocks",
            steps,
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
    """Return one sentence on a case that cannot be reduced further, and on all that fail.

    needed: paths that could not be taken back, each with the case in which it is, as from
    `reductions.left`; from_world: more ranks than these fail too.
    """
    needs = list(_needs(case, needed, from_world=from_world))
    # A checkpoint is wrong after any step.
    if violation is not None and violation.obligation not in RESUME and violation.step > 0:
        unsaid = "training.steps"  # the step is named instead
        needs = [n._replace(default=True) if n.path == unsaid else n for n in needs]
        needs.append(_from_step(violation.step))

    def such(other: WrongCase) -> bool:
        return all(need.met(other) for need in needs)

    contrast = of_cases(
        [other.case for other in tried.wrong if such(other)],
        [other for other in tried.right if such(WrongCase(other))],
    )
    own = [need for need in needs if not all(map(need.met, tried.wrong))]
    said = [need for need in needs if need not in own and not need.default]
    parts = [_sentence(case, said)] if said or not own else []
    if own:
        lacking = sum(not all(need.met(other) for need in own) for other in tried.wrong)
        parts.append(
            f"the smallest case {_only(own)}, unlike {lacking} of the {len(tried.wrong)} failing "
            "cases"
        )
    parts += [contrast, *_places(case, violation, tried.wrong)]
    return "; ".join(part for part in parts if part)


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


class _Need(NamedTuple):
    """Property that a case needs to fail, in words."""

    path: str
    text: str
    kind: Literal["with", "where", "since"]
    met: Callable[[WrongCase], bool]
    """True if another case has it."""
    default: bool = False
    """It is not said, unless other cases fail without."""


def _needs(case: Case, needed: Sequence[tuple[str, Case]], *, from_world: bool) -> Iterator[_Need]:
    """Iterate over what a case needs, the steps of the violation aside."""

    def at_least(number: Callable[[Case], int]) -> Callable[[WrongCase], bool]:
        return lambda other: number(other.case) >= number(case)

    grouped = any(path == "optimizer.groups" for path, _ in needed)
    for path, reset in needed:
        value = value_at(case, path)
        if grouped and path.startswith("optimizer.groups["):
            continue  # its options differ from the other groups', which is what counts
        if path == "mesh" and case.axes.has("replicate") > reset.axes.has("replicate"):
            axes = "a mesh of two axes"
            yield _Need(path, axes, "with", lambda other: other.case.axes.has("replicate"))
        elif path == "mesh" and (from_world or case.world_size == 2):
            text = f"from {case.world_size} ranks on"
            met = at_least(lambda other: other.world_size)
            yield _Need(path, text, "since", met, case.world_size == 2)
        elif path == "training.steps":
            met = at_least(lambda other: other.training.steps)
            yield _Need(path, f"with {value} steps or more", "since", met)
        elif path == "training.microbatches":
            text = "several microbatches" if value == 2 else f"{value} microbatches or more"
            yield _Need(path, text, "with", at_least(lambda other: other.training.microbatches))
        elif path == "model.blocks" and len(value) > 1:
            met = at_least(lambda other: len(other.model.blocks))
            yield _Need(path, f"{len(value)} blocks", "with", met)
        elif type(value) is int and not _direct(case, reset, path):
            sign = 1 if value > value_at(reset, path) else -1
            text = f"{path} {value} or {'more' if sign > 0 else 'less'}"
            yield _Need(path, text, "with", _beyond(path, value, sign))
        else:
            text = _lost(case, reset, path) or f"{path} {_plain(value)}"
            kind: Literal["where", "with"] = "where" if _is_clause(text) else "with"
            yield _Need(path, text, kind, _having(_direct(case, reset, path)))


def _having(names: Collection[str]) -> Callable[[WrongCase], bool]:
    """Return a test for one of these features; it is passed where there is none to test."""
    return lambda other: not names or not {*features(other.case)}.isdisjoint(names)


def _beyond(path: str, value: int, sign: int) -> Callable[[WrongCase], bool]:
    """Return a test for a number at the path: at least the value, or at most, for a sign of -1."""
    return lambda other: bool(sign * value_at(other.case, path) >= sign * value)


def _from_step(first: int) -> _Need:
    """Return the need of a violation that is first seen in this step, 0-based, and not 0."""
    text = f"from the {_ORDINALS.get(first + 1, f'{first + 1}th')} step on"
    return _Need("", text, "since", lambda other: other.step is None or other.step >= first)


def _sentence(case: Case, needs: Sequence[_Need]) -> str:
    """Return the sentence on what every failing case has."""
    text = _only(needs) if needs else "with all options at their default"
    return f"{text}, on one rank already" if case.world_size == 1 else text


def _only(needs: Sequence[_Need]) -> str:
    parts = []
    for kind in ("with", "where"):
        texts = [need.text for need in needs if need.kind == kind]
        parts += [f"{kind} {_listed(texts)}"] if texts else []
    return f"only {', '.join([*parts, *(need.text for need in needs if need.kind == 'since')])}"


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
    elif kind := of_tensors([*wrong, WrongCase.of(case, violation)]):
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
