"""Check of chosen steps in a loop with accelerate.

    from zerocheck.integrations.accelerate import check
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    check(accelerator, reference=make_model)

The loop stays as it is: `with accelerator.accumulate(model):` around backward, `optimizer.step()`
and `optimizer.zero_grad()`. A step is one update, with all microbatches. What
`accelerator.save_state` saves gets a record, and what `load_state` loads is judged by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..attached.session import Attached
from ..errors import UsageError
from .options import attach_in_trainer, check_options

if TYPE_CHECKING:
    from accelerate import Accelerator


NEW_FOLDER = "checkpoints"
"""Where accelerate makes folders of its own, for metrics."""


def check(accelerator: Accelerator, *, done: int = 0, **options: Any) -> Attached:
    """Check steps that are taken within `accelerator.accumulate`. options: of `zerocheck.attach`.

    Every rank calls this, after `accelerator.prepare`. done: steps taken before, for a run that is
    resumed. Raises UsageError for an option that there is not, and unless one model and at least
    one optimizer are prepared.
    """
    check_options(options)
    models, optimizers = accelerator._models, accelerator._optimizers
    if len(models) != 1 or not optimizers:
        raise UsageError(
            f"{len(models)} models and {len(optimizers)} optimizers are prepared (needed: one "
            "model and its optimizers, by accelerator.prepare before check); use zerocheck.attach "
            "for each model"
        )
    attached = attach_in_trainer(models[0], optimizers, done=done, **options)
    plain: Any = accelerator.accumulate
    opened = False

    @contextmanager
    def accumulate(*given: Any) -> Iterator[None]:
        nonlocal opened
        if not opened:
            attached.before()
            opened = True
        with plain(*given):
            yield
        if accelerator.sync_gradients:
            attached.after()
            opened = False

    save, load = accelerator.save_state, accelerator.load_state

    def save_state(*given: Any, **named: Any) -> Any:
        folder = given[0] if given else named.get("output_dir")
        with attached.timed("save", folder or NEW_FOLDER):
            place = save(*given, **named)
        attached.saved(place)
        return place

    def load_state(input_dir: Any = None, **named: Any) -> Any:
        with attached.timed("load", input_dir or NEW_FOLDER):
            result = load(input_dir, **named)
        if input_dir is not None:
            attached.loaded(input_dir, required=False)
        return result

    accelerator.accumulate = accumulate
    accelerator.save_state, accelerator.load_state = save_state, load_state
    return attached
