"""`attach` in one process: which steps, what it leaves alone, what it refuses, and its bundles."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from decaying import DecaysTwice, parts
from torch import nn

import zerocheck
from zerocheck import compat
from zerocheck.attached.checks import slices
from zerocheck.attached.session import Attached
from zerocheck.cli import main
from zerocheck.compat import clip_functions


def take(model: nn.Module, optimizer: torch.optim.Optimizer, *, fails: bool = False) -> None:
    loss = model(torch.randn(4, 5)).square().mean()
    if fails:
        raise FloatingPointError("the user's own")
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that a check could leave behind."""
    of_modules = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
        for m in model.modules()
    ]
    return [
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
        *of_modules,
        *(cell.cell_contents for cell in clip_functions()),
        torch.amp.GradScaler.step,
        torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_,
        *(len(p._backward_hooks or ()) for p in model.parameters()),
    ]


def test_which_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, optimizer = parts()
    check = zerocheck.attach(
        model, optimizer, steps=(1, 4), every=5, done=2, directory=tmp_path / "kept"
    )
    checked = []
    original = Attached.begin

    def begin(self: Attached) -> None:
        checked.append(self.taken)
        original(self)

    monkeypatch.setattr(Attached, "begin", begin)
    for _ in range(14):
        with check.step():
            take(model, optimizer)
    assert checked == [4, 5, 10, 15] and check.taken == 16
    assert not (tmp_path / "kept").exists()


def test_between_checked_steps_nothing_is_hooked(tmp_path: Path) -> None:
    model, optimizer = parts()
    clean = hooks(model, optimizer)
    check = zerocheck.attach(model, optimizer, steps=(1, 3), every=None, directory=tmp_path)
    assert hooks(model, optimizer) == clean
    inside = []
    for _ in range(4):
        with check.step() as given:
            assert given is None
            inside.append(hooks(model, optimizer) != clean)
            take(model, optimizer)
        assert hooks(model, optimizer) == clean
    assert inside == [True, False, True, False]
    assert check.step() is check.step()  # one object for all of them


def test_the_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    states = []
    for attached in (False, True):
        model, optimizer = parts()
        check = zerocheck.attach(
            model, optimizer, steps=range(1, 9) if attached else (), every=None, directory=tmp_path
        )
        for _ in range(5):
            with check.step():
                take(model, optimizer)
        states.append((model.state_dict(), optimizer.state_dict()["state"], torch.get_rng_state()))
    (model, state, random), (other_model, other_state, other_random) = states
    assert torch.equal(random, other_random)
    assert all(torch.equal(model[name], other_model[name]) for name in model)
    for number, entry in state.items():
        assert all(torch.equal(entry[role], other_state[number][role]) for role in entry)


def test_nothing_is_kept(tmp_path: Path) -> None:
    model, optimizer = parts()
    check = zerocheck.attach(model, optimizer, steps=(1, 2), directory=tmp_path)

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    with check.step():
        take(model, optimizer)
    before = tensors()
    with check.step():
        take(model, optimizer)
    assert tensors() <= before  # what other tests left may go meanwhile


def test_an_exception_passes(tmp_path: Path) -> None:
    model, optimizer = parts()
    clean = hooks(model, optimizer)
    check = zerocheck.attach(model, optimizer, steps=(1, 2), directory=tmp_path)
    with pytest.raises(FloatingPointError, match="the user's own"), check.step():
        take(model, optimizer, fails=True)
    assert hooks(model, optimizer) == clean and check.last is None
    with check.step():
        take(model, optimizer)
    assert check.last is not None and not check.last.violations


def test_a_step_without_an_update_is_made_up_for(tmp_path: Path) -> None:
    """As where the block is around a microbatch."""
    model, optimizer = parts()
    check = zerocheck.attach(model, optimizer, steps=(1,), every=None, directory=tmp_path)
    for number in range(3):
        with check.step():
            model(torch.randn(4, 5)).square().mean().backward()
            if number == 2:
                optimizer.step()
        assert check.last is not None and not check.last.violations
        assert check._next == (number + 2 if number < 2 else -1)


def caught(tmp_path: Path, **options: Any) -> tuple[Attached, Callable[[], None]]:
    model, optimizer = parts()
    check = zerocheck.attach(model, optimizer, every=4, directory=tmp_path / "kept", **options)
    optimizer.wrong = 6

    def step() -> None:
        with check.step():
            take(model, optimizer)

    return check, step


def test_a_violation_is_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check, step = caught(tmp_path)
    for _ in range(7):
        step()
    with pytest.raises(zerocheck.Violated, match=r"step 8: update: .* zerocheck replay .*step-8"):
        step()
    answer = capsys.readouterr().err
    assert "VIOLATED one process with DecaysTwice: parameter is wrong" in answer
    assert "  cause       weight decay twice" in answer
    assert check.last is not None and check.last.tier == "state only"


def test_or_said_once_with_its_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, step = caught(tmp_path, on_violation="warn")
    for _ in range(13):
        step()
    answer = capsys.readouterr().err
    assert answer.count("VIOLATED") == 1 and answer.count("  replay ") == 1
    assert [one.name for one in (tmp_path / "kept").iterdir()] == ["step-8"]


def test_large_tensors_are_judged_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut anywhere: the same verdict, but for the element where it is worst."""
    verdicts = []
    for size in (slices.AT_ONCE, 16):
        monkeypatch.setattr(slices, "AT_ONCE", size)
        check, step = caught(tmp_path, on_violation="warn")
        for _ in range(8):
            step()
        assert check.last is not None
        verdicts.append(check.last.violations)
    assert verdicts[0] == verdicts[1]
    (violation,) = verdicts[0]
    assert violation.wrong == violation.total == 5 * 7 + 7 + 7 * 2 + 2
    assert set(violation.tensors) == {"0.weight", "0.bias", "2.weight", "2.bias"}


class DecaysAsAdamWToo(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        with torch.no_grad():
            shrinks = [p * (group["lr"] * group["weight_decay"]) for p in group["params"]]
            done = super().step(closure)
            for parameter, less in zip(group["params"], shrinks, strict=True):
                parameter.sub_(less)
        return done


def test_a_wrong_step_of_sgd_is_named(tmp_path: Path) -> None:
    model, optimizer = parts(DecaysAsAdamWToo, momentum=0.9)
    check = zerocheck.attach(model, optimizer, directory=tmp_path / "kept", on_violation="warn")
    with check.step():
        take(model, optimizer)
    assert check.last is not None
    (violation,) = check.last.violations
    assert (violation.role, violation.causes) == ("parameter", ("weight decay twice",))


def test_the_element_is_that_of_the_whole_tensor(tmp_path: Path) -> None:
    model, optimizer = parts(torch.optim.AdamW)
    check = zerocheck.attach(model, optimizer, directory=tmp_path / "kept", on_violation="warn")
    with check.step():
        take(model, optimizer)
        with torch.no_grad():
            model[2].weight[1, 4] += 1.0
    assert check.last is not None
    (violation,) = check.last.violations
    assert violation.tensors == ("2.weight",) and violation.element == (1, 4)
    assert violation.observed == model[2].weight[1, 4].item()
    assert violation.wrong == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda kept: (kept / "rank-0.safetensors").unlink(), "copy them here"),
        (lambda kept: (kept / "rank-0.json").write_text("{}"), "is not of a bundle"),
        (
            lambda kept: (kept / "rank-0.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}"),
            "is damaged",
        ),
        (
            lambda kept: (kept / "bundle.json").write_text(
                (kept / "bundle.json").read_text().replace('"attached": 4', '"attached": 9')
            ),
            "bundle format 9; this zerocheck knows format 4",
        ),
    ],
)
def test_a_bundle_that_is_not_whole(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    _, step = caught(tmp_path, on_violation="warn")
    for _ in range(8):
        step()
    kept = tmp_path / "kept" / "step-8"
    assert CliRunner().invoke(main, ["replay", str(kept / "bundle.json")]).exit_code == 1
    damage(kept)
    done = CliRunner().invoke(main, ["replay", str(kept)])
    assert done.exit_code == 2 and message in done.output, done.output


def test_adam_without_decay_is_judged(tmp_path: Path) -> None:
    model, optimizer = parts(torch.optim.Adam, weight_decay=0.0)
    check = zerocheck.attach(model, optimizer, directory=tmp_path)
    with check.step():
        take(model, optimizer)
    assert check.last is not None and check.last.statuses["update"] == "holds"


class Prefix(nn.Module):
    """A wrapper whose prefix is on no list."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = model

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward_module(x)


class Outer:
    """An optimizer around another, as those of Accelerate and Lightning are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Casting(Prefix):
    """Autocast within the forward of a wrapper, as in Fabric."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def cast_in_place(model: nn.Module) -> nn.Module:
    """Autocast within a forward that is put on the module, as by Accelerate."""
    original = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return original(x).float()

    model.forward = forward  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("wrap", [Casting, cast_in_place])
def test_autocast_within_a_wrapper(tmp_path: Path, wrap: Callable[..., nn.Module]) -> None:
    """The reference computes in the same dtype: else it would be far off, and the bound narrow."""
    model = wrap(nn.Sequential(*parts()[0], nn.Linear(2, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model,
        optimizer,
        reference=lambda: nn.Sequential(*parts()[0], nn.Linear(2, 3)),
        directory=tmp_path,
    )
    for _ in range(3):
        with check.step():
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
        assert check.last is not None and check.last.statuses["gradient"] == "holds"


def test_wrappers_of_the_model_and_of_the_optimizer(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(parts()[0], nn.BatchNorm1d(2), nn.Dropout(0.3))

    model = Prefix(nn.ModuleDict({"module": make()})["module"])
    model._forward_module[2].eval()
    optimizer = DecaysTwice(model.parameters(), lr=1e-2, weight_decay=0.1)
    outer = Outer(optimizer)
    check = zerocheck.attach(
        model,
        outer,  # type: ignore[arg-type]
        reference=make,
        directory=tmp_path,
        on_violation="warn",
    )
    optimizer.wrong = 3
    for number in range(3):
        with check.step():
            model(torch.randn(4, 5)).square().mean().backward()
            outer.step()
            optimizer.zero_grad()
        assert check.last is not None and check.last.statuses["gradient"] == "holds"
        assert bool(check.last.violations) is (number == 2)


def test_two_updates_in_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is reported once, and nothing is checked any more: the training goes on."""
    model, optimizer = parts()
    check = zerocheck.attach(model, optimizer, directory=tmp_path)
    for _ in range(3):
        with check.step():
            take(model, optimizer)
            take(model, optimizer)
    answer = capsys.readouterr().err
    assert answer.count("took 2 steps within one checked step") == 1
    assert answer.count("No step is checked from here on; the training goes on") == 1
    assert check.last is None and check.taken == 3


def closed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    def closure() -> float:
        loss = model(torch.randn(4, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss.item()

    return closure


@pytest.mark.parametrize("named", [False, True])
def test_a_closure_is_observed(tmp_path: Path, named: bool) -> None:
    """It runs within `step`; the gradient is that of after it."""
    model, optimizer = parts()
    check = zerocheck.attach(
        model, optimizer, reference=lambda: parts()[0], directory=tmp_path, on_violation="warn"
    )
    optimizer.wrong = 3
    for number in range(3):
        with check.step():
            closure = closed(model, optimizer)
            loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
            assert isinstance(loss, float)
        assert check.last is not None
        held = {o for o, status in check.last.statuses.items() if status == "holds"}
        assert "clip" in held and ({"gradient", "update"} <= held) is (number < 2)


def test_an_exception_of_a_closure_is_the_script_s(tmp_path: Path) -> None:
    model, optimizer = parts()
    check = zerocheck.attach(model, optimizer, directory=tmp_path)

    def closure() -> float:
        raise FloatingPointError("the user's own")

    with pytest.raises(FloatingPointError), check.step():
        optimizer.step(closure)
    with check.step():
        optimizer.step(closed(model, optimizer))
    assert check.last is not None and not check.last.violations


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), False),
        ((None, None), False),
        ((torch.float32, torch.float32), False),  # what the parameters have, in words
        ((torch.bfloat16, None), True),
        ((torch.float32, torch.bfloat16), True),
    ],
)
def test_what_fsdp_casts(
    monkeypatch: pytest.MonkeyPatch, given: tuple[Any, ...], expected: bool
) -> None:
    policies = [SimpleNamespace(param_dtype=given[0], reduce_dtype=given[1])] if given else []
    monkeypatch.setattr(compat, "precision_policies", lambda _: iter(policies))
    assert compat.casts(nn.Linear(2, 2)) is expected
