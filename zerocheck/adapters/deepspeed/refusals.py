"""Cases that DeepSpeed cannot run, with the reason, known from the case alone."""

from __future__ import annotations

from ...case.schema import Case
from ...case.shapes import (
    empties,
    parameter_dtypes,
    scalars,
    sometimes_used,
    trainable,
    transposed,
    uncalled,
)
from ...case.traits import reduced_precision
from ...contract.groups import group_of
from ..shared.limits import (
    bf16_only,
    elementwise,
    norms_cast,
    one_axis,
    one_of,
    one_precision,
    unpinned,
)
from . import releases
from .idle_ranks import ranks_without_elements
from .options import options_of


def refusal(case: Case, stage: int) -> str | None:
    """Return the reason why DeepSpeed cannot run the case, or None."""
    reason = one_axis(case) or one_precision(case) or bf16_only(case) or norms_cast(case)
    reason = reason or elementwise(case) or one_of(case, "adamw", "sgd", "adam")
    reason = reason or _of_release(case, stage)
    if stage:
        reason = reason or unpinned(case)
    if reason is not None:
        return reason
    if not stage and (case.precision.compute, case.precision.reduce) == ("bf16", "fp32"):
        return (
            "DeepSpeed 0 sums gradients in the dtype of compute: unsupported mix of "
            "model_dtype=torch.bfloat16 and grad_accum_dtype=torch.float32"
        )
    for names, what in ((scalars(case.model), "0-d"), (transposed(case.model), "not contiguous")):
        if names:
            # reports/findings/deepspeed-broadcasts-bytes.md
            return f"DeepSpeed cannot broadcast a parameter that is {what}: {names[0]}"
    if stage and not options_of(case).universal and _resized(case):
        return (
            "DeepSpeed loads a checkpoint of ZeRO on as many ranks as wrote it; "
            "a universal one is made for others"
        )
    if stage and case.resume and options_of(case).universal and case.optimizer.kind == "sgd":
        return "DeepSpeed converts checkpoints of Adam alone: ds_to_universal reads exp_avg"
    if case.training.clip is not None and case.training.norm == "inf":
        return "DeepSpeed clips by the 2-norm only"
    if stage == 3 and empties(case.model):
        # reports/findings/deepspeed3-module-without-elements.md
        return f"DeepSpeed 3 never gathers a parameter without elements: {empties(case.model)[0]}"
    if stage and (idle := _group_of_empties(case)) is not None:
        # reports/findings/deepspeed-group-without-elements.md
        return f"DeepSpeed fails on a group whose parameters have no elements, that of {idle}"
    if stage and case.world_size > 1 and sometimes_used(case.model):
        # reports/findings/deepspeed-gradients-of-other-parameters.md
        return (
            "DeepSpeed reduces the gradients that a rank has, in order: with those of a parameter "
            "that other ranks did not use, it mixes them up"
        )
    dtypes = parameter_dtypes(case.model)
    if stage and len(set(dtypes.values())) > 1:
        return "DeepSpeed flattens parameters of one dtype: a block of the model is in bf16"
    return None


def _of_release(case: Case, stage: int) -> str | None:
    """Return what the installed release fails at, or cannot be judged by, or None."""
    name, count = f"DeepSpeed {releases.INSTALLED}", case.training.microbatches
    options, precision = options_of(case), case.precision
    if releases.other_precision and reduced_precision(case):
        return f"{name} in reduced precision is not read; 0.18.9 and later are"
    if releases.divides_outputs and count & (count - 1):
        return (
            f"{name} divides the gradients of what the model returns, and not the loss: with "
            f"{count} microbatches, which is no power of 2, it rounds elsewhere"
        )
    if releases.sums_anew and stage in (1, 2):
        if ranks_without_elements(case) or uncalled(case.model):
            return f"{name} fails where a rank has no gradient of a parameter group"
        if stage == 2 and count > 1 and not options.contiguous_gradients:
            return f"{name} then reduces nothing, and sums nothing: two faults that hide each other"
    if releases.converts_one_group and stage == 3 and case.resume and options.universal:
        return f"{name} converts the first parameter group of stage 3 alone"
    if releases.waits_for_the_last and stage == 3 and options.persistence_threshold:
        return f"{name} does not wait for all gathers of persistent parameters: on a CPU it races"
    narrow = precision.compute == "bf16" and precision.reduce == "fp32"
    if releases.last_not_reduced and stage == 1 and narrow and case.training.clip is not None:
        # reports/findings/deepspeed1-last-microbatch-not-reduced.md
        return f"{name} clips by the norm of gradients that are not all reduced"
    return None


def _resized(case: Case) -> bool:
    """Return True if some segment loads on a different mesh than the first."""
    return any(segment.mesh != case.mesh for segment in case.resume)


def _group_of_empties(case: Case) -> str | None:
    """Return a parameter of a group without any trainable element, or None."""
    empty, trained = empties(case.model), trainable(case.model)
    full = {group_of(case, name) for name in trained if name not in empty}
    idle = (name for name in trained if group_of(case, name) not in full)
    return next(idle, None)
