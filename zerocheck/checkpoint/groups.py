"""Param groups of a checkpoint, whichever way they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..contract.names import unwrapped
from .optimizer_keys import GroupKey, number_or_name

_MEMBERS = ("params", "param_names")
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that choose how torch computes a step, and not which step."""


@dataclass
class ParamGroup:
    """Param group: its members as written (names or numbers), and its settings."""

    members: list[str | int] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)


def groups_of(found: Mapping[GroupKey, object]) -> list[ParamGroup]:
    """Return the groups, from every setting by its key.

    Settings that are written for each parameter are put together again: parameters of one
    optimizer with equal settings are one group.
    """
    numbered: dict[tuple[object, int], ParamGroup] = {}
    single: dict[tuple[object, str], dict[str, object]] = {}
    for key, value in found.items():
        if isinstance(key.of, int):
            group = numbered.setdefault((key.owner, key.of), ParamGroup())
            if key.setting == "params":
                members = value if isinstance(value, list | tuple) else []
                group.members = [
                    number_or_name(one if isinstance(one, str | int) else str(one))
                    for one in members
                ]
            elif key.setting not in _MEMBERS:
                group.settings[key.setting] = value
        else:
            single.setdefault((key.owner, key.of), {})[key.setting] = value
    groups = [numbered[key] for key in sorted(numbered, key=lambda key: (str(key[0]), key[1]))]
    same: dict[str, ParamGroup] = {}
    for (owner, name), settings in single.items():
        kept = {word: value for word, value in settings.items() if word not in _MEMBERS}
        form = repr((owner, sorted(kept.items())))
        same.setdefault(form, ParamGroup(settings=kept)).members.append(name)
    return [*groups, *same.values()]


def written_names(found: Mapping[GroupKey, object]) -> dict[int, str]:
    """Return the name of each number, where an optimizer was given names (`param_names`)."""
    names: dict[int, str] = {}
    for key, value in found.items():
        if key.setting != "param_names" or not isinstance(value, list | tuple):
            continue
        numbers = found.get(key._replace(setting="params"))
        if isinstance(numbers, list | tuple) and len(numbers) == len(value):
            names |= {
                number: unwrapped(str(name))
                for number, name in zip(numbers, value, strict=True)
                if isinstance(number, int)
            }
    return names


def betas(settings: Mapping[str, object]) -> tuple[float, float] | None:
    """Return the two betas of a group, or None if it has none that AdamW could have."""
    pair = settings.get("betas")
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return None
    first, second = pair
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return None
    return (float(first), float(second)) if 0 <= first < 1 and 0 <= second < 1 else None
