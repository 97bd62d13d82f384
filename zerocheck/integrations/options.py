"""Options of `zerocheck.attach`, checked before the training begins."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from ..attached.attach import attach
from ..errors import UsageError, unknown

GIVEN = ("model", "optimizer", "done")
"""Options that are not to be given, since the trainer knows them."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that `attach` has not, or that the trainer gives."""
    allowed = [name for name in inspect.signature(attach).parameters if name not in GIVEN]
    for name in options:
        if name in GIVEN:
            raise UsageError(f"{name} is not to be given: the trainer knows it")
        if name not in allowed:
            raise unknown("option of attach", name, allowed)


def library(name: str) -> ModuleType:
    """Import the library of an integration. Raises ImportError, with what to do."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"zerocheck.integrations.{name} needs {name}, which cannot be imported ({error}); "
            "install it, or use zerocheck.attach"
        ) from error
