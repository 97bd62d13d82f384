"""Text that shards a model as a user of torch writes it, per implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Literal

from torch import nn

from ..case.schema import Case, Group
from ..case.schema import Sharding as SharedOptions
from ..case.shapes import sometimes_used, uncalled
from ..implementations.fsdp1.refusals import wrapped_units
from ..implementations.units import in_order_of_calls, members, skeleton, unit_modules
from ..optimizers import optimizer_of
from .layout import attribute, options, quoted

Gather = Literal["replicated", "dtensor", "summoned", "flat"]
"""How a whole tensor is had: it is whole on every rank; from a DTensor; from FSDP1's original
parameters; from its flat ones."""

Units = Callable[[nn.Module, SharedOptions], list[nn.Module]]
"""Which modules are units below the root."""

STRATEGIES = {
    "fsdp1": "FULL_SHARD",
    "fsdp1-grad-op": "SHARD_GRAD_OP",
    "fsdp1-no-shard": "NO_SHARD",
}

TITLES = {
    "ddp": "DistributedDataParallel",
    "zero-redundancy": "ZeroRedundancyOptimizer over DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel (FULL_SHARD)",
    "fsdp1-grad-op": "FullyShardedDataParallel (SHARD_GRAD_OP)",
    "fsdp1-no-shard": "FullyShardedDataParallel (NO_SHARD)",
    "fsdp2": "fully_shard (FSDP2)",
}
"""The implementations that a script can say in torch's words."""


@dataclass
class ShardingText:
    """Text that makes `model` and `optimizer`, without indent.

    setup: makes both, wrap: the model alone; sync: "no_sync", "set_requires_gradient_sync" or ""
    for neither; clip: what is called with the maximum norm; rewrap: unfreezes all
    parameters and makes `model` anew; first: lines at the top of the script.
    """

    title: str
    gather: Gather
    setup: list[str]
    wrap: list[str]
    sync: str
    clip: str = "nn.utils.clip_grad_norm_(model.parameters(), {maximum}{norm})"
    rewrap: str = ""
    scaler: str = ""
    first: list[str] = field(default_factory=list)
    built: bool = True
    """Whether `model` is to be there before `setup`."""
    flat: list[str] = field(default_factory=list)
    """Names of parameters in the order of flat ones, where it is not that of the model."""


def sharding_of(name: str, case: Case) -> ShardingText:
    """Return the sharding text of an implementation in TITLES."""
    if name in STRATEGIES:
        made = _fsdp1(name, case)
    elif name == "fsdp2":
        made = _fsdp2(case)
    else:
        made = _ddp(name, case)
    if case.sharding.sync == "each" or case.training.microbatches == 1:
        made.sync = ""
    if case.training.loss_scale is not None:
        kind = "ShardedGradScaler" if name in STRATEGIES else "torch.amp.GradScaler"
        made.scaler = f'{kind}("cpu", init_scale={case.training.loss_scale!r})'
    return made


def optimizer_call(case: Case, of: str, *, fused: bool) -> str:
    """Return the optimizer of the case over the parameters of the model `of`."""
    return _call(torch_name(case), _arguments(case, of, fused=fused))


def torch_name(case: Case) -> str:
    """Return the optimizer's class: `torch.optim.AdamW`."""
    return f"torch.optim.{optimizer_of(case.optimizer).torch_class.__name__}"


def group_options(case: Case, group: Group) -> list[str]:
    """Return the options of a group that differ from torch's defaults."""
    return _options(case, group, of_all=False)


def common_options(case: Case) -> list[str]:
    """Return the options of the whole optimizer that differ from torch's defaults."""
    return _options(case, case.optimizer.groups[0], of_all=True)


def _options(case: Case, group: Group, *, of_all: bool) -> list[str]:
    optimizer = optimizer_of(case.optimizer)
    defaults = signature(optimizer.torch_class).parameters
    return options(
        (name, value, defaults[name].default)
        for name, value in optimizer.torch_group(group, case.optimizer).items()
        if name not in ("foreach", "fused") and (name in optimizer.fields.optimizer) == of_all
    )


def grouped(case: Case) -> bool:
    """Return True if there are several parameter groups."""
    return len(case.optimizer.groups) > 1 or case.optimizer.groups[0].pattern != "*"


def _arguments(case: Case, of: str, *, fused: bool) -> list[str]:
    optimizer = case.optimizer
    given = common_options(case)
    if fused and optimizer.kernel == "fused":
        given.append("fused=True")
    if grouped(case):
        return [f"groups({of})", *given]
    parameters = f"{of}.parameters()"
    if case.model.frozen and case.training.unfreeze is None:
        parameters = f"[p for p in {parameters} if p.requires_grad]"
    return [parameters, *group_options(case, optimizer.groups[0]), *given]


def _in_order(case: Case, optimizer: list[str], wrap: list[str]) -> list[str]:
    """Order the lines: the optimizer after the model is wrapped, or before."""
    return [*optimizer, *wrap] if case.sharding.optimizer_first else [*wrap, *optimizer]


def _ddp(name: str, case: Case) -> ShardingText:
    sharding = case.sharding
    unused = bool(uncalled(case.model) or sometimes_used(case.model)) or sharding.find_unused
    views = sharding.bucket_view and name == "ddp"
    given = options(
        [
            ("bucket_cap_mb", sharding.bucket * 4 / 2**20, 4.0),
            ("gradient_as_bucket_view", views, False),
            ("find_unused_parameters", unused, False),
            ("static_graph", sharding.static_graph, False),
        ]
    )
    first = sharding.optimizer_first
    made = "model" if first else "build()"
    wrap = [_call("model = DistributedDataParallel", [made, *given])]
    if name == "ddp":
        optimizer = [f"optimizer = {optimizer_call(case, 'model', fused=True)}"]
    else:
        parameters, *rest = _arguments(case, "model", fused=True)
        view = ["parameters_as_bucket_view=True"] if sharding.bucket_view else []
        arguments = [parameters, torch_name(case), *view, *rest]
        optimizer = [_call("optimizer = ZeroRedundancyOptimizer", arguments)]
    rewrap = ""
    if case.training.unfreeze is not None:
        module = "model.module.requires_grad_()"
        rewrap = f"model = DistributedDataParallel({', '.join([module, *given])})"
    return ShardingText(
        title=TITLES[name],
        gather="replicated",
        setup=_in_order(case, optimizer, wrap),
        wrap=wrap,
        sync="no_sync",
        rewrap=rewrap,
        built=first,
    )


def _fsdp1(name: str, case: Case) -> ShardingText:
    sharding = case.sharding
    units = _units(case, wrapped_units)
    given = ['device_id=torch.device("cpu")']
    wrap = []
    if STRATEGIES[name] != "FULL_SHARD":
        wrap.append(f"strategy = ShardingStrategy.{STRATEGIES[name]}")
        given.append("sharding_strategy=strategy")
    if sharding.backward_prefetch != "pre":
        post = sharding.backward_prefetch == "post"
        given.append(f"backward_prefetch={'BackwardPrefetch.BACKWARD_POST' if post else None}")
    if sharding.prefetch and len(units) > 1:
        given.append("forward_prefetch=True")
    given.append(f"use_orig_params={sharding.use_orig_params}")
    if sharding.wrap == "size":
        policy = f"partial(size_based_auto_wrap_policy, min_num_params={sharding.bucket})"
        given.append(f"auto_wrap_policy={policy}")
    elif units:
        wrap += [_call("given = dict", given)]
        given = ["**given"]
        wrap += _each(units, "FullyShardedDataParallel({}, **given)")
    first = sharding.optimizer_first
    built = bool(units) or first
    arguments = ["model" if built else "build()", *given]
    wrap += [_call("model = FullyShardedDataParallel", arguments)]
    optimizer = [f"optimizer = {optimizer_call(case, 'model', fused=True)}"]
    whole = STRATEGIES[name] == "NO_SHARD" or case.world_size == 1
    gather: Gather = "summoned"
    if not sharding.use_orig_params:
        gather = "flat"
    elif whole:
        gather = "replicated"
    flat = []
    if gather == "flat" and units:
        model = skeleton(case)
        inside = members(model, wrapped_units(model, sharding))
        flat = [name for path in sorted(inside, key=bool) for name in inside[path]]
    return ShardingText(
        title=TITLES[name],
        gather=gather,
        setup=_in_order(case, optimizer, wrap),
        wrap=wrap,
        sync="no_sync",
        clip="model.clip_grad_norm_({maximum}{norm})",
        flat=flat,
        built=built,
    )


def _fsdp2(case: Case) -> ShardingText:
    sharding = case.sharding
    units = _units(case, unit_modules)
    kept = "" if sharding.reshard else ", reshard_after_forward=False"
    if sharding.offload != "none":
        kept += ", offload_policy=offload"
    wrap = [f'mesh = init_device_mesh("cpu", ({case.world_size},))']
    if sharding.offload != "none":
        pinned = sharding.offload == "pinned"
        wrap.append(f"offload = CPUOffloadPolicy(pin_memory={pinned})")
    ahead = sharding.prefetch if len(units) > 1 else 0
    every = units == [f"blocks.{index}" for index in range(len(case.model.blocks))]
    if every and len(units) > 1 and not ahead:
        wrap += ["for block in model.blocks:", f"    fully_shard(block, mesh=mesh{kept})"]
    elif len(units) == 1:
        wrap.append(f"fully_shard({attribute(units[0])}, mesh=mesh{kept})")
    elif units:
        if every:
            wrap.append("units = list(model.blocks)")
        else:
            wrap += [_call("units = ", [attribute(unit) for unit in units])]
        wrap += ["for unit in units:", f"    fully_shard(unit, mesh=mesh{kept})"]
    wrap.append(f"fully_shard(model, mesh=mesh{kept})")
    if ahead:
        wrap += [
            "for place, unit in enumerate(units):",
            f"    unit.set_modules_to_forward_prefetch(units[place + 1 : place + {1 + ahead}])",
            f"    unit.set_modules_to_backward_prefetch(units[:place][::-1][:{ahead}])",
        ]
    if sometimes_used(case.model):
        wrap.append("model.set_reduce_scatter_unused_params(True)")
    optimizer = [f"optimizer = {optimizer_call(case, 'model', fused=True)}"]
    return ShardingText(
        title=TITLES["fsdp2"],
        gather="dtensor",
        setup=_in_order(case, optimizer, wrap),
        wrap=wrap,
        sync="set_requires_gradient_sync",
    )


def _units(case: Case, choose: Units) -> list[str]:
    """Paths of the units below the root, in the order of calls."""
    model = skeleton(case)
    modules = choose(model, case.sharding)
    paths = {module: path for path, module in model.named_modules()}
    called = in_order_of_calls(model, modules, case) if case.sharding.wrap != "size" else modules
    return [paths[m] for m in (*called, *(m for m in modules if m not in called))]


def _each(units: list[str], what: str) -> list[str]:
    """Lines that put `what` of each unit in its place."""
    if len(units) == 1:
        place = attribute(units[0])
        return [f"{place} = {what.format(place)}"]
    lines = [_call("paths = ", [quoted(unit) for unit in units])]
    inner = what.format("model.get_submodule(path)")
    return [*lines, "for path in paths:", f"    model.set_submodule(path, {inner})"]


def _call(head: str, arguments: list[str]) -> str:
    return f"{head}({', '.join(arguments)})"
