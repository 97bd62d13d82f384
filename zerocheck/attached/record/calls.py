"""Calls of a model as data: JSON for their form, and tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from .dtypes import dtype_of
from .forwards import Autocast, Forward

_TENSOR, _TUPLE = "a tensor", "a tuple"


Words = tuple[str, str] | None


class StoredForward(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one forward call without its tensors.

    In trees {"a tensor": n} stands for the n-th of them, and {"a tuple": [...]} for a tuple.
    random: states that exist; drawn: names of generators; returned: paths of outputs that got a
    gradient; differentiable: numbers of the inputs that need one. The rest: as in Forward.
    """

    args: Any
    kwargs: Any
    random: int
    autocast: tuple[str, str] | None
    training: bool
    returned: tuple[str, ...]
    differentiable: tuple[int, ...] = ()
    other_mode: tuple[str, ...] = ()
    inner_autocast: dict[str, Words] = {}
    dropout: dict[str, float] = {}
    drawn: tuple[str, ...] = ()
    numbers: dict[str, int | float] = {}


def stored(
    forwards: Sequence[Forward],
) -> tuple[tuple[StoredForward, ...] | None, dict[str, torch.Tensor]]:
    """Return the calls and their tensors; (None, {}) for an unsupported kind of input.

    Inputs are tensors and plain values.
    """
    calls, tensors = [], {}
    try:
        for number, forward in enumerate(forwards):
            inputs: list[torch.Tensor] = []
            calls.append(
                StoredForward(
                    args=_plain(forward.args, inputs),
                    kwargs=_plain(forward.kwargs, inputs),
                    random=len(forward.random),
                    autocast=_words(forward.autocast),
                    inner_autocast={
                        name: _words(one) for name, one in forward.inner_autocast.items()
                    },
                    training=forward.training,
                    returned=tuple(forward.returned),
                    differentiable=tuple(at for at, one in enumerate(inputs) if one.requires_grad),
                    other_mode=forward.other_mode,
                    dropout=forward.dropout,
                    drawn=tuple(forward.drawn),
                    numbers=dict(forward.numbers),
                )
            )
            for kind, several in (
                ("input", inputs),
                ("random", forward.random),
                ("drawn", forward.drawn.values()),
                ("returned", forward.returned.values()),
            ):
                for position, one in enumerate(several):
                    name = f"forward {number}/{kind}/{position}"
                    tensors[name] = one.detach().cpu().contiguous()
    except TypeError:
        return None, {}
    return tuple(calls), tensors


def restored(calls: Sequence[StoredForward], tensors: Mapping[str, torch.Tensor]) -> list[Forward]:
    """Rebuild the forward calls that `stored` serialized."""
    found = []
    for number, call in enumerate(calls):

        def of(kind: str, position: int, number: int = number) -> torch.Tensor:
            return tensors[f"forward {number}/{kind}/{position}"]

        inputs = {
            (at := int(name.rpartition("/")[2])): one.requires_grad_(at in call.differentiable)
            for name, one in tensors.items()
            if name.startswith(f"forward {number}/input/")
        }
        found.append(
            Forward(
                _tree(call.args, inputs),
                _tree(call.kwargs, inputs),
                tuple(of("random", position) for position in range(call.random)),
                _autocast(call.autocast),
                call.training,
                call.other_mode,
                {name: _autocast(one) for name, one in call.inner_autocast.items()},
                call.dropout,
                {name: of("drawn", position) for position, name in enumerate(call.drawn)},
                call.numbers,
                {path: of("returned", position) for position, path in enumerate(call.returned)},
            )
        )
    return found


def _words(autocast: Autocast) -> Words:
    return None if autocast is None else (autocast[0], str(autocast[1]))


def _autocast(words: Words) -> Autocast:
    return None if words is None else (words[0], dtype_of(words[1]))


def _plain(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Raises TypeError for a value that JSON does not have."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return {_TENSOR: len(tensors) - 1}
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if type(tree) is tuple:
        return {_TUPLE: [_plain(one, tensors) for one in tree]}
    if type(tree) is list:
        return [_plain(one, tensors) for one in tree]
    if type(tree) is dict and all(type(name) is str for name in tree):
        return {name: _plain(one, tensors) for name, one in tree.items()}
    raise TypeError(f"{type(tree).__name__} is not plain data")


def _tree(plain: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_tree(one, tensors) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if plain.keys() == {_TENSOR}:
        return tensors[plain[_TENSOR]]
    if plain.keys() == {_TUPLE}:
        return tuple(_tree(one, tensors) for one in plain[_TUPLE])
    return {name: _tree(one, tensors) for name, one in plain.items()}
