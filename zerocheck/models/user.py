"""User's own model as the model of a case: `--model path/to/file.py:factory`.

The factory takes no arguments and returns one of

    (model, batch)          batch(generator) -> the arguments of the model, which returns the loss,
                            or an object or mapping with the loss under `loss`
    (model, batch, loss)    batch(generator) -> (inputs, target), of which the loss is
                            loss(model(*inputs), target)

`batch` draws one microbatch of one rank with the torch.Generator that it is given, and nothing
else; inputs are a tensor, a tuple of tensors, or a dict of tensors, which the model gets as keyword
arguments; the target is a tensor. The loss is a 0-d tensor, the mean over the microbatch. The
harness seeds torch before it calls the factory, so that every rank and the judge build the same
model; which one follows from the seed of the case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn

from ..case.schema import Case, UserModel, UserParameter
from ..case.shapes import matching
from ..errors import UsageError
from ..user_code import import_user_code
from .parts import model_of, show_blocks
from .seeds import WEIGHTS, seed_of

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""dtypes that parameters may have."""

Draw = Callable[[torch.Generator], Any]
Loss = Callable[[Any, Any], Any]


class DrawnBatch(NamedTuple):
    """Batch: the arguments of the model, the last of them keywords by these names."""

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parts:
    """Functions that belong to a model.

    draw: draws a batch; loss: None where the model returns it.
    """

    name: str
    draw: Draw
    loss: Loss | None

    def drawn(self, generator: torch.Generator) -> DrawnBatch:
        """Draw one microbatch; the target is empty where the model computes the loss.

        Raises UsageError, with what is needed, for anything else that `batch` returns.
        """
        given = self.draw(generator)
        target: Any = torch.empty(0)
        if self.loss is not None:
            if not isinstance(given, tuple | list) or len(given) != 2:
                raise self._wrong(given, "needed is a pair (inputs, target), since it has a loss")
            given, target = given
            if not isinstance(target, torch.Tensor):
                raise self._wrong(target, "as the target; needed is a tensor")
        keywords: tuple[str, ...] = ()
        inputs = (given,) if isinstance(given, torch.Tensor) else given
        if isinstance(given, Mapping):
            keywords, inputs = tuple(map(str, given)), tuple(given.values())
        if not isinstance(inputs, tuple | list):
            raise self._wrong(given, "needed is a tensor, a tuple of tensors, or a dict of tensors")
        for value in inputs:
            if not isinstance(value, torch.Tensor):
                raise self._wrong(value, "among the inputs; needed are tensors")
        return DrawnBatch(tuple(inputs), target, keywords)

    def loss_of(self, outputs: Any, target: torch.Tensor) -> torch.Tensor:
        """Return the loss, 0-d fp32. Raises UsageError, with what is needed, for anything else."""
        loss = _loss_in(outputs) if self.loss is None else self.loss(outputs, target)
        if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point():
            return loss.float()
        if isinstance(loss, torch.Tensor):
            what = f"a tensor of shape {tuple(loss.shape)} and dtype {loss.dtype}"
        else:
            what = type(loss).__name__
        if self.loss is not None:
            raise UsageError(f"the loss of {self.name} is {what}; needed is a 0-d float tensor")
        raise UsageError(
            f"the model of {self.name} returns {what}; needed is the loss, a 0-d float tensor, an "
            "object with it as .loss, or a third function: return model, batch, loss with "
            "loss(outputs, target)"
        )

    def _wrong(self, given: Any, needed: str) -> UsageError:
        what = type(given).__name__
        if isinstance(given, tuple | list):
            what += f" of {len(given)}"
        return UsageError(f"the batch function of {self.name} returns {what}; {needed}")


def _loss_in(outputs: Any) -> Any:
    """Return the loss in a model's output: itself, or `loss` of an object or a mapping."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("loss", outputs)
    return getattr(outputs, "loss", outputs)


def call_with(
    call: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    keywords: tuple[str, ...],
    past: Callable[..., torch.Tensor] | None = None,
) -> Any:
    """Call a model with inputs of which the last ones are keyword arguments by these names.

    past: a second call with the same inputs, of which half is added (`data.past_wrapper`).
    """
    count = len(inputs) - len(keywords)
    named = dict(zip(keywords, inputs[count:], strict=True))
    outputs = call(*inputs[:count], **named)
    return outputs if past is None else outputs + past(*inputs[:count], **named) * 0.5


_factories: dict[str, Callable[[], Any]] = {}
_parts: dict[str, Parts] = {}


def forget_factories() -> None:
    """Import the user's functions anew where they are needed next: they may have changed."""
    _factories.clear()
    _parts.clear()


def factory_of(name: str) -> Callable[[], Any]:
    """Return the function of that name, import_user_code once per process. Runs the user's code.

    Raises UsageError, with the nearest name, where there is none.
    """
    if name not in _factories:
        found = import_user_code(name)
        if not callable(found) or isinstance(found, nn.Module):
            raise UsageError(
                f"{name} is of type {type(found).__name__}; needed is a function that returns "
                "(model, batch) or (model, batch, loss)"
            )
        _factories[name] = found
    return _factories[name]


def make_model(name: str, seed: int) -> tuple[nn.Module, Parts]:
    """Call the factory with torch's global generator seeded; its state is put back.

    Raises UsageError for what it raises, and for what is not a model with its batches.
    """
    factory = factory_of(name)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        try:
            given = factory()
        except Exception as error:
            raise UsageError(f"{name} fails: {type(error).__name__}: {error}") from error
    return model_of(name, given), _parts.setdefault(name, parts_in(name, given))


def parts_in(name: str, given: Any) -> Parts:
    """Return the functions in the result of a factory.

    Raises UsageError for a result without them, and for what is no such function.
    """
    functions = given[1:] if isinstance(given, tuple) else ()
    if len(functions) not in (1, 2):
        what = "the model alone" if not functions else f"a tuple of {len(given)}"
        raise UsageError(
            f"{name} returns {what}; needed is (model, batch) or (model, batch, loss), where "
            "batch(generator) draws one microbatch"
        )
    for label, function, count in zip(("batch", "loss"), functions, (1, 2), strict=False):
        _check_callable(name, label, function, count)
    return Parts(name, functions[0], functions[1] if len(functions) == 2 else None)


def parts_of(user: UserModel) -> Parts:
    """Return batches and loss of the model: those of the first that was made in this process."""
    if user.factory not in _parts:
        make_model(user.factory, 0)
    return _parts[user.factory]


def build_user_model(case: Case) -> nn.Module:
    """Build the model of a case with `model.user`, on the CPU, in the factory's mode.

    Raises UsageError where it is not the one that the case describes.
    """
    user = case.model.user
    assert user is not None
    model, _ = make_model(user.factory, seed_of(case.seed, WEIGHTS))
    parameters = dict(model.named_parameters())
    _check_same(user, parameters)
    with torch.no_grad():
        for name in matching(parameters, case.start.zeros):
            parameters[name].zero_()
    _mark_no_units(user, model)
    show_blocks(model, otherwise=model.children())
    return model


@torch.no_grad()
def vary_batch(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return different fp32 values of about the same size: every element changes, and no 0 stays.

    The user's own initialization determines the size.
    """
    value = tensor.detach().float()
    if value.numel() == 0:
        return value.clone()
    factor = torch.empty(value.shape).uniform_(0.75, 1.25, generator=generator)
    added = torch.empty(value.shape).uniform_(0.005, 0.02, generator=generator)
    other = value * factor + added
    return torch.where(other == value, other + 1, other)


def describe_model(name: str, parameter: torch.Tensor, used: Any = "always") -> UserParameter:
    """Describe a parameter for cases. Raises UsageError for one that cannot be judged."""
    if parameter.dtype not in DTYPES:
        raise UsageError(
            f"parameter {name} has dtype {parameter.dtype}; allowed: torch.float32, torch.bfloat16"
        )
    return UserParameter(
        name=name,
        shape=tuple(parameter.shape),
        dtype="bf16" if parameter.dtype == torch.bfloat16 else "fp32",
        trains=parameter.requires_grad,
        contiguous=parameter.is_contiguous(),
        used=used,
    )


def _check_callable(name: str, label: str, function: Any, count: int) -> None:
    """Raise UsageError for an object that cannot be called with so many arguments."""
    takes = "(generator)" if count == 1 else "(outputs, target)"
    if not callable(function):
        raise UsageError(
            f"the {label} of {name} is of type {type(function).__name__}; needed is a function "
            f"{label}{takes}"
        )
    try:
        signature(function).bind(*range(count))
    except TypeError:
        given = signature(function)
        raise UsageError(f"the {label} of {name} takes {given}; needed is {label}{takes}") from None
    except ValueError:  # a builtin without a signature
        return


def _check_same(user: UserModel, parameters: dict[str, nn.Parameter]) -> None:
    wanted = {one.name: one for one in user.parameters}
    for name in {**wanted, **parameters}:
        if name not in parameters or name not in wanted:
            where = "the case" if name in wanted else "the model"
            raise UsageError(f"{user.factory}: only {where} has the parameter {name}")
        now, then = describe_model(name, parameters[name]), wanted[name]
        for field in ("shape", "dtype", "trains", "contiguous"):
            if getattr(now, field) != getattr(then, field):
                raise UsageError(
                    f"{user.factory}: {name} has {field} {getattr(now, field)}, in the case it is "
                    f"{getattr(then, field)}"
                )
    if list(wanted) != list(parameters):
        raise UsageError(f"{user.factory}: its parameters come in another order than in the case")


def _mark_no_units(user: UserModel, model: nn.Module) -> None:
    """Mark modules that some ranks do not call, or whose weights are used elsewhere."""
    sometimes = {one.name for one in user.parameters if one.used == "sometimes"}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        trained = {names[parameter] for parameter in module.parameters()} if sometimes else set()
        if path and (path in user.bypassed or (trained and trained <= sometimes)):
            module.no_unit = True
