"""Whether a loss reaches the parameters by another way than the outputs of the model.

A penalty on the weights, a head that is multiplied by hand, an auxiliary loss that a block leaves
in an attribute: the reference sees none of it, since it goes back from the outputs alone. The
gradient of such a step is right and not that of the reference, so it is not judged.

The graph of the loss is walked from its roots, and not beyond the outputs. What is met on the way
is a parameter of the model, or was made in its forward, only if there is another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..contract.names import unwrapped

INNER = "the loss uses tensors of the model that are not among its outputs"


class Ways:
    """Of the calls of a model: which nodes are its outputs, and when its own were made."""

    def __init__(self, model: nn.Module) -> None:
        self._names: Mapping[int, str] = {
            id(parameter): unwrapped(name) for name, parameter in model.named_parameters()
        }
        self._outputs: dict[Any, None] = {}
        self._spans: list[tuple[int, int]] = []
        self.reason = ""

    def entered(self) -> int:
        """A call begins: what `left` wants to know of it."""
        return _now()

    def left(self, begun: int, outputs: Iterable[torch.Tensor]) -> None:
        """A call is over. outputs: those that need a gradient."""
        self._spans.append((begun, _now()))
        self._outputs.update({one.grad_fn: None for one in outputs if one.grad_fn is not None})

    def watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """In place of torch.autograd.backward: looks at the roots, then does what that does."""

        def backward(tensors: Any, *more: Any, **named: Any) -> Any:
            if not self.reason:
                roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
                self.reason = self._beside(roots)
            return original(tensors, *more, **named)

        return backward

    def _beside(self, roots: Iterable[Any]) -> str:
        """What is reached, in words, or an empty text."""
        nodes = (getattr(root, "grad_fn", None) for root in roots)
        for node in _reached([one for one in nodes if one is not None], self._outputs):
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                if id(leaf) in self._names:
                    return f"the loss uses {self._names[id(leaf)]} beside the outputs of the model"
            elif any(low < node._sequence_nr() < high for low, high in self._spans):
                return INNER
        return ""


def _reached(nodes: list[Any], ends: Mapping[Any, None]) -> Iterator[Any]:
    """The nodes of a graph, without `ends` and what only they lead to."""
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node in ends:
            continue
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def _now() -> int:
    """Nodes are numbered as they are made, in each thread."""
    with torch.enable_grad():
        made = torch.zeros((), requires_grad=True).view(1)
    assert made.grad_fn is not None
    return int(made.grad_fn._sequence_nr())
