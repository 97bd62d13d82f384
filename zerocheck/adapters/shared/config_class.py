"""Classes of implementations that are made of a user's config, each once."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol, TypeVar

from ...contract.implementation import Implementation
from ...errors import UsageError
from ...version import install_extra
from ..deepspeed.user_config import DeepSpeedConfig


class TrainerConfigLike(Protocol):
    """Config of a trainer, which may be one of DeepSpeed: then its engine is the implementation."""

    @property
    def name(self) -> str:
        """Name of the file, as it was given."""
        ...

    @property
    def deepspeed(self) -> DeepSpeedConfig | None:
        """Config that is handed to DeepSpeed, or None."""
        ...


Given = TypeVar("Given", bound=TrainerConfigLike)

_made: dict[str, tuple[object, type[Implementation]]] = {}


def class_for(given: Given, make: Callable[[Given], type[Implementation]]) -> type[Implementation]:
    """Make the class of a config, once: by `make`, or that of the engine of DeepSpeed."""
    made = _made.get(given.name)
    if made is None or made[0] is not given:
        engine = given.deepspeed
        new = make(given) if engine is None else _engine_of(engine)
        made = _made[given.name] = (given, new)
    return made[1]


def _engine_of(given: DeepSpeedConfig) -> type[Implementation]:
    """Make the class of a config that is handed to DeepSpeed. UsageError if that is missing."""
    if find_spec("deepspeed") is None:
        advice = f"install it with: {install_extra('deepspeed')}"
        raise UsageError(f"{given.name} needs deepspeed, which is not installed; {advice}")
    from ..deepspeed.configured_engine import of_config

    return of_config(given)
