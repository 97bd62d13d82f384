"""Plan of a run: its cases and their order."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import msgspec

from ...case.covering import Pairs, candidates
from ...case.features import FEATURES, IN_PAIRS, OF_AXIS, OF_OPTIMIZERS, OF_RESUME, OF_STEPS
from ...case.mesh import INNER
from ...case.resume import Harm, draw_resumed
from ...case.schema import Case, MeshSizes, Optimizer
from ...case.segments import only_loads, segments_of
from ...catalogue import is_built_in
from ...errors import UsageError
from ...protocol.replies import Description
from ...protocol.verdicts import EQUIVALENCE, MEMORY, RESUME, Obligation
from ..records.records import Coverage
from .covering_array import Array
from .draws import apart, at_random, complete, mapping
from .fixed_fields import fixed_fields, meshes_of
from .options import RunOptions
from .profiles import PROFILES
from .replacements import Replacements
from .streams import Asking, Stream

HARM_OF: dict[Obligation, Harm] = {"durability": "killed", "damage": "damaged"}
"""What must be done to a checkpoint to exercise an obligation."""

Ask = Callable[[str, Sequence[Case]], list[str | None]]
"""ask(implementation, cases) -> of each case, why it is not supported, or None."""


@dataclass(frozen=True)
class PlannedCase:
    """Case to run on an implementation."""

    implementation: str
    case: Case


MANY_RANKS = 11
"""Ranks of the case that is saved on more than ten."""


class SharedDraws:
    """Candidates and covering arrays that several plans share, each computed once.

    An array follows from the candidates, from those that are refused and from the features that
    are ignored; implementations that agree in these share it, such as a fault and its parent.
    """

    def __init__(self) -> None:
        self._pairs = Pairs(IN_PAIRS)
        self._pools: dict[bytes, dict[Case, int]] = {}
        self._arrays: dict[tuple[object, ...], Array] = {}

    def array(
        self,
        options: RunOptions,
        fixed: Mapping[str, object],
        meshes: Sequence[MeshSizes],
        ignored: Sequence[str],
        ask: Asking,
    ) -> tuple[Array, dict[Case, int]]:
        """Return a fresh array, and the candidates that it is made of."""
        asked = (options.seed, options.world_sizes, meshes, options.features, fixed)
        key = msgspec.json.encode(asked, order="deterministic")
        if key not in self._pools:
            self._pools[key] = candidates(
                self._pairs,
                seed=options.seed,
                world_sizes=options.world_sizes,
                fixed=fixed,
                having=options.features,
                meshes=meshes,
            )
        pool = self._pools[key]
        reasons = tuple(ask(list(pool)))
        which = (key, reasons, tuple(ignored))
        if which not in self._arrays:
            self._arrays[which] = Array(self._pairs, pool, reasons, ignored)
        return self._arrays[which].restarted(), pool


class Plan:
    """All cases of a run, the same for the same options.

    cases: implementations take turns, so that the first minute says something of all of them. It
    grows while the run goes on, by cases that replace others: see `more`.
    """

    def __init__(
        self,
        options: RunOptions,
        described: Mapping[str, Description],
        ask: Ask,
        drawn: SharedDraws | None = None,
    ) -> None:
        """Plan the cases of a run.

        drawn: candidates that other plans drew already. Raises UsageError if no case has the
        features asked for.
        """
        self._options = options
        self._drawn = SharedDraws() if drawn is None else drawn
        self._arrays: dict[str, Array] = {}
        self._streams: defaultdict[str, list[Stream]] = defaultdict(list)
        self._replacements: dict[str, Replacements] = {}
        self.coverage: list[Coverage] = []
        """What is to be exercised on each implementation."""
        queues = [
            [PlannedCase(name, case) for case in self._cases(name, described[name], ask)]
            for name in options.implementations
        ]
        self.cases = [planned for turn in zip_longest(*queues) for planned in turn if planned]

    def note(self, done: PlannedCase, *, refused: bool, idle: Collection[str] = ()) -> None:
        """Note a case that was judged, or refused while it was built.

        idle: features that it had and did not exercise, see records/exercised.py.
        """
        for stream in self._streams[done.implementation] if refused else ():
            stream.note(done.case)
        if done.case.resume:
            return
        if done.implementation in self._replacements and not refused:
            self._replacements[done.implementation].note(done.case, idle=idle)
        if done.implementation in self._arrays:
            self._arrays[done.implementation].note(done.case, refused=refused, idle=idle)

    def more(self) -> bool:
        """Append cases for pairs that were run in vain, and where few cases could be built.

        They go to the end of `cases`. Returns True if there were any.
        """
        added = False
        for name in self._options.implementations:
            sources: list[Array | Stream | Replacements] = [*self._streams[name]]
            if name in self._arrays:
                sources.insert(0, self._arrays[name])
            if name in self._replacements:
                sources.append(self._replacements[name])
            there = {item.case for item in self.cases if item.implementation == name}
            cases = [case for source in sources for case in source.more() if case not in there]
            if self._options.max_cases is not None:
                del cases[max(0, self._options.max_cases - len(there)) :]
            self.cases += [PlannedCase(name, case) for case in cases]
            added = added or bool(cases)
        return added

    def _stream(
        self, name: str, draw_some: Callable[[int], list[Case]], count: int, ask: Ask
    ) -> list[Case]:
        """Return the first cases of a stream that continues if most of them are refused."""
        stream = Stream(draw_some, count, partial(ask, name))
        self._streams[name].append(stream)
        return stream.cases

    def _cases(self, name: str, described: Description, ask: Ask) -> list[Case]:
        fixed = fixed_fields(self._options, described, own=not is_built_in(name))
        ignored, model = tuple(_ignored(described, fixed)), _model(described)
        steps = bool(set(self._options.obligations) & {*EQUIVALENCE, *MEMORY})
        cases = self._steps(name, described, fixed, ignored, ask) if steps else []
        if name not in self._arrays:
            features = OF_STEPS if steps else OF_RESUME
            self.coverage.append(
                Coverage(implementation=name, features=features, ignored=ignored, model=model)
            )
        if set(self._options.obligations) & set(RESUME):
            cases += self._resumed(name, described, fixed, ask)
        return cases

    def _resumed(
        self, name: str, described: Description, fixed: Mapping[str, object], ask: Ask
    ) -> list[Case]:
        """Cases with checkpoints; one of an implementation that has none, which says so."""
        options = self._options
        count = PROFILES[options.profile].resumed if described.resumes else 1
        if options.max_cases is not None:
            count = min(count, options.max_cases)
        sizes = options.world_sizes
        if not options.world_sizes_given:
            sizes = PROFILES[options.profile].resumed_sizes
        asked = {*options.obligations}.intersection(RESUME)
        draw_some = partial(
            draw_resumed,
            seed=options.seed + 1,
            world_sizes=sizes,
            fixed=fixed,
            into=described.exchanges if name in described.exchanges else (),
            having=options.features,
            replicates="replicate" in described.axes,
            harms=[HARM_OF[one] for one in sorted(asked)] if asked <= HARM_OF.keys() else (),
        )
        cases = self._stream(name, draw_some, count, ask) if described.resumes else draw_some(1)
        if described.resumes and count > 1 and not options.world_sizes_given:
            cases = _saved_by_many(cases, draw_some)
        # Small ones first: they say most for their time.
        return sorted(
            cases, key=lambda case: sum(segment.world_size for segment in segments_of(case))
        )

    def _steps(
        self,
        name: str,
        described: Description,
        fixed: Mapping[str, object],
        ignored: Sequence[str],
        ask: Ask,
    ) -> list[Case]:
        """Cases without checkpoints."""
        options, profile = self._options, PROFILES[self._options.profile]
        meshes = meshes_of(options, described)
        found: list[Case] = []
        count = profile.cases
        if profile.covering:
            array, pool = self._drawn.array(options, fixed, meshes, ignored, partial(ask, name))
            self._arrays[name] = array
            # Where all are refused, one case says so.
            found = array.cases or list(pool)[:1]
            if array.cases and not options.features:
                found = [*found, *apart(found, options, fixed, partial(ask, name))]
            count = max(count if array.cases else 1, len(found))
        if options.max_cases is not None:
            count = min(count, options.max_cases)
        limit = options.max_cases if count < len(found) else None
        if len(found) < count:  # a few more, since some may be in the array already
            draw_some = partial(at_random, options, fixed=fixed, meshes=meshes)
            drawn = self._stream(name, draw_some, count - len(found) + len(found) // 10, ask)
            found = list(dict.fromkeys((*found, *drawn)))
        found = found[:count]
        if not profile.covering or limit is not None:  # an array has every feature
            complete(found, options, fixed, meshes)
        if not found:
            wanted = ", ".join(options.features)
            raise UsageError(f"no case for {name} has the features asked for: {wanted}")
        if profile.covering:
            coverage = self._arrays[name].coverage(name, max_cases=limit, model=_model(described))
            self.coverage.append(coverage)
        else:
            others = dataclasses.replace(options, seed=options.seed + 1)
            draw_some = partial(at_random, others, fixed=fixed, meshes=meshes)
            self._replacements[name] = Replacements(draw_some, partial(ask, name))
        return found


def _saved_by_many(cases: list[Case], draw_some: Callable[..., list[Case]]) -> list[Case]:
    """Return the cases, with one that is saved on more than ten ranks in place of another.

    Names of files and ranks that are sorted as text have another order there.
    """
    many = FEATURES["resume-many"].present
    if any(map(many, cases)):
        return cases
    drawn = draw_some(len(cases), world_sizes=(2, 3, MANY_RANKS))
    unharmed = [case for case in cases if not only_loads(case, len(case.resume))]
    added = next(filter(many, drawn), None)
    if added is None or not unharmed:
        return cases
    return [added if case is unharmed[-1] else case for case in cases]


def _model(described: Description) -> str:
    """Return the user's own model that every case has, or an empty text."""
    user = mapping(mapping(described.fixed.get("model")).get("user"))
    return str(user.get("factory", ""))


def _ignored(described: Description, fixed: Mapping[str, object]) -> list[str]:
    """Return the features of options and axes that it, or its optimizer, does not obey."""
    kind = mapping(fixed.get("optimizer")).get("kind", Optimizer().kind)
    others = {name for names in OF_OPTIMIZERS.values() for name in names}
    others -= set(OF_OPTIMIZERS.get(str(kind), ()))  # type: ignore[call-overload]
    sizes = mapping(fixed.get("sharding"))
    others |= {name for axis in INNER if sizes.get(INNER[axis]) == 1 for name in OF_AXIS[axis]}
    options = described.options
    return [
        name
        for name, feature in FEATURES.items()
        if name in others
        or (options is not None and feature.field is not None and feature.field not in options)
    ]
