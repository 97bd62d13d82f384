"""Private torch API that zerocheck needs, probed in this one place."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import HarnessError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_index(tensor: DTensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that the local tensor of a DTensor is, one per dim.

    FSDP2 shards what tensor parallelism left of a dim, and calls that `_StridedShard` (of an
    earlier axis of the mesh, though it was sharded later). torch computes another place for that
    placement where the axes divide the dim unevenly: of 7 rows on 3 x 2 ranks it takes the last
    row to be that of rank 4, and rank 5 has it. So it is computed here.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(_strided(placement) for placement in tensor.placements):
        return _index_of_strided(tensor)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _strided(placement: Any) -> bool:
    """Return True for a `_StridedShard`, a shard of what a later mesh axis left of a dim."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def _index_of_strided(tensor: DTensor) -> tuple[slice, ...]:
    """Return the slices of `local_index` for strided shards.

    Chunks are of one size and the last ones smaller, as FSDP2 makes them.
    """
    ranges = [(0, size) for size in tensor.shape]
    places = list(enumerate(tensor.placements))
    for axis, placement in sorted(places, key=lambda place: _strided(place[1])):
        dim: int | None = getattr(placement, "dim", None)
        if dim is None:  # replicated
            continue
        start, stop = ranges[dim]
        chunk = -(-(stop - start) // tensor.device_mesh.size(axis))
        start = min(start + chunk * tensor.device_mesh.get_local_rank(axis), stop)
        ranges[dim] = start, min(start + chunk, stop)
    return tuple(slice(start, stop) for start, stop in ranges)


def reduces_unused(model: torch.nn.Module) -> bool | None:
    """Return True if FSDP2 reduces zeros for parameters that a rank did not use.

    See `set_reduce_scatter_unused_params`. None for a model that FSDP2 does not shard.
    """
    from torch.distributed.fsdp import FSDPModule

    groups: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # one only before torch 2.12
            groups += [state._fsdp_param_group] if several is None else several
    found = [group for group in groups if group is not None]
    if not found:
        return None
    return all(getattr(group, "reduce_scatter_unused_params", False) for group in found)


def all_gather_single(
    output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work | None:
    """Launch an all-gather of equal 1-D parts into one tensor; wait for what it returns."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(output, part, group=group, async_op=True)  # type: ignore[no-any-return]


def reduce_scatter_single(
    part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work | None:
    """Launch a reduce-scatter (sum) of one 1-D tensor; wait for what it returns."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(part, whole, group=group, async_op=True)  # type: ignore[no-any-return]


def wait(work: dist.Work | None) -> None:
    """Wait for a collective; None is one that is over."""
    if work is not None:
        work.wait()


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode: while it is entered, `called` replaces each operator that runs.

    A DTensor calls its collectives from its own dispatch of an operator. So operators of DTensors
    are left to them first, or the mode would not see those.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Not imported here: that takes as long as half of torch, and who has one has imported it.
        known = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        if known is not None and any(issubclass(kind, known) for kind in types):
            return NotImplemented
        return self.called(func, args, kwargs or {})

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator; the result goes to its caller."""
        raise NotImplementedError


class Unchanged(Operators):
    """Dispatch mode in which each operator runs unchanged.

    Within a mode the tensors that an operator has let go of live on until Python returns: a GRU
    holds one more tensor, batch norm one of the size of its input. So a run that is compared with
    one under a mode is run under one too.
    """

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)


def count_exchanges() -> Counter[tuple[str, str]]:
    """Count calls from now on, by the name of their group and "send" or "recv".

    gloo counts them among its collectives, and only the two ranks that take part.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for name in ("send", "recv", "recv_anysource"):
        call = getattr(dist.ProcessGroup, name)

        def counted(
            group: Any, *given: Any, call: Any = call, of: Any = name[:4], **named: Any
        ) -> Any:
            counts[str(group.group_name), of] += 1
            return call(group, *given, **named)

        setattr(dist.ProcessGroup, name, counted)
    return counts


def process_group(given: Any) -> dist.ProcessGroup:
    """Return the process group in a c10d operator's argument: boxed, by name, or itself."""
    if isinstance(given, dist.ProcessGroup):
        return given
    if isinstance(given, str):
        resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
        return resolve(given)  # type: ignore[no-any-return]
    return dist.ProcessGroup.unbox(given)


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator's call by their names."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def group_size(arguments: Mapping[str, Any]) -> int:
    """Return the number of ranks of a c10d operator's call, from its arguments by name."""
    return process_group(arguments.get("group_name") or arguments["process_group"]).size()


def wait_for_work(boxed: Any) -> None:
    """Wait for the Work that a c10d operator returned, boxed for C++."""
    dist.Work.unbox(boxed).wait()


def when_over(boxed: Any, call: Callable[[], None]) -> None:
    """Call `call`, on any thread, once a c10d operator's Work is over.

    The Work is boxed for C++. Raises RuntimeError for one that cannot tell (send, recv).
    """
    dist.Work.unbox(boxed).get_future().add_done_callback(lambda _: call())


def in_backward() -> bool:
    """Return True while the autograd engine runs a backward on this thread."""
    return int(torch._C._current_graph_task_id()) != -1


def in_transform(tensor: torch.Tensor) -> bool:
    """Return True for a tensor within a transform of torch.func, such as vmap."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def current_node() -> Any:
    """Return the node of the graph whose backward runs on this thread, or None."""
    return torch._C._current_autograd_node()


def work_from_future(future: torch.futures.Future[Any]) -> Any:
    """Return a Work, boxed for C++, that ends with the future; its value is a list of tensors.

    Its `wait` raises nothing: a future that fails is none for it.
    """
    from torch._C import _distributed_c10d

    make: Any = vars(_distributed_c10d)["_create_work_from_future"]
    return make(future).boxed()


def draws_by_itself(model: torch.nn.Module) -> bool:
    """Return True if inductor compiled a module so that it draws random numbers of its own.

    Their seed is of torch's generator, and the numbers are not those that torch would draw.
    """
    for module in model.modules():
        compiled: Any = module._compiled_call_impl
        if compiled is None and hasattr(module, "_orig_mod"):
            compiled = module.forward
        asked = getattr(compiled, "get_compiler_config", None)
        config = asked() if asked is not None else None
        if config is not None and not config.get("fallback_random", False):
            return True
    return False


def precision_policies(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the mixed precision policies of FSDP1 and FSDP2, with `param_dtype` and the like."""
    for module in model.modules():
        policy = precision_policy(module)
        if policy is not None:
            yield policy


def precision_policy(module: Any) -> Any:
    """Return the mixed precision policy of one unit of FSDP1 or FSDP2, or None."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        return module.mixed_precision
    if isinstance(module, FSDPModule):
        state: Any = module._get_fsdp_state()
        return state._mp_policy
    return None


def casts(model: torch.nn.Module) -> bool:
    """Return True if FSDP computes or reduces in another dtype than that of the parameters."""
    own = {None, *(one.dtype for one in model.parameters())}
    given = {d for one in precision_policies(model) for d in (one.param_dtype, one.reduce_dtype)}
    return bool(given - own) or (len(own) > 2 and bool(given - {None}))


class ClipFunctions(NamedTuple):
    """Cells that hold what torch's functions for clipping call: to replace their `cell_contents`.

    norm: (gradients, norm_type, ...) returns the norm; multiply: (parameters, max_norm, norm, ...)
    multiplies the gradients; value: (parameters, clip_value, ...) limits each element.
    """

    norm: Any
    multiply: Any
    value: Any


def clip_functions() -> ClipFunctions:
    """Return the cells of the functions. All names of a function share its cell, so that calls are
    seen however a script imported it: each is a wrapper around the function in the cell."""
    from torch.nn.utils import clip_grad

    found = []
    for name in ("_get_total_norm", "_clip_grads_with_norm_", "clip_grad_value_"):
        wrapper = getattr(clip_grad, name, None)
        names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
        if "func" not in names:
            raise HarnessError(f"torch {torch.__version__} has no wrapped clip_grad.{name}")
        found.append(wrapper.__closure__[names.index("func")])  # type: ignore[union-attr]
    return ClipFunctions(*found)


def store_of(group: dist.ProcessGroup | None) -> tuple[str, Any]:
    """Return (name, store) of a process group, that of all ranks for None.

    A few backends have no store. Keys in it are of this group alone.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return "", None
    from torch.distributed import distributed_c10d

    known: Any = distributed_c10d
    group = group or known._get_default_group()
    return known._get_process_group_name(group), known._get_process_group_store(group)


_numbered: Counter[tuple[str, str]] = Counter()


def numbered_store(group: dist.ProcessGroup | None, purpose: str) -> tuple[str, Any]:
    """Return (prefix of keys, store), for one more user of the store for this purpose.

    Every rank asks in the same order, so that all have the same prefix.
    """
    name, store = store_of(group)
    _numbered[name, purpose] += 1
    return f"{purpose}/{_numbered[name, purpose]}", store


@contextmanager
def without_recomputation() -> Iterator[None]:
    """Compute once, within the context, what is in checkpoints that are not reentrant.

    A reentrant one takes all of its backward from its second forward, so that these two agree.
    """
    name = "_checkpoint_without_reentrant_generator"  # yields before the forward and after it
    if hasattr(torch.utils.checkpoint, f"{name}_impl"):
        name += "_impl"  # from 2.14 on: the other one calls it, as `checkpoint` does
    if not hasattr(torch.utils.checkpoint, name):
        raise HarnessError(f"this torch has no torch.utils.checkpoint.{name}")
    once = mock.Mock(side_effect=lambda *_, **__: iter((None,)))
    with mock.patch.object(torch.utils.checkpoint, name, once):
        yield


class FlatPiece(NamedTuple):
    """Place of an original parameter in the flat parameter of a unit of FSDP1.

    name: in the wrapped model; strides: of the whole, in elements: the flat parameter has its
    elements in the order of memory. This rank holds `numel` of them, from `start` on, at `offset`
    of its flat shard.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    start: int
    numel: int


class FlatHandle(NamedTuple):
    """Flat parameter of FSDP1 on this rank.

    names, shapes: of all its parameters, in the wrapped model; tensor: the local shard, or the
    whole with NO_SHARD; originals: the parameters that the optimizer sees, by name, or None if it
    sees the flat one; pieces: without parameters of which
    this rank holds nothing; padding: ranges of `tensor` that belong to no parameter.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    tensor: torch.nn.Parameter
    sharded: bool
    originals: dict[str, torch.nn.Parameter] | None
    pieces: list[FlatPiece]
    padding: list[slice]


def flat_parameters(model: torch.nn.Module) -> list[FlatHandle]:
    """Return every flat parameter of a model wrapped by FSDP1, without communication."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    paths = {module: path for path, module in model.named_modules()}
    flats = []
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = unit._handle
        if handle is None:
            continue  # all of its parameters are in units below it
        tensor = handle.flat_param
        names = [f"{paths[unit]}.{name}".lstrip(".") for name in tensor._fqns]
        pieces = [
            FlatPiece(
                name,
                tuple(shape),
                tuple(strides),
                info.offset_in_shard,
                info.intra_param_start_idx,
                info.numel_in_shard,
            )
            for name, shape, strides, info in zip(
                names, tensor._shapes, tensor._strides, tensor._shard_param_infos, strict=True
            )
            if info.in_shard
        ]
        originals = None
        if handle._use_orig_params:
            originals = dict(zip(names, tensor._params, strict=True))
        sharded = bool(handle.uses_sharded_strategy)
        gaps = _gaps(pieces, tensor.numel())
        shapes = [tuple(shape) for shape in tensor._shapes]
        flats.append(FlatHandle(names, shapes, tensor, sharded, originals, pieces, gaps))
    return flats


def release(flat: FlatHandle) -> None:
    """Break the cycles that keep a flat parameter alive for ever.

    Views of it stay behind, as attributes of its modules, in the list of its weights that a
    recurrent one has, and in attributes of its own, as does the hook of a forward without a
    backward. Their graph leads back to it in C++, where Python's collector does not look
    (https://github.com/pytorch/pytorch/pull/183211).
    """
    tensor: Any = flat.tensor
    for name, module, *_ in (*tensor._param_infos, *tensor._shared_param_infos):
        if hasattr(module, name):
            delattr(module, name)
        if isinstance(module, torch.nn.RNNBase):
            module._flat_weights.clear()
    *_, hook = vars(tensor).get("_post_backward_hook_state", (None,))
    if hook is not None:
        hook.remove()
    vars(tensor).clear()


def _gaps(pieces: list[FlatPiece], numel: int) -> list[slice]:
    gaps = []
    end = 0
    for piece in sorted(pieces, key=lambda one: one.offset):
        gaps.append(slice(end, piece.offset))
        end = piece.offset + piece.numel
    gaps.append(slice(end, numel))
    return [gap for gap in gaps if gap.start < gap.stop]


def size_based_units(model: torch.nn.Module, least: int) -> list[torch.nn.Module]:
    """Return the modules that FSDP1 wraps below the root by `size_based_auto_wrap_policy`."""
    from torch.distributed.fsdp import wrap

    found: list[torch.nn.Module] = []

    def note(module: torch.nn.Module, **_: Any) -> torch.nn.Module:
        found.append(module)
        return module

    wrap._recursive_wrap(
        module=model,
        auto_wrap_policy=partial(wrap.size_based_auto_wrap_policy, min_num_params=least),
        wrapper_cls=note,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
    )
    return found


COLLECTIVES = (
    "allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base "
    "allgather_into_tensor_coalesced all_gather_single all_gather_single_coalesced alltoall "
    "alltoall_base all_to_all_single broadcast gather reduce reduce_scatter _reduce_scatter_base "
    "reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter "
    "send recv recv_anysource"
)
"""Names of collectives of a ProcessGroup, over all releases of torch."""


def collective_calls() -> Iterator[tuple[Any, str]]:
    """Iterate over (owner, name) of what Python calls for a collective, under any import.

    The last one is that of all operators; `collective_of` says which of them is a collective.
    """
    group = dist.ProcessGroup
    yield from ((group, name) for name in COLLECTIVES.split() if hasattr(group, name))
    yield torch._ops.OpOverloadPacket, "__call__"


def ranks_of_call(owner: Any, args: Sequence[Any], named: Mapping[str, Any]) -> set[int]:
    """Return the ranks, in the world, of a collective; all of them where that is not seen."""
    for given in (owner, *reversed(args), *named.values()):
        if isinstance(given, (dist.ProcessGroup, str, torch.ScriptObject)):
            with suppress(RuntimeError, ValueError):
                return set(dist.get_process_group_ranks(process_group(given)))
    return set(range(dist.get_world_size()))


def collective_of(name: str, owner: Any) -> str:
    """Return the name of a collective that is called, "" for another operator."""
    if name != "__call__":
        return name.strip("_")
    space, _, operator = str(owner).rpartition(".")
    return operator if "_c10d_functional" in space and operator != "wait_tensor" else ""
