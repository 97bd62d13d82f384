"""Causes of parameters that are not the updated ones on every rank."""

from __future__ import annotations

from .registry import cause

COPIES_OF_THE_PREVIOUS_STEP = cause(
    "copies of the previous step",
    of=("publish",),
    says="they are those of the step before: the update was not sent",
    shows="Copies are the parameters of the step before.",
    usual="The update is not sent, or the gather comes before it.",
    attributed=r"(is|are) (that|those) [^;]*, one step earlier",
)
COPIES_ROUNDED_TO_BF16 = cause(
    "copies rounded to bf16",
    of=("publish", "loss"),
    says="they are the updated ones rounded to bf16",
    shows="Copies are the updated parameters rounded to bf16.",
    usual="Parameters are gathered in bf16 and kept.",
    attributed=r"rounded to bf16",
)
COPIES_DIFFER = cause(
    "copies differ",
    of=("publish", "roundtrip", "update"),
    tier=2,
    shows="Copies of one tensor differ between ranks.",
    usual="Each rank updates its own copy, and nothing is sent.",
    attributed=r"^(?!.*(steps? earlier|rounded to)).*on (every rank|ranks? \d)",
)
COPIES_OF_THE_GRADIENT_DIFFER = cause(
    "copies of the gradient differ",
    of=("gradient",),
    tier=2,
    shows="Copies of one gradient differ between ranks, in a step that `attach` checks.",
    usual="A rank is left out of the reduction, or changes its gradient after it.",
)
INITIAL_STATE = cause(
    "initial state",
    of=("publish",),
    shows="The state that training begins with is not the one that was given.",
    usual="Wrapping reads the parameters before the state is loaded, or rounds them.",
    attributed=r"^before the first step, ",
)
PARAMETERS_OF_THE_PREVIOUS_STEP = cause(
    "parameters of the previous step",
    of=("publish",),
    shows="The last forward used parameters of the step before.",
    usual="Gathered parameters are not refreshed after the step.",
    attributed=r"computes? with [^;]*of the step before",
)
PIECES_IN_THE_ORDER_OF_A_PLAIN_SHARD = cause(
    "pieces in the order of a plain shard",
    of=("publish",),
    shows="Pieces of tensors on two axes are exchanged.",
    usual="What is cut over the tp axis and then sharded is taken for what is sharded and then "
    "cut.",
    attributed=r"in another order of shards",
)
