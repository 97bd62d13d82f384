"""Settings and modes of torch that hold for all code of a process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils import _device, _python_dispatch

from .settings import GlobalSetting

_C: Any = torch._C
_autograd: Any = _C._autograd
_global_device: Any = torch._GLOBAL_DEVICE_CONTEXT
_distributed: Any = dist
_cuda: Any = torch.cuda
_deterministic: Any = torch.utils.deterministic

_FLAGS = (
    "cudnn_enabled",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_allow_tf32",
    "cublas_allow_tf32",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "mkldnn_enabled",
    "mkldnn_deterministic",
    "onednn_allow_tf32",
    "nnpack_enabled",
    "cpu_allow_fp16_reduced_precision_reduction",
    "math_sdp_allow_fp16_bf16_reduction",
    "dtensor_allow_implicit_replication",
)
"""torch._C has _get_ and _set_ of each; torch.backends shows most of them."""
_ATTENTION = ("flash", "math", "mem_efficient", "cudnn")
_PRECISIONS = tuple(
    (backend, operator)
    for backend in ("generic", "cuda", "mkldnn")
    for operator in (("all",) if backend == "generic" else ("all", "matmul", "conv", "rnn"))
)
_SOME = 100
"""Modes that are left entered, at most; more are none that `with` would leave."""


def modes() -> Iterator[GlobalSetting]:
    """Iterate over modes and hooks with enter and exit; first, since they change operators."""
    yield GlobalSetting("default device", _default_device, torch.set_default_device)
    yield GlobalSetting(
        "torch-function modes entered",
        _C._len_torch_function_stack,
        partial(_leave, _C._len_torch_function_stack, _top_function_mode),
        quantity=True,
    )
    yield GlobalSetting(
        "torch-dispatch modes entered",
        _dispatch_modes,
        partial(_leave, _dispatch_modes, _top_dispatch_mode),
        quantity=True,
    )
    yield GlobalSetting(
        "device of the context torch.device(...)",
        lambda: _device.CURRENT_DEVICE,
        lambda device: setattr(_device, "CURRENT_DEVICE", device),
    )
    yield GlobalSetting("torch functions overridable", _C._is_torch_function_enabled)
    yield GlobalSetting(
        "hooks on saved tensors entered",
        lambda: _autograd._top_saved_tensors_default_hooks(True) is not None,
        _leave_saved_tensor_hooks,
    )
    yield GlobalSetting(
        "hooks on saved tensors forbidden",
        _autograd._saved_tensors_hooks_get_disabled_error_message,
        _forbid_saved_tensor_hooks,
    )
    yield GlobalSetting(
        "autocast contexts entered", _autocast_nesting, _leave_autocast, quantity=True
    )
    for device in ("cpu", "cuda"):
        yield GlobalSetting(
            f"autocast on {device}",
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
        yield GlobalSetting(
            f"dtype of autocast on {device}",
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        )
    yield GlobalSetting(
        "cache of autocast", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    )
    yield GlobalSetting("inference mode", torch.is_inference_mode_enabled)
    yield GlobalSetting("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled)
    yield GlobalSetting(
        "multithreading of autograd", _C._is_multithreading_enabled, _C._set_multithreading_enabled
    )
    yield GlobalSetting(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    )
    yield GlobalSetting("level of forward-mode autograd", lambda: forward_ad._current_level)
    yield GlobalSetting(
        "a torch.func transform entered", lambda: _C._functorch.peek_interpreter_stack() is not None
    )
    yield GlobalSetting("profiler of autograd", _autograd._profiler_enabled)
    yield GlobalSetting("tracing of torch.jit", lambda: _C._get_tracing_state() is not None)
    yield GlobalSetting(
        "dispatch keys of the thread",
        lambda: (
            _C._dispatch_tls_local_include_set().raw_repr(),
            _C._dispatch_tls_local_exclude_set().raw_repr(),
        ),
        follows=True,
    )


def settings() -> Iterator[GlobalSetting]:
    """Iterate over settings with a getter and a setter."""
    yield GlobalSetting("default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield GlobalSetting("deterministic algorithms", _deterministic_algorithms, _set_deterministic)
    yield GlobalSetting(
        "filling of uninitialized memory",
        lambda: _deterministic.fill_uninitialized_memory,
        lambda value: setattr(_deterministic, "fill_uninitialized_memory", value),
    )
    yield GlobalSetting(
        "float32 matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    )
    for backend, operator in _PRECISIONS:
        yield GlobalSetting(
            f"fp32 precision of {backend} {operator}",
            partial(_C._get_fp32_precision_getter, backend, operator),
            partial(_C._set_fp32_precision_setter, backend, operator),
        )
    for name in _FLAGS:
        get, put = getattr(_C, f"_get_{name}", None), getattr(_C, f"_set_{name}", None)
        if get is not None and put is not None:
            yield GlobalSetting(name, get, put)
    for kind in _ATTENTION:
        get, put = f"_get_{kind}_sdp_enabled", f"_set_sdp_use_{kind}"
        yield GlobalSetting(f"{kind} attention", getattr(_C, get), getattr(_C, put))
    yield GlobalSetting(
        "opt_einsum",
        lambda: torch.backends.opt_einsum.enabled,
        lambda value: setattr(torch.backends.opt_einsum, "enabled", value),
    )
    yield GlobalSetting("number of threads", torch.get_num_threads, torch.set_num_threads)
    yield GlobalSetting("number of threads between operators", torch.get_num_interop_threads)
    yield GlobalSetting(
        "flushing of denormal numbers", _flushes_denormals, torch.set_flush_denormal
    )
    yield GlobalSetting("warnings every time", torch.is_warn_always_enabled, torch.set_warn_always)
    for name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        future: Any = torch.__future__
        yield GlobalSetting(
            f"torch.__future__.{name}",
            getattr(future, f"get_{name}"),
            getattr(future, f"set_{name}"),
        )
    yield GlobalSetting(
        "debug level of torch.distributed",
        _distributed.get_debug_level,
        _distributed.set_debug_level,
    )
    yield GlobalSetting("operators of aten replaced", _replaced_operators, quantity=True)
    yield GlobalSetting("stance of torch.compile", _stance, _set_stance)
    yield GlobalSetting(
        "device of CUDA",
        lambda: _cuda.current_device() if _cuda.is_initialized() else 0,
        torch.cuda.set_device,
    )


def _default_device() -> torch.device | None:
    context = getattr(_global_device, "device_context", None)
    return None if context is None else context.device


def _top_function_mode() -> Any:
    return _C._get_function_stack_at(_C._len_torch_function_stack() - 1)


def _dispatch_modes() -> int:
    return len(_python_dispatch._get_current_dispatch_mode_stack())


def _top_dispatch_mode() -> Any:
    return _python_dispatch._get_current_dispatch_mode_stack()[-1]


def _leave(count: Callable[[], int], top: Callable[[], Any], wanted: int) -> None:
    """Leave modes like the end of their `with` block, the innermost first."""
    for _ in range(_SOME):
        if count() <= wanted:
            return
        top().__exit__(None, None, None)


def _leave_saved_tensor_hooks(wanted: bool) -> None:
    for _ in range(_SOME):
        if wanted or _autograd._top_saved_tensors_default_hooks(True) is None:
            return
        _autograd._pop_saved_tensors_default_hooks()


def _forbid_saved_tensor_hooks(message: str | None) -> None:
    if message is None:
        _autograd._saved_tensors_hooks_enable()
    else:
        _autograd._saved_tensors_hooks_disable(message)


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _leave_autocast(wanted: int) -> None:
    while _autocast_nesting() > wanted:
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def _deterministic_algorithms() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_DENORMAL = torch.tensor(1e-40)


def _flushes_denormals() -> bool:
    return float(_DENORMAL * 1.0) == 0.0


_operators: tuple[int, int] = (-1, 0)


def _replaced_operators() -> int:
    """Count the implementations of aten operators that Python code has registered."""
    global _operators
    implementations: Any = vars(torch.library)["_impls"]
    if len(implementations) != _operators[0]:
        count = sum(1 for name in implementations if name.startswith("aten/"))
        _operators = len(implementations), count
    return _operators[1]


def _stance() -> Any:
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(frames, "_stance", None)


def _set_stance(stance: Any) -> None:
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    frames._set_stance(stance)
