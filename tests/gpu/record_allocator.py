"""Record what the caching allocator of a GPU does while the simulated setups run with data.

python tests/gpu/record_allocator.py FOLDER [NAME ...]

Each recording is one `.npz` of columns (action, size, address, stream), and of the free segments
that were there before, `initial` (address, size, stream); and one `.json`: the setup, and what the
allocator counts at the end of each phase. A rank of many is alone on the GPU; its collectives move
nothing, and allocate what they would. tests/memory/recorded_on_a_gpu has those of an H100.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from zerocheck.compat_memory import AllocatorHistory
from zerocheck.memory.allocation_tracker import AllocationTracker
from zerocheck.memory.setup import Setup
from zerocheck.memory.simulate import simulate
from zerocheck.memory.source import source
from zerocheck.memory.timeline import timeline

ACTIONS = {"alloc": 0, "free_completed": 2, "segment_alloc": 3, "segment_map": 5}
"""Actions by their number in the recordings. That a block's release is requested changes nothing
until it is completed."""
FEW = 4
"""Blocks of the models that are recorded in part."""


def gpt2(name: str, blocks: int | None = FEW, **more: Any) -> tuple[Setup, int | None]:
    return Setup(model="gpt2", implementation=name, **{"batch": 4, **more}), blocks


def llama(blocks: int | None = FEW, **more: Any) -> tuple[Setup, int | None]:
    return Setup(model="llama-8b", implementation="fsdp2", **{"sequence": 2048, **more}), blocks


def pictures(model: str, name: str, **more: Any) -> tuple[Setup, int | None]:
    """Of a factory of tests/memory that draws batches of its own."""
    return Setup(model=f"small_models:{model}", implementation=name, **more), None


SETUPS: dict[str, tuple[Setup, int | None]] = {
    **{name: gpt2(name) for name in ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")},
    "fsdp2-fp32": gpt2("fsdp2", precision="fp32"),
    "fsdp2-checkpointed": gpt2("fsdp2", checkpoint=True),
    "fsdp2-kept": gpt2("fsdp2", reshard=False),
    "fsdp2-accumulated": gpt2("fsdp2", microbatches=2),
    "fsdp2-layers": gpt2("fsdp2", wrap="layer"),
    "fsdp2-of-two": gpt2("fsdp2", world_size=2),
    "fsdp2-sgd": gpt2("fsdp2", optimizer="sgd"),
    "ddp-fp32": gpt2("ddp", precision="fp32"),
    "ddp-adafactor": gpt2("ddp", optimizer="adafactor"),
    "ddp-muon": gpt2("ddp", optimizer="muon"),
    "ddp-checkpointed": gpt2("ddp", checkpoint=True),
    "ddp-whole": gpt2("ddp", None, batch=8),
    "fsdp2-whole": gpt2("fsdp2", None, batch=8),
    "fsdp2-hsdp": gpt2("fsdp2", replicas=2),
    "pictures-ddp": pictures("vision_transformer", "ddp"),
    "pictures-fsdp2": pictures("vision_transformer", "fsdp2"),
    "pictures-fp32": pictures("vision_transformer", "fsdp2", precision="fp32"),
    "convolutions-ddp": pictures("residual_network", "ddp"),
    "convolutions-fsdp2": pictures("residual_network", "fsdp2", precision="fp32"),
    "llama": llama(),
    "llama-long": llama(sequence=8192, checkpoint=True),
    "llama-whole": llama(None),
    "llama-whole-checkpointed": llama(None, checkpoint=True, batch=2),
    "llama-whole-of-64": llama(None, world_size=64, checkpoint=True, sequence=8192),
}


def lengths(checkpoint: bool, evaluate: bool = False) -> None:
    """Train on batches of other lengths, as without packing; evaluate: every second one."""
    torch.manual_seed(0)
    model = _with_memory(FEW, checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(16):
        tokens = torch.randint(2, (4, 64 * (1 + (7 * step) % 16)), device="cuda")
        if evaluate and step % 2:
            with torch.no_grad():
                model(tokens).float().log_softmax(-1).sum()
            continue
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def streams() -> None:
    """Copy each batch and a part of the result on a stream of its own, with `record_stream`."""
    torch.manual_seed(0)
    model = _with_memory(FEW, False)
    side = torch.cuda.Stream()
    for step in range(8):
        with torch.cuda.stream(side):
            tokens = torch.randint(2, (4, 128 + 64 * (step % 3)), device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        tokens.record_stream(torch.cuda.current_stream())
        loss = model(tokens).float().log_softmax(-1).mean()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kept = loss.detach() * torch.ones(1 << (14 + step), device="cuda")
        loss.record_stream(side)
        kept.record_stream(torch.cuda.current_stream())
        loss.backward()
        model.zero_grad(set_to_none=step % 2 == 0)


def _with_memory(blocks: int, checkpoint: bool) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from zerocheck.memory.simulate import materialize
    from zerocheck.models.parts import block_list

    model = source("gpt2").build(blocks)
    if checkpoint:
        found = block_list(model)
        assert found is not None
        for index, block in enumerate(found[1]):
            found[1][index] = checkpoint_wrapper(block)
    materialize(model, "cuda")
    return model


LOOPS: dict[str, Callable[[], None]] = {
    "lengths": lambda: lengths(False),
    "lengths-checkpointed": lambda: lengths(True),
    "lengths-and-evaluation": lambda: lengths(False, True),
    "streams": streams,
}


class Recording:
    """One recording, from here to `write`."""

    def __init__(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.history = AllocatorHistory(torch.device("cuda", torch.cuda.current_device()))
        self.phases: list[dict[str, Any]] = []
        self.trace: list[dict[str, Any]] = []
        self.phase: tuple[int, str] = (-1, "built")
        self.history.start()  # it gives the workspaces of cuBLAS back
        torch.cuda.empty_cache()
        self.before = torch.cuda.memory_allocated(), self.history.taken().segments
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def phases_of_the_simulation(self) -> Iterator[None]:
        """Note the end of each phase that a simulation enters."""
        entered = AllocationTracker.enter

        def enter(tracker: AllocationTracker, phase: Any, step: int) -> None:
            if (step, phase) != self.phase:
                self.end()
                self.phase = step, phase
            entered(tracker, phase, step)

        with mock.patch.object(AllocationTracker, "enter", enter):
            yield

    def end(self) -> None:
        """Note what the allocator counts."""
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        number = torch.cuda.current_device()
        self.trace = torch.cuda.memory._snapshot()["device_traces"][number]
        step, phase = self.phase
        noted = {"step": step, "phase": phase, "events": len(self.trace)}
        for word in ("allocated", "reserved", "requested", "inactive_split"):
            noted[word] = stats[f"{word}_bytes.all.current"]
            noted[f"{word}_peak"] = stats[f"{word}_bytes.all.peak"]
        self.phases.append(noted)
        torch.cuda.reset_peak_memory_stats()

    def write(self, folder: Path, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Write the files and return what the `.json` holds."""
        self.history.stop()
        free, total = torch.cuda.mem_get_info()
        facts = {
            "name": name,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(),
            "settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "outside": total - free - torch.cuda.memory_reserved(),
            "phases": self.phases,
            **facts,
        }
        (folder / f"{name}.json").write_text(json.dumps(facts, indent=1))
        np.savez_compressed(folder / f"{name}.npz", **columns(self.trace, self.before[1]))
        return facts


def columns(
    trace: list[dict[str, Any]], before: list[dict[str, Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the events as columns; addresses from the lowest one on, streams by number.

    before: segments that were there, of which nothing was in use.
    """
    trace = [one for one in trace if one["action"] in ACTIONS]
    lowest = min(one["addr"] for one in trace)
    numbers: dict[int, int] = {0: 0}
    return {
        "initial": np.array(
            [
                (
                    one["address"] - lowest,
                    one["total_size"],
                    numbers.setdefault(one["stream"], len(numbers)),
                )
                for one in before
            ],
            np.int64,
        ).reshape(-1, 3),
        "action": np.array([ACTIONS[one["action"]] for one in trace], np.uint8),
        "size": np.array([one["size"] for one in trace], np.int64),
        "address": np.array([one["addr"] - lowest for one in trace], np.int64),
        "stream": np.array(
            [numbers.setdefault(one["stream"], len(numbers)) for one in trace], np.uint8
        ),
    }


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "-expandable" if "expandable" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") else ""
    torch.ones(1, device="cuda").add_(1)
    for name in names or [*SETUPS, *LOOPS]:
        started = time.perf_counter()
        facts: dict[str, Any] = {}
        recording = Recording()
        try:
            if name in LOOPS:
                LOOPS[name]()
            else:
                setup, blocks = SETUPS[name]
                with recording.phases_of_the_simulation():
                    run = simulate(setup, source(setup.model), blocks, data=True, device="cuda")
                peak = timeline(run.log, run.blocks).peak()
                facts = {"setup": asdict(setup), "blocks": blocks, "tracked_peak": peak.total}
                del run
        except (RuntimeError, AssertionError) as error:  # the next one may be recorded
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            recording.history.stop()
            continue
        recording.end()
        done = recording.write(folder, name + suffix, facts)
        most = max(one["allocated_peak"] for one in done["phases"]) - recording.before[0]
        reserved = max(one["reserved_peak"] for one in done["phases"])
        print(
            f"{name}{suffix}: {time.perf_counter() - started:.1f} s, "
            f"{done['phases'][-1]['events']} events, allocated {most / 2**20:.1f} MiB, "
            f"tracked {done.get('tracked_peak', 0) / 2**20:.1f}, reserved {reserved / 2**20:.1f}, "
            f"outside {done['outside'] / 2**20:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
