"""Guard around every job of a rank: afterwards global state is restored, or the rank is unfit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ...machine import place_variables
from . import groups, process_settings, torch_settings
from .patches import all_code, environment, hooks
from .places import StateChange, StateKind
from .settings import Settings


class LeakSink(Protocol):
    """Receiver of the state in which a job leaves its rank: see ranks/context.py."""

    collectives: dict[str, int]

    def leaked(self, words: str, *, undone: bool) -> None: ...


class StateGuard:
    """Clean state of this process, and the changes made by importing each implementation.

    Such code runs once, so what it changed is there for all jobs of that implementation, and for no
    others; but for what is `lasting`: entries of `sys.path`, new environment variables.
    """

    def __init__(self, code: Sequence[StateKind] = ()) -> None:
        """Take the current state as clean. code: as of `all_code`, where that was taken before."""
        self._environment = environment()
        self._places: tuple[StateKind, ...] = (
            Settings(torch_settings.modes()),
            *(code or all_code()),
            *hooks(),
            self._environment,
            Settings(torch_settings.settings()),
            Settings(process_settings.settings()),
            groups.Groups(),
        )
        self._imported: dict[str, list[StateChange]] = {}
        self._random = _random_states()

    @contextmanager
    def around(
        self, imports: Sequence[tuple[str, Callable[[], object]]], condition: LeakSink
    ) -> Iterator[None]:
        """Guard a job that runs within the context. imports: code that it imports, by name."""
        self._environment.take(*place_variables.NAMES)  # other jobs, other hosts
        meant = self._import(imports, condition)
        try:
            yield
        finally:
            self._clean(meant, condition)

    def _import(
        self, imports: Sequence[tuple[str, Callable[[], object]]], condition: LeakSink
    ) -> list[StateChange]:
        """Import the job's code, or reapply its changes; return the changes that are intended."""
        meant: list[StateChange] = []
        for name, import_ in imports:
            if name not in self._imported:
                try:
                    import_()
                except Exception:
                    continue  # the job says why
                self._imported[name] = self._changed_by_import(meant)
            else:
                for change in self._imported[name]:
                    if change.exact:
                        change.place.put(change.key, change.after)
            meant += self._imported[name]
        return meant

    def _changed_by_import(self, known: Sequence[StateChange]) -> list[StateChange]:
        kept = []
        for change in self._changes():
            if change.lasting:
                change.place.adopt(change)
            elif not _among(change, known):
                kept.append(change)
        return kept

    def _changes(self) -> Iterator[StateChange]:
        for place in self._places:
            yield from place.changes()

    def _clean(self, meant: Sequence[StateChange], condition: LeakSink) -> None:
        try:
            for change in self._changes():
                undone = change.exact and _undone(change)
                if not (undone and _among(change, meant)):
                    condition.leaked(f"left {change.words}", undone=undone)
            for name, state in self._random.items():
                _RANDOM[name][1](state)
        except Exception as error:
            words = f"left a state that cannot be looked at ({_gist(error)})"
            condition.leaked(words, undone=False)
        condition.collectives = groups.collectives()


def _among(change: StateChange, known: Sequence[StateChange]) -> bool:
    """Return True if a change is one of the known ones."""
    return any(
        one.place is change.place and one.key == change.key and one.after is change.after
        for one in known
    )


def _undone(change: StateChange) -> bool:
    try:
        change.place.put(change.key, change.before)
    except Exception:
        return False
    return True


def _gist(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _numpy() -> Any:
    return sys.modules["numpy"].random


_RANDOM: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "random": (random.getstate, random.setstate),
    "numpy": (lambda: _numpy().get_state(), lambda state: _numpy().set_state(state)),
}


def _random_states() -> dict[str, Any]:
    """Return the states of generators with which every job begins, as in a fresh process."""
    return {name: get() for name, (get, _) in _RANDOM.items() if name in sys.modules}
