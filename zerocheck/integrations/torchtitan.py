"""Check of chosen steps in the trainer of torchtitan.

    from zerocheck.integrations.torchtitan import check
    check(trainer, reference=make_model)
    trainer.train()

A step is one `trainer.train_step`, with all microbatches. torchtitan divides losses by the tokens
of all ranks and sums gradients, which is declared here. A training that is resumed goes on
counting. Checkpoints get no record by themselves: `attached.saved(folder)` after a save makes one.
"""

from __future__ import annotations

from typing import Any

from ..attached.session import Attached
from ..contract.semantics import Semantics
from ..errors import UsageError
from .options import attach_in_trainer, check_options

NEEDED = ("train_step", "model_parts", "optimizers", "step")
"""Attributes of the trainer that are used."""


class TitanCheck:
    """Checks of a trainer. attached: of `zerocheck.attach`, None before the first step."""

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self._trainer, self._step, self._options = trainer, trainer.train_step, options
        self.attached: Attached | None = None

    def train_step(self, *given: Any, **named: Any) -> Any:
        """Take a step of the trainer, and judge it if it was chosen."""
        if self.attached is None:  # a checkpoint is loaded by now
            self.attached = self._attach()
        with self.attached.step():
            return self._step(*given, **named)

    def _attach(self) -> Attached:
        trainer = self._trainer
        (model,), optimizers = trainer.model_parts, list(trainer.optimizers.optimizers)
        given = {"semantics": Semantics(average="sum"), **self._options}
        return attach_in_trainer(model, optimizers, done=trainer.step - 1, **given)


def check(trainer: Any, **options: Any) -> TitanCheck:
    """Check steps of a trainer, from its next one on. options: those of `zerocheck.attach`.

    Every rank calls this, before `trainer.train()`. Raises UsageError for an option that there is
    not, for what is no trainer of torchtitan, and for one with several parts of a model.
    """
    check_options(options)
    lacking = [name for name in NEEDED if not hasattr(trainer, name)]
    if lacking:
        raise UsageError(
            f"check is given a {type(trainer).__name__} without {lacking[0]} (allowed: the Trainer "
            "of torchtitan)"
        )
    parts, optimizers = len(trainer.model_parts), len(trainer.optimizers.optimizers)
    if parts != 1 or not optimizers:
        raise UsageError(
            f"the trainer has {parts} model parts and {optimizers} optimizers (allowed: one model "
            "part, and its optimizers); use zerocheck.attach with group= for the stages of a "
            "pipeline"
        )
    found = TitanCheck(trainer, options)
    trainer.train_step = found.train_step
    return found
