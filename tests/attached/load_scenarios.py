"""Checkpoints of a run: saved on some ranks, loaded on others, with a mistake or without."""

from __future__ import annotations

import copy
import io
import threading
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scenarios import WRAPS
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import zerocheck
from zerocheck.attached.record.holdings import local
from zerocheck.attached.saves.saved_state import record_folder


def wide() -> nn.Sequential:
    """Rows that three and four ranks do not share evenly, and a running mean."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 10))


def made(wrap: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = WRAPS[wrap](wide())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def take(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    rank = dist.get_rank()
    data = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * seed + rank))
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(
    wrap: str = "fsdp2", *, directory: str, folder: str, schedule: bool = False
) -> dict[str, Any]:
    """Four steps, and a checkpoint of torch.distributed.checkpoint; with a schedule, one more."""
    model, optimizer = made(wrap)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if schedule else 1.0)
    check = zerocheck.attach(model, optimizer, directory=directory)
    for step in range(4):
        with check.step():
            take(model, optimizer, step)
        scheduler.step()
    states, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": of_optimizer}, checkpoint_id=folder)
    check.saved(folder, data={"epoch": 0, "samples": 4 * 5 * dist.get_world_size()})
    if schedule:
        with check.step():
            take(model, optimizer, 4)
    return {"files": sorted(one.name for one in Path(folder).glob("zerocheck*"))}


def load(
    wrap: str = "fsdp2",
    *,
    directory: str,
    folder: str,
    mistake: str = "",
    data: Any = None,
    random: bool = False,
    warn: bool = True,
    due: bool = False,
    options: bool = True,
) -> dict[str, Any]:
    """Load it, with a mistake, and take two more steps. due: `attach` is told of the folder."""
    model, optimizer = made(wrap)
    take(model, optimizer, 77)  # a state of its own, which the load is to replace
    states, of_optimizer = get_state_dict(model, optimizer)
    content: Any = {"model": states, "optimizer": of_optimizer}
    if mistake == "nothing":
        content = {}
    elif mistake == "model alone":
        content = {"model": states}
    dcp.load(content, checkpoint_id=folder)
    if mistake == "model alone":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    elif mistake != "nothing":
        set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=of_optimizer)
    spoil(mistake, model, optimizer)
    on_violation: Any = "warn" if warn else "raise"
    resume_from = folder if due else None
    check = zerocheck.attach(
        model, optimizer, directory=directory, on_violation=on_violation, resume_from=resume_from
    )
    said = io.StringIO()
    with redirect_stderr(said):
        if not due:
            check.loaded(folder, data=data, random=random, options=options)
            if mistake == "scheduler":  # made after the load, it begins at step 0
                optimizer.param_groups[0]["lr"] = 1e-2
        last = []
        for step in (4, 5):
            with check.step():
                take(model, optimizer, step)
            last.append(check.taken if check.last is not None else 0)
    return {
        "wrong": check.wrong,
        "said": said.getvalue(),
        "taken": check.taken,
        "checked": last,
        "summary": check.summary,
    }


@torch.no_grad()
def spoil(mistake: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state
    first = next(iter(model.parameters()))
    if mistake == "moments swapped":
        for one in state.values():
            one["exp_avg"], one["exp_avg_sq"] = one["exp_avg_sq"], one["exp_avg"]
    elif mistake == "moments rounded":
        for one in state.values():
            local(one["exp_avg_sq"]).copy_(local(one["exp_avg_sq"]).bfloat16().float())
    elif mistake == "moments zero":
        for one in state.values():
            local(one["exp_avg"]).zero_()
    elif mistake == "one row":
        if dist.get_rank() == dist.get_world_size() - 1:
            local(first).view(-1)[-1:] += 1e-3
    elif mistake == "count":
        for one in state.values():
            one["step"].zero_()
    elif mistake == "rate":
        optimizer.param_groups[0]["lr"] = 3e-3
    elif mistake == "copy":
        if dist.get_rank() == 1:
            local(first).view(-1)[3] += 1e-3
    elif mistake == "random":
        torch.rand(1)
    elif mistake == "buffers":
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inner.get_buffer("1.running_mean").zero_()


class Table(torch.utils.data.Dataset[torch.Tensor]):
    """719 samples, some of them copies of others."""

    def __init__(self, copies: int = 0) -> None:
        self.rows = torch.randn(719, 6, generator=torch.Generator().manual_seed(9))
        for at in range(copies):
            self.rows[718 - at] = self.rows[at]

    def __len__(self) -> int:
        return 719

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def epochs(
    *,
    directory: str,
    folder: str,
    saves: int = 0,
    resumes: bool = False,
    mistake: str = "",
    copies: int = 0,
    count: int = 2,
    batch: int = 4,
    data_ranks: int | None = None,
) -> dict[str, Any]:
    """Train on a table; save in `folder` after so many steps, or resume.

    Without a folder by torch's DistributedSampler, which repeats one sample for 3 ranks.

    mistake: "no sampler": all ranks have all samples; "from the first": a resume reads the epoch
    from its beginning.
    """
    model, optimizer = made("fsdp2")
    check = zerocheck.attach(
        model, optimizer, steps=(1,), every=20, directory=directory, on_violation="warn"
    )
    table, said = Table(copies), io.StringIO()
    sampler: Any = torch.utils.data.distributed.DistributedSampler(table)
    size, done = dist.get_world_size(), 0
    with redirect_stderr(said):
        if resumes:
            states, of_optimizer = get_state_dict(model, optimizer)
            dcp.load({"model": states, "optimizer": of_optimizer}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=of_optimizer)
            check.loaded(folder)
            done = 0 if mistake == "from the first" else 240
        for epoch in range(count):
            check.epoch(epoch, data_ranks=data_ranks)
            order = torch.randperm(719, generator=torch.Generator().manual_seed(epoch)).tolist()
            left = order[done : done + (719 - done) // size * size]
            mine = left[dist.get_rank() :: size]
            if mistake == "no sampler":
                mine = order
            elif not folder:
                sampler.set_epoch(epoch)
                mine = list(sampler)
            done = 0
            for at in range(0, len(mine) - batch + 1, batch):
                with check.step():
                    out = model(torch.stack([table[i] for i in mine[at : at + batch]]))
                    if mistake == "none, twice":
                        out = out + model(torch.stack([table[i] for i in mine[at : at + batch]]))
                    out.square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if check.taken == saves:
                    states, of_optimizer = get_state_dict(model, optimizer)
                    dcp.save({"model": states, "optimizer": of_optimizer}, checkpoint_id=folder)
                    check.saved(folder)
                    return {"said": said.getvalue(), "wrong": check.wrong, "taken": check.taken}
            model.eval()
            with torch.no_grad():
                model(torch.stack([table[i] for i in range(8)]))
            model.train()
    return {"said": said.getvalue(), "wrong": check.wrong, "taken": check.taken}


class NoCopy(BlockingAsyncStager):
    """The mistake: what is written is what training goes on to change."""

    def stage(self, state_dict: Any) -> Any:
        return state_dict


class Late(dcp.FileSystemWriter):
    """Writer that training overtakes."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.overtaken = threading.Event()

    def write_data(self, *given: Any) -> Any:
        self.overtaken.wait()
        return super().write_data(*given)


def mistaken(state: dict[str, Any], mistake: str) -> dict[str, Any]:
    """Return a copy of what is to be saved, with a mistake of a writer."""
    state = copy.deepcopy(state)
    weights, moments = state["model"], state["optim"]["state"]
    for one in moments.values():
        if mistake == "moments exchanged":
            one["exp_avg"], one["exp_avg_sq"] = one["exp_avg_sq"], one["exp_avg"]
        elif mistake == "rounded":
            local(one["exp_avg"]).copy_(local(one["exp_avg"]).bfloat16())
        elif mistake == "steps lost":
            one["step"].zero_()
    first, second = moments["0.bias"], moments["1.bias"]
    if mistake == "of another":
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
    elif mistake == "optimizer lost":
        state["optim"]["state"] = {}
    elif mistake == "a moment lost":
        del first["exp_avg_sq"]
    elif mistake == "zeroed":
        local(weights["3.weight"]).zero_()
    elif mistake == "of one rank" and dist.get_rank() == 0:
        local(weights["3.weight"])[:1].zero_()
    elif mistake == "decayed again":
        for name in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"):
            local(weights[name]).mul_(0.999)
    elif mistake == "a statistic lost":
        weights["1.running_mean"] = torch.zeros_like(weights["1.running_mean"])
    elif mistake == "a weight lost":
        del weights["3.bias"]
    return state


def written(writer: str, *, directory: str, folder: str, mistake: str = "") -> dict[str, Any]:
    """Write the state after a step, in this way, and go on training."""
    model, optimizer = made("fsdp2")
    check = zerocheck.attach(model, optimizer, directory=directory)
    beside = dist.new_group(backend="gloo")
    later: Any = None
    late = Late(folder)
    for number in range(3):
        with check.step():
            take(model, optimizer, number)
        if number:
            late.overtaken.set()
            continue
        whole = StateDictOptions(full_state_dict=writer == "whole", cpu_offload=writer == "whole")
        weights, moments = get_state_dict(model, optimizer, options=whole)
        state: dict[str, Any] = {"model": weights, "optim": moments}
        if state["model"] and mistake not in ("", "overtaken"):  # whole on rank 0 alone
            state = mistaken(state, mistake)
        elif mistake == "overtaken" and writer != "later":
            state = copy.deepcopy(state)
            take(model, optimizer, 9)
        if writer == "later":
            stager = NoCopy() if mistake == "overtaken" else None
            later = dcp.async_save(
                state, storage_writer=late, process_group=beside, async_stager=stager
            )
        elif writer == "shards":
            dcp.save(state, checkpoint_id=folder)
        elif writer == "parts":
            for name, part in state.items():
                dcp.save({name: part}, checkpoint_id=f"{folder}/{name}_0")
        elif dist.get_rank() == 0:
            torch.save(state, folder)
        dist.barrier()
        check.saved(folder)
    if later is not None:
        later.result()
    with check.step():
        take(model, optimizer, 3)
    return {"files": sorted(one.name for one in record_folder(Path(folder)).glob("zerocheck*"))}
