"""Local gradients of every rank and microbatch, computed by the reference on one device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerocheck_reference import local_pass

from ..case.schema import Case
from ..case.shapes import unfrozen
from ..compat import without_recomputation
from ..compat_compiler import use_deterministic, without_compiler
from ..contract.no_kernel import refused_dtypes
from ..execution.alignment import lies, place
from ..execution.graph import GraphNotes
from ..execution.kernels import deterministic, kept
from ..execution.operator_noise import CancellationNoise, OperatorNoise
from ..machine.devices import CPU, forked, seed_device, set_random_state
from ..models.batches import Batch, batch, loss_of, weight
from ..models.overflow import Overflow
from ..models.user import call_with
from ..protocol.observations import StepObservation
from . import vectors
from .layout import ParameterLayout
from .mirrors import (
    as_parameters,
    as_views,
    cast_inputs,
    cast_outputs,
    pass_detached,
    pass_through,
    recomputing,
)
from .perturbation import rounding_otherwise
from .precision import OWN, Computing
from .redrawn import computing_again
from .uses import Use, UseNotes

Scale = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Passes:
    """All forwards and backwards of one step.

    gradients: (ranks, microbatches, size), 0 where there is none; fp32, or float64 where losses
    were scaled or divided by the number of ranks, which is taken back; arrived: (ranks,
    microbatches, parameters), whether there was a gradient; losses: [rank][microbatch]; buffers:
    per rank, after the forwards.
    """

    gradients: torch.Tensor
    arrived: torch.Tensor
    losses: list[list[float]]
    buffers: list[dict[str, torch.Tensor]]

    @property
    def used(self) -> torch.Tensor:
        """Return, per rank, the mask of parameters that took part."""
        return self.arrived.any(1)

    def without_gradients(self) -> Passes:
        """Return everything but the gradients, which are the largest."""
        return replace(self, gradients=self.gradients[..., :0].clone())


class LocalRunner:
    """Runner of a case's model with given parameters, as each rank would run it."""

    def __init__(
        self,
        model: nn.Module,
        case: Case,
        layout: ParameterLayout,
        device: torch.device | None = None,
        computing: Computing = OWN,
    ) -> None:
        """Build the model. device: of the kind that the ranks ran on, None for the CPU.

        The device's kernels decide bits. The model is moved there, and its parameters are cast if
        `computing` declares it: loading them from fp32 is that cast. All inputs and results are on
        the CPU, and in fp32.
        """
        self.case = case
        self._device = device or torch.device(CPU)
        if self._device.type != CPU:
            model = model.to(self._device)
        self._computing = computing
        if computing.cast is not None:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(computing.cast)
        self.layout = layout
        self._loss_of = loss_of(case)
        self._overflow = Overflow(case)
        self._scale: Scale | None = None
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._later = unfrozen(case)
        self._states: Sequence[Sequence[bytes]] = ()
        self._same_buffers = None if case.model.user else dict(model.named_buffers())
        self._modules = dict(model.named_modules())
        self._strides = {name: p.stride() for name, p in self._parameters.items()}
        self._as_on: tuple[Mapping[str, int], Mapping[str, tuple[int, ...]]] | None = ({}, {})
        if self._device.type != CPU:
            self._as_on = None  # cuDNN lays the weights of a recurrent module end to end
        self._hooked: tuple[tuple[str, ...], ...] = ((), (), (), (), ())
        self._tracked: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self._recomputed: dict[nn.Module, Any] = {}
        self._graphs: GraphNotes | None = None
        self._forward_only = False
        self._past_factor = 1.0
        self._uses: UseNotes | None = None
        self._noted: dict[tuple[int, int], dict[str, list[Use]]] = {}

    @property
    def _buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of the model, which a user's own model may replace by other tensors."""
        return self._same_buffers or dict(self._model.named_buffers())

    def run(
        self,
        step: int,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[Mapping[str, torch.Tensor]],
        observed: Sequence[StepObservation],
        *,
        loss_divisor: float,
        ranks: int = 1,
        weighted: bool = False,
        scales: Sequence[float] = (),
        states: Sequence[Sequence[bytes]] = (),
        scale: Scale | None = None,
        sent_each: bool = False,
        one_forward: bool = False,
    ) -> Passes:
        """Run one step of all ranks.

        parameters[r]: the flat vector that rank r computes with; buffers[r]: its buffers before;
        observed[r]: how it ran the model; ranks: what of the divisor of losses is taken back, by an
        exact product of their gradients; weighted: losses are weighted by their tokens; scales[r]:
        loss scale of rank r; states[r][m]: random state in which it enters a loss, if the case
        carries random numbers on; sent_each: the buffers of rank 0 are sent to all ranks before
        every forward; one_forward: of the first microbatch alone, without a backward. For
        counterfactuals: scale, what else is done to each loss
        before its backward.
        """
        self._scale = scale
        self._states = states
        learning = self._later if step >= (self.case.training.unfreeze or 0) else ()
        world, count = len(parameters), 1 if one_forward else self.case.training.microbatches
        gradients = vectors.zeros(world, count, self.layout.size)
        arrived = torch.zeros(world, count, len(self.layout.places), dtype=torch.bool)
        losses: list[list[float]] = []
        after: list[dict[str, torch.Tensor]] = []
        sent: list[dict[str, torch.Tensor]] = []
        loaded: torch.Tensor | None = None
        for rank in range(world):
            self._place(observed[rank])
            self._hook(observed[rank])
            self._track(observed[rank].tracked, learning)
            if loaded is not parameters[rank]:
                self._load(parameters[rank])
                loaded = parameters[rank]
            self._load_buffers(buffers[rank])
            losses.append([])
            for number in range(count):
                if sent_each and rank == 0:
                    sent.append({name: one.clone() for name, one in self._buffers.items()})
                elif sent_each:
                    self._load_buffers(sent[number])
                self._allow(arrived[rank, :number].any(0), last=number == count - 1)
                losses[rank].append(
                    self._pass(
                        step,
                        rank,
                        number,
                        gradients[rank, number],
                        arrived[rank, number],
                        loss_divisor=loss_divisor,
                        weighted=weighted,
                        loss_scale=scales[rank] if scales else 1.0,
                        backward=not one_forward,
                    )
                )
            after.append({n: buffer.to("cpu", copy=True) for n, buffer in self._buffers.items()})
        if ranks > 1 or any(one != 1.0 for one in scales):
            gradients = vectors.copy(gradients, torch.float64)
        if any(one != 1.0 for one in scales):
            gradients /= torch.tensor(scales, dtype=torch.float64).view(-1, 1, 1)
        if ranks > 1:
            gradients *= ranks
        return Passes(gradients, arrived, losses, after)

    def _allow(self, arrived: torch.Tensor, *, last: bool) -> None:
        """Let the leaves take gradients as `Computing.kernel` says.

        arrived: by place, True where an earlier microbatch gave a gradient.
        """
        if not self._computing.kernel:
            return
        for one, known in zip(self.layout.places, arrived.tolist(), strict=True):
            begins = self._computing.first and not (known or last)
            self._parameters[one.name].grad_dtype = torch.float32 if begins else None

    def _pass(
        self,
        step: int,
        rank: int,
        number: int,
        into: torch.Tensor,
        arrived: torch.Tensor,
        *,
        loss_divisor: float,
        weighted: bool,
        loss_scale: float,
        backward: bool,
    ) -> float:
        where = {"step": step, "rank": rank, "microbatch": number}
        drawn = batch(self.case, **where).on(self._device)
        self._overflow.enter(**where)

        def loss(model: nn.Module) -> torch.Tensor:
            self._randomise(drawn.seed, rank, number)
            value = self._loss_of(self._outputs(model, drawn), drawn.target)
            value = self._overflow.of_loss(value, **where)
            if self._graphs is not None:
                self._graphs.note(value)
            return value if self._scale is None else self._scale(value)

        if self._forward_only:
            with torch.no_grad():
                return float(loss(self._model))
        if not backward:  # with what a backward needs, as on a rank: that may choose kernels
            with self._overflow.planted(), torch.enable_grad():
                return float(loss(self._model).detach())
        with self._overflow.planted():
            result = local_pass(
                self._model,
                loss,
                loss_weight=weight(self.case, **where) if weighted else 1.0,
                loss_divisor=loss_divisor,
                loss_scale=loss_scale,
                parameters=self._parameters,
            )
        if self._uses is not None:
            self._noted[rank, number] = self._uses.taken()
        found = [
            None if place_.name in self._tracked else result.gradients.get(place_.name)
            for place_ in self.layout.places
        ]
        given = [one.reshape(-1) for one in found if one is not None]
        if given and len(given) == len(found):
            if self._device.type == CPU:
                torch.cat(given, out=into)
            else:
                into.copy_(torch.cat(given))
            arrived.fill_(True)
            return float(result.loss)
        for position, (place_, gradient) in enumerate(zip(self.layout.places, found, strict=True)):
            if gradient is not None:
                arrived[position] = True
                into[place_.start : place_.stop] = gradient.reshape(-1)
        return float(result.loss)

    def _outputs(self, model: nn.Module, drawn: Batch) -> torch.Tensor:
        """Compute the model's outputs as the semantics declare."""
        dtype, inputs = self._computing.dtype, drawn.inputs
        if dtype is not None and self._computing.inputs:
            inputs = cast_inputs(dtype, None, inputs)
        outputs: torch.Tensor
        autocast = torch.autocast(self._device.type, dtype, enabled=self._computing.autocast)
        with refused_dtypes(), autocast:
            past = partial(self._past_wrapper, model) if self.case.data.past_wrapper else None
            outputs = call_with(model, inputs, drawn.keywords, past)
        return cast_outputs(dtype, outputs) if self._computing.outputs else outputs

    def _past_wrapper(self, model: nn.Module, *inputs: torch.Tensor, **named: Any) -> torch.Tensor:
        """Call the model as a loss does past the wrapper."""
        outputs: torch.Tensor = model(*inputs, **named)
        factor = self._past_factor
        if factor != 1.0 and outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
        return outputs

    def _randomise(self, seed: int, rank: int, number: int) -> None:
        """Set the generator to the rank's state at the entry of the loss."""
        if self.case.data.rng == "seeded":
            seed_device(seed, self._device)
        elif number < len(self._states[rank]):
            set_random_state(self._states[rank][number], self._device)

    @contextmanager
    def rounding_otherwise(self, replica: int) -> Iterator[None]:
        """Perturb all module outputs, and terms that cancel, by a round-off within the context."""
        with rounding_otherwise(self._model, replica), CancellationNoise(replica):
            yield

    @contextmanager
    def moving_operators(self, replica: int) -> Iterator[None]:
        """Move each result of an operator by a round-off, within the context.

        What is checkpointed is computed once: a second forward would be moved in another way.
        """
        with without_recomputation(), OperatorNoise(replica):
            yield

    @contextmanager
    def noting_graphs(self) -> Iterator[GraphNotes]:
        """Record the fingerprint of each forward within the context."""
        self._graphs = GraphNotes()
        try:
            yield self._graphs
        finally:
            self._graphs = None

    @contextmanager
    def noting_uses(self) -> Iterator[dict[tuple[int, int], dict[str, list[Use]]]]:
        """Record the uses of each parameter by (rank, microbatch) within the context."""
        self._uses = UseNotes(self._model)
        self._noted = {}
        try:
            with self._uses.noting():
                yield self._noted
        finally:
            self._uses = None

    @contextmanager
    def adding_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Let autograd add the gradients of a parameter's uses in a narrower dtype."""
        wide = [one for one in self._parameters.values() if one.dtype.itemsize > dtype.itemsize]
        before = [one.grad_dtype for one in wide]
        for one in wide:
            one.grad_dtype = dtype
        try:
            yield
        finally:
            for one, given in zip(wide, before, strict=True):
                one.grad_dtype = given

    @contextmanager
    def multiplying_past_wrapper(self, factor: float) -> Iterator[None]:
        """Multiply gradients of what a loss takes past the wrapper, within the context."""
        self._past_factor = factor
        try:
            yield
        finally:
            self._past_factor = 1.0

    def computing_again(self, *, same_draws: bool) -> AbstractContextManager[None]:
        """Return a context with blocks that are computed again in the backward: see redrawn.py."""
        return computing_again(self._model, same_draws=same_draws)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run forwards only, in evaluation mode, within the context.

        cuDNN has no backward of a recurrent module in that mode.
        """
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        self._forward_only = True
        try:
            yield
        finally:
            self._forward_only = False
            for module, mode in modes:
                module.training = mode

    def _load(self, flat: torch.Tensor) -> None:
        flat = flat.to(self._device)
        with torch.no_grad():
            torch._foreach_copy_(
                list(self._parameters.values()),
                [flat[p.start : p.stop].view(p.shape) for p in self.layout.places],
            )

    def _load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in self._buffers.items():
            if name in buffers:
                buffer.copy_(buffers[name])

    def _place(self, observed: StepObservation) -> None:
        """Move the parameters to the alignment and strides of the ranks: BLAS depends on both."""
        if (observed.misaligned, observed.strides) == self._as_on:
            return
        for name, parameter in self._parameters.items():
            offset = observed.misaligned.get(name, 0)
            strides = observed.strides.get(name, self._strides[name])
            if offset != lies(parameter) or strides != parameter.stride():
                # The same nn.Parameter, so that nn.GRU's list of its parameters stays right.
                parameter.data = place(parameter.data, offset, strides)
        self._as_on = dict(observed.misaligned), dict(observed.strides)

    def _track(self, names: Collection[str], unfrozen_: Collection[str]) -> None:
        """Require gradients of the frozen parameters that the implementation tracks, unused here.

        unfrozen_: what was frozen and learns by now.
        """
        for name in {*self._tracked, *self._later, *names}:
            self._parameters[name].requires_grad_(name in names or name in unfrozen_)
        self._tracked = set(names) - set(unfrozen_)

    def _hook(self, observed: StepObservation) -> None:
        """Hook the same modules as the implementation: nodes change the order of additions."""
        how = (
            observed.passed_through,
            observed.restrided,
            observed.viewed,
            observed.cast,
            observed.recomputed,
        )
        if how == self._hooked:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for module, forward in self._recomputed.items():
            _put(module, "forward", forward)
        self._recomputed = {
            self._modules[name]: self._modules[name].__dict__.get("forward")
            for name in observed.recomputed
        }
        for module in self._recomputed:
            _put(module, "forward", partial(recomputing, module, module.forward))
        if self._computing.cast is not None:
            into = partial(cast_inputs, self._computing.cast)
            self._hooks += [
                self._modules[name].register_forward_pre_hook(into) for name in observed.cast
            ]
        self._hooks += [
            self._modules[name].register_forward_pre_hook(
                pass_through if name in observed.restrided else pass_detached
            )
            for name in observed.passed_through
        ]
        for name in observed.viewed:
            module = self._modules[name]
            parameters = {key: one for key, one in module._parameters.items() if one is not None}
            self._hooks.append(module.register_forward_pre_hook(as_views))
            # Also where the forward is cut short, as checkpointing does when it has all it needs.
            self._hooks.append(
                module.register_forward_hook(partial(as_parameters, parameters), always_call=True)
            )
        self._hooked = how


def _put(instance: nn.Module, attribute: str, value: Any) -> None:
    """Set an attribute of the instance; None: restore that of its class."""
    if value is None:
        instance.__dict__.pop(attribute, None)
    else:
        instance.__dict__[attribute] = value


@contextmanager
def as_on_a_rank(device: torch.device | None = None) -> Iterator[None]:
    """Use one thread and deterministic kernels, as ranks do, and restore the caller's settings.

    The thread count decides bits: Linear, LayerNorm and attention split their sums by it. device:
    on which the ranks were, None for the CPU.
    """
    device = device or torch.device(CPU)
    threads = torch.get_num_threads()
    asked = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if threads != 1:
        torch.set_num_threads(1)
    try:
        with kept(device), forked(device), without_compiler():
            deterministic(device, compiles=False)
            yield
    finally:
        use_deterministic(asked, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        if threads != 1:
            torch.set_num_threads(threads)
