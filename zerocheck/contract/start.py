"""State of a model before a case: a start in mid-training, and other weights before a load."""

from __future__ import annotations

import torch
from torch import nn

from ..case.schema import Case
from ..case.shapes import matching
from ..models.layers import fill
from ..models.seeds import SCRAMBLED, STATE, generator_of
from ..models.user import vary_batch
from ..optimizers import rule_of

SCALES = {"typical": 1.0, "tiny": 1e-12, "huge": 1e6}
"""Size of the average gradient. `typical` is spread over 1e-2 to 1 by tensor."""


@torch.no_grad()
def initial_state(case: Case, model: nn.Module) -> dict[tuple[str, str], torch.Tensor] | None:
    """Return whole tensors by (name, role), or None for a start at step 0 with zero moments.

    Roles: `parameter` for every parameter; for the trainable ones the optimizer's states and `step`
    (0-d), where it counts. The parameters are not those that `build_model` gave, so that a restore
    which forgets them is seen; zeros stay zeros. Tensors have the dtype of their parameter, as
    torch's optimizers keep them, but for `step`: fp32. They are drawn in fp32 and rounded, which
    keeps their order.
    """
    if case.start.step == 0:
        return None
    generator = generator_of(case.seed, STATE)
    parameters = dict(model.named_parameters())
    zeros = set(matching(parameters, case.start.zeros))
    state: dict[tuple[str, str], torch.Tensor] = {}
    for name, parameter in parameters.items():
        value = torch.zeros(parameter.shape)
        if name not in zeros and case.model.user is not None:
            value = vary_batch(parameter, generator)
        elif name not in zeros:
            fill(name, value, generator)
        state[name, "parameter"] = value
        if not parameter.requires_grad:
            continue
        scale = _scale(case, generator)
        rule = rule_of(case.optimizer, name, parameter.shape)
        drawn = rule.drawn(value, case.optimizer, scale, generator)
        state.update({(name, role): tensor for role, tensor in drawn.items()})
        if rule.counts_steps:
            state[name, "step"] = torch.tensor(float(case.start.step))
    return {
        (name, role): value if role == "step" else value.to(parameters[name].dtype)
        for (name, role), value in state.items()
    }


def _scale(case: Case, generator: torch.Generator) -> float:
    """Size of the moments of one tensor."""
    if case.start.moments == "zero":
        return 0.0
    scale = SCALES[case.start.moments]
    if case.start.moments == "typical":
        scale *= 0.01 + 0.99 * float(torch.rand((), generator=generator)) ** 2
    return scale


@torch.no_grad()
def scramble(model: nn.Module, case: Case) -> None:
    """Change every element of every parameter and buffer, in place, the same on every rank.

    Parameters get numbers of their usual size, buffers are moved by 1, or negated where they are
    true or false. No element stays what it was, so whatever a load leaves alone is wrong. Buffers
    that are in no checkpoint (`persistent=False`) stay.
    """
    generator = generator_of(case.seed, SCRAMBLED)
    for name, parameter in model.named_parameters():
        if case.model.user is not None:
            parameter.copy_(vary_batch(parameter, generator))
            continue
        other = torch.empty_like(parameter)
        fill(name, other, generator)
        same = other == parameter
        parameter.copy_(torch.where(same, other + 1, other))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                continue
            if buffer.dtype == torch.bool:
                buffer.logical_not_()
            else:
                buffer.add_(1)
