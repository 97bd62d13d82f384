"""Registry of implementations by name, and of faults to inject.

The only place outside `adapters/` that names built-in implementations and their libraries. What
differs between them is asked of the adapter: of its class, or of a part of its folder.

Imports no torch: the command line lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from .errors import UsageError, did_you_mean, unknown
from .version import DISTRIBUTION, install_extra

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
"""Implementations that need an extra of zerocheck. They run where they are named."""

MODEL_LIBRARY = "transformers"
"""Extra, and library, that builds the model of any config.json."""

WITH_OPTIMIZERS: dict[str, str] = {"fsdp2-muon": "zerocheck.adapters.fsdp2.gathered_muon:Fsdp2Muon"}
"""Implementations with an optimizer of their own. They run where they are named."""

_CODE_OF = {"fsdp2-muon": "fsdp2"}
"""Implementations that are the code of another one, whose known issues apply to them."""

_EXTRA_OF = {
    "zerocheck.adapters.accelerate": "accelerate",
    "zerocheck.adapters.deepspeed": "deepspeed",
    "zerocheck.adapters.lightning": "lightning",
    "zerocheck.adapters.transformers": "transformers",
    "zerocheck.faults.deepspeed": "deepspeed",
}
"""Packages and modules that need an extra, which has the name of its library."""

NAMED: dict[str, str] = {**BUILT_IN, **OF_EXTRAS, **WITH_OPTIMIZERS}
"""All names of implementations that come with zerocheck."""

RECOMMENDED = {1: "zero1", 2: "zero2", 3: "fsdp2"}
"""Implementation that advice on memory names for a stage of the ZeRO paper."""

BY_STAGE = {0: "ddp", **RECOMMENDED}
"""Implementations among which `memory --fit` chooses, by their stage."""

COMPARED = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
"""Implementations that published tables of memory compare: nothing sharded, then by stage."""

LIBRARIES = {"torch": "torch", "deepspeed": "DeepSpeed"}
"""Libraries whose versions known issues name -> how prose spells them."""

STACKS = frozenset(
    {"accelerate", "deepspeed", "fairscale", "lightning", "pytorch_lightning", "torch", "zerocheck"}
)
"""Packages whose own hooks on a model are part of what is checked."""

CHANGING = frozenset({"kernels", "liger_kernel", "peft", "transformers", "trl"})
"""Packages that change a model after its factory made it: what they do, a reference needs too."""

CONFIG = (".json", ".yaml", ".yml", ".toml")
"""Endings of names that are paths of a library's config, which stand for what it makes."""
CONFIG_FILE = "the path of a config such as ds_config.json or fsdp.yaml"
"""Such a name, as messages show it."""


IN_CHECKPOINTS = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes of libraries in checkpoints. Their objects are read as plain records of attributes."""


class ConfigKind(NamedTuple):
    """Kind of config, which an extra reads.

    reader: package that reads it; maker: what makes the implementation; example: usual file name;
    content: what such a file holds.
    """

    reader: str
    maker: str
    example: str
    content: str

    @property
    def extra(self) -> str:
        """Extra of zerocheck that brings its library."""
        return extra_of(self.reader)


_DEEPSPEED = ConfigKind(
    "zerocheck.adapters.deepspeed.user_config",
    "zerocheck.adapters.deepspeed.configured_engine:of_file",
    "ds_config.json",
    "configuration of DeepSpeed",
)
_ACCELERATE = ConfigKind(
    "zerocheck.adapters.accelerate.user_config",
    "zerocheck.adapters.accelerate.implementation:of_file",
    "fsdp.yaml",
    "configuration of `accelerate launch`",
)
_TRANSFORMERS = ConfigKind(
    "zerocheck.adapters.transformers.user_config",
    "zerocheck.adapters.transformers.implementation:of_file",
    "training_args.json",
    "TrainingArguments of transformers",
)
_LIGHTNING = ConfigKind(
    "zerocheck.adapters.lightning.user_config",
    "zerocheck.adapters.lightning.implementation:of_file",
    "trainer.yaml",
    "configuration of LightningCLI",
)
CONFIG_KINDS = (_DEEPSPEED, _ACCELERATE, _TRANSFORMERS, _LIGHTNING)
_CONFIG_READER = "zerocheck.adapters.shared.user_config.reader"
_UNREAD = "zerocheck.adapters.shared.user_config.unread"
_KNOWN_BY_KEYS = (_ACCELERATE, _TRANSFORMERS, _LIGHTNING)
"""Kinds that are known by their keys, in this order."""

_OF_OBJECTS = {"lightning": "zerocheck.adapters.lightning.given_strategy:of_object"}
"""Libraries whose objects are taken, and the functions that make implementations of them."""

RANK_KINDS = {"without-elements": "zerocheck.adapters.deepspeed.idle_ranks:ranks_without_elements"}
"""Kinds of ranks in entries of known issues -> the function that finds them in a case."""


_OPTIONS = ("zerocheck.adapters.deepspeed.options",)
"""Modules that declare options of their adapter, as `OPTIONS`. They import no torch."""


def spelled(kind: str) -> str:
    """Convert `AverageBecomesSum` to `average-becomes-sum`."""
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in kind).lstrip("-")


PLANTING = "zerocheck.faults.injections.injection:planted"
"""Function that makes an implementation with an injected fault."""
INJECTED: dict[str, str] = {
    spelled(kind): f"zerocheck.faults.injections.collectives:{kind}"
    for kind in (
        "AverageBecomesSum", "DoubleAverage", "FirstStepLocal", "EveryThirdLocal", "RankLeftOut",
        "RankCountedTwice", "HalfGroup", "NeighboursShard", "LastElementLocal", "ReductionStale",
        "ReducedInBf16", "ResultRounded", "SignedBeforeReduced", "NormLocal", "GatherStale",
        "GatherSwapped", "GatherRounded", "BroadcastLost", "WaitTimesOut", "Nothing",
    )
}  # fmt: skip
"""Faults that can be injected into the collectives of any implementation, and where they are.

`IMPLEMENTATION+FAULT` names an implementation with one, wherever a name is taken: `fsdp2+nothing`,
`my_fsdp.py:MyFSDP+gather-stale`. `nothing` is the control. Their decorators say what each one is.
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

    The code of a config is what its library makes of it: a stage of DeepSpeed, or FSDP2.
    """
    parent, fault = apart(name)
    if fault:
        return (name, *family(parent))
    if name in _CODE_OF:
        return name, _CODE_OF[name]
    code = _reader(name).code_of(name) if is_config(name) else None
    return (name,) if code is None else (name, code)


def innermost(name: str) -> str:
    """Return the name without injected faults."""
    parent, fault = apart(name)
    return innermost(parent) if fault else name


def is_config(name: str) -> bool:
    """Return True for the path of a library's config, injected faults aside."""
    return innermost(name).endswith(CONFIG)


def check_config(name: str) -> None:
    """Raise UsageError for a config that cannot be read or checked."""
    _reader(name).read(name)


def config_notes(names: Iterable[str]) -> Iterator[str]:
    """Iterate over the notes on the configs among the names, each config once."""
    for config in dict.fromkeys(innermost(name) for name in names if is_config(name)):
        yield from _reader(config).read(config).notes


def _reader(name: str) -> Any:
    return import_module(_kind_of(innermost(name)).reader)


def _kind_of(name: str) -> ConfigKind:
    """Return the kind of a config by the keys in it.

    Of one that is not known by them, and of one that cannot be read, it is accelerate's for YAML
    and DeepSpeed's for JSON, whose reader says what is wrong. Raises UsageError for one of a
    library that is known and not read.
    """
    other = _DEEPSPEED if name.endswith(".json") else _ACCELERATE
    try:
        values = import_module(_CONFIG_READER).values_of(name)
    except UsageError:
        return other
    import_module(_UNREAD).check_read(name, values)
    known = (one for one in _KNOWN_BY_KEYS if import_module(one.reader).recognises(values))
    return next(known, other)


@cache
def option_sets() -> tuple[Any, ...]:
    """Return the options that adapters declare, an OptionSet each, in the order of their draws."""
    return tuple(import_module(module).OPTIONS for module in _OPTIONS)


def is_built_in(name: str) -> bool:
    """Return True if the implementation comes with zerocheck, injected faults aside."""
    return innermost(name) in NAMED


def place_of(name: str) -> str:
    """Return `module:Name` of an implementation, which may be its name already."""
    if is_config(name):
        return _kind_of(innermost(name)).maker
    points = () if name in NAMED else installed().get(name, ())
    return points[0].place if points else NAMED.get(name, name)


def maker_of(given: object) -> str | None:
    """Return `module:function` for an object, or a class, of a library; None for any other."""
    kinds = given.__mro__ if isinstance(given, type) else type(given).__mro__
    tops = (kind.__module__.partition(".")[0] for kind in kinds)
    return next((_OF_OBJECTS[top] for top in tops if top in _OF_OBJECTS), None)


def check_installed(name: str) -> None:
    """Raise UsageError for the name of an installed package's implementation that is refused."""
    if reason := refusal(name, name in NAMED):
        raise UsageError(f"{reason}; run one of them as package.module:Name")


def package_of(name: str) -> str:
    """Return the installed package that brings an implementation of this name; "" for others."""
    points = () if name in NAMED else installed().get(name, ())
    return points[0].package if points else ""


def part_of(name: str, part: str) -> ModuleType | None:
    """Import a part of a built-in adapter, such as "script"; None if its folder has no such file.

    It may need torch, and its library.
    """
    module = f"{NAMED[name].partition(':')[0].rpartition('.')[0]}.{part}"
    return import_module(module) if find_spec(module) is not None else None


def extra_of(name: str) -> str:
    """Return the extra that an implementation or a fault needs; "" without one.

    name: with or without its place, injected faults aside.
    """
    module = place_of(innermost(name)).partition(":")[0]
    found = (extra for part, extra in _EXTRA_OF.items() if f"{module}.".startswith(f"{part}."))
    return next(found, "")


def modules_of(names: Iterable[str]) -> list[str]:
    """Return the modules of those implementations that come with zerocheck, or need an extra."""
    places = (place_of(innermost(name)) for name in names if is_built_in(name) or extra_of(name))
    return list(dict.fromkeys(place.partition(":")[0] for place in places))


def missing(extra: str) -> str | None:
    """Return the message for an extra whose library is not installed, or too old, or None."""
    advice = f"install it with: {install_extra(extra)}"
    if find_spec(extra) is None:
        return f"needs {extra}, which is not installed; {advice}"
    for wanted in _wanted(extra):
        with suppress(PackageNotFoundError):
            found = version(wanted.name)
            if not wanted.specifier.contains(found, prereleases=True):
                return f"needs {wanted.name}{wanted.specifier}, and {found} is installed; {advice}"
    return None


def _wanted(extra: str) -> Iterator[Requirement]:
    """Iterate over what an extra of the installed zerocheck requires."""
    with suppress(PackageNotFoundError):
        for line in requires(DISTRIBUTION) or ():
            wanted = Requirement(line)
            if wanted.marker is not None and f'extra == "{extra}"' in str(wanted.marker):
                yield wanted


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
    names = {**NAMED, **installed()}
    if ":" in name:
        _check_place(
            name,
            "not an implementation",
            f"give package.module:Name, path/to/file.py:Name or {CONFIG_FILE}",
        )
    elif name not in names:
        raise _without_colon(name, names)


def _without_colon(name: str, names: Iterable[str]) -> UsageError:
    """Return the error for an unknown implementation that names nothing in a file or module."""
    wanted = "the class or build function in it"
    if name.endswith(".py"):
        return UsageError(f"{name!r} names a file; name {wanted} too: {name}:NAME")
    if not did_you_mean(name, names):
        if Path(name).is_dir():
            example = Path(name) / "FILE.py"
            return UsageError(
                f"{name!r} is a folder; name a file of it, and {wanted}: {example}:NAME"
            )
        if Path(f"{name}.py").is_file():
            return UsageError(
                f"{name!r} names no file; name {name}.py, and {wanted}: {name}.py:NAME"
            )
        local = Path(*name.split("."))
        if local.is_dir() or local.with_suffix(".py").is_file():
            return UsageError(f"{name!r} names a module; name {wanted} too: {name}:NAME")
    error = unknown("implementation", name, names)
    return UsageError(
        f"{error}; or give package.module:Name, path/to/file.py:Name or {CONFIG_FILE}"
    )


_USER_OBJECTS = {
    "model": ("function that makes the model", "factory"),
    "optimizer": ("class", "Class"),
}
"""Objects of the user's beside implementations -> how messages name them, and an example."""


def check_factory(name: str, kind: str = "model") -> None:
    """Raise UsageError for a name that cannot be that of a user's object. kind: which one."""
    noun, example = _USER_OBJECTS[kind]
    if ":" not in name and name.endswith(".py"):
        raise UsageError(f"{name!r} names a file; name the {noun} too: {name}:NAME")
    allowed = f"give package.module:{example} or path/to/file.py:{example}"
    _check_place(name, f"no {kind}", allowed)


def _check_place(name: str, verdict: str, allowed: str) -> None:
    """Raise UsageError for a name that is not `where:attribute`."""
    where, colon, attribute = name.rpartition(":")
    if where.strip(":") == where != "" and attribute.isidentifier():
        return
    intended = f"{where.rstrip(':')}:{attribute.removesuffix('()')}"
    if where and intended != name and intended.rpartition(":")[2].isidentifier():
        raise UsageError(f"{name!r} is {verdict}; did you mean {intended!r}?")
    if not colon:
        reason = "it has no colon"
    elif not where:
        reason = "it names no file or module before the colon"
    elif not attribute:
        reason = "it names nothing after the colon"
    else:
        reason = f"{attribute!r} cannot be a name at the top of a file"
    raise UsageError(f"{name!r} is {verdict}: {reason}; {allowed}")


SESSION = "__main__"
"""Module of objects that are defined in a notebook or a script, and go to ranks by their code."""


def in_session(name: str) -> bool:
    """Return True for the name of an object that only the process that defined it has."""
    return innermost(name).startswith(f"{SESSION}:")


def command_name(name: str) -> str:
    """Return the name as a command takes it: an object of a session must be put into a file."""
    return f"FILE.py{name.removeprefix(SESSION)}" if in_session(name) else name


GROUP = "zerocheck.implementations"
TAKEN = (".py", *CONFIG)
"""Ends of names that are paths."""


class InstalledImplementation(NamedTuple):
    """Entry point: its name, `package.module:Name`, and the package that declares it."""

    name: str
    place: str
    package: str


@cache
def installed() -> dict[str, tuple[InstalledImplementation, ...]]:
    """Return the entry points of installed packages by name; several where packages disagree.

    Nothing of a package is imported here: its code runs in ranks, where it is asked for.
    """
    found: dict[str, tuple[InstalledImplementation, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda one: (one.name, one.value)):
        package = "" if point.dist is None else point.dist.name
        place = point.value.partition("[")[0].strip()
        one = InstalledImplementation(point.name, place, package)
        found[one.name] = (*found.get(one.name, ()), one)
    return found


def refusal(name: str, taken: bool) -> str | None:
    """Return the reason why the entry point of this name cannot be used, or None.

    taken: a built-in implementation has the name.
    """
    points = installed().get(name, ())
    if not points:
        return None
    packages = " and ".join(f"{one.package} ({one.place})" for one in points)
    if taken:
        return f"{name!r} is built in, and an installed package has the same name: {packages}"
    if len(points) > 1:
        return f"{name!r} is the name of implementations of several packages: {packages}"
    if set(name) & set(":+/\\") or name.endswith(TAKEN):
        return f"{name!r} cannot be a name, it reads as a path or a fault: {packages}"
    module, _, attribute = points[0].place.partition(":")
    if not module or not attribute.isidentifier():
        return f"{name!r} is declared as {packages}; needed is package.module:Name"
    return None
