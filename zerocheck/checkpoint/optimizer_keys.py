"""Keys of optimizer state and param groups, in each of the forms that torch writes.

- `("optim", "state", 3, "exp_avg")`: of `Optimizer.state_dict`, by the number of the parameter
- `("optim", "state", "blocks.0.weight", "exp_avg")`: of the distributed state-dict API, and of
  FSDP1's full state dict, by its name
- `("optim", "state.blocks.0.weight.exp_avg")`: the same with `flatten_optimizer_state_dict`
- `("optim.state.blocks.0.weight.exp_avg",)`: where a format has names only

and likewise `("optim", "param_groups", 0, "lr")`, `("optim", "param_groups.blocks.0.weight.lr")`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .source import Key

KINDS = frozenset({
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg",
    "grad_avg", "acc_delta", "sum", "mu_product", "ax", "eta", "mu",
})  # fmt: skip
"""Optimizer state of torch.optim; other kinds are known by the param groups next to them."""


class StateKey(NamedTuple):
    """Key of optimizer state: path of the optimizer, parameter (name or number), kind."""

    owner: Key
    parameter: str | int
    kind: str


class GroupKey(NamedTuple):
    """Key of a param group: path of the optimizer, group or parameter, setting."""

    owner: Key
    of: str | int
    setting: str


def group_key(key: Key) -> GroupKey | None:
    """Return the parts of a key of a param group, or None for another key."""
    for place, part in enumerate(key):
        if part == "param_groups" and len(key) == place + 3:
            return GroupKey(key[:place], number_or_name(key[place + 1]), str(key[place + 2]))
    found = _flat(key, "param_groups")
    return found and GroupKey(*found)


def owners(keys: Iterable[Key]) -> frozenset[Key]:
    """Return the paths of all optimizers that have param groups."""
    return frozenset(found.owner for key in keys if (found := group_key(key)))


def state_key(key: Key, known: frozenset[Key]) -> StateKey | None:
    """Return the parts of a key of optimizer state, or None; `known`: from `owners`."""
    for place, part in enumerate(key):
        if part == "state" and len(key) == place + 3:
            kind = str(key[place + 2])
            if key[:place] in known or kind in KINDS:
                return StateKey(key[:place], number_or_name(key[place + 1]), kind)
    found = _flat(key, "state")
    if found is None or (found[0] not in known and found[2] not in KINDS):
        return None
    return StateKey(*found)


def _flat(key: Key, word: str) -> tuple[Key, str | int, str] | None:
    """Split `...word.<name>.<kind>` in the last part of a key; digits are a number."""
    *above, last = key or ("",)
    parts = str(last).split(".")
    if word not in parts[:-2]:
        return None
    place = parts.index(word)
    owner = (*above, *([".".join(parts[:place])] if place else []))
    name = ".".join(parts[place + 1 : -1])
    return owner, number_or_name(name), parts[-1]


def number_or_name(part: str | int) -> str | int:
    """Convert digits to a number: torch.distributed.checkpoint writes keys of mappings as words."""
    number = isinstance(part, str) and part.isascii() and part.isdigit() and len(part) < 19
    return int(part) if number else part
