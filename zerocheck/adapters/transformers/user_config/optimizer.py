"""Optimizer of TrainingArguments, as fields of cases."""

from __future__ import annotations

from typing import Any

from ...shared.user_config.section import Section

KINDS = {
    "adamw_torch_fused": ("adamw", "fused"),
    "adamw_torch": ("adamw", "for-loop"),
    "sgd": ("sgd", "for-loop"),
    "adagrad": ("adagrad", "for-loop"),
    "rmsprop": ("rmsprop", "for-loop"),
}
"""`optim` -> kind and kernel of cases."""

UNDECAYED = ("*bias", "*norm*")
"""Patterns of the parameters that a Trainer does not decay: biases, and those of norms."""


def optimizer_of(top: Section) -> dict[str, Any]:
    """Return the fields of `case.optimizer`. A missing key has transformers' default."""
    name = top.values.get("optim") or "adamw_torch_fused"
    if name not in KINDS:
        allowed = ", ".join(f'"{one}"' for one in KINDS)
        raise top.refuse("optim", "zerocheck runs what torch has alone", allowed)
    kind, kernel = KINDS[name]
    largest = 1e30
    decay = top.number("weight_decay", 0.0, below=largest)
    options = {
        "lr": top.number("learning_rate", 5e-5, below=largest),
        "beta1": top.number("adam_beta1", 0.9, below=1.0),
        "beta2": top.number("adam_beta2", 0.999, below=1.0),
        "eps": top.number("adam_epsilon", 1e-8, below=largest),
        "weight_decay": decay,
    }
    if kind != "adamw":  # a Trainer gives these its rate alone
        options |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    apart = UNDECAYED if decay else ()
    groups = [{"pattern": pattern, **options, "weight_decay": 0.0} for pattern in apart]
    return {"kind": kind, "kernel": kernel, "groups": [*groups, {"pattern": "*", **options}]}
