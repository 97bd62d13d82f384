"""Text that wraps a model in DistributedDataParallel, as a user of torch writes it."""

from __future__ import annotations

from ...case.schema import Case
from ...case.shapes import sometimes_used, uncalled
from ..shared.script_text import (
    AdapterScript,
    ShardingText,
    call_text,
    in_order,
    optimizer_call,
    options,
)


def wrapped_text(case: Case, *, views: bool) -> tuple[str, str]:
    """Return the lines that make `model` with DDP, and those that make it again after an unfreeze.

    views: gradients are views of the buckets.
    """
    sharding = case.sharding
    unused = bool(uncalled(case.model) or sometimes_used(case.model)) or sharding.find_unused
    given = options(
        [
            ("bucket_cap_mb", sharding.bucket * 4 / 2**20, 4.0),
            ("gradient_as_bucket_view", views, False),
            ("find_unused_parameters", unused, False),
            ("static_graph", sharding.static_graph, False),
        ]
    )
    made = "model" if sharding.optimizer_first else "build()"
    rewrap = ""
    if case.training.unfreeze is not None:
        module = "model.module.requires_grad_()"
        rewrap = f"model = DistributedDataParallel({', '.join([module, *given])})"
    return call_text("model = DistributedDataParallel", [made, *given]), rewrap


def _text(case: Case) -> ShardingText:
    made, rewrap = wrapped_text(case, views=case.sharding.bucket_view)
    optimizer = f"optimizer = {optimizer_call(case, 'model', fused=True)}"
    return ShardingText(
        title=SCRIPTS["ddp"].title,
        gather="replicated",
        setup=in_order(case, [optimizer], [made]),
        wrap=[made],
        sync="no_sync",
        rewrap=rewrap,
        built=case.sharding.optimizer_first,
    )


SCRIPTS = {"ddp": AdapterScript("DistributedDataParallel", _text)}
