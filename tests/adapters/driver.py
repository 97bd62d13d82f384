"""Runs implementations on real ranks: forked processes, gloo, and a file to meet at."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zerocheck.case.schema import Case
from zerocheck.contract import Implementation, Microbatch, Shard, Step
from zerocheck.contract.groups import learning_rates
from zerocheck.models.batches import batch, loss_of

torch.set_num_threads(1)
# The first AdamW imports torch._dynamo: once, before the ranks are forked.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()

HANGS_S = 180
"""Seconds after which a rank ends, with its stacks on stderr: gloo gives up after a third of it."""


View = tuple[str, str, torch.Tensor | None, tuple[int, ...], Any]
"""A copied shard: name, role, tensor, shape, index."""


def in_ranks(world_size: int, function: Callable[..., Any], *given: Any) -> list[Any]:
    """`function(mesh, *given)` on each of `world_size` forked ranks; their results in rank order.

    Raises RuntimeError with the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        # A process group of an earlier test may be garbage. To collect it in a forked rank would
        # wait for its threads, which a fork does not have.
        gc.collect()
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _live(rank, world_size, Path(folder), function, given)
            ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)
        results = []
        for rank in range(world_size):
            answer = Path(folder, str(rank))
            if not answer.exists():
                raise RuntimeError(f"rank {rank} died without a word")
            right, result = pickle.loads(answer.read_bytes())
            if not right:
                raise RuntimeError(f"rank {rank}: {result}")
            results.append(result)
        return results


def _live(rank: int, world_size: int, folder: Path, function: Any, given: Any) -> None:
    """The life of a rank. Never returns."""
    gc.freeze()  # a collection would copy the pages that the ranks share
    faulthandler.dump_traceback_later(HANGS_S, exit=True, file=2)
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
        answer = (True, function(mesh, *given))
        dist.barrier()
    except BaseException:
        answer = (False, traceback.format_exc())
    # Renamed when whole, so that a rank that dies in writing is seen as dead.
    (folder / f"{rank}.part").write_bytes(pickle.dumps(answer))
    (folder / f"{rank}.part").rename(folder / str(rank))
    os._exit(0)


def microbatches(case: Case, step: int, rank: int) -> list[Microbatch]:
    """The microbatches of one rank in one step."""
    made = [
        batch(case, step=step, rank=rank, microbatch=number)
        for number in range(case.training.microbatches)
    ]
    return [
        Microbatch(inputs=one.inputs, target=one.target, seed=one.seed, loss_of=loss_of(case))
        for one in made
    ]


def step_of(case: Case, index: int, rank: int, reached: Callable[[Any], None]) -> Step:
    """Step `index` of the case."""
    return Step(
        index=index,
        microbatches=microbatches(case, index, rank),
        lr=learning_rates(case, index),
        reached=reached,
    )


def copied(implementation: Implementation) -> list[View]:
    """Copies of all shards."""

    def copy(shard: Shard) -> View:
        tensor = None if shard.tensor is None else shard.tensor.detach().clone()
        return shard.name, shard.role, tensor, shard.shape, shard.index

    return [copy(shard) for shard in implementation.shards()]


def assembled(views: list[list[View]], role: str) -> dict[str, torch.Tensor | None]:
    """The whole tensors of one role, from the views of all ranks. Fails unless they tile."""
    whole: dict[str, torch.Tensor | None] = {}
    covered: dict[str, torch.Tensor] = {}
    for rank in views:
        for name, its_role, tensor, shape, index in rank:
            if its_role != role:
                continue
            if tensor is None:
                whole[name] = None
                continue
            if name not in covered:
                whole[name] = torch.full(shape, float("nan"))
                covered[name] = torch.zeros(shape, dtype=torch.int)
            here, count = whole[name], covered[name]
            assert here is not None and here.shape == shape
            if isinstance(index, slice):
                here, count = here.view(-1)[index], count.view(-1)[index]
            elif index is not None:
                here, count = here[index], count[index]
            assert here.shape == tensor.shape, (name, role, here.shape, tensor.shape)
            if index is None:
                assert not count.any() or torch.equal(here, tensor), f"replicas of {name} differ"
                count.zero_()
            here.copy_(tensor)
            count += 1
    for name, count in covered.items():
        assert bool((count == 1).all()), f"{role} of {name} is not tiled exactly once"
    return whole
