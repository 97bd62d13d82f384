"""Check of chosen steps in the trainer of torchtitan.

    from zerocheck.integrations.torchtitan import check
    check(trainer, reference=make_model)
    trainer.train()

A step is one `trainer.train_step`, with all microbatches. torchtitan divides losses by the tokens
of all ranks and sums gradients, which is declared here. A training that is resumed goes on
counting. Checkpoints get no record by themselves: `attached.saved(folder)` after a save makes one.
The meshes of its context, tensor, expert and pipeline parallelism are those of the trainer.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ..attached.session import Attached
from ..contract.semantics import Semantics
from ..errors import UsageError
from .options import attach_in_trainer, check_options

NEEDED = ("train_step", "model_parts", "optimizers", "step")
"""Attributes of the trainer that are used."""

SPLIT = ("pp", "cp", "tp", "ep")
"""Dimensions of its meshes that split something else than samples."""


class TitanCheck:
    """Checks of a trainer.

    every: of `zerocheck.attach`, one for each part of the model, none before the first step.
    """

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self._trainer, self._step, self._options = trainer, trainer.train_step, options
        self.every: list[Attached] = []

    @property
    def attached(self) -> Attached | None:
        """Check of the first part of the model, None before the first step."""
        return self.every[0] if self.every else None

    def train_step(self, *given: Any, **named: Any) -> Any:
        """Take a step of the trainer, and judge it if it was chosen."""
        if not self.every:  # a checkpoint is loaded by now
            self.every = [self._attach(part) for part in self._trainer.model_parts]
        with ExitStack() as stack:
            for one in self.every:
                stack.enter_context(one.step())
            return self._step(*given, **named)

    def _attach(self, part: Any) -> Attached:
        trainer = self._trainer
        ids = {id(parameter) for parameter in part.parameters()}
        optimizers = [
            one
            for one in trainer.optimizers.optimizers
            if any(id(p) in ids for group in one.param_groups for p in group["params"])
        ]
        dims = getattr(trainer, "parallel_dims", None)
        meshes = [] if dims is None else [dims.get_optional_mesh(name) for name in SPLIT]
        given = {
            "semantics": Semantics(average="sum"),
            "mesh": [mesh for mesh in meshes if mesh is not None],
            **self._options,
        }
        return attach_in_trainer(part, optimizers, done=trainer.step - 1, **given)


def check(trainer: Any, **options: Any) -> TitanCheck:
    """Check steps of a trainer, from its next one on. options: those of `zerocheck.attach`.

    Every rank calls this, before `trainer.train()`. Raises UsageError for an option that there is
    not, and for what is no trainer of torchtitan.
    """
    check_options(options)
    lacking = [name for name in NEEDED if not hasattr(trainer, name)]
    if lacking:
        raise UsageError(
            f"check is given a {type(trainer).__name__} without {lacking[0]} (allowed: the Trainer "
            "of torchtitan)"
        )
    found = TitanCheck(trainer, options)
    trainer.train_step = found.train_step
    return found
