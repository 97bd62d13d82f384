"""What the rank processes of test_titan.py do: a loop with the names and the steps of torchtitan.

Its own trainer needs an accelerator. `train_step` and `train` do what those of torchtitan 0.3.0 do
with the model: losses are divided by the tokens of all ranks, gradients are summed, and clipped in
two calls.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from zerocheck.errors import ZerocheckError
from zerocheck.integrations.torchtitan import check
from zerocheck.ranks.context import RankContext


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 17))


class Trainer:
    def __init__(self, *, averages: bool, done: int, parts: int, optimizer: str) -> None:
        model: Any = make_model()
        fully_shard(model[1])
        self.model_parts = [model] if parts == 1 else [model[:3], model[3:]]
        for part in self.model_parts:
            fully_shard(part)
            for module in part.modules():
                if isinstance(module, FSDPModule) and not averages:
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        kind = getattr(torch.optim, optimizer)
        self.optimizers = SimpleNamespace(
            optimizers=[kind(p.parameters()) for p in self.model_parts]
        )
        self.step = done

    def train_step(self, batches: Any) -> None:
        for optimizer in self.optimizers.optimizers:
            optimizer.zero_grad()
        microbatches = [next(batches) for _ in range(2)]
        count = torch.tensor(sum((labels != -100).sum() for _, labels in microbatches))
        dist.all_reduce(count)
        for tokens, labels in microbatches:
            logits = tokens
            for part in self.model_parts:
                logits = part(logits)
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            (loss / count).backward()
        parameters = [one for part in self.model_parts for one in part.parameters()]
        norm: Any = get_total_norm([one.grad for one in parameters], 2.0, False, True)
        clip_grads_with_norm_(parameters, 0.1, norm.full_tensor(), True)
        for optimizer in self.optimizers.optimizers:
            optimizer.step()

    def train(self, steps: int) -> None:
        data = torch.Generator().manual_seed(dist.get_rank())

        def batches() -> Any:
            while True:
                tokens = torch.randint(17, (2, 6), generator=data)
                labels = tokens.clone()
                labels[0, : 2 + dist.get_rank()] = -100
                yield tokens, labels

        each = batches()
        while self.step < steps:
            self.step += 1
            self.train_step(each)


def run(payload: bytes, context: RankContext) -> bytes:
    """Options of the trainer -> what came of it."""
    torch.use_deterministic_algorithms(False)
    given = json.loads(payload)
    directory = given.pop("directory")
    trainer = Trainer(**given)
    message = io.StringIO()
    try:
        with redirect_stderr(message):
            reference = make_model if given["parts"] == 1 else None
            found = check(trainer, reference=reference, directory=directory, on_violation="warn")
            trainer.train(steps=trainer.step + 3)
    except ZerocheckError as error:
        return json.dumps({"raised": type(error).__name__, "said": str(error)}).encode()
    assert found.attached is not None
    last = found.attached.last  # None where no step was chosen
    answer = {
        "statuses": {} if last is None else dict(last.statuses),
        "unjudged": {} if last is None else last.unjudged,
        "parts": len(found.every),
        "wrong": found.attached.wrong,
        "taken": found.attached.taken,
        "message": message.getvalue(),
    }
    return json.dumps(answer).encode()
