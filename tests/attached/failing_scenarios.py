"""A training in which the check itself fails, on one rank: it must end as without the check."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import scenarios
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerocheck
from zerocheck.attached import bundle
from zerocheck.attached.checks import slices
from zerocheck.attached.record import forwards, output_gradients
from zerocheck.attached.record.holdings import local
from zerocheck.attached.session import Attached
from zerocheck.attached.verdict import exchange, full_gradient
from zerocheck.attached.verdict.reference import Reference
from zerocheck.attached.watching.watch import Watch

PLACES: dict[str, tuple[Any, str]] = {
    "before": (Watch, "_start"),
    "hook of the call": (forwards, "_copy"),
    "end of the call": (output_gradients.OutputGradients, "leave"),
    "backward": (output_gradients._BackwardWalk, "follow"),
    "in the backward": (output_gradients.Target, "add"),
    "clip": (Watch, "_gradients"),
    "optimizer": (Watch, "_take"),
    "after": (Watch, "_state"),
    "own shards": (exchange, "judge_rank"),
    "reference": (Reference, "__init__"),
    "load": (Reference, "load"),
    "local gradient": (Reference, "local"),
    "sums": (full_gradient, "compare_shards"),
    "all ranks": (exchange, "judge_all_ranks"),
    "hashes": (slices.SliceContext, "hashes_of"),
    "bundle": (bundle, "write_safetensors"),
}
"""Where an exception is planted: a function of each phase."""


@contextmanager
def planted(place: str, ranks: list[int]) -> Iterator[None]:
    """A function of the check raises on these ranks."""
    if not place or dist.get_rank() not in ranks:
        yield
        return
    owner, name = PLACES[place]
    error = ZeroDivisionError("planted")
    with mock.patch.object(owner, name, side_effect=error):
        yield


def train(check: Attached | None, model: nn.Module, optimizer: Any, wrong: bool = False) -> None:
    for number in range(4):
        with check.step() if check is not None else contextlib.nullcontext():
            optimizer.zero_grad()
            model(scenarios.batch() + number).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if wrong and number == 1:
                with torch.no_grad():
                    local(next(model.parameters())).add_(1.0)


def failing(
    place: str, *, directory: str, on: list[int], wrap: str = "ddp", on_violation: str = "raise"
) -> dict[str, Any]:
    """The parameters at the end, with the check and without, and what was printed."""
    ends, message = [], io.StringIO()
    check = None
    for attached in (False, True):
        torch.manual_seed(3)
        model = scenarios.WRAPS[wrap](scenarios.net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with contextlib.redirect_stderr(message), planted(place, on):
            if attached:
                check = zerocheck.attach(
                    model,
                    optimizer,
                    reference=scenarios.net,
                    steps=range(1, 5),
                    directory=directory,
                    on_violation=on_violation,
                )
            raised = ""
            try:
                train(check, model, optimizer, wrong=place == "bundle")
            except zerocheck.Violated as error:
                raised = str(error)
        ends.append([local(parameter).clone() for parameter in model.parameters()])
    assert check is not None
    equal = all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    return {"equal": equal, "message": message.getvalue(), "raised": raised, "next": check._next}


def swallowed(*, directory: str) -> dict[str, Any]:
    """The script's own step raises on one rank, after the update, and the script goes on."""
    model = DistributedDataParallel(scenarios.net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    message = io.StringIO()
    with contextlib.redirect_stderr(message):
        check = zerocheck.attach(
            model, optimizer, steps=range(1, 5), directory=directory, verbose=True
        )
        for number in range(4):
            with contextlib.suppress(FloatingPointError), check.step():
                optimizer.zero_grad()
                model(scenarios.batch()).square().mean().backward()
                optimizer.step()
                if number == 1 and dist.get_rank() == 1:
                    raise FloatingPointError("a plot of the script's own")
    return {**scenarios.answer(check), "message": message.getvalue()}


def different(kind: str, *, directory: str) -> dict[str, Any]:
    """Ranks that train different models."""
    torch.manual_seed(dist.get_rank())
    rank = dist.get_rank()
    makes: dict[str, Callable[[], nn.Module]] = {
        "names": lambda: nn.ModuleDict({f"layer{rank}": nn.Linear(6, 3)}),
        "shapes": lambda: nn.ModuleDict({"layer": nn.Linear(6, 3 + rank)}),
        "values": lambda: nn.ModuleDict({"layer": nn.Linear(6, 3)}),
        "stages": lambda: nn.ModuleDict({"layer": nn.Linear(6, 6)}),
    }
    model = makes[kind]()
    stage = None
    if kind == "stages":
        from torch.distributed.pipelining import PipelineStage

        stage = PipelineStage(model["layer"], rank, 2, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    message = io.StringIO()
    with contextlib.redirect_stderr(message):
        check = zerocheck.attach(model, optimizer, directory=directory, on_violation="warn")
        for _ in range(3):
            with check.step():
                next(iter(model.values()))(scenarios.batch()).square().mean().backward()
                optimizer.step()
    alone = dist.new_group([rank], use_local_synchronization=True)
    of_stage = zerocheck.attach(model, optimizer, directory=directory, group=alone)
    with of_stage.step():
        optimizer.step()
    del stage
    return {
        "message": message.getvalue(),
        "checked": check.last is not None,
        "stage": scenarios.answer(of_stage),
    }
