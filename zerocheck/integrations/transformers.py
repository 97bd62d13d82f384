"""Check of chosen steps in the Trainer of transformers, and in those of TRL that extend it.

    from zerocheck.integrations.transformers import check
    check(trainer, reference=make_model)
    trainer.train()

A step is one update, with all microbatches of `gradient_accumulation_steps`. A training that is
resumed goes on counting where it was. Each checkpoint of the Trainer gets a record of what was
saved, and a training that is resumed from one is judged by it, on any number of ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..attached.session import Attached
from ..errors import UsageError
from .options import attach_in_trainer, check_options, library

if TYPE_CHECKING:
    from transformers import Trainer

_Callback: Any = library("transformers").TrainerCallback


class TrainerCheck(_Callback):  # type: ignore[misc]
    """Callback of a Trainer that checks its steps.

    attached: what `zerocheck.attach` returned, None before the first step.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        check_options(options)
        self._trainer, self._options = trainer, options
        self.attached: Attached | None = None
        save: Any = trainer._save_checkpoint

        def save_checkpoint(*given: Any, **named: Any) -> None:
            timed: AbstractContextManager[None] = nullcontext()
            if self.attached is not None:
                timed = self.attached.timed("save", _folder(trainer.args, trainer.state))
            with timed:
                save(*given, **named)

        trainer._save_checkpoint = save_checkpoint  # type: ignore[method-assign,unused-ignore]

    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Begin an update. By the first one the Trainer has wrapped the model."""
        if self.attached is None:
            model = self._trainer.model_wrapped
            self.attached = attach_in_trainer(
                model, optimizer, done=state.global_step, **self._options
            )
            if state.global_step:
                self.attached.loaded(_folder(args, state), required=False)
        self.attached.before()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End an update, and judge it if it was chosen."""
        if self.attached is not None:
            self.attached.after()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record what the Trainer saved."""
        if self.attached is not None:
            self.attached.saved(_folder(args, state))


def _folder(args: Any, state: Any) -> Path:
    """Return the folder of the Trainer's checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def check(trainer: Trainer, **options: Any) -> TrainerCheck:
    """Check steps of a Trainer, from its next `train` on. options: those of `zerocheck.attach`.

    Every rank calls this, before `trainer.train()`. Raises UsageError for an option that there is
    not, and for what is no Trainer.
    """
    if not isinstance(trainer, library("transformers").Trainer):
        raise UsageError(
            f"check is given a {type(trainer).__name__} (allowed: a transformers.Trainer)"
        )
    callback = TrainerCheck(trainer, **options)
    trainer.add_callback(callback)
    return callback
