"""The oracle of these tests: each step, taken from the observed state on a single device."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from zerocheck.case.schema import Case
from zerocheck.contract import grouped
from zerocheck.contract.groups import learning_rates
from zerocheck.contract.semantics import Semantics
from zerocheck.contract.start import initial_state
from zerocheck.execution.alignment import place
from zerocheck.models.network import build_model

from .driver import Placed, Seen, View, assembled, microbatches

U = 2.0**-24
Tensors = dict[str, torch.Tensor]


def check(case: Case, ranks: list[Seen]) -> None:
    """Fail unless every step of every rank is right, obligation by obligation."""
    semantics = ranks[0].semantics
    model = build_model(case)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    start = initial_state(case, model) or {
        (name, "parameter"): p.detach() for name, p in model.named_parameters()
    }
    views = [rank.start for rank in ranks]
    for role in ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
        expected = {name: tensor for (name, its), tensor in start.items() if its == role}
        got: Mapping[str, torch.Tensor | None] = (
            _steps(views) if role == "step" else assembled(views, role)
        )
        _same(got, expected, role)
    for index in range(case.training.steps):
        before = views
        views = [rank.after[index] for rank in ranks]
        norms = {rank.norms[index] for rank in ranks}
        reduced = assembled([rank.reduced[index] for rank in ranks], "gradient")
        parameters = _present(assembled(before, "parameter"))
        placed = [rank.placed[index] for rank in ranks]
        _check_gradient(case, semantics, index, parameters, reduced, trainable, placed)
        clipped = reduced
        if case.training.clip is not None:
            clipped = assembled([rank.clipped[index] for rank in ranks], "gradient")
            _check_clip(case, norms, _present(reduced), _present(clipped))
        else:
            assert norms == {None}
        _check_update(case, index, before, _present(clipped), views)


def _check_gradient(
    case: Case,
    semantics: Semantics,
    index: int,
    parameters: Tensors,
    reduced: dict[str, torch.Tensor | None],
    trainable: set[str],
    placed: list[Placed],
) -> None:
    model = build_model(case)
    own = dict(model.named_parameters())
    total: dict[str, torch.Tensor] = {}
    absolute: dict[str, torch.Tensor] = {}
    for rank in range(case.world_size):
        for name, parameter in own.items():
            parameter.data = place(parameters[name], *placed[rank][name])
        for microbatch in microbatches(case, index, rank):
            model.zero_grad(set_to_none=True)
            loss = microbatch.loss(model) / case.training.microbatches
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            for name, parameter in own.items():
                if parameter.grad is not None:
                    grad = parameter.grad.double() / case.world_size
                    total[name] = total.get(name, 0) + grad
                    absolute[name] = absolute.get(name, 0) + grad.abs()
    assert set(reduced) <= trainable
    for name in trainable:
        if name not in total:
            got = reduced.get(name)
            if semantics.unused == "skip":
                assert got is None, f"{name} is unused and has a gradient"
            elif got is not None:
                assert not got.any(), f"{name} is unused, gradient not 0"
            continue
        got = reduced[name]
        assert got is not None, f"no gradient of {name}"
        terms = case.training.microbatches * (case.world_size + 2)
        error = (got.double() - total[name]).abs()
        assert bool((error <= terms * U * absolute[name] + 1e-44).all()), (
            f"gradient of {name}: off by {error.max():.3g} of {total[name].abs().max():.3g}"
        )


def _check_clip(case: Case, norms: set[float | None], before: Tensors, after: Tensors) -> None:
    (norm,) = norms
    flat = torch.cat([torch.zeros(1), *(g.double().reshape(-1) for g in before.values())])
    exact = float(flat.norm(float(case.training.norm)))
    assert norm is not None and math.isclose(norm, exact, rel_tol=1e-6), (norm, exact)
    assert case.training.clip is not None
    factor = min(1.0, case.training.clip / (norm + 1e-6))
    for name, gradient in before.items():
        error = (after[name].double() - gradient.double() * factor).abs()
        limit = 5 * U * gradient.double().abs() * factor + 1e-44 if factor < 1.0 else 0.0
        assert bool((error <= limit).all()), f"clipped gradient of {name}"


def _check_update(
    case: Case, index: int, before: list[list[View]], gradient: Tensors, after: list[list[View]]
) -> None:
    parameters = _present(assembled(before, "parameter"))
    whole = {name: tensor.clone() for name, tensor in parameters.items() if name in gradient}
    for name, tensor in whole.items():
        tensor.grad = gradient[name]
    optimizer = torch.optim.AdamW(grouped(case, whole.items()))
    for group, rate in zip(optimizer.param_groups, learning_rates(case, index), strict=True):
        group["lr"] = rate
    steps = _steps(before)
    for role in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        for name, moment in _present(assembled(before, role)).items():
            if name in whole:
                state = optimizer.state[whole[name]]
                state[role] = moment.clone()
                state["step"] = steps[name].clone()
    optimizer.step()
    _near(_present(assembled(after, "parameter")), {**parameters, **whole}, "parameter", parameters)
    for role in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        states = {name: optimizer.state[tensor] for name, tensor in whole.items()}
        expected = {name: state[role] for name, state in states.items() if role in state}
        got = _present(assembled(after, role))
        _near({name: got[name] for name in expected}, expected, role, {})
    done = _steps(after)
    for name in whole:
        # Less than case.start.step + index for a parameter that no rank used in some step.
        held = float(steps[name]) if name in steps else case.start.step
        assert float(done[name]) == held + 1, name


def _near(got: Tensors, expected: Tensors, role: str, unmoved: Tensors) -> None:
    assert got.keys() == expected.keys(), (role, got.keys() ^ expected.keys())
    for name, tensor in expected.items():
        scale = tensor.abs()
        if name in unmoved:
            moved = (tensor - unmoved[name]).abs()
            scale = torch.maximum(scale, unmoved[name].abs()) + 4 * moved
        error = (got[name].double() - tensor.double()).abs()
        assert bool((error <= 8 * U * scale.double() + 1e-44).all()), (
            f"{role} of {name}: off by {error.max():.3g}"
        )


def _same(got: Mapping[str, torch.Tensor | None], expected: Tensors, role: str) -> None:
    assert got.keys() == expected.keys(), (role, got.keys() ^ expected.keys())
    for name, tensor in expected.items():
        here = got[name]
        assert here is not None and torch.equal(here, tensor), f"{role} of {name}"


def _steps(views: list[list[View]]) -> Tensors:
    """The step count of each parameter; all of its shards must agree."""
    counts: Tensors = {}
    for rank in views:
        for name, role, tensor, shape, _ in rank:
            if role == "step":
                assert tensor is not None and shape == () and tensor.shape == ()
                assert float(counts.setdefault(name, tensor)) == float(tensor), name
    return counts


def _present(tensors: dict[str, torch.Tensor | None]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
