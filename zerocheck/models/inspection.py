"""Inspection of the user's model: its description, and whether it can be judged.

It runs in a rank process. A model is judged by running it twice, once by the implementation and
once by the reference, so it must do the same both times: that is tried here, and what differs is
named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..case.schema import UseKind, UserModel, UserParameter
from ..case.validity import MAX_ELEMENTS
from ..catalogue import check_factory
from ..compat import Operators
from ..errors import UsageError
from ..machine.devices import CPU, forked, random_state, seed_device
from .parts import is_container
from .seeds import DATA, DROPOUT, WEIGHTS, generator_of, seed_of
from .user import call_with, describe_model, make_model

SAMPLES = 8
"""Microbatches that are tried, to see which parameters are used always, sometimes or never."""

FEW_SAMPLES = 2
LARGE = 1 << 22
"""Elements; of a larger model FEW_SAMPLES are tried, since each takes about a second."""

OF_MODULES: tuple[tuple[str, tuple[type[nn.Module], ...]], ...] = (
    ("stem-embedding", (nn.Embedding,)),
    ("block-attention", (nn.MultiheadAttention,)),
    ("block-conv", (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    ("block-recurrent", (nn.RNNBase,)),
    ("block-layer-norm", (nn.LayerNorm,)),
    ("block-rms-norm", (nn.RMSNorm,)),
    ("block-group-norm", (nn.GroupNorm,)),
    ("block-batch-norm", (nn.modules.batchnorm._BatchNorm,)),
)
"""Features that a model has if it has a module of one of these types."""


def inspect_model(name: str, device: torch.device | None = None) -> UserModel:
    """Inspect the factory's model. Runs the user's code, and keeps torch's global random state.

    device: on which it is tried, None for the CPU. Raises UsageError, with what is given and what
    is needed, for a model that cannot be judged.
    """
    check_factory(name)
    device = device or torch.device(CPU)
    with forked(device), torch.enable_grad():
        return _Look(name, device).result()


class _Look:
    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.model, self.parts = make_model(name, seed_of(0, WEIGHTS))
        self.parameters = dict(self.model.named_parameters())
        self.buffers = dict(self.model.named_buffers())
        self.calls: Counter[nn.Module] = Counter()
        self.bypassed: set[nn.Module] = set()

    def result(self) -> UserModel:
        parameters = self._parameters()
        replica, _ = make_model(self.name, seed_of(0, WEIGHTS))
        self._same_start(replica)
        self._same_batches()
        if self.device.type != CPU:
            self.model, replica = self.model.to(self.device), replica.to(self.device)
            self.parameters = dict(self.model.named_parameters())
            self.buffers = dict(self.model.named_buffers())
        start = {name: buffer.clone() for name, buffer in self.buffers.items()}
        loss, gradients, random = self._pass(self.model, 0, counted=True)
        self._same(loss, gradients, replica, "is not deterministic")
        self._put_back(start)
        self._pass(self.model, 1)
        self._put_back(start)
        self._same(
            loss, gradients, self.model, "keeps a state between forwards that is in no buffer"
        )
        uses, draws = self._uses(gradients)
        paths = {module: path for path, module in self.model.named_modules()}
        return UserModel(
            factory=self.name,
            parameters=tuple(
                describe_model(one.name, self.parameters[one.name], uses[one.name])
                for one in parameters
            ),
            order=tuple(paths[module] for module in self.calls if paths.get(module)),
            bypassed=tuple(sorted(paths[module] for module in self.bypassed)),
            features=tuple(self._features(random=random or draws)),
            buffers=bool(self.buffers),
        )

    def _uses(self, first: Collection[str]) -> tuple[dict[str, UseKind], bool]:
        """Return how each parameter is used, and whether random numbers were drawn.

        Routing depends on weights as on samples, so each microbatch has other weights too. first:
        names of those with a gradient in the first.
        """
        elements = sum(one.numel() for one in self.parameters.values())
        count = FEW_SAMPLES if elements > LARGE else SAMPLES
        used = Counter(list(first))
        random = False
        for number in range(1, count):
            model, _ = make_model(self.name, seed_of(number, WEIGHTS))
            if self.device.type != CPU:
                model = model.to(self.device)
            _, others, draws = self._pass(model, number)
            used.update(others.keys())
            random = random or draws
        uses: dict[str, UseKind] = {}
        for name, parameter in self.parameters.items():
            if used[name] == count or not parameter.requires_grad:
                uses[name] = "always"
            else:
                uses[name] = "sometimes" if used[name] else "never"
        self._spread(uses)
        if not any(one.requires_grad and uses[n] == "always" for n, one in self.parameters.items()):
            raise UsageError(
                f"{self.name}: no parameter has a gradient in each of {count} microbatches; needed "
                "is at least 1"
            )
        return uses, random

    def _spread(self, uses: dict[str, UseKind]) -> None:
        """Mark all items of a list like one that is used sometimes, as an expert is.

        A few samples may have called some of them always, or never.
        """
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for module in self.model.modules():
            if not isinstance(module, nn.ModuleList):
                continue
            tensors = [
                (type(item), [names[p] for p in item.parameters() if p.requires_grad])
                for item in module
            ]
            routed = {
                kind
                for kind, held in tensors
                if "sometimes" in {uses[name] for name in held}
                and "always" not in {uses[name] for name in held}
            }
            for kind, held in tensors:
                if kind in routed:
                    uses.update(dict.fromkeys(held, "sometimes"))

    def _parameters(self) -> list[UserParameter]:
        """Describe all parameters. Raises UsageError for one that cannot be judged."""
        if not self.parameters:
            raise UsageError(f"the model of {self.name} has no parameters")
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            if nn.parameter.is_lazy(tensor):
                raise UsageError(
                    f"{self.name}: {name} has no shape yet; run the model once in the factory"
                )
            if tensor.device.type != "cpu":
                raise UsageError(
                    f"{self.name} puts {name} on {tensor.device}; needed is the CPU: the harness "
                    "moves the model"
                )
        found = [describe_model(name, one) for name, one in self.parameters.items()]
        elements = sum(one.numel() for one in self.parameters.values())
        if elements > MAX_ELEMENTS:
            raise UsageError(
                f"the model of {self.name} has {elements} elements; allowed: at most {MAX_ELEMENTS}"
            )
        return found

    def _same_start(self, replica: nn.Module) -> None:
        others = {**dict(replica.named_parameters()), **dict(replica.named_buffers())}
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            other = others.pop(name, None)
            if other is None or not same_bits(tensor, other):
                raise UsageError(
                    f"{self.name} is not deterministic: built twice from the same seed of torch, "
                    f"{name} differs"
                )
        if others:
            raise UsageError(
                f"{self.name} is not deterministic: built twice, {next(iter(others))} is there once"
            )

    def _same_batches(self) -> None:
        """Check that equal generators give equal batches, and different ones different batches."""
        torch.default_generator.manual_seed(1)
        first = self._batch(0)
        torch.default_generator.manual_seed(2)
        again, other = self._batch(0), self._batch(1)
        for index, (one, two) in enumerate(zip(first, again, strict=False)):
            if not same_bits(one, two):
                what = "the target" if index == len(first) - 1 else f"input {index}"
                raise UsageError(
                    f"the batch of {self.name} is not deterministic: {what} differs for the same "
                    "generator; draw with the generator that it is given, and nothing else"
                )
        if len(first) == len(other) and all(map(same_bits, first, other)):
            raise UsageError(
                f"the batch of {self.name} does not depend on the generator that it is given, so "
                "all ranks would read the same samples"
            )

    def _batch(self, number: int) -> tuple[torch.Tensor, ...]:
        generator = generator_of(0, DATA, microbatch=number)
        with as_usage_error(f"the batch of {self.name}"):
            drawn = self.parts.drawn(generator)
        self.keywords = drawn.keywords
        return (*drawn.inputs, drawn.target)

    def _pass(
        self, model: nn.Module, number: int, *, counted: bool = False
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], bool]:
        """Run a forward and backward.

        Returns (loss, gradients, True if random numbers were drawn).
        """
        *inputs, target = (one.to(self.device) for one in self._batch(number))
        for parameter in model.parameters():
            parameter.grad = None
        seed_device(seed_of(0, DROPOUT, microbatch=number), self.device)
        before = random_state(self.device)
        with (
            as_usage_error(f"the forward of {self.name}"),
            self._counting() if counted else nullcontext(),
        ):
            loss = self.parts.loss_of(call_with(model, tuple(inputs), self.keywords), target)
        random = before != random_state(self.device)
        if not bool(torch.isfinite(loss)):
            raise UsageError(
                f"the loss of {self.name} is {float(loss.detach())}; needed is a finite one"
            )
        if not loss.requires_grad:
            raise UsageError(f"the loss of {self.name} depends on no parameter that trains")
        with as_usage_error(f"the backward of {self.name}"):
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: one.grad for name, one in model.named_parameters() if one.grad is not None
        }
        return loss.detach(), gradients, random

    def _same(
        self, loss: torch.Tensor, gradients: dict[str, torch.Tensor], model: nn.Module, how: str
    ) -> None:
        again, others, _ = self._pass(model, 0)
        wrong = f"{self.name} {how}: run again from the same seed of torch,"
        if not same_bits(loss, again):
            raise UsageError(f"{wrong} the loss is {float(again)}, not {float(loss)}")
        for name in {**gradients, **others}:
            one, two = gradients.get(name), others.get(name)
            if one is None or two is None or not same_bits(one, two):
                raise UsageError(f"{wrong} the gradient of {name} differs")

    def _put_back(self, start: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(start[name])

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the calls of modules with parameters, and note which are bypassed.

        Not around a backward: that of a checkpoint calls its modules once more.
        """
        active: list[nn.Module] = []

        def called(module: nn.Module, _: object) -> None:
            active.append(module)
            if any(True for _ in module.parameters()):
                self.calls[module] += 1

        def returned(module: nn.Module, *_: object) -> None:
            active.pop()

        hooks = nn.modules.module
        registered = [
            hooks.register_module_forward_pre_hook(called),
            hooks.register_module_forward_hook(returned, always_call=True),
        ]
        try:
            with _Uses(self.model, active, self.bypassed):
                yield
        finally:
            for hook in registered:
                hook.remove()

    def _features(self, *, random: bool) -> Iterator[str]:
        modules = list(self.model.modules())
        for feature, kinds in OF_MODULES:
            if any(isinstance(module, kinds) for module in modules):
                yield feature
        tests: tuple[tuple[str, Callable[[], bool]], ...] = (
            ("dropout", lambda: random),
            ("tied", self._tied),
            ("padding-idx", lambda: any(_pads(module) for module in modules)),
            ("module-twice", lambda: any(count > 1 for count in self.calls.values())),
            ("mixed-dtypes", lambda: len({one.dtype for one in self.parameters.values()}) > 1),
        )
        for feature, present in tests:
            if present():
                yield feature

    def _tied(self) -> bool:
        every = list(self.model.named_parameters(remove_duplicate=False))
        return len(every) > len(self.parameters)


class _Uses(Operators):
    """Notes modules whose parameters are used while they are not active: by a parent that takes
    the weight of a child, or by an autograd function.

    Of a tied parameter one of its places must be active. A list of modules is never active.
    """

    def __init__(self, model: nn.Module, active: list[nn.Module], noted: set[nn.Module]) -> None:
        super().__init__()
        self.active, self.noted = active, noted
        self.places: dict[int, list[set[nn.Module]]] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            parts = path.split(".") if path else []
            above = (modules[".".join(parts[:depth])] for depth in range(1, len(parts)))
            place = {*(parent for parent in above if not is_container(parent)), module} - {model}
            for parameter in module.parameters(recurse=False):
                self.places.setdefault(_storage(parameter), []).append(place)

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                left = [
                    place.difference(self.active) for place in self.places.get(_storage(value), ())
                ]
                if left and all(left):
                    self.noted.update(*left)
        return func(*args, **kwargs)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _pads(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and module.padding_idx is not None


@contextmanager
def as_usage_error(what: str) -> Iterator[None]:
    """Turn errors of the user's code into usage errors that say where they come from."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what} fails: {type(error).__name__}: {error}") from error


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype and values; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool(torch.equal(one.nan_to_num(nan=0.0), other.nan_to_num(nan=0.0))) and torch.equal(
        one.isnan(), other.isnan()
    )
