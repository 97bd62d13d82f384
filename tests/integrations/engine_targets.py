"""What the rank processes of test_engines.py do: a few steps of a DeepSpeedEngine, checked."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerocheck.adapters.deepspeed.library import closed, make_engine
from zerocheck.errors import ZerocheckError
from zerocheck.integrations.deepspeed import check
from zerocheck.ranks.context import RankContext

MICROBATCHES = 2


def make_model(frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 11), nn.LayerNorm(11), nn.Tanh(), nn.Linear(11, 5), nn.Linear(5, 3)
    )
    model[3].weight.requires_grad_(not frozen)
    return model


def groups_of(model: nn.Module, *, several: bool) -> list[dict[str, Any]]:
    learns = [one for one in model.parameters() if one.requires_grad]
    if not several:
        return [{"params": learns}]
    matrices = [one for one in learns if one.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [one for one in learns if one.dim() < 2], "weight_decay": 0.0},
    ]


def planted(fault: str, engine: Any, inner: torch.optim.Optimizer) -> None:
    """Give the engine a fault, on rank 1 where it is one rank's."""
    zero, rank = engine.optimizer, dist.get_rank()
    if fault == "reduction":  # what is in the bucket stays as this rank computed it
        zero.average_tensor = lambda *_, **__: None
    elif fault == "clipped twice":
        clip = zero.unscale_and_clip_grads

        def clipped(*given: Any) -> None:
            clip(*given)
            clip(*given)

        zero.unscale_and_clip_grads = clipped
    elif fault == "decay twice":
        step: Any = inner.step

        def decays(*given: Any) -> Any:
            for group in inner.param_groups:
                for one in group["params"]:
                    one.data.mul_(1 - group["lr"] * group["weight_decay"])
            return step(*given)

        inner.step = decays  # type: ignore[method-assign]
    elif fault == "stale" and rank == 1:
        whole = zero.step

        def stale(*given: Any) -> None:
            kept = [one.clone() for one in zero.bit16_groups_flat]
            whole(*given)
            for one, old in zip(zero.bit16_groups_flat, kept, strict=True):
                one.copy_(old)

        zero.step = stale
    elif fault == "drift" and rank == 1:
        masters = (
            zero.fp32_partitioned_groups_flat
            if engine.zero_optimization_stage() == 3
            else (zero.single_partition_of_fp32_groups)
        )
        masters[0].data[:3].add_(0.5)


def train(
    stage: int,
    directory: str,
    *,
    count: int = 4,
    fault: str = "",
    name: str = "AdamW",
    groups: bool = False,
    frozen: bool = False,
    bf16: bool = False,
    saves: bool = False,
    clip: float = 0.0,
    zero: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    model = make_model(frozen)
    kind = getattr(torch.optim, name)
    optimizer = kind(groups_of(model, several=groups), lr=1e-2, weight_decay=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
    }
    if fault == "no optimizer":
        del optimizer.param_groups[0]["params"][-1]
    engine = make_engine(model, config, optimizer=optimizer)
    message = io.StringIO()
    answer: dict[str, Any] = {}
    try:
        with redirect_stderr(message):
            planted(fault, engine, optimizer)
            attached = check(
                engine,
                reference=lambda: make_model(frozen),
                directory=directory,
                on_violation="warn",
                **options,
            )
            torch.manual_seed(dist.get_rank())
            for number in range(count):
                for _ in range(MICROBATCHES):
                    x = torch.randn(4, 6)
                    loss = engine(x.bfloat16() if bf16 else x).float().square().mean()
                    engine.backward(loss)
                    engine.step()
                with torch.no_grad():  # an evaluation is no part of a step
                    engine.eval()
                    engine(torch.randn(4, 6).to(x.dtype if not bf16 else torch.bfloat16))
                    engine.train()
                if saves and number == 1:
                    engine.save_checkpoint(Path(directory) / "saved")
            if saves:
                engine.load_checkpoint(Path(directory) / "saved")
        judged = attached.last
        answer = {
            "statuses": {} if judged is None else dict(judged.statuses),
            "unjudged": {} if judged is None else dict(judged.unjudged),
            "taken": attached.taken,
            "wrong": attached.wrong,
            "summary": attached.summary,
        }
    except ZerocheckError as error:
        answer = {"raised": type(error).__name__, "said": str(error)}
    finally:
        closed(engine)
    return {**answer, "message": message.getvalue()}


def run(payload: bytes, context: RankContext) -> bytes:
    """Keywords of `train` -> what came of it."""
    torch.use_deterministic_algorithms(False)
    return json.dumps(train(**json.loads(payload))).encode()
