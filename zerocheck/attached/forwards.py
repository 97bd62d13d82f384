"""What goes into the model and comes back to it: inputs, random state, gradients of its outputs.

With these and its parameters, the model that is not wrapped gives the local gradient: no loss
function is needed, and no target. Whatever the script does with the outputs (a loss, its scale, its
share of the microbatches) is in the gradient that comes back to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from .beside import Ways


@dataclass
class Forward:
    """One call of the model. Trees of tensors and plain values; tensors are copies.

    random: state of the generator of the CPU, and of the current GPU, as it was entered; autocast:
    (device type, dtype) if it was on; returned: the gradient of each tensor of the outputs that
    needs one, in the order of `tensors_in`, None where none came back.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: tuple[torch.Tensor, ...]
    autocast: tuple[str, torch.dtype] | None
    training: bool
    returned: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        """Whether a backward came to it."""
        return any(one is not None for one in self.returned)


class Forwards:
    """Listens to the calls of one module while its hooks are on."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open: list[tuple[Forward, int]] = []
        self.seen: list[Forward] = []
        self.ways = Ways(model)

    def hooked(self) -> ExitStack:
        """Closing it takes the hooks off."""
        stack = ExitStack()
        before = self._model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        after = self._model.register_forward_hook(self._after)
        stack.callback(before.remove)
        stack.callback(after.remove)
        return stack

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        forward = Forward(
            mapped(args, _copy), mapped(kwargs, _copy), _random(), _autocast(), module.training
        )
        self._open.append((forward, self.ways.entered()))

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if not self._open:
            return
        forward, begun = self._open.pop()
        needing = list(tensors_in(outputs))
        self.ways.left(begun, needing)
        for number, tensor in enumerate(needing):
            forward.returned.append(None)
            tensor.register_hook(partial(_returned, forward, number))  # type: ignore[no-untyped-call]
        self.seen.append(forward)


def _returned(forward: Forward, number: int, gradient: torch.Tensor) -> None:
    """Of several backwards through one output, the sum."""
    before = forward.returned[number]
    new = gradient.detach()
    forward.returned[number] = new.clone() if before is None else before + new


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors that need a gradient, in a fixed order. Dataclasses are entered too."""
    if isinstance(tree, torch.Tensor):
        if tree.requires_grad:
            yield tree
    elif isinstance(tree, Mapping):
        for one in tree.values():
            yield from tensors_in(one)
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from tensors_in(one)
    elif hasattr(tree, "__dataclass_fields__"):
        for name in tree.__dataclass_fields__:
            yield from tensors_in(getattr(tree, name))


def mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tree with all its tensors changed; other values are kept as they are."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if type(tree) is dict:
        return {name: mapped(one, change) for name, one in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(mapped(one, change) for one in tree)
    return tree


def entered(forward: Forward, model: nn.Module, device: torch.device) -> Any:
    """Call a model as `forward` was called: mode, random state and autocast.

    The caller keeps the random state for itself.
    """
    model.train(forward.training)
    torch.set_rng_state(forward.random[0])
    if len(forward.random) > 1 and device.type == "cuda":
        torch.cuda.set_rng_state(forward.random[1], device)

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device)

    args, kwargs = mapped(forward.args, there), mapped(forward.kwargs, there)
    with ExitStack() as stack:
        if forward.autocast is not None:
            stack.enter_context(torch.autocast(device.type, dtype=forward.autocast[1]))
        return model(*args, **kwargs)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _random() -> tuple[torch.Tensor, ...]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return tuple(states)


def _autocast() -> tuple[str, torch.dtype] | None:
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return kind, torch.get_autocast_dtype(kind)
    return None
