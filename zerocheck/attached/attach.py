"""`zerocheck.attach`: checks of chosen steps of a running training script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..contract.semantics import Semantics
from ..job_metrics.options import JobMetrics
from .options import AttachOptions, default_semantics
from .record.axes import SequenceAxis, Split, axes_of
from .session import Attached
from .verdict.reference import Factory
from .violated import OnViolation


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    reference: Factory | None = None,
    semantics: Semantics | None = None,
    steps: Iterable[int] = (1, 2, 3),
    every: int | None = 1000,
    directory: str | Path = "zerocheck-attach",
    on_violation: OnViolation = "raise",
    on_unsupported: OnViolation = "raise",
    done: int = 0,
    group: dist.ProcessGroup | None = None,
    recorder: str | int | None = None,
    verbose: bool = False,
    metrics: str | Path | JobMetrics | None = None,
    mesh: DeviceMesh | Sequence[DeviceMesh] | None = None,
    axes: Mapping[str, Split | SequenceAxis] | None = None,
    resume_from: str | Path | None = None,
) -> Attached:
    """Check chosen steps of a training run that uses `model` and `optimizer` as always.

        check = zerocheck.attach(model, optimizer)
        for x, y in loader:
            with check.step():
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    Every rank calls this, after wrapping, with the optimizer. The block is around all that belongs
    to one update: all microbatches, clipping, `optimizer.step()`.

    model         as it is called in training: of DDP, FSDP1, FSDP2, torch.compile, or plain; an
                  engine of DeepSpeed, with ZeRO stages 1 to 3 too
    optimizer     torch.optim.AdamW, Adam, SGD, Adagrad or RMSprop, or a subclass, also within
                  ZeroRedundancyOptimizer or a wrapper such as that of Accelerate;
                  `optimizer.step(closure)` is supported.
                  A list of them, of several classes too, where each has parameters of its own;
                  or one `attach` for each of them
    reference     function without arguments that makes a new model, not wrapped. With it
                  gradients are judged too: each rank calls that model with what `model` was called
                  with, and gives its outputs the gradients that came from outside. Not where a
                  loss reaches parameters past the outputs: the summary says so
    semantics     how gradients of ranks become one (`average`, `unused`); default: their mean;
                  weight="token": the loss is the mean over all tokens of the step, which is judged
    steps         numbers of steps to check; the first after `attach` is 1
    every         check each step whose number is a multiple of it, too; None: no others
    directory     where a violated step is written, for `zerocheck replay`
    on_violation  "raise": Violated, on all ranks; "warn": printed once, and training goes on;
                  `check.wrong` counts the wrong steps, for an exit code of your choice
    on_unsupported
                  "raise": UsageError for an optimizer or a model that cannot be judged; "warn":
                  the reason is printed, and the training goes on without checks
    done          steps taken before, for a run that is resumed: its first step is done + 1
    group         the ranks that train this model; default: all
    recorder      bytes of disk for each rank, such as "2GiB": the steps between the checked ones
                  are kept there, and where a checked step is wrong, the first wrong one is found
    verbose       print a line for each step in which all holds; a summary is printed at the end
    metrics       folder for `metrics.jsonl`, or JobMetrics: seconds of each step, and of a few the
                  collectives and the memory, and the failure patterns that they show
    mesh          device mesh of the job, or a list of them, where ranks have parts of a sequence,
                  experts of their own, or stages of a pipeline: then `model` is one of them, and
                  `reference` it or the whole model. What its dimensions split is known from their
                  usual names
    axes          what they split by other names: {"context": "sequence"} (or "samples", "experts",
                  "parameters", "layers", "nothing"), or zerocheck.SequenceAxis for a zigzag order
    resume_from   folder of the checkpoint that the script resumes, with what `check.saved` wrote:
                  before the first step the load is judged, also if the script forgets it

    On a checked step each rank copies its shards to the CPU, before and after, and the gradient:
    seven times the bytes of its parameters. On other steps one integer is compared, and nothing is
    hooked; with `recorder` they are copied, too, to disk.

    Raises UsageError for wrong options, and with on_unsupported="raise" for what cannot be judged.
    After that only a violation ends the training, with on_violation="raise": where zerocheck fails,
    it prints why, and checks no further step.
    """
    options = AttachOptions.checked(
        reference=reference,
        semantics=default_semantics(model) if semantics is None else semantics,
        steps=steps,
        every=every,
        directory=directory,
        on_violation=on_violation,
        on_unsupported=on_unsupported,
        group=group,
        recorder=recorder,
        verbose=verbose,
        metrics=metrics,
        axes=axes_of(mesh, axes, group),
        resume_from=resume_from,
    )
    return Attached(model, optimizer, options, done)
