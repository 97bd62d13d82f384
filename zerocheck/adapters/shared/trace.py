"""Trace of one microbatch of the bare model: its events in the forward, then the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from ...case.schema import Case
from ...case.shapes import parameter_shapes, sometimes_used, unfrozen
from ...compat import Unchanged
from ...compat_memory import Allocation, AllocatorLog
from ...models.batches import batch, loss_of
from ...models.network import build_model
from ...models.user import call_with
from .live_memory import NOTHING, ModelMemory, model_memory

What = Literal["enter", "leave", "loss", "output", "inputs", "parameter", "over"]

MARK = "zerocheck event "
"""Begins the names of events among what the allocator does."""
ROOT = -1
"""The unit of an event of the whole model."""


Predict = TypeVar("Predict", bound=Callable[..., Any])


class UnitEvent(NamedTuple):
    """enter, leave: a unit is called, or returns; loss: the forward is over; output, inputs: the
    gradient of a unit's output, or of all of its inputs, is there; parameter: the gradient of
    parameter `name` is there; over: the backward is.

    unit: its index, or ROOT; number: of "leave" and "output", of the call of a unit in this
    forward, from 0 (ROOT: -1); learns: of "leave", whether the output needs a gradient; again: the
    backward runs the forward once more; bytes: of "parameter", of its gradient; model: what the
    model holds between the event before and this one.
    """

    what: What
    unit: int = ROOT
    number: int = -1
    name: str = ""
    learns: bool = False
    again: bool = False
    bytes: int = 0
    model: ModelMemory = NOTHING


class _Marked(torch.autograd.Function):
    """Identity function that reports when the gradients of all its inputs are complete."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.notify = notify
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.notify()
        return None, *gradients


class Unpredicted(Exception):
    """Raised where the user's own model does something that these events do not cover."""


def or_none(predict: Predict) -> Predict:
    """Wrap predict(model, case, ...) to return None where the model's trace is insufficient."""

    @wraps(predict)
    def predicted(*given: Any) -> Any:
        try:
            return predict(*given)
        except Unpredicted:
            return None

    return cast("Predict", predicted)


def is_of_case(model: nn.Module, case: Case) -> bool:
    """Return True if the model is the one of the case.

    The order of execution of any other model is not known, nor that of a user's own model in which
    some parameters are used only sometimes.
    """
    if case.model.user is not None and sometimes_used(case.model):
        return False
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return shapes == parameter_shapes(case.model)


def trace(
    case: Case,
    units: Callable[[nn.Module], Sequence[nn.Module]],
    *,
    step: int,
    marked: bool = False,
    watched: bool = False,
    at_base: bool = False,
    flat: Callable[[nn.Module], Iterable[Collection[str]]] | None = None,
) -> list[UnitEvent]:
    """Trace the events of a microbatch of step `step`, which decides the frozen parameters.

    units(model): the modules that are units. "inputs" is noted with marked, where each unit's
    inputs pass through one more node of the graph, or with watched, where they have hooks. at_base:
    "output" comes with the gradient of the tensor that an output is a view of. flat(model): names
    of parameters that are views of one flat parameter: if one of them learns, gradients are
    computed for all.

    The model is that of the case, on the CPU. Where some ranks use other parameters than others,
    this is rank 0's first microbatch: "parameter" is then not the same on all. The global random
    state is left as it was.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        return _trace(case, units, step, marked, watched, at_base, flat)


def _trace(
    case: Case,
    units: Callable[[nn.Module], Sequence[nn.Module]],
    step: int,
    marked: bool,
    watched: bool,
    at_base: bool,
    flat: Callable[[nn.Module], Iterable[Collection[str]]] | None,
) -> list[UnitEvent]:
    model = build_model(case)
    _unfreeze(model, frozenset(unfrozen(case)) if _over(case, step) else frozenset())
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for names in flat(model) if flat is not None else ():
        if learns & set(names):
            _unfreeze(model, names)
    log = AllocatorLog()
    events: list[UnitEvent] = []

    def note(*given: Any, **named: Any) -> None:
        log.mark(f"{MARK}{len(events)}")
        events.append(UnitEvent(*given, **named))

    backward = False
    calls = 0

    def enter(unit: int, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        note("enter", unit, again=backward)
        if any(isinstance(one, torch.Tensor) for one in named.values()):
            raise Unpredicted
        tensors = [one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad]
        if unit == ROOT or not tensors or not (marked or watched):
            return None

        def over(*_: Any) -> None:
            note("inputs", unit)

        if watched:
            register_multi_grad_hook(tensors, over)
            return None
        done = iter(_Marked.apply(over, *tensors))  # type: ignore[no-untyped-call]
        chosen = {id(one) for one in tensors}
        return tuple(next(done) if id(one) in chosen else one for one in inputs), named

    def leave(unit: int, _: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal calls
        number = ROOT
        if unit != ROOT and not backward:
            number, calls = calls, calls + 1
        if not isinstance(output, torch.Tensor):
            raise Unpredicted
        learns = output.requires_grad
        note("leave", unit, number, learns=learns, again=backward)
        if learns and not backward:
            base = output._base
            source = base if at_base and base is not None and base.requires_grad else output
            source.register_hook(partial(reached, unit, number))  # type: ignore[no-untyped-call]

    def reached(unit: int, number: int, _: torch.Tensor) -> None:
        note("output", unit, number)

    def arrived(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        note("parameter", name=name, bytes=parameter.grad.untyped_storage().nbytes())
        parameter.grad = None  # a sharder lets go of it when it likes

    for unit, module in [(ROOT, model), *enumerate(units(model))]:
        module.register_forward_pre_hook(partial(enter, unit), with_kwargs=True)
        module.register_forward_hook(partial(leave, unit))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hook = partial(arrived, name)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    drawn = batch(case, step=case.training.first, rank=0, microbatch=0)
    torch.manual_seed(drawn.seed)
    log.start()
    allocations: list[str | Allocation] = []
    try:
        with Unchanged():  # ranks are measured under a mode
            past = model if case.data.past_wrapper else None
            # No name for the outputs: it would keep them for the backward.
            loss = loss_of(case)(call_with(model, drawn.inputs, drawn.keywords, past), drawn.target)
            note("loss", learns=loss.requires_grad)
            backward = True
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            note("over")
    finally:
        allocations = log.stop(MARK)
    return [
        event._replace(model=memory)
        for event, memory in zip(events, model_memory(allocations), strict=True)
    ]


class ModelTrace(NamedTuple):
    """Step with its trace. late: parameters that are frozen at first are trainable in it."""

    step: int
    late: bool
    events: list[UnitEvent]


def traces(
    case: Case, steps: Iterable[int], go: Callable[[int], list[UnitEvent]]
) -> Iterator[ModelTrace]:
    """Iterate over the steps of a case with their traces.

    go(step): the trace of that step, computed again only once more parameters are trainable.
    """
    events: dict[bool, list[UnitEvent]] = {}
    for step in steps:
        late = _over(case, step)
        if late not in events:
            events[late] = go(step)
        yield ModelTrace(step, late, events[late])


def _over(case: Case, step: int) -> bool:
    """Return True if the parameters that are frozen at first are trainable in this step."""
    return case.training.unfreeze is not None and step >= case.training.unfreeze


def _unfreeze(model: nn.Module, names: Collection[str]) -> None:
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(True)
