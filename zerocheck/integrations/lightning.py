"""Check of chosen steps in the Trainer of Lightning.

    from zerocheck.integrations.lightning import LightningCheck
    lightning.Trainer(callbacks=[LightningCheck(reference=MyModule)], ...).fit(MyModule(), loader)

A step is one update, with all batches of `accumulate_grad_batches`. DDP calls `training_step` of
the module, and so does the reference. Without DDP Lightning does not call the model as a module,
and gradients are not judged. A checkpoint that the Trainer saves gets a record, and what
`fit(ckpt_path=...)` loads is judged by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..attached.session import Attached
from .options import attach_in_trainer, check_options, library

if TYPE_CHECKING:
    from lightning import LightningModule, Trainer

_Callback: Any = library("lightning").Callback


class LightningCheck(_Callback):  # type: ignore[misc]
    """Callback of a Trainer that checks its steps. options: those of `zerocheck.attach`.

    `reference` makes the module, as the Trainer was given it. attached: what `zerocheck.attach`
    returned, None before the first step. Raises UsageError for an option that there is not.
    """

    def __init__(self, **options: Any) -> None:
        check_options(options)
        if callable(options.get("reference")):
            options["reference"] = _training(options["reference"])
        self._options = options
        self._updates: int | None = None
        self.attached: Attached | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Attach to the wrapped model, and judge what was loaded into it."""
        if self.attached is not None:
            return
        done = trainer.global_step
        model, optimizers = trainer.strategy.model, trainer.optimizers
        self.attached = attach_in_trainer(model, optimizers, done=done, **self._options)
        if trainer.ckpt_path:
            self.attached.loaded(trainer.ckpt_path, required=False)
        self._record_saves(trainer)

    def _record_saves(self, trainer: Trainer) -> None:
        save: Any = trainer.save_checkpoint

        def save_checkpoint(
            path: Any, weights_only: bool = False, *given: Any, **more: Any
        ) -> None:
            if weights_only or self.attached is None:
                save(path, weights_only, *given, **more)
                return
            with self.attached.timed("save", path):
                save(path, weights_only, *given, **more)
            self.attached.saved(path)

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign,unused-ignore]

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin an update with its first batch."""
        if self.attached is not None and self._updates is None:
            self.attached.before()
            self._updates = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """End an update after the batch that took it."""
        if self.attached is not None and self._updates != trainer.global_step:
            self.attached.after()
            self._updates = None


def _training(factory: Callable[[], Any]) -> Callable[[], Any]:
    """Return a factory of modules that are called by their `training_step`, as DDP calls them."""

    def made() -> Any:
        module = factory()
        if isinstance(module, library("lightning").LightningModule):
            module.forward = module.training_step
        return module

    return made
