"""Text that shards a model with `fully_shard`, as a user of torch writes it."""

from __future__ import annotations

from ...case.schema import Case
from ...case.shapes import sometimes_used
from ..shared.script_text import (
    AdapterScript,
    ShardingText,
    attribute,
    call_text,
    in_order,
    optimizer_call,
    unit_paths,
)
from ..shared.units import unit_modules


def _text(case: Case) -> ShardingText:
    sharding = case.sharding
    units = unit_paths(case, unit_modules)
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
            wrap += [call_text("units = ", [attribute(unit) for unit in units])]
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
        title=SCRIPTS["fsdp2"].title,
        gather="dtensor",
        setup=in_order(case, optimizer, wrap),
        wrap=wrap,
        sync="set_requires_gradient_sync",
        sharded=True,
    )


SCRIPTS = {"fsdp2": AdapterScript("fully_shard (FSDP2)", _text)}
