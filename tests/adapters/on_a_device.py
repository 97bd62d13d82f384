"""Takes two steps on a device that is not the CPU, for `test_devices.py`, in a process of its own.

The device is a stand-in that torch knows by name only: tensors on it have a shape and no data, and
an operator that mixes it with the CPU raises. Collectives are those of torch's `fake` backend. What
is read as a number is 1.

    python on_a_device.py IMPLEMENTATION[=OFFLOAD]...

OFFLOAD is the case's `sharding.offload`. For each name one line of
JSON: what was wrong, and the devices of the shards of each role.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "standin"
VERBOSE = False


class Nothing:
    """An event, a stream or a context that does nothing, whatever it is asked to do."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class BackendModule(Nothing):
    """torch.standin: one device, which is there."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def stream(self, stream: object) -> object:
        return stream

    def get_rng_state(self, *_: object) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)


class Ones(TorchDispatchMode):
    """A number that is read of a tensor is 1: a finite loss, a norm, a scale."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


@contextmanager
def on_the_device() -> Iterator[None]:
    from zerocheck.compat_memory import fake_mode, shapes_only

    with shapes_only(), fake_mode(), Ones():
        yield


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """On the device, as `to` does: the same nn.Parameters where that can be."""
    seen: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in seen:
                    there = torch.empty_strided(
                        parameter.shape, parameter.stride(), dtype=parameter.dtype, device=DEVICE
                    )
                    needs = parameter.requires_grad
                    seen[id(parameter)] = torch.nn.Parameter(there, requires_grad=needs)
                setattr(module, name, seen[id(parameter)])
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)
    return model


def steps(name: str) -> dict[str, list[str]]:
    """{role: devices of its shards}, after two steps of the implementation."""
    from zerocheck.case.schema import Block, Case, Data, Model, Optimizer, Sharding, Start, Training
    from zerocheck.contract import Microbatch, Step
    from zerocheck.contract.start import initial_state
    from zerocheck.drive.rank import load
    from zerocheck.models.batches import batch, loss_of
    from zerocheck.models.network import build_model

    blocks = (Block(kind="mlp"), Block(kind="layer_norm"), Block(kind="batch_norm"))
    case = Case(
        mesh=(2,),
        model=Model(blocks=blocks),
        data=Data(batch=2, length=3),
        training=Training(steps=2, microbatches=2, clip=1.0, loss_scale=4.0),
        optimizer=Optimizer(kernel="foreach"),
        start=Start(step=2, moments="typical"),
    )
    name, _, offload = name.partition("=")
    if offload:
        from msgspec.structs import replace

        case = replace(
            case,
            sharding=Sharding(offload=offload),  # type: ignore[arg-type]
            training=replace(case.training, loss_scale=None),
        )
    kind = load(name)
    if "loss_scale" not in kind.capabilities:
        from msgspec.structs import replace

        case = replace(case, training=replace(case.training, loss_scale=None))
    mesh = init_device_mesh(DEVICE, case.axes.sizes, mesh_dim_names=case.axes.names)
    found: dict[str, set[str]] = {}
    with on_the_device():
        model = moved(build_model(case))
        subject = kind(model, case, mesh)

        def look(_: str = "") -> None:
            for shard in subject.shards():
                if shard.tensor is not None:
                    found.setdefault(shard.role, set()).add(shard.tensor.device.type)

        look()
        state = initial_state(case, build_model(case))
        if state is not None:
            subject.restore(
                {
                    key: value if key[1] == "step" else value.to(DEVICE)
                    for key, value in state.items()
                }
            )
        for index in range(2):
            drawn = [
                batch(case, step=index, rank=0, microbatch=number).on(torch.device(DEVICE))
                for number in range(2)
            ]
            microbatches = [
                Microbatch(inputs=one.inputs, target=one.target, seed=None, loss_of=loss_of(case))
                for one in drawn
            ]
            subject.train_step(
                Step(index=index, microbatches=microbatches, lr=[1e-3], reached=look)
            )
            look()
        subject.close()
    return {role: sorted(devices) for role, devices in found.items()}


def main(names: list[str]) -> None:
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=BackendModule())
    from zerocheck.compat_memory import fake_ranks

    torch.set_num_threads(1)
    for name in names:
        wrong = ""
        found: dict[str, list[str]] = {}
        with fake_ranks(2, 0), mock.patch.object(torch.Tensor, "record_stream", create=True):
            try:
                found = steps(name)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
                if VERBOSE:
                    traceback.print_exc()
        print(json.dumps({"name": name, "wrong": wrong, "devices": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
