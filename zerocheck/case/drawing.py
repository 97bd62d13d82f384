"""Drawing of cases by seed: the same ones everywhere, without Hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import UsageError
from .choices import Choices
from .codec import merged, merged_fields
from .mesh import frequencies_of
from .picker import Choose, Part, T
from .schema import Block, Case, MeshSizes
from .validity import check


def draw(
    count: int,
    *,
    seed: int,
    world_sizes: Sequence[int],
    fixed: Mapping[str, Any] | None = None,
    meshes: Sequence[MeshSizes] = (),
) -> list[Case]:
    """Draw exactly `count` distinct valid cases, the simplest first; the same for equal arguments.

    fixed: nested case fields that are not drawn, such as {"training": {"clip": None}}; meshes:
    sizes of further meshes, such as (R, S).

    Not drawn through Hypothesis, which repeats itself on purpose: of 200 cases that it generates
    65 are not new, and 200 hold fewer pairs of features than 50 drawn here. Its choices may also
    change with its version. Raises UsageError if the fixed fields leave too few cases.
    """
    maker = CaseMaker(world_sizes, fixed, meshes)
    found: dict[Case, None] = {}
    for number, case in enumerate(attempts(maker, seed)):
        if len(found) == count:
            break
        if number > 20 * count + 100:
            reason = f": {maker.refused}" if maker.refused else ""
            raise UsageError(
                f"the fixed fields leave only {len(found)} of {count} cases in {number} "
                f"attempts{reason}"
            )
        if case is not None:
            found[case] = None
    return list(found)


def attempts(maker: CaseMaker, seed: int) -> Iterator[Case | None]:
    """Iterate over the results of `maker.make` without end; the first is the simplest case."""
    yield maker.make(lambda n: 0)
    source = random.Random(seed)  # only random() is used: its sequence is promised to stay
    while True:
        yield maker.make(lambda n: int(source.random() * n))


def _apart(make: Callable[[], T]) -> T:
    return make()


class CaseMaker:
    """Maker of cases for the given world sizes, with the fixed fields in place.

    meshes: further ones, such as (R, S). Raises UsageError for a world size below 1 or fixed
    fields that no case has.
    """

    def __init__(
        self,
        world_sizes: Sequence[int],
        fixed: Mapping[str, Any] | None = None,
        meshes: Sequence[MeshSizes] = (),
    ) -> None:
        if not (world_sizes or meshes) or any(size < 1 for size in world_sizes):
            raise UsageError(f"world sizes {list(world_sizes)}; allowed: one or more integers >= 1")
        fixed = fixed or {}
        self._nested = msgspec.to_builtins(dict(fixed))
        sizes, frequencies = frequencies_of(self._nested)
        base = merged(Case(), sizes, source="fixed fields")
        self._fixed: dict[str, Any] = frequencies
        for section, fields in sizes.items():
            if section == "options":
                self._fixed |= {f"options.{name}": value for name, value in fields.items()}
            elif isinstance(fields, dict):
                part = getattr(base, section)
                self._fixed |= {f"{section}.{name}": getattr(part, name) for name in fields}
            else:
                self._fixed[section] = getattr(base, section)
        self._worlds: list[MeshSizes] = [(size,) for size in dict.fromkeys(world_sizes)]
        self._worlds += dict.fromkeys(meshes)
        self.meshes = (base.mesh,) if "mesh" in self._fixed else tuple(self._worlds)
        """Meshes that its cases can have."""
        self.refused: UsageError | None = None
        """Why the last case was refused, if one was."""

    @property
    def fixed_paths(self) -> tuple[str, ...]:
        """Paths of the fixed fields, such as `training.clip`."""
        return tuple(self._fixed)

    def fixing(self, fields: Mapping[str, Any]) -> CaseMaker:
        """Return a maker of cases of the same ranks with further fixed fields."""
        both = merged_fields(self._nested, fields)
        return CaseMaker((), both, self._worlds)

    def make(self, choose: Choose, part: Part[Block | None] = _apart) -> Case | None:
        """Make a valid case, or return None where the fixed fields contradict the choices."""
        case = Choices(choose, part, self._fixed, self._worlds).case()
        try:
            check(case)
        except UsageError as error:
            self.refused = error
            return None
        return case
