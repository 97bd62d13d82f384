"""Laws on the bytes of a rank that follow from its declared stage and its shards, without a layout.

A rank that declares stage s of the ZeRO paper holds, between steps, its share of what s shards:
optimizer states from stage 1 on, gradients from 2, parameters from 3. How large a share is follows
from the shards that are exposed. Tensors are shared out over N ranks in one of these ways:

    flat     E elements in buffers, each padded to a multiple of N and cut in N chunks. A chunk of b
             elements is ceil(b / N) <= (b + N - 1) / N, and there are at most as many buffers as
             tensors, T: at most (E + T (N - 1)) / N elements on every rank. E counts padding that
             is exposed or in the storages of parameters: of one rank, where parameters are whole,
             and else of the ranks of one replica together.
    rows     of every tensor at most as many rows as the first rank has. The last ones may hold
             padding up to that, which no shard has to expose: the most that any rank exposes.
    tensors  whole tensors, to each rank some of them. A rank holds what it exposes.

So no rank holds more than the larger of the first and the most that any rank exposes, times the
bytes of an element. The second counts only if the shards partition the tensors: where ranks expose
more than one copy together, that each exposes all of it is the fault itself. An optimizer holds as
many such shares as it has states, and a master weight is one more of a parameter. Parameters that
are declared to stay gathered (`Implementation.stays_gathered`) are held whole next to their shards.

A copy is known by its sizes. Memory that no shard is a view of, with the sizes of all storages of
the parameters, of all exposed parameters, of all whole ones, or of one of these end to end, is a
copy of them, whatever it is called; so it is with the parameters that learn alone. Buffers of other
sizes are not said to be one: how much a sharder needs to communicate follows from no declaration.
An implementation that exposes no states, or no gradients, has memory for them that looks the same,
and a stage of a pipeline keeps activations of any size: they are asked for no copies.

Of a kind that no rank exposes, nobody knows which ranks own what: a rank may hold whole tensors, or
nothing. Then ranks are compared together: those of one replica hold each element once, and the
padding of the flat form. That is N times the first bound, in bytes of the parameters' elements.

Numbers (NUMBER_BYTES) are not counted: step counts, norms, flags. Nothing is said where state is
offloaded: then it is staged through memory of two devices, which are one where ranks are measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from operator import or_
from typing import NamedTuple

from .. import causes as bugs
from ..case.measurement import settled
from ..case.schema import Case
from ..case.shapes import ITEMSIZE, learning, parameter_bytes, parameter_dtypes, parameter_shapes
from ..contract.shard import OF_NO_STATE
from ..optimizers import most_states, state_elements, states_of
from ..protocol.layout import NUMBER_BYTES, Category
from ..protocol.measurements import UNEXPLAINED, Exposed, Held, Measured
from ..protocol.verdicts import Violation, merge_violations


class _Kind(NamedTuple):
    """Kind of state that a stage shards.

    stage: the first that does; roles: empty for optimizer states, whose names are many;
    categories: of the memory that holds it; cause: if it is whole.
    """

    name: Category
    stage: int
    roles: tuple[str, ...]
    categories: tuple[Category, ...]
    cause: str

    def has(self, role: str) -> bool:
        """Return True if a role is of this kind."""
        return role in self.roles if self.roles else role not in OF_NO_STATE


KINDS = (
    _Kind("optimizer", 1, (), ("optimizer",), bugs.OPTIMIZER_STATE_REPLICATED),
    _Kind("gradient", 2, ("gradient",), ("gradient",), bugs.WHOLE_GRADIENTS_KEPT),
    _Kind(
        "parameter",
        3,
        ("parameter", "master"),
        ("parameter", "gathered"),
        bugs.GATHERED_PARAMETERS_KEPT,
    ),
)


def declared(case: Case, measured: Sequence[Measured]) -> bool:
    """Return True if all ranks declare what they shard, expose it, and offload nothing."""
    shown = all(one.stage is not None and one.exposed for one in measured)
    return shown and not _offloaded(case)


def _offloaded(case: Case) -> bool:
    return case.sharding.offload != "none"


def sharded(case: Case, measured: Sequence[Measured]) -> bool:
    """Return True if the declaration shards anything over more than one rank."""
    return case.axes.size("shard") > 1 and bool(measured[0].stage)


def bounds(case: Case, measured: Sequence[Measured]) -> bool:
    """Return True if anything that ranks could hold would be too much."""
    several = case.world_size > 1
    return several and (sharded(case, measured) or compares_copies(case, measured))


def check(case: Case, measured: Sequence[Measured]) -> Violation | None:
    """Find what ranks hold beyond their shares and beside them, between two steps."""
    found = [*_beyond_shares(case, measured), *_copies(case, measured)]
    return merge_violations(found)


def _beyond_shares(case: Case, measured: Sequence[Measured]) -> Iterator[Violation]:
    if not declared(case, measured) or not sharded(case, measured):
        return
    on_gpu = measured[0].on_gpu  # there what was gathered is held until its stream is through
    stage = measured[0].stage or 0
    for kind in KINDS:
        if stage < kind.stage:
            continue
        counted = [one for one in kind.categories if not (on_gpu and one == "gathered")]
        holders = [
            [one for one in rank.held if one.category in counted and one.bytes > NUMBER_BYTES]
            for rank in measured
        ]
        sums = [sum(one.bytes for one in held) for held in holders]
        if any(kind.has(one.role) for rank in measured for one in rank.exposed):
            bound = _bound(case, measured, kind)
            ranks = tuple(rank for rank, total in enumerate(sums) if total > bound)
            who, whose = f"rank {ranks[0]} holds" if ranks else "", "its"
        else:
            bound, sums = _together(case, measured, kind), [sum(sums)]
            ranks = tuple(range(len(measured))) if sums[0] > bound else ()
            who, whose = "all ranks together hold", "their"
        if ranks:
            first = ranks[0]
            largest = sorted(holders[first], key=lambda one: -one.bytes)
            names = tuple(dict.fromkeys(one.holder for one in largest if one.holder))
            yield Violation(
                obligation="persistent",
                step=settled(case),
                role=kind.name,
                tensors=names,
                ranks=ranks,
                observed=float(sums[first]),
                expected=float(bound),
                bound=0.0,
                explanation=(
                    f"between steps {who} {sums[first]:,} bytes of {kind.name}, "
                    f"{sums[first] - bound:,} more than {whose} share, which is {bound:,} at most "
                    f"by stage {stage} and the shards of all ranks; held by {', '.join(names[:3])}"
                ),
                causes=(kind.cause,),
            )


def _bound(case: Case, measured: Sequence[Measured], kind: _Kind) -> int:
    """Most bytes that a rank may hold of a kind, by the derivation above."""
    shards = case.axes.size("shard")
    stays = {("parameter", name) for name in measured[0].stays_gathered}
    exposed = [
        [one for one in _once(r) if kind.has(one.role) and (one.role, one.name) not in stays]
        for r in measured
    ]
    copies = most_states(case.optimizer) if kind.name == "optimizer" else 1
    widths: dict[str, int] = {}  # by role, since a master is wider than its parameter
    for one in (one for rank in exposed for one in rank if one.elements):
        widths[one.role] = max(widths.get(one.role, 0), one.bytes // one.elements)
    width = max(widths.values(), default=0) * copies
    if kind.name == "parameter":
        width, copies = sum(widths.values()), max(len(widths), 1)
    elements, buffers = _whole(case, measured, kind)
    even = (elements + buffers * (shards - 1)) // shards * width
    together = sum(one.elements for rank in exposed for one in rank)
    gathered = _gathered(case, measured) * widths.get("parameter", 0)
    if together > case.world_size // shards * copies * elements:
        return even + gathered
    paddings: list[list[Exposed]] = [[] for _ in measured]
    if kind.name == "parameter":
        paddings = [[one for one in _once(rank) if one.role == "padding"] for rank in measured]
    both = zip(exposed, paddings, strict=True)
    most = max(sum(one.bytes for one in (*rank, *more)) for rank, more in both)
    return max(even, most) + gathered


def _together(case: Case, measured: Sequence[Measured], kind: _Kind) -> int:
    """Most bytes that all ranks may hold of a kind that none exposes."""
    elements, buffers = _whole(case, measured, kind)
    width = max(ITEMSIZE[dtype] for dtype in parameter_dtypes(case.model).values())
    copies = most_states(case.optimizer) if kind.name == "optimizer" else 1
    shards = case.axes.size("shard")
    replicas = case.world_size // shards
    return replicas * (elements + buffers * (shards - 1)) * width * copies


def _gathered(case: Case, measured: Sequence[Measured]) -> int:
    """Elements of the parameters that are declared to stay gathered, with their padding."""
    shards = case.axes.size("shard")
    names = set(measured[0].stays_gathered)
    sizes = (prod(s) for name, s in parameter_shapes(case.model).items() if name in names)
    return sum(-(-size // shards) * shards for size in sizes)


def _whole(case: Case, measured: Sequence[Measured], kind: _Kind) -> tuple[int, int]:
    """Return (elements, buffers at most) of what the ranks of one replica share out: E and T.

    Of parameters, their own and exposed padding. Of gradients and optimizer states, which may be
    padded alike, the storages of parameters that learn; unless ranks that are to share these out
    expose them more than once.
    """
    sizes = {name: prod(shape) for name, shape in parameter_shapes(case.model).items()}
    names = set(sizes) if kind.name == "parameter" else set(learning(case))
    whole = sum(sizes[name] for name in names)
    padding = [sum(o.elements for o in _once(rank) if o.role == "padding") for rank in measured]
    learns = [[o for o in _once(r) if o.role == "parameter" and o.name in names] for r in measured]
    # A rank may hold a chunk that is padding alone.
    behind = [
        [o for o in _once(r) if o.role == "padding" or (o.role == "parameter" and o.name in names)]
        for r in measured
    ]
    storages = [
        sum({o.number: o.storage * o.elements // o.bytes for o in rank}.values()) for rank in behind
    ]
    if (measured[0].stage or 0) < 3:
        return max(storages), len(names)
    replicas = case.world_size // case.axes.size("shard")
    if kind.name == "parameter" or sum(o.elements for r in learns for o in r) > replicas * whole:
        return whole + -(-sum(padding) // replicas), len(names)
    return -(-sum(storages) // replicas), len(names)


def _once(measured: Measured) -> Iterator[Exposed]:
    """Iterate over the shards of a rank, gradients as they are reduced, others after the step."""
    reduced = any(one.phase == "backward" for one in measured.exposed)
    for one in measured.exposed:
        if (one.phase == "backward") == (reduced and one.role == "gradient"):
            yield one


def _copies(case: Case, measured: Sequence[Measured]) -> Iterator[Violation]:
    if not compares_copies(case, measured):
        return
    shards = [Counter(o.bytes for o in one.held if o.exposed) for one in measured]
    paddings = [reduce(or_, (other - own for other in shards)) for own in shards]
    found = [_copy(case, *one) for one in zip(measured, paddings, strict=True)]
    ranks = tuple(rank for rank, sizes in enumerate(found) if sizes)
    if not ranks:
        return
    first = ranks[0]
    sizes = Counter(found[first])
    names = tuple(dict.fromkeys(o.holder for o in _unexposed(measured[first]) if o.bytes in sizes))
    total = sum(found[first])
    yield Violation(
        obligation="persistent",
        step=settled(case),
        role="parameter",
        tensors=names,
        ranks=ranks,
        observed=float(total),
        expected=0.0,
        bound=0.0,
        explanation=(
            f"between steps rank {first} holds {total:,} bytes with the sizes of all parameters, "
            f"of which no shard is a view; held by {', '.join(names[:3])}"
        ),
        causes=(bugs.PARAMETERS_HELD_TWICE,),
    )


def state_bytes(case: Case) -> int:
    """Bytes of the optimizer's states of all parameters that are trained."""
    dtypes, shapes = parameter_dtypes(case.model), parameter_shapes(case.model)
    return sum(
        ITEMSIZE[dtypes[name]] * sum(state_elements(case.optimizer, name, shapes[name]).values())
        for name in learning(case)
    )


def compares_copies(case: Case, measured: Sequence[Measured]) -> bool:
    """Return True if all memory of training is exposed, so that more of it is a copy."""
    roles = {one.role for rank in measured for one in rank.exposed}
    hidden = states_of(case.optimizer) and roles <= OF_NO_STATE
    told = "gradient" in roles and not hidden and not _offloaded(case)
    return told and not measured[0].on_gpu and not case.axes.has("pp")


def _copy(case: Case, measured: Measured, padding: Counter[int]) -> tuple[int, ...]:
    """Return the sizes of memory that is a copy of the parameters, or nothing.

    padding: sizes of shards that only other ranks expose: where shards are of one size, those of
    the last ranks may have no element.
    """
    there = Counter(one.bytes for one in _unexposed(measured)) - padding
    wholes = parameter_bytes(case.model)
    for names in (set(wholes), set(learning(case))):
        shards = [o for o in _once(measured) if o.role == "parameter" and o.name in names]
        storages = {one.number: one.storage for one in shards}
        for sizes in (
            tuple(storages.values()),
            tuple(one.bytes for one in shards),
            tuple(wholes[name] for name in wholes if name in names),
        ):
            for wanted in (_counted(sizes), _counted([sum(sizes)])):
                if wanted and not Counter(wanted) - there:
                    return wanted
    return ()


def _counted(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(size for size in sizes if size > NUMBER_BYTES)


def _unexposed(measured: Measured) -> list[Held]:
    """Return what is held beside parameters, gradients, optimizer states, buffers and buckets."""
    return [
        one
        for one in measured.held
        if not one.exposed
        and one.category in ("other", "gathered")
        and one.bytes > NUMBER_BYTES
        and not one.holder.startswith(UNEXPLAINED)
    ]
