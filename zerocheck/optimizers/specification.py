"""Interface of an optimizer: its states, and the enclosure of one step of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import torch
from msgspec.structs import replace

from zerocheck_reference import OptimizerOptions

from ..case.schema import Group, Optimizer, OptimizerKind
from ..floating_point import FP32, Enclosure, Format
from .state_shape import WHOLE, StateShape

StateRole = str
"""Role of a state of an optimizer that has values for the elements of its parameter: its key, as
torch has it. Of a factored state, each value is that of several elements (`state_shape.py`)."""

Reading = Literal[
    "double", "single rate", "single", "single corrections", "same kernels", "estimated"
]
"""Way in which a right implementation computes a step.

It reads its hyperparameters as Python's doubles, or rounded to fp32 first; or only what it computes
from the step count is fp32, as where that is a tensor of a graph. One that multiplies
matrices does it by the kernels of one device; or by others, and then the bound is estimated.
"""


class UpdateElements(NamedTuple):
    """Some elements of one update: before it, its gradient, and after it. float64 vectors.

    parameter: before; gradient: negated with maximize; old, new: states by role, before and after,
    zeros where the optimizer has none; error: what is not known of the gradient; format: of the
    parameter and the states; shape, strides: of the parameter, where these are the elements of a
    whole one; strides None: contiguous; held: the optimizer has states of the parameter already;
    parts: of it on different ranks, at most.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    old: Mapping[str, torch.Tensor]
    new: Mapping[str, torch.Tensor]
    error: torch.Tensor | float = 0.0
    format: Format = FP32
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    held: bool = False
    parts: int = 1

    def shaped(self, vector: torch.Tensor) -> torch.Tensor:
        """Return elements of a whole parameter in its shape and order of memory.

        Kernels that multiply matrices round by the order of memory.
        """
        if self.strides is None:
            return vector.reshape(self.shape)
        whole = torch.empty_strided(self.shape, self.strides, dtype=vector.dtype)
        return whole.copy_(vector.reshape(self.shape))


class Segment(NamedTuple):
    """Inputs and results of an update for the wrong tensors of one parameter group.

    role: which is wrong; observed: its values after the update; options, group, lr, step, reading:
    what scalars are made of, the number of the update among them; rates: learning rates of this
    group at other steps; others: other groups, with their learning rates; unclipped: the gradient
    before clipping; previous: what it was to be in the step before; since: steps since the case
    began; microbatches: of each step; wider: what is not known of each result, where states are
    hidden; in_memory: the gradient with the elements of parameters that are not contiguous in the
    order of memory, and the other way round; gradients: (cause, gradient) of known mistakes in a
    reduction; parameter_after: as it was observed; ranks: numbers of ranks that it may be sharded
    over.
    """

    role: str
    observed: torch.Tensor
    elements: UpdateElements
    options: Optimizer
    group: Group
    lr: float
    step: int
    reading: Reading
    rates: Sequence[float] = ()
    others: Sequence[tuple[Group, float]] = ()
    unclipped: torch.Tensor | None = None
    previous: torch.Tensor | None = None
    since: int = 0
    microbatches: int = 1
    wider: torch.Tensor | float = 0.0
    in_memory: Sequence[torch.Tensor] = ()
    gradients: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple
    parameter_after: torch.Tensor | None = None
    ranks: Sequence[int] = ()


class Change(NamedTuple):
    """One thing that a step may have done otherwise, and what it would have given."""

    cause: str
    """The known bug that it is, "" for none."""
    words: str
    """What the step did, as the end of a sentence: "with weight decay twice"."""
    made: Callable[[], Enclosure | None]
    """Encloses the role of the segment; None if such a step does not have it."""

    @classmethod
    def known(cls, cause: str, words: str, enclosure: Enclosure) -> Change:
        """Return a change whose result is known already."""
        return cls(cause, words, lambda: enclosure)


class SegmentStep:
    """Step of a segment, to be taken with something else than what it should read."""

    def __init__(self, rule: UpdateRule, segment: Segment) -> None:
        self.rule, self.segment = rule, segment
        self.elements, self.role = segment.elements, segment.role
        self.scalars = self.with_()

    def with_(
        self,
        *,
        options: Optimizer | None = None,
        lr: float | None = None,
        step: int | None = None,
        **group: Any,
    ) -> Any:
        """Return the scalars with other options, or with other fields of the group."""
        one = self.segment
        return self.rule.scalars(
            replace(one.group, **group),
            options or one.options,
            lr=one.lr if lr is None else lr,
            step=step or one.step,
            reading=one.reading,
        )

    def take(
        self, scalars: Any = None, *, role: str | None = None, rounds: float = 0.0, **elements: Any
    ) -> Enclosure | None:
        """Enclose a role after the step. role: None for that of the segment.

        scalars: None for the right ones; elements: fields of UpdateElements that are others;
        rounds: roundings of the parameter, before and after, that this form of the step has more.
        """
        e = self.elements._replace(**elements)
        scalars = self.scalars if scalars is None else scalars
        asked = role or self.role
        made = next((one for name, one in self.rule.enclosures(e, scalars) if name == asked), None)
        if made is None or not rounds:
            return made
        more = rounds * e.format.u * (self.elements.parameter.abs() + made.exact.abs())
        return Enclosure(made.exact, made.bound + more)

    def change(self, cause: str, words: str, scalars: Any = None, **changed: Any) -> Change:
        """Return a change, with what `take` is given for it."""
        return Change(cause, words, partial(self.take, scalars, **changed))


class Interval(NamedTuple):
    """Values that are not known exactly, float64: [middle - error, middle + error]."""

    middle: torch.Tensor
    error: torch.Tensor


States = Mapping[str, torch.Tensor]
"""Values by role, and those of `parameter`."""
Hidden = Mapping[str, Interval]
"""Values by role that are not observed."""


class OptionFields(NamedTuple):
    """Names of fields of `case.schema.Group` and `Optimizer` that an optimizer reads."""

    group: tuple[str, ...]
    optimizer: tuple[str, ...]


class OptimizerTrial(NamedTuple):
    """Options with which a class is tried alone, to see that it is this optimizer.

    options: exact in fp32; states: roles that a state must have then; close: largest error of an
    update, relative to the right one. Of an elementwise optimizer round-off gives less than 2^-18:
    a few units of 2^-24 of the update, and half an ulp of a parameter below 1/4 (2^-27) against a
    step of 2^-6. Other optimizers, and the same with another term, are off by a tenth or more. It
    sorts; it is no verdict.
    """

    options: Mapping[str, Any]
    states: tuple[StateRole, ...]
    close: float = 2.0**-10


class OptimizerSpecification(Protocol):
    """Optimizer of a case, as far as zerocheck has to know it: one rule, or two of them."""

    kind: OptimizerKind
    """Name in cases and options: "adamw"."""
    name: str
    """Name in sentences: "AdamW"."""
    states: tuple[StateRole, ...]
    """Roles of the states that have values for the elements of a parameter, in the order of a step.

    A state that does not exist before the first step counts as zeros there.
    """
    hidden: tuple[StateRole, ...]
    """States that are enclosed from step to step where an optimizer does not expose them."""
    counts_steps: bool
    """True if a parameter's state counts its steps."""
    fields: OptionFields
    """Fields of a case that are options of this optimizer."""

    @property
    def rules(self) -> tuple[UpdateRule, ...]:
        """Rules by which it updates parameters, each of them once."""

    def rule(self, options: Optimizer, name: str, shape: Sequence[int]) -> UpdateRule:
        """Return the rule by which the parameter of this name and shape is updated."""

    def states_with(self, options: Optimizer) -> tuple[StateRole, ...]:
        """Return the states that it has with these options."""

    def swaps(self, role: str) -> Sequence[tuple[str, str]]:
        """Return (cause, other role) of each state that can be taken for this one."""

    def read_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a case that a parameter group of torch's optimizer has."""


class UpdateRule(OptimizerSpecification, Protocol):
    """Optimizer that updates all of its parameters by one rule: base of these classes.

    Scalars are the hyperparameters of one group at one step, with what is computed from them; only
    the optimizer that made them reads them.
    """

    @property
    def rules(self) -> tuple[UpdateRule, ...]:
        """Return the optimizer itself."""
        return (self,)

    def rule(self, options: Optimizer, name: str, shape: Sequence[int]) -> UpdateRule:
        """Return the optimizer itself."""
        return self

    def swaps(self, role: str) -> Sequence[tuple[str, str]]:
        """Return nothing, as of one state."""
        return ()

    def read_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a case that a group has by the same names."""
        names = (*self.fields.group, *self.fields.optimizer)
        return {name: group[name] for name in names if name in group}

    torch_class: type[torch.optim.Optimizer]
    """Optimizer of torch that takes these steps."""
    lookalikes: tuple[type[torch.optim.Optimizer], ...]
    """Classes of torch with the states of this optimizer; a wrong step is for the judge."""
    trial: OptimizerTrial
    """Options with which a class of the user's is tried."""
    readings: tuple[Reading, ...]
    """Ways in which right implementations compute a step, the usual one first."""
    whole: bool
    """True if it computes with whole parameters; False if element by element."""
    one_by_one: bool = False
    """True if a step is judged one parameter after the other; False if all elements at once."""
    itself: bool = False
    """True if its reference is the optimizer itself, run unsharded; False if its equations are."""
    couples_decay: bool = True
    """True if weight decay is added to the gradient; False if it shrinks the parameter."""
    recovers: bool = True
    """True if the gradient of a step can be recovered from its states."""
    counts_in_tensor: bool = True
    """True if a step count is a tensor, and no number of Python."""
    counts_in_group: bool = False
    """True if the step count stands in the parameter group, for all of its parameters."""
    scalar_names: tuple[str, ...] = ()
    """Names of states that are one number, other than the step count."""
    states_at_once: bool = False
    """True if torch makes the states with the optimizer, and not in the first step."""

    def torch_group(self, group: Group, options: Optimizer) -> dict[str, Any]:
        """Return the options of a parameter group of torch's optimizer."""

    def foreign_option(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
        """Say in words which option of a group makes it another optimizer; "" if none does."""
        return ""

    def scalar_states(self, group: Mapping[str, Any], count: int) -> dict[str, torch.Tensor]:
        """Return states that are one number, after `count` steps with a group of torch.

        The step count is not among them. By default there are none.
        """
        return {}

    def counted(self, count: torch.Tensor) -> Any:
        """Return a step count as a state has it: a tensor, or a number."""
        return count.clone()

    def state_dtype(self, role: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a state for a parameter of the given dtype."""
        return dtype

    def state_shape(self, role: str, dims: int) -> StateShape | None:
        """Return the shape of a state of a parameter with so many dims, None if it has none."""
        return WHOLE if role in self.states else None

    def size_of(self, role: str, scale: float) -> float:
        """Return the size of a state as of gradients of the size `scale`."""

    def drawn(
        self, parameter: torch.Tensor, options: Optimizer, scale: float, generator: torch.Generator
    ) -> dict[StateRole, torch.Tensor]:
        """Draw states (fp32) in mid-training, as of gradients of the size `scale`, expanded."""

    def scalars(
        self, group: Group, options: Optimizer, *, lr: float, step: int, reading: Reading
    ) -> Any:
        """Compute the scalars of a group at its update number `step` >= 1.

        An optimizer that does not count steps is given any number.
        """

    def enclosures(self, elements: UpdateElements, scalars: Any) -> Iterator[tuple[str, Enclosure]]:
        """Enclose what a step computes, in its order, from what was observed; parameter last."""

    def changes(self, step: SegmentStep) -> Iterator[Change]:
        """Iterate over the changes that this rule alone may have, beyond `changes.py`."""

    def recovered(self, old: States, new: States, scalars: Any, format: Format) -> Interval:
        """Recover the gradient of a step, to fp32, from what is held before and after it.

        old, new: states by role, and `parameter`. Raises NotImplementedError for a rule whose step
        says nothing of its gradient.
        """
        _unknown(self, "with the gradient that it was given")

    def range(
        self, parameter: torch.Tensor, hidden: Hidden, gradient: Interval, scalars: Any
    ) -> Enclosure:
        """Enclose the next parameter where states are known as intervals only."""
        _unknown(self, "by its states")

    def hidden_after(
        self, parameter: torch.Tensor, hidden: Hidden, gradient: Interval, scalars: Any
    ) -> dict[str, Interval]:
        """Enclose the hidden states after a step. parameter: before it."""
        _unknown(self, "by its states")

    def reference_options(self, group: Group, options: Optimizer) -> OptimizerOptions:
        """Return the options of a group for the trainer of the reference."""


def _unknown(rule: UpdateRule, judged: str) -> NoReturn:
    raise NotImplementedError(f"{rule.name} is judged {judged}")
