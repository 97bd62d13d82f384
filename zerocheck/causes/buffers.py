"""Causes of wrong running statistics."""

from __future__ import annotations

from .registry import cause

BUFFERS_LOCAL = cause(
    "buffers local",
    of=("buffers",),
    says="they were never sent from rank 0",
    shows="Each rank holds buffers of its own.",
    usual="They are never sent from rank 0.",
)
BUFFERS_OF_RANK_0 = cause(
    "buffers of rank 0",
    of=("buffers",),
    says="every rank holds those of rank 0",
    shows="Every rank holds the buffers of rank 0.",
    usual="They are sent after the forward, or read back from what rank 0 saved.",
)
BUFFERS_SENT = cause(
    "buffers sent",
    of=("buffers",),
    says="rank 0 sends its own before the forward",
    shows="Each rank's buffers follow from those of rank 0 and the rank's own samples.",
    usual="They are broadcast before the first forward of a step; declare "
    "Semantics(buffers='rank0') if it is meant.",
)
BUFFERS_SENT_EACH = cause(
    "buffers sent each time",
    of=("buffers",),
    says="rank 0 sends its own before each forward",
    shows="With each microbatch, a rank's buffers follow from those of rank 0 anew.",
    usual="They are broadcast before each forward, as DDP does without `no_sync`; declare "
    "Semantics(buffers='rank0_each') if it is meant.",
)
BUFFERS_AVERAGED = cause(
    "buffers averaged",
    of=("buffers",),
    says="they were averaged over ranks",
    shows="Buffers are the mean over ranks.",
    usual="They are reduced like gradients.",
)
BUFFERS_ROUNDED_TO_BF16 = cause(
    "buffers rounded to bf16",
    of=("buffers",),
    says="they were rounded to bf16",
    shows="Buffers are rounded to bf16.",
    usual="They are cast with the parameters.",
)
BUFFERS_NOT_UPDATED = cause(
    "buffers not updated",
    of=("buffers",),
    says="they are those of the step before",
    shows="Buffers are those of the step before.",
    usual="The forward runs on a copy of the module.",
)
BUFFERS_UPDATED_TWICE = cause(
    "buffers updated twice",
    of=("buffers",),
    says="they are updated again where activation checkpointing computes the forward again",
    shows="Buffers are updated twice for each forward.",
    usual="A checkpointed block with batch norm runs again in the backward, in training mode.",
)
BUFFERS_MOVED_APART = cause(
    "buffers moved apart",
    of=("buffers",),
    says="the script moves them by what the rank alone counted",
    shows="Buffers that the script changes outside of the forward, such as the bias of a router, "
    "differ between ranks.",
    usual="The counts of tokens are not summed over ranks.",
)
BUFFERS_DIFFER = cause(
    "buffers differ",
    of=("buffers",),
    tier=2,
    shows="Buffers differ from the declared semantics in no known way.",
    usual="Several updates are mixed.",
)
