"""Space of cases to draw from: those with certain features that an implementation supports.

A case is made of choices, as in `drawing.py`. One that would be refused is not drawn again, but
replaced by the nearest supported one: hypothesis gives up on a test that refuses most of what it
draws, and choices made in vain do not shrink.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

from ..errors import UsageError
from .drawing import CaseMaker, attempts
from .features import features
from .patterns import Pattern, patterns_of
from .picker import Choose, Part
from .reductions import differing, simpler
from .schema import Block, Case, MeshSizes

Asking = Callable[[Sequence[Case]], list[str | None]]
"""asking(cases) -> for each case the reason why it is not supported, or None."""


TRIED = 100
"""Attempts to make a case, before its fixed fields count as contradictory."""


class CaseSpace:
    """Space of the cases that have the wanted features and that are supported.

    world_sizes, meshes, fixed: as in `drawing.draw`. Raises UsageError if there is no such case,
    with the reason: the fixed fields contradict each other, or nothing is supported.
    """

    def __init__(
        self,
        world_sizes: Sequence[int],
        meshes: Sequence[MeshSizes] = (),
        fixed: Mapping[str, Any] | None = None,
        *,
        wanted: Collection[str] = (),
        ask: Asking = lambda cases: [None] * len(cases),
    ) -> None:
        fixed = fixed or {}
        self._ask = ask
        self._wanted = frozenset(wanted)
        self._all = CaseMaker(world_sizes, fixed, meshes)
        self._reason = ""
        makers = [CaseMaker((size,), fixed) for size in sorted({*world_sizes})]
        if meshes and "mesh" not in fixed:  # all of them together, as often as one world size
            makers.append(CaseMaker((), fixed, meshes))
        self._makers = [maker for maker in makers if self._some(maker)]
        self._patterns = self._supported_patterns() if self._makers and wanted else []
        if not self._makers or (wanted and not self._patterns):
            raise UsageError(self._reason)
        self._maker = cache(lambda world, pattern: self._makers[world].fixing(pattern.fields))

    def make(self, choose: Choose, part: Part[Block | None]) -> Case | None:
        """Make a case by choices; None if they give no valid one, or none that is supported.

        The first option of every choice is the simplest, so cases shrink to few ranks, one step and
        no features.
        """
        world = choose(len(self._makers))
        if not self._wanted:
            case = self._makers[world].make(choose, part)
        else:
            pattern = self._patterns[choose(len(self._patterns))]
            case = self._maker(world, pattern).make(choose, part)
            if case is None or not self._wanted <= {*features(case)}:
                case = pattern.case  # the other choices do not go with its fields
        return None if case is None else self._supported(case)

    def _some(self, maker: CaseMaker) -> bool:
        """Return True if some case of these ranks can be made and is supported."""
        tried = islice(attempts(maker, seed=0), TRIED)
        case = next((case for case in tried if case is not None), None)
        if case is None:
            self._reason = f"the fixed fields leave no case in {TRIED} attempts: {maker.refused}"
            return False
        return self._supported(case) is not None

    def _supported_patterns(self) -> list[Pattern]:
        found = patterns_of(self._wanted, self._all)
        if not found:
            self._reason = f"no case has the features asked for: {', '.join(sorted(self._wanted))}"
        reasons = self._ask([pattern.case for pattern in found])
        self._reason = next((reason for reason in reasons if reason), self._reason)
        return [one for one, reason in zip(found, reasons, strict=True) if reason is None]

    def _supported(self, case: Case) -> Case | None:
        """Return the nearest case that is supported: the case itself, or with options taken back.

        Each round takes back one option or section, such that the reason to refuse it is gone.
        """
        (reason,) = self._ask([case])
        while reason is not None:
            simple = [one for one in simpler(case, kept=self._all.fixed_paths) if self._has(one)]
            left = [
                (len(differing(case, one)), one, why)
                for one, why in zip(simple, self._ask(simple), strict=True)
                if why is None or _plain(why) != _plain(reason)
            ]
            if not left:
                self._reason = reason
                return None
            _, case, reason = min(left, key=lambda one: one[0])
        return case

    def _has(self, case: Case) -> bool:
        return case.mesh in self._all.meshes and self._wanted <= {*features(case)}


def _plain(reason: str) -> str:
    """Return a reason without numbers: `blocks.1` is refused as `blocks.0` is."""
    return re.sub(r"\d+", "", reason)
