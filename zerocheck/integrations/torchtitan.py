"""Check of chosen steps in the trainer of torchtitan.

    from zerocheck.integrations.torchtitan import check
    check(trainer, reference=make_model)
    trainer.train()

A step is one `trainer.train_step`, with all microbatches. torchtitan divides losses by the tokens
of all ranks and sums gradients, which is declared here. A training that is resumed goes on
counting. Checkpoints with the state of the optimizer get a record, by which loads are judged, if
each rank has one part of the model. The meshes of its context, tensor, expert and pipeline
parallelism are those of the trainer.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
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
        checkpointer: Any = getattr(trainer, "checkpointer", None)
        saves = bool(getattr(checkpointer, "enable", False))
        self._checkpointer: Any = checkpointer if saves else None
        self.every: list[Attached] = []
        if saves:
            self._save = checkpointer.save
            checkpointer.save = self.save

    @property
    def attached(self) -> Attached | None:
        """Check of the first part of the model, None before the first step."""
        return self.every[0] if self.every else None

    def train_step(self, *given: Any, **named: Any) -> Any:
        """Take a step of the trainer, and judge it if it was chosen."""
        if not self.every:  # a checkpoint is loaded by now
            self.every = [self._attach(part) for part in self._trainer.model_parts]
            if self._checkpointer is not None and len(self.every) == 1:
                self.every[0].loaded(self._folder(self._trainer.step - 1), required=False)
        with ExitStack() as stack:
            for one in self.every:
                stack.enter_context(one.step())
            return self._step(*given, **named)

    def save(self, curr_step: int, last_step: bool = False) -> Any:
        """Save as the trainer does, and record what was saved."""
        result = self._save(curr_step, last_step)
        weights_alone = last_step and self._checkpointer.last_save_model_only
        if result and not weights_alone and len(self.every) == 1:
            self.every[0].saved(self._folder(curr_step))
        return result

    def _folder(self, step: int) -> Path:
        return Path(self._checkpointer.folder) / f"step-{step}"

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
