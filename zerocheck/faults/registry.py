"""All faults by name, with description, source and the expected finding. Imports no torch.

They are read from the decorators in the source, since faults import torch, and some a library that
is an extra.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from .. import causes as bugs
from ..catalogue import NAMED, extra_of, spelled
from . import fault as description
from .fault import Fault


@cache
def _classes(module: str) -> list[ast.ClassDef]:
    """Return the classes of a module of this package, such as `a.b`."""
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    nodes = ast.parse(path.read_text(encoding="utf-8"), path).body
    return [node for node in nodes if isinstance(node, ast.ClassDef)]


def _read(module: str) -> Iterator[tuple[str, Fault]]:
    """Iterate over the faults of a module of this package, with their classes."""
    names = {**vars(description), "bugs": bugs}
    for node in _classes(module):
        for decorator in node.decorator_list:
            if ast.unparse(decorator).startswith("fault("):
                fault = eval(compile(ast.Expression(decorator), module, "eval"), names)
                first = (ast.get_docstring(node) or "").partition("\n")[0].removesuffix(".")
                yield node.name, replace(fault, name=spelled(node.name), summary=_lowered(first))


_NAMES = {where.partition(":")[2]: name for name, where in NAMED.items()}
"""Name of an implementation, by its class."""


def _parent(kind: str) -> str:
    """Return the first named implementation from which a class of this package derives."""
    parents = (_NAMES.get(base) or _parent(base) for base in _bases().get(kind, ()))
    return next(filter(None, parents), "")


@cache
def _bases() -> dict[str, list[str]]:
    """Return the bases of each class of this package."""
    nodes = [node for module in _modules() for node in _classes(module)]
    return {node.name: [ast.unparse(base) for base in node.bases] for node in nodes}


def _lowered(line: str) -> str:
    """Return the line as it continues a sentence: `The loss` is `the loss`, `DDP` stays."""
    first, space, rest = line.partition(" ")
    lower = first[1:] == first[1:].lower()
    return f"{first.lower() if lower else first}{space}{rest}"


def _modules() -> Iterator[str]:
    """Iterate over the modules of faults: those of this package, then those of `elsewhere`."""
    for folder in (Path(__file__).parent, Path(__file__).parent / "elsewhere"):
        place = folder.relative_to(Path(__file__).parent).parts
        yield from sorted(".".join((*place, path.stem)) for path in folder.glob("*.py"))


_CLASSES = [
    replace(fault, where=f"{__package__}.{module}:{kind}", parent=fault.parent or _parent(kind))
    for module in _modules()
    for kind, fault in _read(module)
]
"""Faults of classes, by module."""

_INJECTIONS = {
    fault.name: replace(fault, injected=fault.name) for _, fault in _read("injections.collectives")
}
"""Faults to inject. The obligation and the cause are those of a fully sharded parent, unless a row
below has others: the consequence of a wrong collective depends on the use of its result."""


def injected_into(implementation: str, **otherwise: Mapping[str, Any]) -> list[Fault]:
    """Return all faults that can be injected, planted into one implementation.

    otherwise: fields that are others there, by the name of the fault with `_` for `-`. Where the
    implementation has no such collective, its cases are unsupported and say so.
    """
    rows = []
    for name, kind in _INJECTIONS.items():
        where = f"{implementation}+{name}"
        changed = otherwise.get(name.replace("-", "_"), {})
        rows.append(replace(kind, name=where, where=where, parent=implementation, **changed))
    return rows


def _default(implementation: str, *left_out: str, **otherwise: Mapping[str, Any]) -> list[Fault]:
    """Return the rows of a built-in implementation, without faults in collectives it never uses."""
    rows = injected_into(implementation, **otherwise)
    return [row for row in rows if row.injected not in left_out]


_DIVIDED_FIRST: dict[str, Any] = {"causes": (bugs.LOCAL_GRADIENT_OVER_W,)}
_UNNAMED: dict[str, Any] = {"causes": ()}
"""Where padding moves with the shards, or a bucket has one element, other causes fit some cases."""

_INJECTED = [
    *_default("fsdp2", "broadcast-lost", last_element_local=_UNNAMED),
    *_default(
        "fsdp1", "broadcast-lost", neighbours_shard=_UNNAMED, gather_swapped=_UNNAMED,
        first_step_local=_DIVIDED_FIRST, every_third_local=_DIVIDED_FIRST,
    ),
    *_default(
        "ddp", "neighbours-shard", "norm-local", "gather-stale", "gather-swapped", "gather-rounded",
        first_step_local=_DIVIDED_FIRST, every_third_local=_DIVIDED_FIRST,
    ),
]  # fmt: skip

ALL = [*_CLASSES, *_INJECTED]
"""All faults. Names are unique, which a test holds."""

OF_EXTRAS: dict[str, Fault] = {fault.name: fault for fault in _CLASSES if extra_of(fault.where)}
"""Faults of a library that is an extra: tried where they are named."""

FAULTS: dict[str, Fault] = {fault.name: fault for fault in ALL if fault.name not in OF_EXTRAS}
"""Name -> fault. All of them are tried where none is named."""

NAMED_FAULTS: dict[str, Fault] = {**FAULTS, **OF_EXTRAS}
"""All names of faults."""
