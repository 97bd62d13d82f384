"""What the rank processes of these tests do. The payload names one of the functions below."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from zerocheck.ranks.context import RankContext


class OwnError(Exception):
    """Told apart by its qualified name."""


_jobs = 0


def run(payload: bytes, context: RankContext) -> bytes:
    global _jobs
    _jobs += 1
    if not payload:
        return b""
    name, _, argument = payload.decode().partition(" ")
    result = globals()[name](context, argument)
    return b"" if result is None else json.dumps(result).encode()


def _reduce(context: RankContext, where: str = "the sum") -> float:
    context.progress.at(where)
    context.progress.collective("all_reduce", 1)
    total = torch.ones(4)
    dist.all_reduce(total)
    return float(total[0])


def already(context: RankContext, argument: str) -> bool:
    """Whether a module is there already."""
    return argument in sys.modules


def reduce(context: RankContext, argument: str) -> float:
    return _reduce(context)


def echo(context: RankContext, argument: str) -> list[object]:
    return [context.rank, context.world_size, dist.get_world_size(), argument]


def put(context: RankContext, argument: str) -> list[object]:
    count = int(argument)
    value = torch.arange(count, dtype=torch.float32) + 1000 * context.rank
    slot = context.arena.put([value[: count // 2], value[count // 2 :]])
    return [slot.offset, slot.numel, slot.dtype]


def kill_one(context: RankContext, argument: str) -> None:
    if context.rank == 1:
        time.sleep(0.05)
        context.progress.at("about to die")
        os.kill(os.getpid(), signal.SIGKILL)
    _reduce(context)


def abort_one(context: RankContext, argument: str) -> None:
    if context.rank == 1:
        os.abort()
    _reduce(context)


def segfault_one(context: RankContext, argument: str) -> None:
    if context.rank == 1:
        ctypes.string_at(0)
    _reduce(context)


def exit_one(context: RankContext, argument: str) -> None:
    if context.rank == 1:
        sys.exit(3)
    _reduce(context)


def leave_one(context: RankContext, argument: str) -> None:
    if context.rank == 1:
        os._exit(5)
    _reduce(context)


def raise_one(context: RankContext, argument: str) -> None:
    if context.rank == 1:
        print("a word before the end")
        context.arena.put([torch.ones(3)])
        raise OwnError("only here")
    _reduce(context)


def raise_all(context: RankContext, argument: str) -> None:
    raise OwnError("everywhere")


def interrupt_all(context: RankContext, argument: str) -> None:
    raise KeyboardInterrupt


def bad_text(context: RankContext, argument: str) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    raise SilentError


def skip_one(context: RankContext, argument: str) -> None:
    if context.rank != 1:
        _reduce(context, "step 2, forward")


def slow_once(context: RankContext, argument: str) -> float:
    """Rank 1 comes to the collective when the others have given up, but not the second time."""
    context.progress.at("the sum")
    context.progress.collective("all_reduce", 1)
    if context.rank == 1 and not slow_once.__dict__.get("was"):
        slow_once.__dict__["was"] = True
        time.sleep(float(argument))
    return _reduce(context)


def sleep(context: RankContext, argument: str) -> int:
    if argument:
        time.sleep(float(argument))
    return os.getpid()


def pid(context: RankContext, argument: str) -> int:
    return os.getpid()


def burn(context: RankContext, argument: str) -> float:
    """One rank computes without any progress, the others wait for it."""
    if context.rank == 0:
        end = time.monotonic() + float(argument)
        while time.monotonic() < end:
            pass
    return _reduce(context)


def child_burns(context: RankContext, argument: str) -> None:
    """As a rank that waits for a compiler."""
    if context.rank == 0:
        os.system(f"timeout {argument} sh -c 'while :; do :; done'")


def fork_child(context: RankContext, argument: str) -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def environment(context: RankContext, argument: str) -> dict[str, object]:
    return {
        "threads": torch.get_num_threads(),
        "path": sys.path,
        "directory": os.getcwd(),
        "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors()),
        "cuda": torch.cuda.is_initialized(),
        "group": dist.get_backend(),
    }


def _descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def backward(context: RankContext, argument: str) -> float:
    """DDP and FSDP2 in the same rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    inputs = torch.randn(2, 4) + context.rank
    plain = DistributedDataParallel(torch.nn.Linear(4, 3))
    plain(inputs).square().mean().backward()
    sharded = torch.nn.Linear(4, 3)
    fully_shard(sharded)
    sharded(inputs).square().mean().backward()
    optimizer = torch.optim.AdamW(sharded.parameters())
    optimizer.step()
    weight = plain.module.weight.grad
    return float(weight.sum())


def places(context: RankContext, argument: str) -> list[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return [os.environ[name] for name in (*names, "GROUP_WORLD_SIZE")]


def imported(context: RankContext, argument: str) -> str:
    import reads_its_place

    return reads_its_place.LOCAL_RANK


def stop_one(context: RankContext, argument: str) -> float:
    """One rank is stopped, the others wait for it."""
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return _reduce(context)


def daemon(context: RankContext, argument: str) -> int:
    """A process with a session of its own, whose parent is gone before the rank is."""
    near, far = os.pipe()
    if os.fork() == 0:
        os.setsid()
        child = os.fork()
        if child == 0:
            time.sleep(60)
        else:
            os.write(far, str(child).encode())
        os._exit(0)
    os.wait()
    return int(os.read(near, 20))


def endless(context: RankContext, argument: str) -> float:
    """One rank takes ever more memory: by objects of Python, or by tensors."""
    kept: list[object] = []
    while context.rank == 0:
        kept.append(torch.ones(1 << 22) if argument else bytearray(1 << 24))
    return _reduce(context)


def lack(context: RankContext, argument: str) -> None:
    """Lack a thread: "always", or else in processes that have done another job."""
    if argument == "always" or _jobs > 1:
        raise RuntimeError("can't start new thread")
