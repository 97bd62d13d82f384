"""Text that wraps a model in DDP and shares out its optimizer states, as a user of torch does."""

from __future__ import annotations

from ...case.schema import Case
from ..ddp.script import wrapped_text
from ..shared.script_text import (
    AdapterScript,
    ShardingText,
    call_text,
    in_order,
    optimizer_arguments,
    torch_name,
)


def _text(case: Case) -> ShardingText:
    sharding = case.sharding
    made, rewrap = wrapped_text(case, views=False)
    parameters, *rest = optimizer_arguments(case, "model", fused=True)
    view = ["parameters_as_bucket_view=True"] if sharding.bucket_view else []
    arguments = [parameters, torch_name(case), *view, *rest]
    return ShardingText(
        title=SCRIPTS["zero-redundancy"].title,
        gather="replicated",
        setup=in_order(case, [call_text("optimizer = ZeroRedundancyOptimizer", arguments)], [made]),
        wrap=[made],
        sync="no_sync",
        rewrap=rewrap,
        built=sharding.optimizer_first,
        optimizer="optimizer.optim",
        checks_optimizer=sharding.bucket_view,
    )


SCRIPTS = {
    "zero-redundancy": AdapterScript("ZeroRedundancyOptimizer over DistributedDataParallel", _text)
}
