"""Causes of collectives that were not predicted."""

from __future__ import annotations

from .registry import cause, family

ANOTHER_ORDER = cause(
    "another order",
    of=("communication",),
    shows="The predicted collectives come in another order.",
    usual="Units are prefetched or reduced in another order.",
)
ONE_COLLECTIVE_PER_PARAMETER = cause(
    "one collective per parameter",
    of=("communication",),
    shows="Each parameter has a collective of its own.",
    usual="Bucketing is off, or the bucket is too small.",
)
REDUCED_WITH_EACH_MICROBATCH = cause(
    "reduced with each microbatch",
    of=("communication",),
    shows="Gradients are reduced with each microbatch.",
    usual="no_sync() is not used.",
)
GATHERED_TWICE = cause(
    "gathered twice",
    of=("communication",),
    shows="Parameters are gathered twice.",
    usual="They are freed between the forward and the backward of one unit, or after the step.",
)
IN_PLACE_OF = family(
    "{other} in place of {kind}",
    of=("communication",),
    shows="A collective of another kind moves the same bytes.",
    usual="A simpler collective is used in place of the one that halves the traffic.",
    other=("all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast"),
    kind=("all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast"),
)
SENT_IN = family(
    "sent in {dtype}",
    of=("communication",),
    shows="As many elements as predicted are sent in another dtype.",
    usual="Values are cast after the collective and not before it, or the other way round.",
    dtype=(
        "float64",
        "float32",
        "bfloat16",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    ),
)
CALLED_ONCE_MORE = cause(
    "called once more",
    of=("communication",),
    tier=2,
    shows="One collective is called more than predicted.",
    usual="A flag or a norm is reduced on its own.",
)
FURTHER_COLLECTIVES = cause(
    "further collectives",
    of=("communication",),
    tier=2,
    shows="Several collectives are called more than predicted.",
    usual="Something is synchronised that the layout does not say.",
)
ONE_LEFT_OUT = cause(
    "one left out",
    of=("communication",),
    tier=2,
    shows="One predicted collective is not called.",
    usual="It is skipped where it has nothing to send.",
)
COLLECTIVES_LEFT_OUT = cause(
    "collectives left out",
    of=("communication",),
    tier=2,
    shows="Several predicted collectives are not called.",
    usual="Units are merged or skipped.",
)
IN_OTHER_PIECES = cause(
    "in other pieces",
    of=("communication",),
    tier=2,
    shows="The same bytes are sent in other pieces.",
    usual="Buckets have another size than declared.",
)
RANKS_CALL_OTHER_COLLECTIVES = cause(
    "ranks call other collectives",
    of=("communication",),
    shows="Ranks call different collectives in one step.",
    usual="A rank takes another branch, by its own data.",
)
DIFFERENT_COLLECTIVES = cause(
    "different collectives",
    shows="Ranks hang or crash since they call different collectives.",
    usual="A collective is called under a condition that differs between ranks.",
)
