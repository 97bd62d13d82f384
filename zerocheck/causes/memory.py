"""Causes of memory that is held too long, or higher than predicted."""

from __future__ import annotations

from .registry import cause

GATHERED_PARAMETERS_KEPT = cause(
    "gathered parameters kept",
    of=("persistent",),
    shows="Gathered parameters are held after they were used.",
    usual="They are not freed after the forward or the backward.",
)
OPTIMIZER_STATE_REPLICATED = cause(
    "optimizer state replicated",
    of=("persistent",),
    shows="Every rank holds the whole optimizer state.",
    usual="The optimizer is built over whole parameters.",
)
WHOLE_GRADIENTS_KEPT = cause(
    "whole gradients kept",
    of=("persistent",),
    shows="Whole gradients are held after the reduction.",
    usual="Unsharded gradients are not freed.",
)
HELD_TWICE = cause(
    "held twice",
    of=("persistent",),
    shows="Twice the predicted bytes are held.",
    usual="A copy is kept next to the flat buffer.",
)
PARAMETERS_HELD_TWICE = cause(
    "parameters held twice",
    of=("persistent",),
    shows="Memory with the sizes of all parameters is held, and no shard is a view of it.",
    usual="A copy is kept, or gathered parameters are not freed.",
)
HELD_BY_NOBODY = cause(
    "held by nobody",
    of=("persistent",),
    shows="Fewer bytes are held than predicted.",
    usual="State is offloaded, or was never made.",
)
THE_LEDGER_DOES_NOT_CLOSE = cause(
    "the ledger does not close",
    of=("persistent",),
    shows="The bytes of the owners do not add up to those of the allocator.",
    usual="Memory is held by something that Python cannot see.",
)
A_GATHERED_UNIT_TWICE = cause(
    "a gathered unit twice",
    of=("peak",),
    shows="One gathered unit is held twice at the peak.",
    usual="A unit is copied out of its gather buffer.",
)
UNITS_NOT_FREED_BEFORE_THE_NEXT = cause(
    "units not freed before the next",
    of=("peak",),
    shows="Several gathered units are held at once.",
    usual="Units are freed late, or prefetched too far ahead.",
)
A_BUCKET_TWICE = cause(
    "a bucket twice",
    of=("peak",),
    shows="One bucket is held twice at the peak.",
    usual="The input and output of a reduction are held together.",
)
WHOLE_GRADIENTS_KEPT_WITHIN_THE_STEP = cause(
    "whole gradients kept within the step",
    of=("peak",),
    shows="Gradients of several units are held at once.",
    usual="Gradients are freed after the backward and not with their reduction.",
)
COPIED_BEFORE_IT_IS_FREED = cause(
    "copied before it is freed",
    of=("peak",),
    shows="The working memory is higher by the size of one buffer.",
    usual="A buffer is cast or copied while the original is still held.",
)
ALIVE_AFTER_CLOSE = cause(
    "alive after close",
    of=("release",),
    shows="Tensors of the sharder are alive after close().",
    usual="Hooks, caches or a reference cycle keep them.",
)
