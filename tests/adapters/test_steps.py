"""Every built-in implementation takes the right step, on every kind of case."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import pytest
import torch
import torch.distributed as dist
from slices import sliced
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.case.schema import Case
from zerocheck.contract import Implementation
from zerocheck.execution.kernels import deterministic
from zerocheck.models.network import build_model
from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial

from .cases import CASES, on
from .driver import assembled, copied, in_ranks, step_of

SHARDINGS: dict[str, tuple[str, ...]] = {
    "ddp": ("block", "views", "first"),
    "zero-redundancy": ("views", "block", "first"),
    "fsdp1": ("layer", "flat", "size", "first"),
    "fsdp1-grad-op": ("flat", "block", "each"),
    "fsdp1-no-shard": ("block", "flat", "each"),
    "zero1": ("block", "layer"),
    "zero2": ("layer", "whole", "block_kept"),
    "zero3": ("layer", "block", "whole", "block_kept", "layer_alone", "layer_kept"),
    "fsdp2": ("layer", "block", "whole", "layer_kept", "size", "each", "offloaded"),
}
"""All cases run with the first sharding, those of KEY with the second too, FEW with the rest."""

KEY = (
    "groups",
    "microbatches",
    "twice",
    "tied",
    "frozen",
    "unused",
    "mixed",
    "experts",
    "checkpointed",
    "shapes",
)
FEW = ("groups", "microbatches", "mixed")
WIDE = ("clip", "clip_inf", "one_wide", *KEY)
"""Cases that run on other numbers of ranks too."""
SMALLER = ("one_wide", "mixed", "experts", "shapes")
"""Cases that run on 5 ranks in any case: parameters are smaller than the world."""

FSDP1_REFUSES = (
    "groups",
    "frozen",
    "fused",
    "tied",
    "shapes",
    "shapes_inf",
    "experts",
    "experts_one",
)
REFUSED: dict[str, tuple[str, ...]] = {
    "ddp": ("shapes_inf",),
    "zero-redundancy": ("shapes_inf",),
    **dict.fromkeys(("fsdp1", "fsdp1-grad-op", "fsdp1-no-shard"), FSDP1_REFUSES),
    "fsdp2": ("clip_inf", "shapes", "shapes_inf"),
}
"""Cases that may be refused, with a reason."""

UNFIT: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("ddp", "zero-redundancy", "fsdp1", "fsdp1-grad-op", "fsdp1-no-shard", "fsdp2"), ("tiny_clip",)
)
"""torch's own norm squares in fp32, where the square of a gradient below 1e-22 is 0."""
UNFIT["zero-redundancy"] = ("tiny_clip", "shapes")  # zero-redundancy-transposed-bucket-view.md


def _chosen(name: str, number: int, world_size: int) -> Collection[str]:
    """Names of the cases that run with the sharding of this number, the first being 0.

    Of a slice an implementation runs every fourth of the cases, on other numbers of ranks every
    second of the few, and the next one the cases beside them.
    """
    place = list(SHARDINGS).index(name)
    if world_size != 3:
        return sliced(WIDE, SMALLER[place % 2 :: 2]) if number == 0 else ()
    if number == 0:
        return sliced(list(CASES), list(CASES)[place % 4 :: 4])
    own = (place + number) % len(KEY)
    return sliced(KEY if number == 1 else FEW, KEY[own : own + 2] if number == 1 else KEY[own:][:1])


AHEAD = 2
"""Cases that are run while another one is judged."""


@pytest.mark.every(8)
@pytest.mark.parametrize("world_size", sliced([1, 2, 3, 5], [1, 3, 5]))
@pytest.mark.parametrize("implementation", SHARDINGS)
def test_steps(pool: Pool, implementation: str, world_size: int) -> None:
    jobs = [
        (name, sharding, on(case, world_size, sharding))
        for number, sharding in enumerate(SHARDINGS[implementation])
        for name, case in CASES.items()
        if name in _chosen(implementation, number, world_size)
        if name not in ("all_frozen", *UNFIT.get(implementation, ()))
    ]
    wrong = []
    trials: deque[Trial] = deque()
    waiting = deque(jobs)
    for name, sharding, _ in jobs:
        while waiting and len(trials) <= AHEAD:
            case = waiting.popleft()[2]
            trials.append(Trial(pool, implementation, case, obligations=EQUIVALENCE))
        outcome = trials.popleft().outcome()
        if outcome.status == "unsupported":
            assert name in REFUSED.get(implementation, ()), f"{name}: {outcome.reason}"
        elif outcome.status != "holds":
            wrong.append(f"{name} / {sharding}: {outcome.reason or outcome.judgement}")
    assert not wrong, "\n".join(wrong)


def _only_frozen(mesh: DeviceMesh, kinds: list[type[Implementation]], case: Case) -> list[object]:
    """For each kind: copies of what it has after a step of the case, and its norm."""
    deterministic()
    shown = []
    for kind in kinds:
        implementation = kind(build_model(case), case, mesh)
        report = implementation.train_step(step_of(case, 0, dist.get_rank(), lambda moment: None))
        shown.append((copied(implementation), report.grad_norm))
        implementation.close()
    return shown


def test_a_step_of_a_model_that_is_frozen_changes_nothing() -> None:
    """The judge has no gradient to compare there."""
    case = on(CASES["all_frozen"], 3, "block")
    start = {name: tensor.detach() for name, tensor in build_model(case).named_parameters()}
    kinds = [Zero1, Zero2, Zero3, Fsdp2]
    ranks = in_ranks(3, _only_frozen, kinds, case)
    for number, kind in enumerate(kinds):
        views = [rank[number][0] for rank in ranks]
        parameters = assembled(views, "parameter")
        assert parameters.keys() == start.keys(), kind
        assert all(torch.equal(parameters[name], tensor) for name, tensor in start.items()), kind
        assert {rank[number][1] for rank in ranks} == {0.0}, kind
        assert not {role for view in views for _, role, *_ in view} & {"exp_avg", "step"}, kind
