"""`zero_optimization` in a DeepSpeed config: fields and options of cases, and the rest.

Sizes in elements are those of real models: buckets of 5e8 elements would never split the models of
cases, of about 300, and would keep all of them gathered. So a size is taken as it is up to SMALL,
and a larger one is drawn as for `deepspeed1` to `deepspeed3`: values that often split a model, and
one that never does. The same holds for a user's model, since sizes are meant for a larger one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ....errors import UsageError
from ...shared.user_config.section import Section
from ...shared.user_config.treatment import treat_keys
from .keys import ALIASES, OFFLOAD, ZERO

SMALL = 4096
"""Elements; a larger size is drawn."""

STAGES = (0, 1, 2, 3)

_FLAGS = {"contiguous_gradients": True, "reduce_scatter": True}
"""Options of the same name at stages 1 to 3, and DeepSpeed's defaults."""
BUCKET = "reduce_bucket_size"
"""The size that is `sharding.bucket`."""
_SIZES = {
    "stage3_prefetch_bucket_size": "prefetch_bucket",
    "stage3_param_persistence_threshold": "persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
}
_SIZES_PASSED = ("allgather_bucket_size", "stage3_max_reuse_distance")
"""Those that no field holds: the engine is given them, if they are small."""


class Zero(NamedTuple):
    """`zero_optimization` of a config, sorted.

    sharding: fields of `case.sharding`; options: those of DeepSpeed in `case.options`; passed:
    further keys for the engine; optimizer, param: whether these are offloaded; pinned: to pinned
    memory, where there is a device; left_out: keys and why; large: sizes that are drawn, by key.
    """

    stage: int
    sharding: dict[str, Any]
    options: dict[str, Any]
    passed: dict[str, Any]
    optimizer: bool
    param: bool
    pinned: bool
    left_out: dict[str, str]
    large: dict[str, int]


def simulated_sizes(large: Mapping[str, int]) -> tuple[int | None, dict[str, int]]:
    """Return the bucket of large sizes, None if they have none, and the options among them."""
    options = {_SIZES[name]: size for name, size in large.items() if name in _SIZES}
    return large.get(BUCKET), options


def zero_of(top: Section) -> Zero:
    """Read `zero_optimization` from the config. Without the key, it is stage 0."""
    given = _section(top)
    sorted_keys = treat_keys(given, ZERO, "it refuses the config")
    stage = given.whole("stage", 0)
    if stage not in STAGES:
        raise given.wrong("stage", "0, 1, 2, 3")
    if given.auto("stage"):
        raise given.wrong("stage", "0, 1, 2, 3: a check is of one stage")
    optimizer = _offloads(given, "offload_optimizer", "cpu_offload")
    param = _offloads(given, "offload_param", "cpu_offload_param")
    left_out = dict(sorted_keys.left_out)
    if stage == 0:
        return Zero(0, {}, {}, {}, False, False, False, left_out, {})
    if param and stage < 3:
        left_out[f"{given.prefix}offload_param"] = f"stage {stage} keeps parameters whole"
        param = False
    sharding: dict[str, Any] = {"offload": "pageable" if optimizer or param else "none"}
    options: dict[str, Any] = {}
    flags = {**_FLAGS, "overlap_comm": stage == 3}
    if stage < 3:
        flags["round_robin_gradients"] = False
    for name, default in flags.items():
        if not given.auto(name):
            options[name] = given.flag(name, default)
    passed = {name.removeprefix("stage3_"): value for name, value in sorted_keys.passed.items()}
    large = {}
    for name in (BUCKET, *_SIZES, *_SIZES_PASSED):
        if not given.says(name):
            continue
        size = given.whole(name, 0, lowest=int(name == BUCKET))
        if stage < 3 and name.startswith("stage3_"):
            continue
        if size > SMALL:
            large[name] = size
        elif name == BUCKET:
            sharding["bucket"] = size
        elif name in _SIZES:
            options[_SIZES[name]] = size
        else:
            passed[name.removeprefix("stage3_")] = size
    sections = [given.part(key) for key in ("offload_optimizer", "offload_param")]
    pinned = any(one.flag("pin_memory", False) for one in sections)
    return Zero(stage, sharding, options, passed, optimizer, param, pinned, left_out, large)


def _section(top: Section) -> Section:
    """Return the object, with aliases of keys replaced. true was once stage 1."""
    given = top.values.get("zero_optimization")
    if isinstance(given, bool):
        return Section(top.library, top.source, "zero_optimization.", {"stage": int(given)})
    section = top.part("zero_optimization")
    named = {ALIASES.get(name, name): value for name, value in section.values.items()}
    if len(named) < len(section.values):
        twice = next(n for n in ALIASES if n in section.values and ALIASES[n] in section.values)
        raise UsageError(
            f"{section.source}: {section.prefix}{twice} is {section.prefix}{ALIASES[twice]} too; "
            "leave one out"
        )
    return Section(section.library, section.source, section.prefix, named)


def _offloads(zero: Section, key: str, old: str) -> bool:
    """Return True if the section offloads to the CPU."""
    given = zero.part(key)
    treat_keys(given, OFFLOAD, "it refuses the config")
    device = given.values.get("device")
    if device == "nvme":
        raise given.refuse("device", "nothing is kept on disks here", '"none", "cpu"')
    return given.word("device", "none", ("none", "cpu")) == "cpu" or zero.flag(old, False)
