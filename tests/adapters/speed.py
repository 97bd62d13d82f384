"""How long five steps take: `python -m tests.adapters.speed`. Not a test."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.case.schema import Block, Case, Data, Model, Sharding, Training
from zerocheck.contract import Implementation
from zerocheck.models.network import build_model

from .driver import in_ranks, step_of

STEPS = 5
KINDS: dict[str, type[Implementation]] = {
    "ddp": Ddp,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "fsdp2": Fsdp2,
}


def _measure(mesh: DeviceMesh, case: Case, rounds: int) -> dict[str, tuple[float, ...]]:
    """Per implementation: best wall ms and CPU ms of a build and five steps with shards()."""
    best: dict[str, tuple[float, ...]] = {}
    for _ in range(rounds):
        for name, kind in KINDS.items():
            model = build_model(case)
            steps = [step_of(case, i, dist.get_rank(), lambda _: None) for i in range(STEPS)]
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            implementation = kind(model, case, mesh)
            built = time.perf_counter() - wall
            for step in steps:
                implementation.train_step(step)
            dist.barrier()
            now = (1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu))
            looked = time.perf_counter()
            for _ in range(10):
                list(implementation.shards())
            looked = 1e3 * (time.perf_counter() - looked)
            implementation.close()
            entry = (*now, 1e3 * built, looked)
            if name not in best or entry < best[name]:
                best[name] = entry
    return best


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    model = Model(inputs=7, width=5, blocks=(Block(kind="mlp", hidden=13),), outputs=3)
    for world_size in (2, 4):
        case = Case(
            mesh=(world_size,),
            model=model,
            data=Data(batch=4, length=1),
            training=Training(steps=STEPS),
            sharding=Sharding(wrap="layer"),
        )
        best = in_ranks(world_size, _measure, case, rounds)[0]
        print(f"W={world_size}, ms: wall, cpu, of which build; 10 x shards()")
        for name, numbers in best.items():
            print(f"  {name:6}", "".join(f"{number:9.2f}" for number in numbers))


if __name__ == "__main__":
    main()
