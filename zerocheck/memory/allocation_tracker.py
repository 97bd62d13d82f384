"""Allocation tracker of all storages of one rank: origin, module, phase and release.

A dispatch mode records the storages that operators return, a weak reference their release;
`UntypedStorage.resize_`, which no mode sees, is recorded too. Buckets that DDP makes in C++ come
through the dispatcher like all others. torch's own MemTracker was not taken: it knows FSDP2 alone,
by hooks into its internals, files DDP's bucket and FSDP2's padding as activation, and counts the
first optimizer step wrongly.

The purpose of a storage is known late: a gradient when it is held as such, an activation when the
forward is over. So the log holds numbers of storages, and categories are asked for at the end.

Not seen: what a kernel allocates and frees inside of itself; that of sums is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from ..adapters.shared.simulation import CollectiveStreams
from ..compat import Operators, arguments_of, group_size, work_from_future
from ..compat_memory import active_fake_mode, on_resize, shapes_only, storage_key, with_data
from ..contract import Shard
from ..contract.names import unwrapped
from ..protocol.layout import OF_ROLE, Category, Phase
from .collectives import collective_kind, sent_bytes
from .kernel_workspace import workspace_of
from .log import HostCopy, Log, Moment, SentBytes, Storage

MARK = "zerocheck"
"""Begins the names of the profiler's records that phases leave."""


class AllocationTracker(Operators):
    """Allocation tracker, active within `with`.

    fake: the mode whose tensors count, None for real ones; number: what reading a float of a tensor
    without data gives; streams: on which collectives' buffers are; sharded_layers: True if the
    functional collectives are those of tensor parallelism, which move activations; device: type of
    the device; with another one than the CPU, tensors on the CPU are in the memory of the host;
    bucket: elements of empty tensors that are buckets, whatever uses them; notify: called with the
    place in the step whenever an operator allocates.
    """

    def __init__(
        self,
        fake: Any = None,
        number: float = 1.0,
        streams: CollectiveStreams | None = None,
        *,
        sharded_layers: bool = False,
        device: str = "cpu",
        bucket: int = 0,
        notify: Callable[[str], None] = lambda words: None,
    ) -> None:
        super().__init__()
        self._notify = notify
        self._bucket = bucket
        self._sharded_layers, self._device = sharded_layers, device
        self.fake, self._number_read = fake, number
        self._streams = streams or CollectiveStreams()
        self.log = Log()
        self.step = -1
        self.phase: Phase = "built"
        self.microbatch = 0
        self._known: dict[int, int] = {}  # key of a storage -> its number
        self._references: dict[int, weakref.ref[Any]] = {}
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[str] = []
        self._backward = ""
        self._scope: list[int] | None = None
        self._hooked: weakref.ref[torch.Tensor] | None = None
        self._open = ExitStack()
        self._asking: Callable[[], bool] = lambda: False

    # What the simulation says.

    def __enter__(self) -> AllocationTracker:
        before = register_module_forward_pre_hook(self._enter_module)
        after = register_module_forward_hook(self._leave_module, always_call=True)
        self._open.callback(before.remove)
        self._open.callback(after.remove)
        self._open.enter_context(on_resize(self._resized))
        self._asking = self._open.enter_context(shapes_only())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._open.close()

    def name(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Give modules their paths, without wrappers; of several the last counts."""
        for path, module in modules:
            self._paths[module] = path_of(path)

    def enter(self, phase: Phase, step: int) -> None:
        """Begin a phase. A forward after a backward of the same step is of the next microbatch."""
        if step != self.step:
            self.microbatch = 0
        elif phase == "forward" and self.phase == "backward":
            self.microbatch += 1
        self.phase, self.step = phase, step
        with record_function(f"{MARK} {phase} {step}"):
            pass  # for whoever profiles
        self._moment("")  # what is freed from here on is freed in this phase
        self._backward = ""
        if phase == "forward":
            self._scope = []

    def forward_over(self) -> None:
        """End the forward: what it allocated and has not freed is what the backward needs."""
        self._end_scope()
        self.enter("backward", self.step)

    def claim(self, shards: Iterable[Shard]) -> None:
        """Attribute storages to the shards that the implementation declares."""
        for shard in shards:
            if shard.tensor is None or not _counts(shard.tensor):
                continue
            number = self._number(shard.tensor)
            storage = self.log.storages[number]
            if not storage.held:
                storage.kind, storage.holder = OF_ROLE.get(shard.role, "optimizer"), shard.name
                storage.held, storage.counts = True, shard.role == "step"

    def claim_rest(self, tensors: Iterable[torch.Tensor], holder: str) -> None:
        """Attribute tensors of the simulation itself, such as inputs."""
        for tensor in tensors:
            storage = self.log.storages[self._number(tensor)]
            storage.holder = storage.holder or holder

    # What operators do.

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.fake is not None and func is torch.ops.aten._local_scalar_dense.default:
            # There is no data to read, of the optimizer's step count for example.
            return self._number_read if args[0].dtype.is_floating_point else 1
        if self.fake is not None and self._for_indices(func, kwargs):
            return with_data(lambda: func(*args, **kwargs))
        if self.fake is not None and func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as with data; without, torch makes another tensor
        if self._device != "cpu" and self.fake is not None:
            if func is torch.ops.aten.is_pinned.default:
                return self._pinned(args[0])
            if func is torch.ops.aten._pin_memory.default:  # has no kernel for shapes
                func, kwargs = torch.ops.aten.empty_like.default, {}
                return self._pin(func(*args))
        result = func(*args, **kwargs)
        if func is torch.ops.c10d.allreduce_.default:
            result = args[0], _over(args[0])
        if self._asking() or active_fake_mode() is not self.fake:
            return result  # DTensor wants to know a shape
        name = str(func)
        if name.startswith("prim.") or name.startswith("profiler."):
            return result
        self._look(name, _tensors(result))
        if self._device != "cpu":
            self._over_the_bus(func, args, kwargs, result)
        if taken := workspace_of(name, args):
            self.log.workspaces.append((len(self.log.changes), taken))
        empty = func is torch.ops.aten.empty.memory_format
        if self._bucket and empty and self._bucket == result.numel():
            self._is("bucket", result)
        elif func is torch.ops.aten.cat.default and self._gathered(args[0]):
            self._is("gathered", result)
        if name.startswith(("c10d.", "fsdp.", "_c10d_functional.")):
            self._evidence(name, args, kwargs, result)
            self._collective(func, args, kwargs, result)
        return result

    def _collective(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the bytes of a collective: of the whole tensor, whichever argument it is."""
        name = str(func)
        if "all_gather_copy_in" in name:  # FSDP2 casts shards on its stream, then copies them
            self._on_stream(self._streams.gather_input, args[0])
        kind = collective_kind(name)
        if kind is None or (kind == "broadcast" and _all_indices(args[0])):
            return
        size = max(_bytes(tree) for tree in (*args[:2], result))
        module = self._stack[-1] if self._stack else self._backward
        sent = sent_bytes(kind, size, group_size(arguments_of(func, args, kwargs)))
        self.log.collectives.append(
            SentBytes(self.step, self.phase, module, kind, size, sent, self.microbatch)
        )
        if self._moves_activations(name):
            return
        if kind == "all-gather":
            self._on_stream(self._streams.gather_output, args[0])
            self._on_stream(self._streams.gather_input, args[1:2])
        elif kind == "reduce-scatter":
            self._on_stream(self._streams.reduce_output, args[0])

    def _moves_activations(self, operator: str) -> bool:
        return self._sharded_layers and operator.startswith("_c10d_functional.")

    def _on_stream(self, stream: int, tree: Any) -> None:
        """Note the stream of buffers; the implementation's own shards are where the model is."""
        for tensor in _tensors(tree) if stream else ():
            storage = self.log.storages[self._number(tensor)]
            storage.stream = 0 if storage.held else stream

    def _for_indices(self, func: Any, kwargs: Any) -> bool:
        """Return True if DDP's reducer allocates the int32 tensor for the order of its buckets.

        It does so before its second forward, and reads and writes that tensor itself.
        """
        if func is not torch.ops.aten.empty.memory_format or len(self._stack) != 1:
            return False
        return bool(kwargs.get("dtype") == torch.int32)

    def _look(self, operator: str, tensors: list[torch.Tensor]) -> None:
        """Record new storages, and changed sizes of known ones, after one call of an operator."""
        moment = -1
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number = self._known.get(storage._cdata)
            size = storage.nbytes()
            if number is not None and self.log.storages[number].size == size:
                continue
            if number is None and not size:
                continue
            if moment < 0:
                moment = self._moment(operator)
            if number is None:
                self._add(storage, moment, host=self._on_host(tensor))
            else:
                self._change(number, size - self.log.storages[number].size, moment)

    def _on_host(self, tensor: torch.Tensor) -> bool:
        return self._device != "cpu" and tensor.device.type == "cpu"

    def _pinned(self, tensor: torch.Tensor) -> bool:
        return self.log.storages[self._number(tensor)].place == "pinned"

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._look("aten._pin_memory.default", [tensor])
        self.log.storages[self._number(tensor)].place = "pinned"
        return tensor

    def _over_the_bus(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a copy between device and host. One that does not block has a pinned target.

        Source: aten/src/ATen/native/TensorConversions.cpp, `_to_copy`: from a device to the CPU.
        """
        converts = func is torch.ops.aten._to_copy.default
        if converts:
            source, target = args[0], result
        elif func is torch.ops.aten.copy_.default:
            target, source = args[:2]
        else:
            return
        to_host = self._on_host(target)
        if to_host == self._on_host(source):
            return
        if converts and to_host and kwargs.get("non_blocking"):
            self.log.storages[self._number(target)].place = "pinned"
        self.log.copies.append(HostCopy(self.step, to_host, _bytes(source), self.microbatch))

    def _moment(self, operator: str) -> int:
        again = self.phase == "backward" and bool(self._stack)
        module = self._stack[-1] if self._stack else self._backward
        if self.phase != "closed":
            self._notify(self._place(module))
        self.log.moments.append(Moment(self.step, self.phase, module, operator, again))
        return len(self.log.moments) - 1

    def _place(self, module: str) -> str:
        """Describe the place in the step for who waits."""
        if self.phase == "built":
            return "building the model"
        return f"step {self.step}, {self.phase}{', ' if module else ''}{module}"

    def _number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; an unknown one gets a new number."""
        key = storage_key(tensor)
        if key not in self._known:
            moment = self._moment("(made unseen)")
            self._add(tensor.untyped_storage(), moment, host=self._on_host(tensor))
        return self._known[key]

    def _add(self, storage: torch.UntypedStorage, moment: int, *, host: bool) -> None:
        number = len(self.log.storages)
        key = storage._cdata
        self.log.storages.append(Storage(0, place="pageable" if host else "device"))
        self._known[key] = number
        self._references[number] = weakref.ref(storage, lambda _: self._gone(key, number))
        if self._scope is not None:
            self._scope.append(number)
        self._change(number, storage.nbytes(), moment)

    def _change(self, number: int, more: int, moment: int) -> None:
        self.log.storages[number].size += more
        if more:
            self.log.changes.append((moment, number, more))

    def _gone(self, key: int, number: int) -> None:
        self._known.pop(key, None)
        self._references.pop(number, None)
        storage = self.log.storages[number]
        storage.alive = False
        self._change(number, -storage.size, len(self.log.moments) - 1)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        number = self._known.get(storage._cdata)
        if number is None:
            return
        more = storage.nbytes() - self.log.storages[number].size
        if more:
            moment = self._moment("resize_") if more > 0 else len(self.log.moments) - 1
            self._change(number, more, moment)

    def _evidence(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Classify storages by the collectives, and FSDP2's copies around them, that use them."""
        if self._moves_activations(name):
            return
        if "allgather" in name or "all_gather" in name or "split_with_sizes_copy" in name:
            self._is("gathered", (args, kwargs, result))
        elif "reduce_scatter" in name:
            self._is("bucket", args[1] if len(args) > 1 else args)
        elif "allreduce" in name:
            self._is("bucket", args[0])
        elif "chunk_cat" in name:
            self._is("gradient", args[0])
            self._is("bucket", kwargs)

    def _gathered(self, tensors: Any) -> bool:
        """Return True for parts of gathered units alone: what they make is gathered too."""
        numbers = [self._known.get(storage_key(one)) for one in _tensors(tensors)]
        storages = [None if one is None else self.log.storages[one] for one in numbers]
        return bool(storages) and all(
            one is not None and one.kind == "gathered" and one.evidence == 2 for one in storages
        )

    def _is(self, kind: Category, tree: Any) -> None:
        for tensor in _tensors(tree):
            storage = self.log.storages[self._number(tensor)]
            if not storage.held and storage.evidence < 2:
                storage.kind, storage.evidence = kind, 2

    # What modules do.

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if self.phase == "backward" and not self._stack:
            self._scope = []
        outer = self._stack[-1] if self._stack else ""
        self._stack.append(self._paths.get(module, outer))

    def _leave_module(self, module: nn.Module, _: Any, output: Any) -> None:
        path = self._stack.pop() if self._stack else ""
        if self.phase == "backward":
            if not self._stack:
                self._end_scope()
            return
        if not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                continue
            if self._hooked is not None and self._hooked() is tensor:
                continue  # a module inside put it out
            self._hooked = weakref.ref(tensor)
            tensor.register_hook(lambda _, path=path: self.in_backward(path))  # type: ignore[no-untyped-call]

    def in_backward(self, path: str) -> None:
        """Note the module whose backward begins."""
        self._backward = path

    def _end_scope(self) -> None:
        for number in self._scope or ():
            storage = self.log.storages[number]
            if storage.alive and not storage.held and not storage.evidence:
                storage.kind, storage.evidence = "activation", 1
        self._scope = None


def path_of(wrapped: str) -> str:
    """Return the path of a module without wrappers around it."""
    return unwrapped(f"{wrapped}.").rstrip(".")


def _over(tensors: list[torch.Tensor]) -> Any:
    """Return the Work of a finished all-reduce.

    That of the fake group has no result, and DDP reads its bucket from there.
    """
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors))
    return work_from_future(future)


def _all_indices(tree: Any) -> bool:
    """Return True for the order of DDP's buckets, sent once, before the second forward."""
    return all(one.dtype == torch.int32 for one in _tensors(tree))


def _bytes(tree: Any) -> int:
    return sum(one.numel() * one.element_size() for one in _tensors(tree))


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta"


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors with memory. In the boxed arguments of c10d, tensors are in lists."""
    leaves = tree_leaves(tree)
    return [one for one in leaves if isinstance(one, torch.Tensor) and _counts(one)]
