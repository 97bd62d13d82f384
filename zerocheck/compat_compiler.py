"""torch's compiler, which takes two seconds to import, left alone where nobody compiles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.utils.checkpoint

_COMPILER = "torch._dynamo"
_KNOWN: dict[str, Any] = {
    f"{_COMPILER}.disable": lambda function: function,
    f"{_COMPILER}.config.error_on_nested_fx_trace": False,
    f"{_COMPILER}.config.patch": lambda **_: nullcontext(),
}
"""Attributes of the compiler that checkpoints use, with values for code that nobody compiles."""
_NOT_COMPILED = ("checkpoint", "_run_fn_with_dynamo_disabled")
"""Functions of torch.utils.checkpoint that torch wraps in `_disable_dynamo`."""
_WRAPPED = "__dynamo_disable"
"""Attribute of such a function: what is called in its place, set at its first call."""


def use_deterministic(mode: bool, *, warn_only: bool) -> None:
    """Set `torch.use_deterministic_algorithms` without importing the compiler.

    torch imports its compiler to set it there too, which takes two seconds. It is set here if the
    compiler is imported already.
    """
    quick = getattr(torch._C, "_set_deterministic_algorithms", None)
    if quick is None or "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    else:
        quick(mode, warn_only=warn_only)


class _NotImported:
    """Stands for `torch._dynamo`, or its `config`, in checkpoints: anything else imports it.

    They keep hooks from being compiled, and note whether it is an error to trace an operator twice,
    which they set when they compute again.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        whole = f"{self._name}.{attribute}"
        if whole == f"{_COMPILER}.config":
            return _NotImported(whole)
        return _KNOWN[whole] if whole in _KNOWN else getattr(import_module(self._name), attribute)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Run checkpoints, within the context, without importing the compiler.

    torch imports it there, which takes two seconds, to say that it shall not compile them. What
    nobody has imported compiles nothing.
    """
    if _COMPILER in sys.modules or isinstance(vars(torch).get("_dynamo"), _NotImported):
        yield
        return
    spared = []
    for name in _NOT_COMPILED:
        function = getattr(getattr(torch.utils.checkpoint, name, None), "__wrapped__", None)
        if function is not None and not hasattr(function, _WRAPPED):
            setattr(function, _WRAPPED, function)
            spared.append(function)
    stands = _NotImported(_COMPILER)
    vars(torch)["_dynamo"] = stands
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is stands:  # an import would have replaced it
            del vars(torch)["_dynamo"]
        for function in spared:
            if getattr(function, _WRAPPED, None) is function:
                delattr(function, _WRAPPED)
