"""Replace functions for a step, and keep errors of the observation out of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ...compat import collective_calls, collective_of


class ErrorGuard:
    """First error of the code that observes a step, kept out of the training."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Record an exception of the block and go on after it."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace owner.name by make(original) within the context. owner: an object, or a cell.

    Contexts need not end in the reverse order: several attached parts of a job end as they began.
    """
    layers = _layers.get((id(owner), name))
    if layers is None:
        original = getattr(owner, name)
        own = vars(owner).get(name) if hasattr(owner, "__dict__") else original
        layers = _layers[id(owner), name] = _Layers(owner, name, original, own)
    layers.makes.append(make)
    layers.apply()
    try:
        yield
    finally:
        layers.makes.remove(make)
        layers.apply()


def around_forwards(
    model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> ExitStack:
    """Call `enter` and `leave` around each call of the model, until the stack is closed."""
    stack = ExitStack()
    stack.callback(model.register_forward_pre_hook(enter, prepend=True).remove)
    stack.callback(model.register_forward_hook(leave, always_call=True).remove)
    return stack


@contextmanager
def before_collectives(seen: Callable[[str, Any, Any, Any], None]) -> Iterator[None]:
    """Call a function before each collective that Python calls, but for what is being compiled.

    seen: gets the name of the collective, whose method it is, and both kinds of arguments.
    """

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def collective(owner: Any, *args: Any, **named: Any) -> Any:
            if not torch.compiler.is_compiling() and (called := collective_of(name, owner)):
                seen(called, owner, args, named)
            return original(owner, *args, **named)

        return collective

    with ExitStack() as stack:
        for owner, name in collective_calls():
            stack.enter_context(replaced(owner, name, partial(noting, name)))
        yield


@dataclass
class _Layers:
    """Replacements of one function."""

    owner: Any
    name: str
    original: Any
    own: Any
    """Attribute of the owner itself; None if only its class has it."""
    makes: list[Callable[[Any], Any]] = field(default_factory=list)

    def apply(self) -> None:
        """Replace the function by what is left, or put the original back."""
        function = self.original
        for make in self.makes:
            function = make(function)
        if self.makes or self.own is not None:
            setattr(self.owner, self.name, function if self.makes else self.own)
        else:
            delattr(self.owner, self.name)
        if not self.makes:
            del _layers[id(self.owner), self.name]


_layers: dict[tuple[int, str], _Layers] = {}
"""By the owner's id and the name: what is replaced now."""
