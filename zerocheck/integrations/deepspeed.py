"""Check of chosen steps of an engine of DeepSpeed.

    from zerocheck.integrations.deepspeed import check
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    check(engine, reference=make_model)

The loop stays as it is: `loss = engine(...)`, `engine.backward(loss)`, `engine.step()`. A step is
one update, from the first call of the engine in training to the `engine.step()` that takes it. What
`engine.save_checkpoint` saves gets a record, by which `engine.load_checkpoint` is judged.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..attached.session import Attached
from ..errors import UsageError
from .options import attach_in_trainer, check_options

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def check(engine: DeepSpeedEngine, *, done: int | None = None, **options: Any) -> Attached:
    """Check steps of an engine, of stage 0 in fp32 or of stages 1 to 3.

    options: of `zerocheck.attach`. Every rank calls this, after `deepspeed.initialize`. done: steps
    taken before, for a run that is resumed; default: what the engine counted. Raises UsageError for
    an option that there is not, and for an engine that cannot be checked.
    """
    check_options(options)
    if not hasattr(engine, "zero_optimization_stage"):
        raise UsageError(
            f"check is given a {type(engine).__name__} (allowed: what deepspeed.initialize returns "
            "first)"
        )
    done = int(engine.global_steps) if done is None else done
    attached = attach_in_trainer(engine, engine.optimizer, done=done, **options)
    _follow_steps(engine, attached)
    _follow_checkpoints(engine, attached)
    return attached


def _follow_steps(engine: Any, attached: Attached) -> None:
    """Begin a step with a call of the engine, and end it with the update.

    The class is extended, since a step begins before the hooks of a call are looked up.
    """
    kind, step = type(engine), engine.step
    opened = False

    def call(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal opened
        if self.module.training and not opened:  # `eval` sets that of the module alone
            opened = True
            attached.before()
        return kind.__call__(self, *given, **named)

    def stepped(*given: Any, **named: Any) -> Any:
        nonlocal opened
        before = engine.global_steps
        result = step(*given, **named)
        if opened and engine.global_steps > before:
            opened = False
            attached.after()
        return result

    engine.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    engine.step = stepped


def _follow_checkpoints(engine: Any, attached: Attached) -> None:
    save, load = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(save_dir: Any, tag: Any = None, *given: Any, **named: Any) -> Any:
        folder = Path(save_dir) / str(tag or f"global_step{engine.global_steps}")
        with attached.timed("save", folder):
            result = save(save_dir, tag, *given, **named)
        attached.saved(folder)
        return result

    def load_checkpoint(load_dir: Any, *given: Any, **named: Any) -> Any:
        with attached.timed("load", load_dir):
            result = load(load_dir, *given, **named)
        if result[0] is not None:
            path = Path(result[0])
            folder = path if path.is_dir() else path.parent
            attached.loaded(folder, required=False)
        return result

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
