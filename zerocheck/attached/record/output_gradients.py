"""Gradients that enter at the outputs of a model, read from the autograd graph.

The gradient that arrives at an output can hold more than what the script gave it: of a model that
returns its loss and its logits, the logits get what came through the loss, inside the forward. The
reference finds that part by itself, so it must be given the other part alone. Only edges of the
graph tell them apart: a hook on an output sees their sum.

The graph is walked from the roots of each backward, and not beyond the outputs. Each node on the
way that leads to an output is outside the model, and a hook on it sees what it sends there. Nothing
in the graph is replaced, so the training computes what it would without the observation.

The same walk finds what the reference cannot know: a loss that uses parameters, or tensors from
inside a forward, by another way than the outputs, and inputs that are made of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...compat import current_node
from ...contract.names import unwrapped
from .guard import ErrorGuard

INNER = "the loss uses tensors of the model that are not among its outputs"
UNSEEN = "a backward that was not started by torch.autograd.backward reached the outputs"
CHANGED = "a hook on an output of the model changes its gradient"
IN_A_FORWARD = "the forward of the model runs a backward itself, as manual optimization does"
PARTIAL = "backward(inputs=...) goes to some of the parameters only"

Returned = dict[str, torch.Tensor]
"""The gradients that came to outputs of a call from outside, by the path of the output."""


class Edge(NamedTuple):
    """One output of a node of the graph; two tensors with the same edge have one gradient."""

    node: Any
    number: int


class Span(NamedTuple):
    """A call of the model: its nodes were made between two numbers of the autograd engine.

    inputs, outputs: edges of the tensors that need a gradient.
    """

    begin: int
    end: int
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]


class Target(NamedTuple):
    """Place of a gradient: the call, its gradients and the path of the output."""

    span: Span
    returned: Returned
    path: str

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient: there can be several consumers, and several backwards."""
        before, new = self.returned.get(self.path), gradient.detach()
        self.returned[self.path] = new.clone() if before is None else before + new


class OutputGradients:
    """Observe the backwards of one model.

    reason: why the gradients cannot be given to a reference; empty while they can. running: number
    of observed backwards that are under way, nested ones included.
    """

    def __init__(self, model: nn.Module, guard: ErrorGuard) -> None:
        self._names: Mapping[int, str] = {
            id(parameter): unwrapped(name) for name, parameter in model.named_parameters()
        }
        self.guard = guard
        self._targets: dict[Edge, Target] = {}
        self._spans: list[Span] = []
        self._kept: list[tuple[Target, torch.Tensor]] = []
        self._handles: list[Any] = []
        self.running = 0
        self.reason = ""
        self._calls = 0  # under way
        self._within = 0  # backwards under way that the model itself started

    def enter(self, inputs: Iterable[torch.Tensor]) -> tuple[int, tuple[Edge, ...]]:
        """Note the beginning of a call, for `leave`. inputs: tensors that need a gradient."""
        self._calls += 1
        return _sequence_number(), tuple(_edge(one) for one in inputs)

    def leave(
        self, entry: tuple[int, tuple[Edge, ...]], outputs: Mapping[str, torch.Tensor]
    ) -> Returned:
        """Note the end of a call; return its gradients, which backwards will fill.

        outputs: tensors that need a gradient, by their paths.
        """
        self._calls -= 1
        begin, inputs = entry
        edges = tuple(_edge(one) for one in outputs.values())
        span = Span(begin, _sequence_number(), inputs, edges)
        self._spans.append(span)
        returned: Returned = {}
        for edge, (path, tensor) in zip(edges, outputs.items(), strict=True):
            # Of two outputs that are one tensor, the first gets the gradient. What comes to an
            # input that is returned as it is goes past the parameters.
            if edge not in self._targets and edge not in inputs:
                self._targets[edge] = Target(span, returned, path)
                arrival = _Arrival(self, edge.number)
                self._handles.append(tensor.register_hook(arrival.tensor))  # type: ignore[no-untyped-call]
                self._handles.append(edge.node.register_prehook(arrival.node))
        return returned

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._targets, self._spans, self._kept = [], {}, [], []
        self._calls = 0

    def observed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap torch.autograd.backward with hooks on the nodes that lead to outputs."""

        def backward(tensors: Any, grad_tensors: Any = None, *more: Any, **named: Any) -> Any:
            handles: list[Any] = []
            within = False
            with self.guard():
                within = self._from_within()
                if not within:
                    if self._calls:
                        self.reason = self.reason or IN_A_FORWARD
                    if named.get("inputs") is not None or len(more) > 3:
                        self.reason = self.reason or PARTIAL
                    self._hook(_several(tensors), _several(grad_tensors), handles)
            self.running += 1
            self._within += within
            try:
                return original(tensors, grad_tensors, *more, **named)
            finally:
                self.running -= 1
                self._within -= within
                for handle in handles:
                    handle.remove()

        return backward

    def in_two_parts(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap torch.autograd.grad, by which zero-bubble pipelines split a backward in two.

        The first part is for inputs of the model, and retains the graph; the second one is for
        parameters, from edges inside the model on. The first one alone leaves no gradient.
        """

        def grad(outputs: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            handles: list[Any] = []
            known = False
            with self.guard():
                roots = _several(outputs)
                if not any(self._is_parameter(one) for one in _several(inputs)):
                    known = True
                    if named.get("retain_graph"):
                        given = _several(named.get("grad_outputs"))
                        self._hook(roots, given, handles, self._keep)
                elif all(isinstance(one, GradientEdge) and self._inside(one.node) for one in roots):
                    known = True
                    self._take_kept(one.node for one in roots)
            self.running += known
            try:
                return original(outputs, inputs, *more, **named)
            finally:
                self.running -= known
                for handle in handles:
                    handle.remove()

        return grad

    def _is_parameter(self, one: Any) -> bool:
        # An edge leads to a parameter of FSDP2 as the forward has it, which is none of the model's.
        return id(one) in self._names or hasattr(getattr(one, "node", None), "variable")

    def _keep(self, target: Target, gradient: torch.Tensor) -> None:
        self._kept.append((target, gradient.detach().clone()))

    def _take_kept(self, nodes: Iterable[Any]) -> None:
        """Add what the first part of a backward gave to the calls that made these nodes."""
        numbers = {node._sequence_nr() for node in nodes}
        kept, self._kept = self._kept, []
        for target, gradient in kept:
            if any(target.span.begin < number < target.span.end for number in numbers):
                target.add(gradient)
            else:
                self._kept.append((target, gradient))

    def _from_within(self) -> bool:
        """Return True if the backward of the model itself starts this one.

        As that of a reentrant checkpoint does, for what it has computed anew.
        """
        if self._within or not self.running:
            return bool(self._within)
        node = current_node()
        return node is not None and self._inside(node)

    def _inside(self, node: Any) -> bool:
        """Return True if a call of the model made the node."""
        return any(span.begin < node._sequence_nr() < span.end for span in self._spans)

    def _hook(
        self,
        roots: Sequence[Any],
        gradients: Sequence[Any],
        handles: list[Any],
        add: Callable[[Target, torch.Tensor], None] = lambda target, one: target.add(one),
    ) -> None:
        """Follow the graph from its roots, and hook the nodes that lead to outputs."""
        walk = _BackwardWalk(self._targets)
        for position, root in enumerate(roots):
            if isinstance(root, torch.Tensor) and not root.requires_grad:
                continue
            gradient = gradients[position] if position < len(gradients) else None
            target = walk.follow(
                _edge(root) if isinstance(root, torch.Tensor) else Edge(root.node, root.output_nr)
            )
            if target is not None and gradient is None and isinstance(root, torch.Tensor):
                gradient = torch.ones_like(root)
            if target is not None and gradient is not None:
                add(target, gradient)
        for node in walk.nodes():
            self._look(node)
            found = [
                (at, target)
                for at, (following, number) in enumerate(node.next_functions)
                if following is not None
                and (target := walk.follow(Edge(following, number))) is not None
            ]
            if found:
                handles.append(node.register_hook(partial(self._passed, found, add)))
        for edge, target, consumers in walk.chained():
            for node in consumers:
                found = [(at, target) for at in _positions(node, edge)]
                handles.append(node.register_hook(partial(self._passed, found, add)))

    def _passed(
        self,
        found: Sequence[tuple[int, Target]],
        add: Callable[[Target, torch.Tensor], None],
        sent: Sequence[Any],
        received: Any,
    ) -> None:
        """Record the gradients that a node sends to outputs. sent: one for each of its edges."""
        with self.guard():
            for at, target in found:
                if sent[at] is not None:
                    add(target, sent[at])

    def _look(self, node: Any) -> None:
        """Find parameters and inner tensors on the way."""
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if id(leaf) in self._names and not self.reason:
                name = self._names[id(leaf)]
                self.reason = f"the loss or an input uses {name} past the outputs of the model"
        elif self._inside(node):
            self.reason = self.reason or INNER


class _Arrival:
    """Pair of hooks where a gradient arrives at an output; the second runs after all others.

    A hook of the script can change the gradient between them.
    """

    def __init__(self, gradients: OutputGradients, number: int) -> None:
        self._gradients = gradients
        self._number = number
        self._arrived: torch.Tensor | None = None

    def tensor(self, gradient: torch.Tensor | None) -> None:
        """Hook of the output; without a gradient, a node of several outputs gives None."""
        self._arrived = gradient
        if not self._gradients.running:
            self._gradients.reason = self._gradients.reason or UNSEEN

    def node(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Hook of the node that made the output."""
        with self._gradients.guard():
            before, after = self._arrived, gradients[self._number]
            self._arrived = None
            if before is not None and (after is None or not _same(before, after)):
                self._gradients.reason = self._gradients.reason or CHANGED


class _BackwardWalk:
    """Walk over the graph outside the calls of a model, from the roots of a backward.

    A call is passed from its outputs to its inputs, and its inside is left out.
    """

    def __init__(self, targets: Mapping[Edge, Target]) -> None:
        self._targets = targets
        self._known: set[Any] = set()
        self._stack: list[Any] = []
        self._chained: list[tuple[Edge, Target, Span]] = []
        self.spans: dict[int, Span] = {}

    def follow(self, edge: Edge) -> Target | None:
        """Return the output that an edge leads to, or None; its node is visited later."""
        target = self._targets.get(edge)
        if target is None:
            if edge.node not in self._known:
                self._known.add(edge.node)
                self._stack.append(edge.node)
            return None
        span = target.span
        if id(span) not in self.spans:
            self.spans[id(span)] = span
            for given in span.inputs:
                before = self.follow(given)
                if before is not None:
                    self._chained.append((given, before, span))
        return target

    def nodes(self) -> Iterator[Any]:
        """Yield all nodes outside the calls."""
        while self._stack:
            yield self._stack.pop()

    def chained(self) -> Iterator[tuple[Edge, Target, list[Any]]]:
        """Outputs that went into another call as they are, with the nodes there that use them."""
        for edge, target, span in self._chained:
            inner = _reached([one.node for one in span.outputs], {one.node for one in span.inputs})
            yield edge, target, [node for node in inner if _positions(node, edge)]


def _positions(node: Any, edge: Edge) -> list[int]:
    return [at for at, one in enumerate(node.next_functions) if Edge(*one) == edge]


def _reached(nodes: list[Any], ends: set[Any]) -> Iterator[Any]:
    """Yield the nodes of a graph that are reached from `nodes` without passing `ends`."""
    known = ends | set(nodes)
    stack = [one for one in nodes if one not in ends]
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                stack.append(following)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or torch.equal(one, other)


def _several(given: Any) -> Sequence[Any]:
    if given is None:
        return ()
    # A GradientEdge is a tuple.
    one = isinstance(given, (torch.Tensor, GradientEdge))
    return (given,) if one else tuple(given)


def _edge(tensor: torch.Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return Edge(edge.node, edge.output_nr)


def _sequence_number() -> int:
    """Return the current sequence number of the autograd engine.

    Nodes are numbered as they are made, in each thread.
    """
    with torch.enable_grad():
        made = torch.zeros((), requires_grad=True).view(1)
    assert made.grad_fn is not None
    return int(made.grad_fn._sequence_nr())
