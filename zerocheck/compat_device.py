"""Device without hardware in torch's place for private backends: its tensors have no data."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from .errors import UsageError

DEVICE = "simulated"
"""Type of the device: `torch.device("simulated")`."""


def simulated_device() -> str:
    """Register the device, once in a process, and return its type.

    Its tensors must be made in a `fake_mode`, but for empty ones. Streams and events do nothing.
    For torch this device is an accelerator, which the process has from then on.

    Raises UsageError for a torch without backends in Python, and next to another private backend.
    """
    if hasattr(torch, DEVICE):
        return DEVICE
    from torch.utils import backend_registration

    register: Any = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if register is None:
        raise UsageError(
            f"torch {torch.__version__} registers no device in Python, which the simulation of a "
            "device next to host memory needs"
        )
    try:
        register(rename=DEVICE, backend_module=_module())
    except RuntimeError as error:
        raise UsageError(
            f"the simulated device cannot be registered next to another backend: {error}"
        ) from error
    _kernels.impl("empty.memory_format", _empty, "PrivateUse1")
    for operator in _composed_elsewhere():
        _kernels.impl(operator, _without_data, "PrivateUse1")
    return DEVICE


# Kept for as long as the process lives: a library that is freed takes its kernels back.
_kernels: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def _composed_elsewhere() -> list[str]:
    """Return the operators of aten that the CPU has a kernel for, and other devices compose.

    A device with any kernel of them is given the operator itself. SiLU's gradient is one.
    """
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    aten = [name for name in names if name.startswith("aten::") and has(name, "CPU")]
    return [name.removeprefix("aten::") for name in aten]


def _without_data(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the simulated device computes shapes alone: in a `fake_mode`")


def _empty(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """Make the tensors without elements that FSDP2 makes outside of a `fake_mode`."""
    return torch.empty(size, dtype=dtype, device="meta")


class _Event:
    """Event of a stream, over as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """Stream that has nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...


def _module() -> ModuleType:
    """Return the module that torch asks about the device."""
    module: Any = ModuleType(f"torch.{DEVICE}")
    stream = _Stream()
    module.Event, module.Stream = _Event, _Stream
    module.current_stream = lambda device=None: stream
    module.stream = nullcontext
    module.synchronize = lambda device=None: None
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    found: ModuleType = module
    return found
