"""Steps of the user's classes, run by a process apart from the judge."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import own_optimizers
import pytest
import torch

from zerocheck.case.schema import Group, Optimizer
from zerocheck.errors import Unsupported
from zerocheck.floating_point import BF16, FP32
from zerocheck.judge.compare import compare
from zerocheck.optimizers import optimizer_of
from zerocheck.optimizers.specification import Reading, UpdateElements
from zerocheck.optimizers.user import process
from zerocheck.optimizers.user.inspection import inspect_optimizer
from zerocheck.optimizers.user.optimizer import User


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """Leave no process behind."""
    yield
    process.close()


def rule_of(name: str) -> User:
    user = inspect_optimizer(f"{own_optimizers.__file__}:{name}")
    found = optimizer_of(Optimizer(kind="user", user=user))
    assert isinstance(found, User)
    return found


def elements(shape: tuple[int, ...], rule: User, *, narrow: bool = False) -> UpdateElements:
    """A parameter in mid-training, with its gradient and states."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if narrow else torch.float32
    p, g = (torch.empty(shape).normal_(generator=generator) for _ in range(2))
    drawn = rule.drawn(p, Optimizer(), 1.0, generator)
    return UpdateElements(
        p.to(dtype).double().reshape(-1),
        g.to(dtype).double().reshape(-1),
        {r: one.to(rule.state_dtype(r, dtype)).double().reshape(-1) for r, one in drawn.items()},
        {},
        format=BF16 if narrow else FP32,
        shape=shape,
        held=True,
    )


def by_hand(name: str, e: UpdateElements, count: int) -> torch.Tensor:
    """The parameter after a step of the class in this process."""
    kind = getattr(own_optimizers, name)
    p = torch.nn.Parameter(e.parameter.to(e.format.dtype).view(e.shape))
    p.grad = e.gradient.to(p.dtype).view(e.shape)
    optimizer = kind([{"params": [p], "lr": 0.5}])
    states = {role: one.to(p.dtype).view(e.shape) for role, one in e.old.items()}
    optimizer.state[p] = {**states, **({"step": count} if name == "Normalized" else {})}
    optimizer.step()
    return p.detach().double().reshape(-1)


@pytest.mark.every(2)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", ["Lion", "Normalized"])
def test_a_step_elsewhere_is_the_step_here(name: str, narrow: bool) -> None:
    rule = rule_of(name)
    e = elements((5, 7), rule, narrow=narrow)
    wanted = by_hand(name, e, 8)
    readings: tuple[Reading, ...] = ("same kernels", "estimated")
    bounds = []
    for reading in readings:
        s = rule.scalars(
            Group(lr=0.5, weight_decay=0.0), Optimizer(), lr=0.5, step=9, reading=reading
        )
        made = dict(rule.enclosures(e, s))
        assert torch.equal(made["parameter"].exact, wanted)
        assert compare(wanted, made["parameter"])[1] is None
        bounds.append(float(made["parameter"].bound.max()))
    assert bounds[0] == 0.0 < bounds[1] < (0.5 if narrow else 1e-3)


@pytest.mark.long
def test_what_was_never_updated_has_no_state_there() -> None:
    rule = rule_of("Normalized")
    e = elements((2, 2), rule)._replace(held=False)
    e = e._replace(old={role: torch.zeros_like(one) for role, one in e.old.items()})
    s = rule.scalars(Group(), Optimizer(), lr=1.0, step=1, reading="same kernels")
    made = dict(rule.enclosures(e, s))
    assert torch.allclose(made["momentum"].exact, e.gradient)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("size", "why"),
    [
        (7, r"alone on a whole parameter of shape \(7,\), fails: ValueError: seven"),
        (5, "ends the process that runs it"),
        (3, "takes more than 2 s for one step"),
    ],
)
def test_a_class_that_fails_there_is_a_reason(
    size: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = rule_of("OddlySlow")
    s = rule.scalars(Group(), Optimizer(), lr=1.0, step=1, reading="same kernels")
    dict(rule.enclosures(elements((2,), rule), s))  # the process is there
    process._servers[os.getpid()]._socket.settimeout(2.0)
    monkeypatch.setattr(process, "SECONDS", 2.0)
    with pytest.raises(Unsupported, match=why):
        dict(rule.enclosures(elements((size,), rule), s))
    monkeypatch.undo()
    dict(rule.enclosures(elements((2,), rule), s))  # and again is


def test_a_relative_location_is_of_the_judges_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = rule_of("Lion")
    scalars = rule.scalars(Group(), Optimizer(), lr=1.0, step=1, reading="same kernels")
    assert scalars.user is not None
    dict(rule.enclosures(elements((2,), rule), scalars))  # the process is there, in another one
    (tmp_path / "moved_optimizers.py").write_bytes(Path(own_optimizers.__file__).read_bytes())
    monkeypatch.chdir(tmp_path)
    moved = msgspec.structs.replace(scalars.user, location="moved_optimizers.py:Lion")
    made = dict(rule.enclosures(elements((2,), rule), scalars._replace(user=moved)))
    assert made["parameter"].exact.shape == (2,)


def test_the_judge_imports_nothing_of_the_users() -> None:
    rule = rule_of("Lion")
    name = "zerocheck_user_own_optimizers"
    sys.modules.pop(name, None)
    e = elements((4,), rule)
    s = rule.scalars(Group(), Optimizer(), lr=1.0, step=1, reading="same kernels")
    assert dict(rule.enclosures(e, s))["parameter"].exact.shape == (4,)
    assert name not in sys.modules
    assert process._servers[os.getpid()]._process.poll() is None
    process.close()
    assert not process._servers
