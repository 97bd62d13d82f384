"""Names of zerocheck's own implementations, and of faults to inject.

Imports no torch: the command line lists them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from .errors import UsageError, unknown

BUILT_IN: dict[str, str] = {
    "ddp": "zerocheck.adapters.ddp.adapter:Ddp",
    "zero-redundancy": "zerocheck.adapters.zero_redundancy.adapter:ZeroRedundancy",
    "fsdp1": "zerocheck.adapters.fsdp1.adapter:Fsdp1",
    "fsdp1-grad-op": "zerocheck.adapters.fsdp1.adapter:Fsdp1GradOp",
    "fsdp1-no-shard": "zerocheck.adapters.fsdp1.adapter:Fsdp1NoShard",
    "fsdp2": "zerocheck.adapters.fsdp2.adapter:Fsdp2",
    "zero1": "zerocheck.adapters.textbook.zero1:Zero1",
    "zero2": "zerocheck.adapters.textbook.zero2:Zero2",
    "zero3": "zerocheck.adapters.textbook.zero3:Zero3",
}
"""Names of the built-in implementations, and where they are. All of them run by default."""

OF_EXTRAS: dict[str, str] = {
    "deepspeed0": "zerocheck.adapters.deepspeed.adapter:DeepSpeed0",
    "deepspeed1": "zerocheck.adapters.deepspeed.stage12:DeepSpeed1",
    "deepspeed2": "zerocheck.adapters.deepspeed.stage12:DeepSpeed2",
    "deepspeed3": "zerocheck.adapters.deepspeed.stage3:DeepSpeed3",
}
"""Those that need an extra of zerocheck: the library of the same name as the module. They run where
they are named."""

CONFIG = ".json"
"""How a name ends that is the path of a DeepSpeed config: it stands for the stage that it says."""
OF_CONFIG = "zerocheck.adapters.deepspeed.configured_engine:of_file"
"""What makes the implementation of such a name."""

FAULTY_OF_EXTRAS = {"zerocheck.faults.deepspeed": "deepspeed"}
"""Modules of faults planted into such a library, and the extra that each needs."""

_LIBRARY_OF = {"zerocheck.adapters.deepspeed": "deepspeed", **FAULTY_OF_EXTRAS}
"""Packages and modules that need a library besides torch, which is also an extra's name."""

NAMED: dict[str, str] = {**BUILT_IN, **OF_EXTRAS}
"""All names of implementations that come with zerocheck."""

EXCHANGING = ("zero1", "zero2", "zero3")
"""Implementations that load each other's checkpoints."""


_INJECTED = {
    "reductions": (
        "AverageBecomesSum", "DoubleAverage", "FirstStepLocal", "EveryThirdLocal", "RankLeftOut",
        "RankCountedTwice", "HalfGroup", "NeighboursShard", "LastElementLocal", "ReductionStale",
        "ReducedInBf16", "NormLocal",
    ),
    "copies": ("GatherStale", "GatherSwapped", "GatherRounded", "BroadcastLost"),
    "races": ("WaitTimesOut",),
    "injection": ("Nothing",),
}  # fmt: skip


def _spelled(kind: str) -> str:
    """Convert `AverageBecomesSum` to `average-becomes-sum`."""
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in kind).lstrip("-")


PLANTING = "zerocheck.faults.injections.injection:planted"
"""Function that makes an implementation with an injected fault."""
INJECTED: dict[str, str] = {
    _spelled(kind): f"zerocheck.faults.injections.{module}:{kind}"
    for module, kinds in _INJECTED.items()
    for kind in kinds
}
"""Faults that can be injected into the collectives of any implementation, and where they are.

`IMPLEMENTATION+FAULT` names an implementation with one, wherever a name is taken: `fsdp2+nothing`,
`my_fsdp.py:MyFSDP+gather-stale`. `nothing` is the control. What each one is: faults/catalogue.
"""


def apart(name: str) -> tuple[str, str]:
    """Split `"fsdp2+gather-stale"` into `("fsdp2", "gather-stale")`; without a fault it is "".

    A plus in the path of a user's file is no fault. The last of several faults is taken.
    """
    parent, plus, fault = name.rpartition("+")
    if not plus or set(fault) & set(":/\\."):
        return name, ""
    return parent, fault or plus


def family(name: str) -> tuple[str, ...]:
    """Return the name, and those of the code with fewer injected faults: their known issues apply.

    The code of a DeepSpeed config is that of its stage.
    """
    parent, fault = apart(name)
    if fault:
        return (name, *family(parent))
    stage = _stage_of(name) if is_config(name) else None
    return (name,) if stage is None else (name, f"deepspeed{stage}")


def innermost(name: str) -> str:
    """Return the name without injected faults."""
    parent, fault = apart(name)
    return innermost(parent) if fault else name


def is_config(name: str) -> bool:
    """Return True for the path of a DeepSpeed config, injected faults aside."""
    return innermost(name).endswith(CONFIG)


def _stage_of(name: str) -> int | None:
    from .ds_config import stage_of

    return stage_of(name)


def is_built_in(name: str) -> bool:
    """Return True if the implementation comes with zerocheck, injected faults aside."""
    return innermost(name) in NAMED


def extra_of(name: str) -> str:
    """Return the extra for an implementation of OF_EXTRAS or a config: also its library's name."""
    place = _place(name)
    return next(extra for part, extra in _LIBRARY_OF.items() if f"{place}.".startswith(f"{part}."))


def modules_of(names: Iterable[str]) -> list[str]:
    """Return the modules of those implementations that need a library besides torch."""
    places = [_place(innermost(name)) for name in names]
    parts = tuple(f"{part}." for part in _LIBRARY_OF)
    return list(dict.fromkeys(place for place in places if f"{place}.".startswith(parts)))


def _place(name: str) -> str:
    """Return the module of an implementation, if its name says it."""
    if is_config(name):
        return OF_CONFIG.partition(":")[0]
    return OF_EXTRAS.get(name, name).partition(":")[0]


def missing(extra: str) -> str | None:
    """Return the message for an extra whose library is not installed, or None."""
    if find_spec(extra) is not None:
        return None
    return (
        f"needs {extra}, which is not installed; install it with: pip install 'zerocheck[{extra}]'"
    )


def check_spelling(name: str) -> None:
    """Raise UsageError, with the nearest name, for an impossible name of an implementation."""
    parent, fault = apart(name)
    if fault:
        check_spelling(parent)
        if fault not in INJECTED:
            raise unknown(f"fault to inject into {parent},", fault, INJECTED)
        return
    if is_config(name):
        return
    if ":" not in name and name not in NAMED:
        if name.endswith(".py"):
            raise UsageError(
                f"{name!r} names a file; name the class or build function in it too: {name}:NAME"
            )
        error = unknown("implementation", name, NAMED)
        raise UsageError(
            f"{error}; or give package.module:Name, path/to/file.py:Name or path/to/ds_config.json"
        )
    where, colon, attribute = name.rpartition(":")
    if colon and not (where and attribute.isidentifier()):
        raise UsageError(
            f"{name!r} is not an implementation; give package.module:Name, path/to/file.py:Name or "
            "path/to/ds_config.json"
        )


def check_factory(name: str) -> None:
    """Raise UsageError for a name that cannot be that of a user's model factory."""
    where, colon, attribute = name.rpartition(":")
    if not colon and name.endswith(".py"):
        raise UsageError(
            f"{name!r} names a file; name the function that makes the model too: {name}:NAME"
        )
    if not where or not attribute.isidentifier():
        raise UsageError(
            f"{name!r} is no model; give package.module:factory or path/to/file.py:factory"
        )
