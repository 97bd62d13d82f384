"""Fingerprint of a local computation: its autograd graph, and the settings that choose kernels.

Two runs with the same fingerprint call the same operators, and add the gradients of what is used
several times in the same order. On the same parameters, placed the same, they give the same bits.
The judge compares the fingerprints of the ranks with those of the reference before it blames a
difference of bits on the code under test.
"""

from __future__ import annotations

import hashlib

import torch
from torch.autograd.function import BackwardCFunction

Edge = tuple[object, int]
"""A node of the backward graph, and which of its outputs is meant."""

_VIEWS = frozenset(
    ("ViewBackward0", "AsStridedBackward0", "SplitWithSizesBackward0", "AliasBackward0")
)
"""Nodes between a flat parameter and the parameters that are views of it."""


class GraphNotes:
    """Collector of the fingerprint of each loss of a step."""

    def __init__(self) -> None:
        self._fingerprints: list[str] = []

    def note(self, loss: torch.Tensor) -> None:
        """Record the graph of a forward that ended with this loss."""
        self._fingerprints.append(fingerprint(loss))

    def taken(self) -> tuple[str, ...]:
        """Return the fingerprints since the last call, and forget them."""
        names, self._fingerprints = tuple(self._fingerprints), []
        return names


def fingerprint(loss: torch.Tensor) -> str:
    """Hash the graph behind a loss and the settings of this process.

    A function with a backward of its own is a node without a name, whatever it is called: FSDP2
    and the reference each have one that passes inputs on. One through which a single value goes, to
    a single user, changes no order of additions and is left out. A parameter that is a view of a
    flat one counts as a leaf.
    """
    lines = [_settings()]
    root = _leaf((loss.grad_fn, 0))
    users = _users(root)
    numbers: dict[object, int] = {}
    waiting = [root]
    while waiting:
        node, _ = waiting.pop()
        if node is None or node in numbers:
            continue
        numbers[node] = len(numbers)
        edges = [_followed(edge, users) for edge in _edges(node)]
        lines.append(f"{_name(node)} {len(edges)}")
        waiting += reversed(edges)
    for node in numbers:
        for target, output in (_followed(edge, users) for edge in _edges(node)):
            lines.append("-" if target is None else f"{numbers[target]}.{output}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _settings() -> str:
    return repr(
        (
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            torch.are_deterministic_algorithms_enabled(),
        )
    )


def _edges(node: object) -> list[Edge]:
    if isinstance(node, tuple):  # a view of a flat parameter
        return []
    return [_leaf(edge) for edge in node.next_functions]  # type: ignore[attr-defined]


def _leaf(edge: Edge) -> Edge:
    """Return the edge, or a view as a leaf if only views are between it and a parameter."""
    node, output = edge
    on: object = node
    while on is not None and on.name() in _VIEWS:  # type: ignore[attr-defined]
        on = on.next_functions[0][0]  # type: ignore[attr-defined]
    if on is node or on is None or on.name() != "torch::autograd::AccumulateGrad":  # type: ignore[attr-defined]
        return edge
    return (node, output), 0


def _name(node: object) -> str:
    if isinstance(node, tuple):
        return "leaf"
    if isinstance(node, BackwardCFunction):
        return "function"
    name: str = node.name()  # type: ignore[attr-defined]
    return "leaf" if name == "torch::autograd::AccumulateGrad" else name


def _users(root: Edge) -> dict[object, int]:
    """Count the edges that lead to each node."""
    users: dict[object, int] = {}
    waiting = [root]
    while waiting:
        node, _ = waiting.pop()
        if node is None:
            continue
        users[node] = users.get(node, 0) + 1
        if users[node] == 1:
            waiting += _edges(node)
    return users


def _followed(edge: Edge, users: dict[object, int]) -> Edge:
    """Return the target of an edge, past functions that pass a single value to a single user."""
    node, output = edge
    while isinstance(node, BackwardCFunction) and users[node] == 1:
        (*edges,) = _edges(node)
        if len(edges) != 1 or edges[0][0] is None:
            break
        node, output = edges[0]
    return node, output
