"""Private torch API for the measurement and simulation of memory, in one place."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .errors import Unsupported


class Allocation(NamedTuple):
    """Memory that the allocator gave out, or took back.

    address: where it begins; bytes: of it, negative where it was taken back; operators: those that
    were running, the outermost first.
    """

    address: int
    bytes: int
    operators: tuple[str, ...]


def quiet_profiler() -> None:
    """Keep the profiler from writing two lines to stderr each time it starts."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class AllocatorLog:
    """Log of torch's CPU allocator on this thread, from `start` to `stop`.

    It is made of the events of torch's profiler, which include allocations in C++ and `resize_` of
    a storage. It cannot run together with another profile.
    """

    def start(self) -> None:
        """Start the log."""
        quiet_profiler()
        from torch._C._profiler import (
            ProfilerActivity,
            ProfilerConfig,
            ProfilerState,
            RecordScope,
            _ExperimentalConfig,
        )

        config = ProfilerConfig(
            ProfilerState.KINETO,
            False,  # no shapes
            True,  # memory
            False,  # no stacks
            False,  # no flops
            False,  # no modules
            _ExperimentalConfig(),
        )
        autograd: Any = torch._C._autograd
        autograd._prepare_profiler(config, {ProfilerActivity.CPU})
        scopes = {RecordScope.FUNCTION, RecordScope.USER_SCOPE}
        autograd._enable_profiler(config, {ProfilerActivity.CPU}, scopes)

    def mark(self, name: str) -> None:
        """Insert a named mark into the log."""
        with torch.profiler.record_function(name):
            pass

    def stop(self, marks: str) -> list[str | Allocation]:
        """Stop the log and return all events, in order.

        marks: the prefix of the names given to `mark`.
        """
        autograd: Any = torch._C._autograd
        tree = autograd._disable_profiler().experimental_event_tree()
        found: list[tuple[int, int, str | Allocation]] = []
        open_: list[tuple[Any, tuple[str, ...]]] = [(event, ()) for event in reversed(tree)]
        while open_:
            event, operators = open_.pop()
            fields = event.extra_fields
            if isinstance(fields, torch._C._profiler._ExtraFields_Allocation):
                one = Allocation(fields.ptr, fields.alloc_size, operators)
                found.append((event.start_time_ns, len(found), one))
                continue
            name = event.name
            if name.startswith(marks):
                found.append((event.start_time_ns, len(found), name))
            # A dispatch mode has each operator appear twice, with its own name between.
            if name != "PythonDispatchMode" and operators[-1:] != (name,):
                operators = (*operators, name)
            open_ += [(child, operators) for child in reversed(event.children)]
        return [one for _, _, one in sorted(found, key=lambda entry: entry[:2])]


class Snapshot(NamedTuple):
    """State of a GPU's caching allocator at an instant.

    trace: entries of its history since the last time; segments: as `torch.cuda.memory_snapshot`
    gives them; allocated, reserved, inactive: bytes that are handed out, that it has of the driver,
    and that are unused between blocks, so that they can be given to nobody else.
    """

    trace: list[dict[str, Any]]
    segments: list[dict[str, Any]]
    allocated: int
    reserved: int
    inactive: int


class AllocatorHistory:
    """History of a GPU's caching allocator, on all threads, from `start` to `stop`."""

    def __init__(self, device: torch.device) -> None:
        """Select the device.

        Raises Unsupported for another allocator than torch's own, which keeps no history.
        """
        self._device = device
        self._consumed = 0
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise Unsupported(
                f"torch's allocator is {backend} (PYTORCH_CUDA_ALLOC_CONF), which does not tell "
                "what it holds; needed is backend:native"
            )

    def start(self) -> None:
        """Start the history."""
        # The workspaces of cuBLAS come from the allocator and stay; they are no one's but its own.
        clear_workspaces()
        torch.cuda.memory._record_memory_history(enabled="all", context=None, clear_history=True)
        self._consumed = 0

    def taken(self) -> Snapshot:
        """Take a snapshot of the allocator at one instant.

        Trace, segments and counts are asked for one after the other, and NCCL's watchdog thread
        frees what a finished collective used whenever it comes by. So it is all asked for again
        where something was handed out or taken back meanwhile.
        """
        clear_workspaces()
        while True:
            before = self._changes()
            snapshot = torch.cuda.memory._snapshot(self._device)
            stats = torch.cuda.memory_stats(self._device)
            if self._changes() == before:
                break
        number = self._device.index or 0
        trace = snapshot["device_traces"][number][self._consumed :]
        self._consumed += len(trace)
        return Snapshot(
            trace,
            [one for one in snapshot["segments"] if one["device"] == number],
            int(stats.get("allocated_bytes.all.current", 0)),
            int(stats.get("reserved_bytes.all.current", 0)),
            int(stats.get("inactive_split_bytes.all.current", 0)),
        )

    def _changes(self) -> tuple[int, int]:
        """Return how often the allocator handed out memory, and took it back, since the start."""
        stats = torch.cuda.memory_stats(self._device)
        counts = (stats.get(f"allocation.all.{one}", 0) for one in ("allocated", "freed"))
        handed_out, taken_back = counts
        return int(handed_out), int(taken_back)

    def stop(self) -> None:
        """Stop the history."""
        torch.cuda.memory._record_memory_history(enabled=None)


class LastOfNccl:
    """Release of the tensors that NCCL's process groups keep of their last collective.

    Each keeps them until its next one (seen with torch 2.11.0, DDP on one rank), even when nothing
    else refers to them. That is no leak of the caller.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the memory now, so that it does not count where it is used."""
        groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
        self._groups = [one for one in groups if "nccl" in dist.get_backend_config(one)]
        self._spare = torch.zeros(1, device=device) if self._groups else torch.zeros(1)

    def let_go(self) -> None:
        """Make a collective of one element in each; all ranks do so at the same moment."""
        for group in self._groups:
            dist.all_reduce(self._spare, group=group)
        if self._groups:
            torch.cuda.synchronize(self._spare.device)


def clear_workspaces() -> None:
    """Give back the workspaces that cuBLAS keeps; it takes new ones when it needs them."""
    clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


class ReducerBuffers(NamedTuple):
    """Tensors that DDP's reducer holds in C++: {bytes: count} of its buckets, and of its maps of
    the parameters that were used."""

    buckets: Counter[int]
    maps: Counter[int]


def reducer_buffers(model: torch.nn.parallel.DistributedDataParallel) -> ReducerBuffers:
    """Return what DDP's reducer holds, by its own account.

    Its buckets are as they are now; it copies them to report them. Its maps are two, of 4 bytes for
    each parameter.
    """
    reducer: Any = model.reducer
    buckets = reducer._get_zeros_like_grad_buckets()
    held = Counter(int(bucket.buffer().untyped_storage().nbytes()) for bucket in buckets)
    return ReducerBuffers(held, Counter({map_bytes(model): 2}))


def map_bytes(model: torch.nn.parallel.DistributedDataParallel) -> int:
    """Return the bytes of one map of used parameters.

    On a GPU the reducer has one there and one on the CPU.
    """
    return MAP_ITEM_BYTES * len([p for p in model.module.parameters() if p.requires_grad])


MAP_ITEM_BYTES = 4
"""Of each parameter in a map of used parameters: int32."""


def gathered_by_fsdp1(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the whole parameters that a flat parameter of FSDP1 holds while they are gathered."""
    for name in ("_full_param_padded", "_full_prec_full_param_padded"):
        whole = getattr(parameter, name, None)
        if whole is not None:
            yield whole


def users_of(storage: torch.UntypedStorage) -> int:
    """Return the reference count of a storage, over Python and C++ and all threads.

    Python counts once.
    """
    count: Any = vars(torch._C)["_storage_Use_Count"]
    return int(count(storage._cdata))


@contextmanager
def fake_ranks(world_size: int, rank: int) -> Iterator[None]:
    """Create a default process group of torch's `fake` backend: one rank of many, no data moved.

    Raises RuntimeError where there is a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("this process is a rank already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_mode() -> Any:
    """Return a mode in which operators compute shapes and dtypes only. Other tensors are converted.

    Tensors say that they are on the CPU, and have storages with a size and no memory.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def active_fake_mode() -> Any:
    """Return the innermost active `fake_mode`, or None: DTensor has one of its own for a moment."""
    from torch._guards import active_fake_mode as active

    return active()


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of the tensor's memory, equal for all tensors that share it while it exists."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def on_resize(notify: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `notify` after each `UntypedStorage.resize_` from Python, by which FSDP frees memory.

    No dispatch mode sees it.
    """
    original: Any = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        notify(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


@contextmanager
def before_resize(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` before each `UntypedStorage.resize_` from Python."""
    original: Any = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        call()
        return original(storage, size)

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


@contextmanager
def shapes_only() -> Iterator[Callable[[], bool]]:
    """Let DTensor, DDP and FSDP1 work under `fake_mode`.

    Gives a function that returns True while DTensor asks for a shape.

    DTensor runs operators on whole shapes to learn the shape of a result, in the fake mode that is
    on: they are no allocations. DDP's constructor compares the shapes of all ranks by reading data,
    which there is none of. FSDP1 looks at addresses.
    """
    from torch.distributed.fsdp import _flat_param
    from torch.distributed.tensor import _sharding_prop
    from torch.nn.parallel import distributed as ddp

    depth = 0
    kind: Any = _sharding_prop.ShardingPropagator
    asked: Any = kind._propagate_tensor_meta_non_cached

    def ask(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return asked(*args, **kwargs)
        finally:
            depth -= 1

    def allocated(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().nbytes() > 0

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return storage_key(one) == storage_key(other)

    with (
        warnings.catch_warnings(),
        mock.patch.object(kind, "_propagate_tensor_meta_non_cached", ask),
        mock.patch.object(ddp, "_verify_param_shape_across_processes", return_value=None),
        mock.patch.object(_flat_param, "_data_ptr_allocated", allocated),
        mock.patch.object(_flat_param, "_same_storage", same),
    ):
        # FSDP1 looks at an address here too, and does not use it.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield lambda: depth > 0


def with_data(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the result of `call` with real data, even while a `fake_mode` is on."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return call()


def placed_over(parameters: Collection[Any], mesh: DeviceMesh) -> Callable[[Any], Any]:
    """Return FSDP2's `shard_placement_fn` that shards some parameters over a mesh of their own.

    Raises Unsupported for a torch whose FSDP2 has one mesh for all parameters of a unit.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    if not hasattr(common, "ShardPlacementResult"):
        raise Unsupported(f"FSDP2 of torch {torch.__version__} shards a unit over one mesh")
    own = common.ShardPlacementResult(Shard(0), common.FSDPMeshInfo(mesh, shard_mesh_dim=0))
    return lambda parameter: own if parameter in parameters else None
