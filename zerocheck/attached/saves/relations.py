"""Names of tensors in an engine or an export, and those in training that make them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

Names = Mapping[str | tuple[str, ...], str | Sequence[str]]
_WILD = re.compile(r"\*\*|\*")


class Relation(NamedTuple):
    """Tensors here that, joined along dim 0, are tensors of training, joined along dim 0.

    transposed: each tensor here is the transpose of what was trained.
    """

    here: tuple[str, ...]
    trained: tuple[str, ...]
    transposed: bool = False

    @property
    def renamed(self) -> bool:
        """True if `names` has it."""
        return self.here != self.trained or self.transposed


def relations(here: Iterable[str], names: Names) -> Iterator[Relation]:
    """Yield the relation of each tensor here; what names= joins makes one."""
    together: dict[tuple[object, tuple[str, ...]], list[tuple[list[str], str]]] = {}
    for name in here:
        entry, targets, place = _in_training(name, names)
        together.setdefault((entry, targets), []).append((place, name))
    for (_, targets), members in together.items():
        flipped = all(target.endswith(".T") for target in targets)
        trained = tuple(target.removesuffix(".T") for target in targets) if flipped else targets
        yield Relation(tuple(name for _, name in sorted(members)), trained, flipped)


def _in_training(name: str, names: Names) -> tuple[object, tuple[str, ...], list[str]]:
    """Return the entry of a name, its names in training, and its place among those joined to it."""
    for entry, target in names.items():
        for number, pattern in enumerate((entry,) if isinstance(entry, str) else entry):
            match = re.fullmatch(_WILD.sub(_group, _escaped(pattern)), name)
            if match is None:
                continue
            targets = (target,) if isinstance(target, str) else (*target,)
            used = max(len(_WILD.findall(each)) for each in targets)
            place = [f"{number:09}", *(part.zfill(20) for part in match.groups()[used:])]
            return entry, tuple(_filled(each, match.groups()) for each in targets), place
    return name, (name,), []


def _escaped(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "*")


def _group(wild: re.Match[str]) -> str:
    return "(.+)" if wild[0] == "**" else "([^.]+)"


def _filled(pattern: str, parts: Sequence[str]) -> str:
    unused = iter(parts)
    return _WILD.sub(lambda wild: next(unused, wild[0]), pattern)
