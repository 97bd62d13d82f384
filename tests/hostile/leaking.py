"""Right sharders that leave global state changed, one for each kind of leak: `leaking.py:NAME`."""

from __future__ import annotations

import builtins
import gc
import locale
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zerocheck.adapters.textbook.zero2 import Zero2

KEPT = []
"""Keeps contexts entered."""


def enter(context):
    KEPT.append(context)
    context.__enter__()


def negated(function):
    return lambda *args, **kwargs: -function(*args, **kwargs)


def nothing(*args, **kwargs):
    return None


def other_step(self, closure=None):
    return None


def doubled(module, args, output):
    return output * 2 if isinstance(output, torch.Tensor) else None


def scaled_gradients(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(3)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.linear else result


class Noisy(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.addmm.default else result


def on_rank_0(call):
    if dist.get_rank() == 0:
        call()


def operator_replaced():
    library = torch.library.Library("aten", "IMPL")
    KEPT.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("tanh", lambda x: x.clone(), "CPU")


def started_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def relu_with_other_code():
    def relu(input, inplace=False):
        return -input

    torch.nn.functional.relu.__code__ = relu.__code__


def compiled_module():
    """torch patches Module.__init__ where something is compiled that makes a module."""
    from torch._dynamo.mutation_guard import install_generation_tagging_init

    install_generation_tagging_init()


def progress_bar():
    """The first bar of tqdm starts a thread that lives on."""
    from tqdm import tqdm

    return list(tqdm(range(2), file=open(os.devnull, "w")))


def to_null(descriptor):
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


LEAKS = {
    # name: (what is done, what is said, whether it is undone)
    "default_dtype": (lambda: torch.set_default_dtype(torch.float64), "default dtype", True),
    "default_device": (lambda: torch.set_default_device("meta"), "default device meta", True),
    "device_context": (lambda: enter(torch.device("meta")), "torch-function modes", False),
    "grad_mode": (lambda: torch.set_grad_enabled(False), "grad mode off", True),
    "inference_mode": (lambda: enter(torch.inference_mode()), "inference mode on", False),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(False), "deterministic algorithms off", True,
    ),
    "matmul_precision": (
        lambda: torch.set_float32_matmul_precision("medium"), "matmul precision medium", True,
    ),
    "autocast": (
        lambda: enter(torch.autocast("cpu", dtype=torch.bfloat16)), "autocast on cpu on", True,
    ),
    "autocast_enabled": (
        lambda: torch.set_autocast_enabled("cpu", True), "autocast on cpu on", True,
    ),
    "all_reduce": (
        lambda: setattr(dist, "all_reduce", nothing), "torch.distributed.all_reduce", True,
    ),
    "linear": (
        lambda: setattr(torch.nn.functional, "linear", negated(torch.nn.functional.linear)),
        "torch.nn.functional.linear replaced", True,
    ),
    "adamw_step": (
        lambda: setattr(torch.optim.AdamW, "step", other_step), "AdamW.step replaced", True,
    ),
    "forward_of_linear": (
        lambda: setattr(torch.nn.Linear, "forward", negated(torch.nn.Linear.forward)),
        "Linear.forward replaced", True,
    ),
    "call_of_modules": (
        lambda: setattr(torch.nn.Module, "__call__", nothing), "Module.__call__ replaced", True,
    ),
    "method_of_tensors": (
        lambda: setattr(torch.Tensor, "mul_", lambda self, other: self), "mul_ replaced", True,
    ),
    "backward": (
        lambda: setattr(torch.Tensor, "backward", nothing), "backward replaced", True,
    ),
    "removed_function": (lambda: delattr(torch, "tanh"), "torch.tanh removed", True),
    "code_of_relu": (relu_with_other_code, "relu with other code", True),
    "forward_hook": (
        lambda: torch.nn.modules.module.register_module_forward_hook(doubled),
        "a hook of all modules", True,
    ),
    "optimizer_hook": (
        lambda: register_optimizer_step_pre_hook(scaled_gradients),
        "a hook of all optimizers", True,
    ),
    "function_mode": (lambda: enter(Doubling()), "1 torch-function modes entered", True),
    "dispatch_mode": (lambda: enter(Noisy()), "1 torch-dispatch modes entered", True),
    "saved_tensor_hooks": (
        lambda: enter(torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x)),
        "hooks on saved tensors entered on", True,
    ),
    "anomaly_mode": (lambda: torch.autograd.set_detect_anomaly(True), "anomaly mode on", True),
    "operator": (operator_replaced, "operators of aten replaced", False),
    "flush_denormal": (
        lambda: torch.set_flush_denormal(True), "flushing of denormal numbers on", True,
    ),
    "threads_of_torch": (lambda: torch.set_num_threads(3), "number of threads 3", True),
    "group_destroyed": (dist.destroy_process_group, "the process group destroyed", False),
    "group_destroyed_by_one": (
        lambda: on_rank_0(dist.destroy_process_group), "process group destroyed on rank 0", False,
    ),
    "lone_collective": (
        lambda: on_rank_0(lambda: KEPT.append(dist.all_reduce(torch.ones(3), async_op=True))),
        "a collective without its partners", False,
    ),
    "lone_send": (
        lambda: on_rank_0(lambda: KEPT.append(dist.isend(torch.ones(1), 1))),
        "a collective without its partners", False,
    ),
    "many_groups": (
        lambda: [dist.new_group() for _ in range(40)], "process groups open", False,
    ),
    "group_timeout": (
        lambda: dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1)),
        "timeout of the process group", True,
    ),
    "thread": (started_thread, "1 threads running", False),
    "process": (
        lambda: KEPT.append(subprocess.Popen(["sleep", "60"])), "1 processes running", False,
    ),
    "filters_of_warnings": (lambda: warnings.simplefilter("error"), "filters of warnings", True),
    "showwarning": (
        lambda: setattr(warnings, "showwarning", nothing), "warnings.showwarning replaced", True,
    ),
    "environment": (
        lambda: os.environ.update(WORLD_SIZE="7"), "environment variable WORLD_SIZE", True,
    ),
    "directory": (lambda: os.chdir("/"), "working directory /", True),
    "signal_handler": (
        lambda: signal.signal(signal.SIGTERM, nothing), "signal handlers changed", True,
    ),
    "blocked_signals": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}), "blocked signals", True,
    ),
    "alarm": (lambda: signal.setitimer(signal.ITIMER_REAL, 30), "an alarm set on", True),
    "umask": (lambda: os.umask(0o777), "umask", True),
    "path": (lambda: sys.path.clear(), "sys.path changed", True),
    "excepthook": (lambda: setattr(sys, "excepthook", nothing), "sys.excepthook changed", True),
    "stdout": (lambda: setattr(sys, "stdout", None), "sys.stdout changed", True),
    "standard_error": (lambda: to_null(2), "standard error elsewhere", False),
    "recursion_limit": (lambda: sys.setrecursionlimit(150), "recursion limit 150", True),
    "trace": (lambda: sys.settrace(nothing), "trace function changed", True),
    "no_collection": (gc.disable, "garbage collection off", True),
    "socket_timeout": (lambda: socket.setdefaulttimeout(0.01), "timeout of sockets 0.01", True),
    "locale_of_c": (lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"), "locale C.UTF-8", True),
    "limit": (
        lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        ),
        "limit NOFILE", True,
    ),
    "print": (lambda: setattr(builtins, "print", nothing), "builtins.print replaced", True),
    "clock": (lambda: setattr(time, "monotonic", lambda: 0.0), "time.monotonic replaced", True),
    "random_state": (lambda: (torch.manual_seed(5), random.seed(5)), "", True),
    # What libraries do by themselves, once, and what changes no result of others:
    "module_of_dynamo": (compiled_module, "", True),
    "bar_of_tqdm": (lambda: KEPT.append(progress_bar()), "", True),
}  # fmt: skip


def leaking(name):
    """A sharder that is right, and leaves this behind in `close`."""

    class Leaking(Zero2):
        def close(self):
            super().close()
            LEAKS[name][0]()

    Leaking.__name__ = Leaking.__qualname__ = name
    return Leaking


def __getattr__(name):
    """The sharder of a leak; some have the names of modules."""
    if name in LEAKS:
        return leaking(name)
    raise AttributeError(name)
