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

from ..attached.attach import attach
from ..attached.session import Attached
from ..contract.semantics import Semantics
from ..errors import UsageError
from .options import check_options

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
        models, optimizers = list(trainer.model_parts), list(trainer.optimizers.optimizers)
        if len(models) != 1 or not optimizers:
            raise UsageError(
                f"the trainer has {len(models)} model parts and {len(optimizers)} optimizers "
                "(allowed: one model part, and its optimizers); use zerocheck.attach with group= "
                "for the stages of a pipeline"
            )
        given = {"semantics": Semantics(average="sum"), **self._options}
        return attach(models[0], optimizers, done=trainer.step - 1, **given)


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
