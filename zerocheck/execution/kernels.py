"""Settings that make the judge's kernels reproduce the bits of the ranks'.

On the CPU that is one thread (see ranks and judge/local.py) and deterministic kernels. On a GPU:

- deterministic kernels, with CUBLAS_WORKSPACE_CONFIG (see ranks/device.py);
- no TF32, which is another precision;
- no choice of a kernel by its time (`benchmark`), which differs from process to process;
- scaled_dot_product_attention by matrix products and softmax: the backward of its other kernels
  adds with atomics, in another order each time, or is chosen by what fits.

The remaining choices are the same on one kind of GPU: cuBLAS and cuDNN choose by shapes, strides
and the alignment of addresses, which judge/mirrors.py mirrors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..compat_compiler import use_deterministic

_FLAGS: tuple[tuple[Any, str, bool], ...] = (
    (torch.backends.cuda.matmul, "allow_tf32", False),
    (torch.backends.cudnn, "allow_tf32", False),
    (torch.backends.cudnn, "benchmark", False),
    (torch.backends.cudnn, "deterministic", True),
)
_ATTENTION = ("flash", "mem_efficient", "cudnn")


def deterministic(device: torch.device | None = None, *, compiles: bool = True) -> None:
    """Ask for deterministic kernels, in ranks and judge alike: the bits of both must agree.

    Memory is not filled outside of drive/poison.py. device: on which they run; None for the CPU.
    compiles: whether torch.compile may follow, as in ranks.
    """
    ask = torch.use_deterministic_algorithms if compiles else use_deterministic
    ask(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device is not None:
        set_exact(device)


def set_exact(device: torch.device) -> None:
    """Set the options that decide the bits of a GPU's kernels. Does nothing for the CPU."""
    if device.type == "cpu":
        return
    for place, name, value in _FLAGS:
        setattr(place, name, value)
    for kind in _ATTENTION:
        _enable(kind, False)
    torch.backends.cuda.enable_math_sdp(True)


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Restore the settings changed by `set_exact`, as far as torch exposes them."""
    if device.type == "cpu":
        yield
        return
    before = []
    for place, name, _ in _FLAGS:
        with suppress(RuntimeError):  # torch does not tell where its newer switches were used
            before.append((place, name, getattr(place, name)))
    enabled = [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _ATTENTION]
    maths = torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
        for kind, value in zip(_ATTENTION, enabled, strict=True):
            _enable(kind, value)
        torch.backends.cuda.enable_math_sdp(maths)


def _enable(kind: str, value: bool) -> None:
    getattr(torch.backends.cuda, f"enable_{kind}_sdp")(value)
