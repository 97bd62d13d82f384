"""Options of `zerocheck.attach`, checked before the training begins."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from ..attached.attach import attach
from ..attached.options import AttachOptions
from ..attached.session import Attached
from ..errors import UsageError, unknown

GIVEN = ("model", "optimizer", "done")
"""Options that are not to be given, since the trainer knows them."""


def attach_in_trainer(model: nn.Module, optimizers: Any, *, done: int, **options: Any) -> Attached:
    """Attach within a trainer. What cannot be judged is printed, and the training goes on."""
    return attach(model, optimizers, done=done, **{"on_unsupported": "warn", **options})


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that `attach` has not, or that the trainer gives.

    So for a wrong value: a training that has begun is not ended by it.
    """
    allowed = [name for name in inspect.signature(attach).parameters if name not in GIVEN]
    for name in options:
        if name in GIVEN:
            raise UsageError(f"{name} is not to be given: the trainer knows it")
        if name not in allowed:
            raise unknown("option of attach", name, allowed)
    parameters = inspect.signature(attach).parameters
    AttachOptions.checked(
        **{
            name: options.get(name, parameters[name].default)
            for name in inspect.signature(AttachOptions.checked).parameters
        }
    )


def library(name: str) -> ModuleType:
    """Import the library of an integration. Raises ImportError, with what to do."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"zerocheck.integrations.{name} needs {name}, which cannot be imported ({error}); "
            "install it, or use zerocheck.attach"
        ) from error
