"""State passed to `restore`, which explains the error of asking for a missing entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import did_you_mean


class NotInState(KeyError):
    """Raised when `restore` asks for a key that the state does not have.

    Its names are those of `model.named_parameters()` of the model that the implementation was made
    with, before it was wrapped. A tied parameter stands there once, under its first name.
    """

    def __str__(self) -> str:
        return str(self.args[0])


class RestoreState(dict[tuple[str, str], torch.Tensor]):
    """Mapping {(name, role): whole tensor}; a missing key raises NotInState."""

    def __init__(self, state: Mapping[tuple[str, str], torch.Tensor], model: nn.Module) -> None:
        """Wrap the state. model: the unwrapped model that the state belongs to."""
        super().__init__(state)
        first: dict[nn.Parameter, str] = {}
        self._tied_to: dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first.setdefault(parameter, name) != name:
                self._tied_to[name] = first[parameter]

    def __missing__(self, key: Any) -> torch.Tensor:
        raise NotInState(self._message(key))

    def _message(self, key: Any) -> str:
        if not (isinstance(key, tuple) and len(key) == 2):
            return f"the state has keys (name, role), not {key!r}"
        name, role = key
        if name in self._tied_to:
            return (
                f"{name!r} is tied to {self._tied_to[name]!r} in the model that was given, and is "
                "in the state under that name only: an implementation that has it as a parameter "
                "of its own has lost the tie"
            )
        names = dict.fromkeys(known for known, _ in self)
        if name not in names:
            nearest = did_you_mean(str(name), names)
            return f"no {name!r} in the state{nearest} (names of the model before it was wrapped)"
        roles = [one for known, one in self if known == name]
        if roles == ["parameter"]:
            return f"{name!r} is frozen: its state is the parameter alone, without {role!r}"
        nearest = did_you_mean(str(role), roles)
        return f"{name!r} has no {role!r} in the state{nearest} (it has {', '.join(roles)})"
