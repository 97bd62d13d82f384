"""Text that wraps a model in FullyShardedDataParallel, as a user of torch writes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ...case.schema import Case
from ...case.shapes import transposed
from ..shared.script_text import (
    AdapterScript,
    Gather,
    ShardingText,
    call_text,
    each_unit,
    grouped,
    in_order,
    optimizer_call,
    unit_paths,
)
from ..shared.units import members, skeleton
from .refusals import wrapped_units

STRATEGIES = {"fsdp1": "FULL_SHARD", "fsdp1-grad-op": "SHARD_GRAD_OP", "fsdp1-no-shard": "NO_SHARD"}


def title_of(strategy: str) -> str:
    """Return the title of a script."""
    return f"FullyShardedDataParallel ({strategy})"


def _whole(case: Case, strategy: str) -> bool:
    """Return True if each rank has whole parameters."""
    return strategy == "NO_SHARD" or case.world_size == 1


def _text(case: Case, strategy: str) -> ShardingText:
    sharding = case.sharding
    units = unit_paths(case, wrapped_units)
    given = ['device_id=torch.device("cpu")']
    wrap = []
    if strategy != "FULL_SHARD":
        wrap.append(f"strategy = ShardingStrategy.{strategy}")
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
        wrap += [call_text("given = dict", given)]
        given = ["**given"]
        wrap += each_unit(units, "FullyShardedDataParallel({}, **given)")
    first = sharding.optimizer_first
    built = bool(units) or first
    arguments = ["model" if built else "build()", *given]
    wrap += [call_text("model = FullyShardedDataParallel", arguments)]
    optimizer = [f"optimizer = {optimizer_call(case, 'model', fused=True)}"]
    gather: Gather = "summoned"
    if not sharding.use_orig_params:
        gather = "flat"
    elif _whole(case, strategy):
        gather = "replicated"
    flat = []
    if gather == "flat" and units:
        model = skeleton(case)
        inside = members(model, wrapped_units(model, sharding))
        flat = [name for path in sorted(inside, key=bool) for name in inside[path]]
    return ShardingText(
        title=title_of(strategy),
        gather=gather,
        setup=in_order(case, optimizer, wrap),
        wrap=wrap,
        sync="no_sync",
        clip="model.clip_grad_norm_({maximum}{norm})",
        flat=flat,
        built=built,
        scaler_class="ShardedGradScaler",
        sharded=gather != "replicated" and strategy != "NO_SHARD",
        rename='replace("_fsdp_wrapped_module.", "")',
        replaces_frozen=gather == "replicated",
    )


def _reasons(case: Case, checks: Sequence[str], steps: int, *, strategy: str) -> Iterator[str]:
    """Yield why a case cannot be shown: flat parameters have no place for each parameter."""
    flat = not case.sharding.use_orig_params
    if flat and (steps > 1 or checks not in (("gradient",), ())):
        yield "flat parameters can be compared in one gradient only (sharding.use_orig_params)"
    if flat and grouped(case):
        yield "flat parameters are in several parameter groups (optimizer.groups)"
    if transposed(case.model) and (flat or not _whole(case, strategy)):
        yield "transposed parameters are cut in the order of memory (model.blocks.transposed)"


SCRIPTS = {
    name: AdapterScript(
        title_of(strategy), partial(_text, strategy=strategy), partial(_reasons, strategy=strategy)
    )
    for name, strategy in STRATEGIES.items()
}
