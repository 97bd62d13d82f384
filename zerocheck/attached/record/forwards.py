"""Calls of a model in a checked step: inputs, random state, gradients that come to the outputs.

With these and its parameters, the model that is not wrapped gives the local gradient: no loss
function is needed, and no target. Whatever the script does with the outputs (a loss, its scale, its
share of the microbatches) is in the gradient that comes back to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.weak import TensorWeakRef

from ...compat import draws_by_itself
from ...contract.names import unwrapped
from .call_state import (
    Numbers,
    TrainedNumbers,
    host_states,
    numbers_of,
    set_host_states,
    set_numbers,
    torch_states,
)
from .guard import ErrorGuard
from .output_gradients import OutputGradients
from .repeatable import Digest, digest

OWN_NUMBERS = (
    "inductor draws random numbers of its own (dropout); torch._inductor.config.fallback_random = "
    "True has it draw those of torch"
)

Autocast = tuple[str, torch.dtype] | None

SAMPLED = 64
"""Elements of an output that are compared with those of the reference."""
NESTED = 16
"""Decorators of a forward that are looked through."""


@dataclass
class Crossing:
    """Digests of what a call of a stage of a pipeline exchanges with the stages beside it.

    given, sent: inputs that need a gradient, and outputs; back: gradients that the inputs got;
    overwritten: an input was another one by then.
    """

    given: Digest
    sent: Digest = ()
    back: Digest = ()
    overwritten: bool = False

    def came_back(self, guard: ErrorGuard, given: TensorWeakRef, gradient: torch.Tensor) -> None:
        """Hook of an input: note its gradient."""
        with guard():
            self.back += digest([gradient])
            there = given()
            if there is not None and not {*self.given}.issuperset(digest([there])):
                self.overwritten = True


@dataclass
class Forward:
    """One call of the model. Trees of tensors and plain values; tensors are copies.

    random: state of the generator of the CPU, and of the current GPU, as it was entered; drawn:
    those of Python and NumPy that it drew from; numbers: attributes of modules that the
    reference must have (see call_state.py); autocast: (device type, dtype) if it was on;
    inner_autocast: that within the wrappers, by the name of the module that is wrapped;
    other_mode: names of modules whose mode was not `training`; dropout: probability of each
    module of dropout, which trainers turn off; returned: gradients that came to the outputs
    from outside the call, by the path of the output (see `tensors_in`); draws: True if the call
    drew random numbers, where that matters; outputs: samples of them, by path; crossing: of a
    stage of a pipeline; cut: cuts an output into the parts of ranks, where they have parts. Names
    of modules are those in the unwrapped model, with a dot at their end.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: tuple[torch.Tensor, ...]
    autocast: Autocast
    training: bool
    other_mode: tuple[str, ...] = ()
    inner_autocast: dict[str, Autocast] = field(default_factory=dict)
    dropout: dict[str, float] = field(default_factory=dict)
    drawn: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)
    returned: dict[str, torch.Tensor] = field(default_factory=dict)
    draws: bool = False
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    crossing: Crossing | None = None
    cut: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None

    def sampled(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return samples of outputs of the reference, at the places of those of the call."""
        if self.cut is None:
            return samples_of(outputs)
        found = {}
        for path, output in outputs.items():
            parts = [samples_of({path: part}).get(path) for part in self.cut(output)]
            if all(part is not None for part in parts):
                found[path] = torch.cat([part for part in parts if part is not None])
        return found

    @property
    def counts(self) -> bool:
        """True if a backward reached this forward."""
        return bool(self.returned)


class Forwards:
    """The calls of one module, recorded while its hooks are on."""

    def __init__(
        self,
        model: nn.Module,
        guard: ErrorGuard,
        numbers: Numbers,
        *,
        in_parts: bool,
        in_stages: bool,
    ) -> None:
        """Prepare.

        numbers: those of the model when the check was attached; in_parts: samples are in parts on
        several ranks, which one device draws other random numbers for; in_stages: the model is a
        stage of a pipeline.
        """
        self._model, self._in_parts, self._in_stages = model, in_parts, in_stages
        self._guard = guard
        self._trained = TrainedNumbers(numbers)
        self._open: list[tuple[Forward, Any] | None] = []
        self._own_numbers = draws_by_itself(model)
        self.reason = ""
        """Why the calls cannot be repeated, if they cannot."""
        self._calls: list[Forward] = []
        self._of_update: list[Forward] | None = None
        self.gradients = OutputGradients(model, guard)
        self._declared: dict[str, Autocast] = {}

    def updated(self) -> None:
        """Note that the optimizers took their step: what a backward reaches later is not in it."""
        if self._of_update is None:
            self._of_update = [call for call in self._calls if call.counts]

    def counted(self) -> list[Forward]:
        """Return the calls that a backward reached, at the end of the step."""
        self._trained.note(numbers_of(self._model, dotted))
        found: list[Forward] = []
        known: Numbers = {}
        for call in self._calls if self._of_update is None else self._of_update:
            if call.counts:
                found.append(replace(call, numbers=self._trained.of(call.numbers, known)))
                known = call.numbers
        return found

    def hooked(self) -> ExitStack:
        """Put the hooks on; closing the stack takes them off."""
        stack = ExitStack()
        before = self._model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        after = self._model.register_forward_hook(self._after)
        stack.callback(before.remove)
        stack.callback(after.remove)
        stack.callback(self.gradients.close)
        wrapped = list(_wrapped(self._model))
        seen = _hookable(self._model, wrapped)
        found = ((name, declared_autocast(module)) for name, module in wrapped[seen:])
        self._declared = {dotted(name): autocast for name, autocast in found if autocast}
        for name, module in wrapped[:seen]:
            inside = partial(self._inside, dotted(name))
            stack.callback(module.register_forward_pre_hook(inside).remove)
            # Accelerate's autocast is within a forward that it puts on the module.
            if "forward" in vars(module):
                for inner in list(module.modules())[1:]:
                    stack.callback(inner.register_forward_pre_hook(inside).remove)
        return stack

    def _inside(self, name: str, module: nn.Module, args: Any) -> None:
        with self._guard():
            opened = self._open[-1] if self._open else None
            if opened is not None and opened[0].inner_autocast.get(name) is None:
                opened[0].inner_autocast[name] = _autocast()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open.append(None)
        with self._guard():
            if torch.is_grad_enabled():
                forward = Forward(
                    mapped(args, _copy),
                    mapped(kwargs, _copy),
                    torch_states(),
                    _autocast(),
                    module.training,
                    _other_mode(module),
                    dict(self._declared),
                    _dropout(module),
                    host_states(),
                    numbers_of(module, dotted),
                )
                self._trained.note(forward.numbers)
                given = tensors_in((args, kwargs)).values()
                if self._in_stages:
                    forward.crossing = Crossing(digest(given))
                    for one in given:
                        hook = partial(forward.crossing.came_back, self._guard, TensorWeakRef(one))
                        one.register_hook(hook)  # type: ignore[no-untyped-call]
                entry = self.gradients.enter(given)
                self._open[-1] = forward, entry

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> None:
        with self._guard():
            opened = self._open.pop() if self._open else None
            if opened is not None:
                forward, entry = opened
                there = tensors_in(outputs)
                forward.outputs = samples_of(there)
                if forward.crossing is not None:
                    forward.crossing.sent = digest(tensors_in(outputs, every=True).values())
                forward.returned = self.gradients.leave(entry, there)
                if self._own_numbers or self._in_parts:
                    forward.draws = not all(map(torch.equal, forward.random, torch_states()))
                if self._own_numbers and forward.draws:
                    self.reason = OWN_NUMBERS
                now = host_states()
                forward.drawn = {
                    name: state
                    for name, state in forward.drawn.items()
                    if not torch.equal(state, now[name])
                }
                forward.draws = forward.draws or bool(forward.drawn)
                self._calls.append(forward)


def samples_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return some elements of each tensor, spread over it, as copies in float64 on its device.

    None of tensors of other kinds than torch's own dense ones: reading them may communicate.
    """
    found = {}
    for path, tensor in tensors.items():
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested:
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED]
            found[path] = some.to(torch.float64, copy=True)
    return found


def tensors_in(tree: Any, *, every: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a tree that need a gradient, by their path: `['logits']`, `.hidden[2]`.

    every: those that need none, too.
    Containers are mappings, lists, tuples, dataclasses, and objects that keep their values as
    attributes.
    """
    return dict(_tensors_in(tree, "", set(), every))


def _tensors_in(
    tree: Any, path: str, above: set[int], every: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the paths and tensors of a tree that need a gradient.

    above: ids of the containers around this one, since an object can hold itself.
    """
    if isinstance(tree, torch.Tensor):
        if every or tree.requires_grad:
            yield path, tree
    elif id(tree) not in above:
        for step, one in _inside_of(tree):
            yield from _tensors_in(one, f"{path}{step}", above | {id(tree)}, every)


def _inside_of(tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        return [(f"[{name!r}]", one) for name, one in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [(f"[{number}]", one) for number, one in enumerate(tree)]
    if isinstance(tree, (type, nn.Module, FunctionType, ModuleType)):
        return []
    names = getattr(tree, "__dataclass_fields__", None) or getattr(tree, "__dict__", {})
    return [(f".{name}", getattr(tree, name, None)) for name in list(names)]


def mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a tree with all its tensors changed; objects of other kinds are not copied."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    new: Any = None
    if isinstance(tree, MutableMapping):
        new = copy(tree)
        for name, one in tree.items():
            new[name] = mapped(one, change)
        return new
    if isinstance(tree, (list, tuple)):
        inner = [mapped(one, change) for one in tree]
        if hasattr(tree, "_make"):  # a NamedTuple
            return tree._make(inner)
        return type(tree)(inner) if type(tree) in (list, tuple) else tree
    if is_dataclass(tree) and not isinstance(tree, type):
        new = copy(tree)
        for name in vars(tree).keys() & {one.name for one in fields(tree)}:
            object.__setattr__(new, name, mapped(getattr(tree, name), change))
        return new
    return tree


def entered(
    forward: Forward,
    model: nn.Module,
    device: torch.device,
    parameters: dict[str, torch.Tensor] | None = None,
) -> Any:
    """Call a model as `forward` was called: mode, random state and autocast.

    parameters: those that it is called with in place of its own. The caller keeps the random state
    for itself.
    """
    for name, module in model.named_modules():
        module.training = forward.training ^ (dotted(name) in forward.other_mode)
        if isinstance(module, _DropoutNd):
            module.p = forward.dropout.get(dotted(name), module.p)
    set_numbers(model, forward.numbers)
    set_host_states(forward.drawn)
    torch.set_rng_state(forward.random[0])
    if len(forward.random) > 1 and device.type == "cuda":
        torch.cuda.set_rng_state(forward.random[1], device)

    def there(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().to(device, copy=True)
        # Not a leaf: the model may change it in place.
        return moved.requires_grad_().clone() if tensor.requires_grad else moved

    args, kwargs = mapped(forward.args, there), mapped(forward.kwargs, there)
    with ExitStack() as stack:
        if forward.autocast is not None:
            stack.enter_context(torch.autocast(device.type, dtype=forward.autocast[1]))
        if parameters is not None:
            return functional_call(model, parameters, args, kwargs)
        return model(*args, **kwargs)


def _wrapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have all parameters of a model, from the model inwards, by name."""
    path, module, count = "", model, len(list(model.parameters()))
    while True:
        yield path, module
        inner = [
            (name, one)
            for name, one in module.named_children()
            if len(list(one.parameters())) == count
        ]
        if not inner:
            return
        name, module = inner[0]
        path = f"{path}.{name}" if path else name


def _hookable(model: nn.Module, wrapped: Sequence[tuple[str, nn.Module]]) -> int:
    """Return how many of these can be hooked: a compiled one would be compiled again for it."""
    if any(one._compiled_call_impl is not None for one in model.modules()):
        return 0
    compiled = (number for number, (_, one) in enumerate(wrapped) if hasattr(one, "_orig_mod"))
    return next(compiled, len(wrapped))


def declared_autocast(module: nn.Module) -> Autocast:
    """Return the autocast in a forward that was put on a module, or None.

    A hook within a compiled module would have it compiled anew, so it is read off the function:
    `torch.autocast` as a decorator is in the closure of what it returns.
    """
    forward = vars(module).get("forward")
    for _ in range(NESTED):
        forward = getattr(forward, "__func__", forward)
        for found in closure(forward):
            if isinstance(found, torch.autocast) and found._enabled:
                return found.device, found.fast_dtype
        forward = getattr(forward, "__wrapped__", None)
    return None


def closure(function: Any) -> Iterator[Any]:
    """Iterate over what is in the cells of a function."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def _other_mode(model: nn.Module) -> tuple[str, ...]:
    # A wrapper and what it wraps have one name: the inner one is that of the reference.
    modes = {dotted(name): module.training for name, module in model.named_modules()}
    return tuple(name for name, training in modes.items() if training != model.training)


def _dropout(model: nn.Module) -> dict[str, float]:
    modules = model.named_modules()
    return {dotted(name): one.p for name, one in modules if isinstance(one, _DropoutNd)}


def dotted(name: str) -> str:
    """Return the name of a module in the unwrapped model, with a dot at its end unless empty."""
    return unwrapped(f"{name}.") if name else ""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _autocast() -> Autocast:
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return kind, torch.get_autocast_dtype(kind)
    return None
