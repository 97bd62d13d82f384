"""Reductions of a case to simpler ones, in the order that shrinking tries. No torch.

Big cuts come first: everything to its default, then ranks, steps, blocks, whole sections, and at
last single fields. Each cut takes a field towards its default, or a number towards the smallest,
and never back, so that a search ends. Sizes go to their default and not to 1: where all sizes
are equal or 1, different mistakes look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from functools import partial
from math import prod
from typing import Any

import msgspec

from ..errors import UsageError
from .codec import to_plain
from .fitting import fit
from .options import defaults
from .schema import Block, BlockKind, Case, Group, MeshSizes, Model, Optimizer, TrainingSegment
from .shapes import overflowing
from .validity import check

Cut = Callable[[Case], Iterator[Case]]
"""cut(case) -> simpler cases of one dimension, the simplest first."""

SECTIONS = (
    "sharding",
    "disturbance",
    "precision",
    "data",
    "start",
    "optimizer",
    "training",
    "model",
)

SIZES = ("inputs", "width", "outputs", "batch", "length", "hidden", "experts", "heads", "kernel")
SMALL_SIZES = (2, 3, 5)
"""Tried where the default does not do: of both parities, and no multiples of each other."""

SIMPLEST_KIND: BlockKind = "mlp"

COUNTS = {"steps": 1, "microbatches": 1, "step": 0}
"""Fields that count something, and their smallest value."""

TRIED_COUNTS = 3
"""Of a count, the smallest values are tried, so many."""

OPTIONS = "options."
"""Beginning of the path of an adapter's option; its name follows."""

_DEFAULT = Case()
_PLAIN = Block(kind=SIMPLEST_KIND)
_replace = msgspec.structs.replace


def simpler(case: Case, *, kept: Collection[str] = ()) -> Generator[Case, bool, Case]:
    """Yield candidates; send True for one that fails in the same way. Returns the smallest.

    Every candidate is valid and was not yielded before. When the generator returns, no single cut
    of the case that it returns fails any more. kept: paths that stay as they are, such as `mesh`,
    `model` or `training.clip`.
    """
    visited = {case}
    before = None
    while case != before:
        before = case
        for cut in (*_cuts(), _each_block, _plain_blocks):
            case = yield from _taken(case, cut, kept, visited)
        for path in _paths(case):
            case = yield from _taken(case, partial(_field, path=path), kept, visited)
    return case


def left(case: Case, *, kept: Collection[str] = ()) -> list[tuple[str, Case]]:
    """List (path, the case with the field at that path reset) of all fields not at their simplest.

    A field that another one needs is left out: taking it back would change both.
    """
    paths = ["mesh", "model.blocks", *_paths(case)]
    found = []
    for path in paths:
        cut = {"mesh": _world, "model.blocks": _each_block}.get(path, partial(_field, path=path))
        candidates = (_valid(candidate, case, kept) for candidate in cut(case))
        reset = next((c for c in candidates if c is not None and c != case), None)
        if reset is not None and differing(case, reset) <= {path}:
            found.append((path, reset))
    blocks = any(path.startswith("model.blocks[") for path, _ in found)
    return [(path, reset) for path, reset in found if path != "model.blocks" or not blocks]


def value_at(case: Case, path: str) -> Any:
    """Return the value of a field, by a path such as `training.clip` or `model.blocks[0].kind`."""
    if path.startswith(OPTIONS):
        name = path.removeprefix(OPTIONS)
        return case.options.get(name, defaults().get(name))
    value: Any = case
    for part in path.replace("]", "").replace("[", ".").split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


def _taken(
    case: Case, cut: Cut, kept: Collection[str], visited: set[Case]
) -> Generator[Case, bool, Case]:
    """Apply the reduction repeatedly, as long as a candidate still fails."""
    went = True
    while went:
        went = False
        for candidate in cut(case):
            valid = _valid(candidate, case, kept)
            if valid is None or valid in visited:
                continue
            visited.add(valid)
            if (yield valid):
                case, went = valid, True
                break
    return case


def _valid(candidate: Case, case: Case, kept: Collection[str]) -> Case | None:
    """Return the candidate without options that no longer fit; None if it cannot be run."""
    candidate = fit(candidate)
    try:
        check(candidate)
        same = all(value_at(candidate, path) == value_at(case, path) for path in kept)
    except (UsageError, IndexError):
        return None
    return candidate if same else None


def _cuts() -> Iterable[Cut]:
    """Iterate over reductions tried before single fields, those that speed up runs first."""
    yield _everything
    yield _fewer_segments
    yield _world
    yield partial(_field, path="training.steps")
    yield partial(_section, name="model")
    yield _many_blocks
    for name in SECTIONS:
        yield partial(_section, name=name)
    yield _frame


def _everything(case: Case) -> Iterator[Case]:
    one = _replace(_DEFAULT.training, steps=1)
    model = _bare(case.model)
    plain = Case(
        mesh=_two_ranks(case.mesh),
        seed=case.seed,
        training=one,
        model=model,
        optimizer=_usual(case.optimizer),
    )
    if case.resume:
        last = _replace(case.resume[-1], mesh=_two_ranks(case.resume[-1].mesh), steps=1)
        for segment in dict.fromkeys((TrainingSegment(), last)):
            yield _replace(plain, resume=(segment,))
    else:
        yield plain
        if case.hosts:
            yield _replace(plain, hosts=(1,))
    steps = min(_DEFAULT.training.steps, case.training.steps)
    training = _replace(one, steps=steps)
    plain = _replace(plain, mesh=case.mesh, training=training, resume=case.resume)
    yield plain
    if case.hosts:
        yield _replace(plain, hosts=case.hosts)


def _two_ranks(mesh: MeshSizes) -> MeshSizes:
    """Reduce to two ranks on one axis; one, if there is only one."""
    return (min(2, prod(mesh)),)


def _bare(model: Model) -> Model:
    """Replace the model by the simplest one. A user's own stays: another one is another case."""
    return Model(user=model.user)


def _usual(optimizer: Optimizer) -> Optimizer:
    """Return the simplest optimizer of the same kind: another kind is another case."""
    return Optimizer(kind=optimizer.kind, user=optimizer.user)


def _fewer_segments(case: Case) -> Iterator[Case]:
    """Reduce to one segment, or by one. A checkpoint stays: without one it is another case."""
    if len(case.resume) > 1:
        yield from (_replace(case, resume=(segment,)) for segment in case.resume)
        yield from (_replace(case, resume=rest) for rest in _with_one_out(case.resume))


def _section(case: Case, name: str) -> Iterator[Case]:
    default = getattr(_DEFAULT, name)
    if name == "sharding":
        case = _replace(case, options={})
    if name == "training":
        default = _replace(default, steps=case.training.steps)
    if name == "model":
        default = _bare(case.model)
    if name == "optimizer":
        default = _usual(case.optimizer)
    yield _replace(case, **{name: default})


def _world(case: Case) -> Iterator[Case]:
    size = case.world_size
    for ranks in dict.fromkeys((1, 2, 3, (size + 1) // 2, size - 1)):
        if 0 < ranks < size:
            yield _replace(case, mesh=(ranks,))
    if case.axes.has("replicate"):
        yield _replace(case, mesh=(size,))
        for axis, length in enumerate(case.mesh):
            for shorter in range(1, min(length, 3)):
                yield _replace(case, mesh=(*case.mesh[:axis], shorter, *case.mesh[axis + 1 :]))


def _many_blocks(case: Case) -> Iterator[Case]:
    """Remove all blocks, or half of them."""
    count = len(case.model.blocks)
    for out in (range(count), range(count // 2, count), range(count // 2)):
        if out:
            yield _without(case, out)


def _each_block(case: Case) -> Iterator[Case]:
    for index in range(len(case.model.blocks)):
        yield _without(case, (index,))


def _frame(case: Case) -> Iterator[Case]:
    """Reset all fields of the model other than its blocks."""
    model = case.model
    yield _replace(case, model=_replace(_bare(model), blocks=model.blocks, calls=model.calls))


def _plain_blocks(case: Case) -> Iterator[Case]:
    """Reset the options of one block, with the simplest kind first, then its own."""
    blocks = case.model.blocks
    for index, block in enumerate(blocks):
        for kind in dict.fromkeys((SIMPLEST_KIND, block.kind)):
            plain = (*blocks[:index], Block(kind=kind), *blocks[index + 1 :])
            yield _replace(case, model=_replace(case.model, blocks=plain))


def _without(case: Case, out: Collection[int]) -> Case:
    """Remove these blocks from the case. Calls go to the remaining blocks."""
    model = case.model
    stay = [index for index in range(len(model.blocks)) if index not in out]
    calls = model.calls
    if calls is not None:
        calls = tuple(stay.index(index) for index in calls if index in stay)
    blocks = tuple(model.blocks[index] for index in stay)
    return _replace(case, model=_replace(model, blocks=blocks, calls=calls))


def _paths(case: Case) -> Iterator[str]:
    """Iterate over every field that has a simplest value, in the order in which they are tried."""
    yield "hosts"
    for index, segment in enumerate(case.resume):
        yield from (f"resume[{index}].{f}" for f in segment.__struct_fields__)
    for section in SECTIONS:
        for name in getattr(case, section).__struct_fields__:
            if (section, name) in (("model", "user"), ("optimizer", "kind")):
                continue
            if (section, name) == ("model", "blocks"):
                for index, block in enumerate(case.model.blocks):
                    yield from (f"model.blocks[{index}].{f}" for f in block.__struct_fields__)
            elif (section, name) == ("optimizer", "groups"):
                yield "optimizer.groups"
                for index in range(len(case.optimizer.groups)):
                    yield from (
                        f"optimizer.groups[{index}].{f}"
                        for f in Group.__struct_fields__
                        if f != "pattern"
                    )
            else:
                yield f"{section}.{name}"
        if section == "sharding":
            yield from (f"{OPTIONS}{name}" for name in defaults())


def _field(case: Case, path: str) -> Iterator[Case]:
    try:
        value = value_at(case, path)
    except IndexError:  # its block or group went with another cut
        return
    name = path.rpartition(".")[2]
    values: Iterable[Any]
    if path == "optimizer.groups":
        values = _fewer_groups(case.optimizer)
    elif path == "model.calls":
        values = [None, *_with_one_out(value)] if value is not None else []
    elif name in COUNTS:
        values = range(COUNTS[name], min(value, COUNTS[name] + TRIED_COUNTS))
    elif path == "training.clip":
        # A maximum norm of about the gradient's, before one that only some bugs need.
        plain = case.data.loss_factor
        values = [] if value is None else [None] if value == plain else [None, plain]
    elif path == "training.unfreeze":
        values = [] if value is None else [None, *range(1, min(value, 1 + TRIED_COUNTS))]
    elif path == "training.overflow_in":
        simplest = overflowing(case.model)[:1]
        values = [] if value is None else [None, *simplest] if value not in simplest else [None]
    elif name == "mesh":
        values = [(size,) for size in (1, 2, 3) if (size,) < value]
        # As many ranks as saved is the simplest.
        values = [] if value == case.mesh else [case.mesh, *values]
    elif name == "hosts":
        values = [simple for simple in dict.fromkeys(((), (1,))) if simple < value]
    elif isinstance(value, tuple):
        values = [(), *_with_one_out(value)] if value else []
    else:
        default = _default(case, path)
        sized = name in SIZES and isinstance(value, int)  # the optimizer has a `kernel` too
        small = [size for size in SMALL_SIZES if size < value] if sized else []
        values = [default, *small] if value != default else []
    for simple in values:
        yield _set(case, path, simple)


def _default(case: Case, path: str) -> Any:
    if path.startswith("model.blocks["):
        return getattr(_PLAIN, path.rpartition(".")[2])
    if path.startswith("optimizer.groups["):
        return getattr(Group(), path.rpartition(".")[2])
    if path.startswith("resume["):
        return getattr(TrainingSegment(), path.rpartition(".")[2])
    return value_at(_DEFAULT, path)


def _fewer_groups(optimizer: Optimizer) -> Iterator[tuple[Group, ...]]:
    """Reduce to one group with the default options, to one of the groups, or by one."""
    groups = optimizer.groups
    if groups != (Group(),):
        yield (Group(),)
    if len(groups) > 1:
        for group in groups:
            yield (_replace(group, pattern="*"),)
        yield from (rest for rest in _with_one_out(groups) if len(rest) > 1)


def _with_one_out(values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for place in range(len(values)):
        yield (*values[:place], *values[place + 1 :])


def _set(case: Case, path: str, value: Any) -> Case:
    """Return the case with another value at the path."""
    if path.startswith("resume["):
        index, _, name = path.removeprefix("resume[").partition("].")
        segments = list(case.resume)
        segments[int(index)] = _replace(segments[int(index)], **{name: value})
        return _replace(case, resume=tuple(segments))
    if path == "hosts":
        return _replace(case, hosts=value)
    if path.startswith(OPTIONS):
        return _replace(case, options={**case.options, path.removeprefix(OPTIONS): value})
    section, _, rest = path.partition(".")
    owner = getattr(case, section)
    listed, _, name = rest.rpartition("].")
    if not listed:
        return _replace(case, **{section: _replace(owner, **{rest: value})})
    field, _, index = listed.partition("[")
    items = list(getattr(owner, field))
    items[int(index)] = _replace(items[int(index)], **{name: value})
    return _replace(case, **{section: _replace(owner, **{field: tuple(items)})})


def differing(one: Case, other: Case) -> set[str]:
    """Return the paths of differing fields; for blocks or groups of another number, the list."""
    here, there = dict(_flat(to_plain(one))), dict(_flat(to_plain(other)))
    differing = {path for path in {*here, *there} if here.get(path) != there.get(path)}
    for listed in ("model.blocks", "optimizer.groups"):
        if len(value_at(one, listed)) != len(value_at(other, listed)):
            inside = {path for path in differing if path.startswith(f"{listed}[")}
            differing = differing - inside | {listed}
    return differing


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over (path, value) of all fields; a list is one unless it holds objects."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{index}]")
    else:
        yield path, value
