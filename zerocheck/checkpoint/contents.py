"""Content of a checkpoint: every tensor with its role and name, step counts, settings.

Roles are `model` (parameters and buffers, which a state dict does not tell apart), the kinds of
optimizer state (`exp_avg`, `exp_avg_sq`, `step` ...) and `other`, of which nothing is known.
Names are those of the unwrapped model. Where an optimizer's state dict has only numbers for its
parameters, they are matched to names if there is exactly one way to do so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..contract.names import unwrapped
from ..errors import UsageError
from .groups import ParamGroup, groups_of, written_names
from .optimizer_keys import GroupKey, StateKey, group_key, owners, state_key
from .result import CheckpointSummary, GroupSettings, RoleTotal
from .source import CheckpointSource, DamagedCheckpoint, Key, Stored, dotted

MODEL, OTHER = "model", "other"
_MODEL_WORDS = ("model", "model_state_dict", "state_dict", "module", "pytorch_model", "net")
NUMBER = "parameter "
"""Name of a parameter of which only the number is known, before the number."""
SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Kinds of optimizer state that have the shape of their parameter."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Item:
    """A tensor with its place in training: role and name."""

    role: str
    name: str
    key: Key
    stored: Stored

    @property
    def label(self) -> str:
        return f"{self.role} {self.name}"


@dataclass
class Contents:
    """Named content of a checkpoint; see the file's docstring.

    settings: of each parameter, by name; others: by dotted key.
    """

    path: Path
    source: CheckpointSource
    items: dict[tuple[str, str], Item] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    odd_steps: dict[str, str] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    settings: dict[str, dict[str, object]] = field(default_factory=dict)
    others: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self, item: Item) -> torch.Tensor:
        """Read the tensor; raises Damaged."""
        return self.source.read(item.key)

    def named(self, role: str) -> dict[str, Item]:
        """Return the items of a role, by name."""
        return {item.name: item for item in self.items.values() if item.role == role}

    @property
    def numbered(self) -> bool:
        """True if the optimizer has numbers in place of the names of parameters."""
        return any(name.startswith(NUMBER) for name in self.optimized())

    def optimized(self) -> list[str]:
        """Names of all parameters that have optimizer state, in the order of the model's."""
        found = dict.fromkeys(n for role, n in self.items if role not in (MODEL, OTHER))
        first = [name for name in self.named(MODEL) if name in found]
        return list(dict.fromkeys([*first, *found, *self.steps]))

    def parts_of(self, name: str, numel: int, known: Container[str]) -> list[str]:
        """Return what a state dict has in place of a parameter, such as a fused one in parts.

        Those are tensors of the model that are not known, below the same module, and together of
        as many elements.
        """
        unknown = {part: item for part, item in self.named(MODEL).items() if part not in known}
        above = name
        while "." in above:
            above = above.rpartition(".")[0]
            parts = [part for part in unknown if part.startswith(f"{above}.")]
            if sum(unknown[part].stored.numel for part in parts) == numel:
                return parts
        return []

    def described(self) -> CheckpointSummary:
        """Summarize the content for a report."""
        roles: dict[str, list[Stored]] = {}
        for item in self.items.values():
            roles.setdefault(item.role, []).append(item.stored)
        moments = next(filter(None, map(self.named, SHAPED)), {})
        return CheckpointSummary(
            path=str(self.path),
            format=self.source.format,
            roles=tuple(_total(role, stored) for role, stored in roles.items()),
            psi=sum(item.stored.numel for item in moments.values()),
            steps={f"{step:g}": n for step, n in sorted(Counter(self.steps.values()).items())},
            groups=tuple(
                GroupSettings(
                    parameters=tuple(map(str, group.members)),
                    settings={word: repr(value) for word, value in group.settings.items()},
                )
                for group in self.groups
            ),
        )


def contents_of(
    path: Path, source: CheckpointSource, members: Sequence[Sequence[str]] = ()
) -> Contents:
    """Give every tensor of a checkpoint its role and name, and read its steps and settings.

    members: names of the parameters in each group, where they are known from elsewhere. Raises
    UsageError for one without tensors in which nothing is wrong: there is nothing to check.
    """
    if not source.tensors and not source.findings:
        raise UsageError(f"{str(path)!r} holds no tensor, so there is nothing to check")
    contents = Contents(path, source, notes=list(source.notes))
    known = owners([*source.tensors, *source.values])
    states: dict[Key, StateKey] = {}
    rest: list[Key] = []
    found: dict[GroupKey, object] = {}
    for key in source.tensors:
        if (setting := group_key(key)) is not None:
            found[setting] = _number(source, key)
        elif (state := state_key(key, known)) is not None:
            states[key] = state
        else:
            rest.append(key)
    numbers: dict[StateKey, object] = {}
    for key, value in source.values.items():
        if (setting := group_key(key)) is not None:
            found[setting] = value
        elif (state := state_key(key, known)) is not None:
            numbers[state] = value
        else:
            contents.others[dotted(key)] = value
    contents.groups = groups_of(found)
    _model(contents, rest, states)
    names = _names_of_numbers(contents, states, written_names(found) or _known(contents, members))
    _states(contents, states, numbers, names)
    _settings(contents, names)
    return contents


def _model(contents: Contents, keys: list[Key], states: Mapping[Key, StateKey]) -> None:
    """Name the tensors that are no optimizer state: those of the model, and others.

    The model's are in the mapping that has the most names in common with the optimizer's, else in
    one whose key says so, else in the largest.
    """
    wanted = {unwrapped(str(state.parameter)) for state in states.values()}
    places: dict[Key, list[Key]] = {}
    for key in keys:
        places.setdefault(key[:-1], []).append(key)
    if not places:
        return

    def fits(place: Key) -> tuple[int, bool, bool, int]:
        names = {unwrapped(str(key[-1])) for key in places[place]}
        called = bool(place) and place[-1] in _MODEL_WORDS
        return len(names & wanted), called, not place, len(names)

    chosen = max(places, key=fits)
    prefix = _prefix([unwrapped(str(key[-1])) for key in places[chosen]], wanted)
    for key in keys:
        name = unwrapped(str(key[-1]))
        role = MODEL if key[:-1] == chosen and name.startswith(prefix) else OTHER
        name = unwrapped(name.removeprefix(prefix))
        if role == OTHER or (MODEL, name) in contents.items:
            role, name = OTHER, dotted(key)
        _add(contents, role, name, key)


def _prefix(names: list[str], wanted: set[str]) -> str:
    """Return the prefix of the model's names in those of the optimizer, such as `model.`, or ""."""
    if not wanted or wanted & set(names):
        return ""
    before = Counter(
        name.removesuffix(known) for known in wanted for name in names if name.endswith(f".{known}")
    )
    return before.most_common(1)[0][0] if before else ""


def _states(
    contents: Contents,
    states: Mapping[Key, StateKey],
    numbers: Mapping[StateKey, object],
    names: Mapping[int, str],
) -> None:
    for key, state in states.items():
        name = _named(state.parameter, names)
        if (state.kind, name) in contents.items:  # of a second optimizer
            _add(contents, OTHER, dotted(key), key)
            continue
        _add(contents, state.kind, name, key)
        if state.kind == "step":
            _note_step(contents, name, _number(contents.source, key))
    for state, value in numbers.items():
        name = _named(state.parameter, names)
        if state.kind == "step":
            _note_step(contents, name, value)
        else:
            contents.others[f"{state.kind} {name}"] = value


def _note_step(contents: Contents, name: str, value: object) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63:
        contents.steps[name] = float(value)
    else:
        contents.odd_steps[name] = str(value)[:100]


def _number(source: CheckpointSource, key: Key) -> object:
    """Return the number in a tensor of one element, or in words why there is none."""
    if source.tensors[key].numel != 1:
        return f"a tensor of shape {list(source.tensors[key].shape)}"
    try:
        value: object = source.read(key).item()
    except DamagedCheckpoint:
        return "damaged"
    return value


def _names_of_numbers(
    contents: Contents, states: Mapping[Key, StateKey], written: Mapping[int, str]
) -> dict[int, str]:
    """Names for numbered parameters: those that are written, or the model's if there is one way.

    With one param group, numbers have the order of the parameters, and so has a state dict,
    buffers aside; several groups, and formats that sort, leave shapes that occur only once. There
    must be as many numbers as names, and every shape must fit.
    """
    shapes = {
        state.parameter: contents.source.tensors[key].shape
        for key, state in states.items()
        if isinstance(state.parameter, int) and state.kind in SHAPED
    }
    members = {one for group in contents.groups for one in group.members if isinstance(one, int)}
    numbers = sorted({*members, *(one for one in shapes if isinstance(one, int))})
    if written or not numbers:
        return dict(written)
    model = [
        item
        for item in contents.named(MODEL).values()
        if item.name.rpartition(".")[2] not in _BUFFERS and item.stored.dtype.is_floating_point
    ]
    names: dict[int, str] = {}
    if len(model) != len(numbers):
        pass
    elif contents.source.ordered and len(contents.groups) < 2:
        if all(
            shapes.get(number, item.stored.shape) == item.stored.shape
            for number, item in zip(numbers, model, strict=True)
        ):
            names = {number: item.name for number, item in zip(numbers, model, strict=True)}
    else:
        by_shape = {item.stored.shape: item.name for item in model}
        if len(by_shape) == len(model) and {*shapes.values()} == by_shape.keys():
            names = {number: by_shape[shapes[number]] for number in numbers}
    if names:
        contents.notes.append("numbers of parameters were matched to names by order and shape")
        return names
    contents.notes.append("numbers of parameters could not be matched to names")
    return {}


def _known(contents: Contents, members: Sequence[Sequence[str]]) -> dict[int, str]:
    """Return the name of each number, where names of all groups are known."""
    pairs: list[tuple[str | int, str]] = []
    for group, names in zip(contents.groups, members, strict=False):
        if len(group.members) == len(names):
            pairs += zip(group.members, names, strict=True)
    whole = len(pairs) == sum(len(group.members) for group in contents.groups)
    return {number: name for number, name in pairs if whole and name and isinstance(number, int)}


def _settings(contents: Contents, names: Mapping[int, str]) -> None:
    for group in contents.groups:
        group.members = [_named(member, names) for member in group.members]
        for member in group.members:
            contents.settings[str(member)] = group.settings


def _named(parameter: str | int, names: Mapping[int, str]) -> str:
    if isinstance(parameter, int):
        return names.get(parameter, f"{NUMBER}{parameter}")
    return unwrapped(parameter)


def _add(contents: Contents, role: str, name: str, key: Key) -> None:
    contents.items[role, name] = Item(role, name, key, contents.source.tensors[key])


def _total(role: str, stored: list[Stored]) -> RoleTotal:
    return RoleTotal(
        role=role,
        tensors=len(stored),
        elements=sum(one.numel for one in stored),
        nbytes=sum(one.nbytes for one in stored),
        dtypes=tuple(sorted({str(one.dtype).removeprefix("torch.") for one in stored})),
    )
