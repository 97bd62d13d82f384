"""Declarations of an implementation's semantics. Correct trainers differ; reports print them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, Self, get_args, get_type_hints

from ..errors import UsageError, unknown

RENAMED = {
    "begins": "master_init",
    "divided": "divide_ranks",
    "lowered": "precision_mode",
    "summed": "accumulate_dtype",
}
"""Earlier names of declarations, and what they are called."""


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """Meaning of a step, declared and not guessed.

    average           "mean": the gradient is the mean over ranks; "sum": their sum.
    divide            where 1/microbatches is applied: to the "loss" before the backward, or to the
                      "gradient" after it.
    weight            "microbatch": every microbatch counts alike; "token": every token does, by
                      `Microbatch.weight`.
    accumulate        "local": microbatches are summed on the rank and reduced once; "reduce_each":
                      every microbatch is reduced, the results are summed; "reduce_shards": every
                      microbatch is reduced over the shard axis of a mesh of two axes, and the sum
                      of the results over its replicate axis; "reduce_again": every microbatch is
                      added to the sum that was reduced with the one before, and all of that is
                      reduced again.
    unused            a trainable parameter that no rank used: "skip" (no update, as torch does) or
                      "zero" (its gradient counts as 0, so that it still decays).
    buffers           "local" to the rank; "rank0": those of rank 0 are sent to all ranks at the
                      first forward of each step; "rank0_each": at every forward.
    clip              how the coefficient comes from the norm: "min(1, c/(norm+eps))" with eps =
                      1e-6, or "c/norm if norm>c".
    compute           dtype of forward and backward: "own" (that of each parameter), "bf16" or
                      "fp16".
    precision_mode    how they come to be in it: "cast" (all parameters are cast to it before the
                      forward, so local gradients are in it too), "autocast" (`torch.autocast`
                      around the forward, not the loss; local gradients are in the parameters'
                      dtype), or "cast_and_autocast" (parameters are cast, and the forward of what
                      is cast is under `torch.autocast` all the same). With `compute` "own" it says
                      nothing.
    inputs            what the model is called with: "kept", or "cast" (floating inputs to the dtype
                      of `compute`).
    outputs           what the model returns: "kept", or "cast" (floating outputs to the dtype of
                      `compute`, as FSDP2's `output_dtype` does; a loss that the model returns too).
    gradient_dtype    dtype in which the backward gives the gradient of a parameter that is cast:
                      "own" (that of its computation), or "kernel" (that in which kernels give it,
                      as of a leaf whose `grad_dtype` is None; where microbatches are summed on the
                      rank, the first of several is in fp32, and so are the parts of its uses).
    accumulate_dtype  dtype in which microbatches are summed: "own" (that of the local gradients),
                      "fp32", "bf16" or "fp16".
    reduce            dtype in which gradients are divided and reduced over ranks: "own" (that in
                      which they were summed), "fp32", "bf16" or "fp16". Where it is declared,
                      `reduce_each` reduces each microbatch once: the sum is not reduced again.
    divide_ranks      where the mean over ranks is divided by their number: in the "reduce" (in its
                      dtype), before it in the gradients' "own" (that of local gradients), which
                      `reduce_each` and `local` know, or in the "loss": each is divided once, by
                      ranks times microbatches (by ranks where `divide` is "gradient"), and the
                      reduction sums.
    master            "none": the optimizer updates the parameters; "fp32": it updates copies of
                      them, of the role `master`, and each parameter is its master cast to the
                      parameter's dtype.
    master_init       what masters are before the first step, if no state was restored: "given" (the
                      model's parameters), or "rounded" (those cast to the dtype of `compute`).

    Raises UsageError for a word that is not allowed.
    """

    average: Literal["mean", "sum"] = "mean"
    divide: Literal["loss", "gradient"] = "loss"
    weight: Literal["microbatch", "token"] = "microbatch"
    accumulate: Literal["local", "reduce_each", "reduce_shards", "reduce_again"] = "local"
    unused: Literal["skip", "zero"] = "skip"
    buffers: Literal["local", "rank0", "rank0_each"] = "local"
    clip: Literal["min(1, c/(norm+eps))", "c/norm if norm>c"] = "min(1, c/(norm+eps))"
    compute: Literal["own", "bf16", "fp16"] = "own"
    precision_mode: Literal["cast", "autocast", "cast_and_autocast"] = "cast"
    inputs: Literal["kept", "cast"] = "kept"
    outputs: Literal["kept", "cast"] = "kept"
    gradient_dtype: Literal["own", "kernel"] = "own"
    accumulate_dtype: Literal["own", "fp32", "bf16", "fp16"] = "own"
    reduce: Literal["own", "fp32", "bf16", "fp16"] = "own"
    divide_ranks: Literal["reduce", "own", "loss"] = "reduce"
    master: Literal["none", "fp32"] = "none"
    master_init: Literal["given", "rounded"] = "given"

    def __new__(cls, *words: object, **declared: object) -> Self:
        """Refuse what is no declaration; the fields are set by `__init__`."""
        names = [field.name for field in fields(cls)]
        if words:
            raise UsageError(
                f"Semantics takes each declaration by its name, such as average={words[0]!r} "
                f"(allowed: {', '.join(names)})"
            )
        for name in declared:
            if name in RENAMED:
                raise UsageError(f"Semantics.{name} is called {RENAMED[name]}")
            if name not in names:
                raise unknown("declaration of Semantics", name, names)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kind: Any = type(self)  # mypy takes a class for one of its instances here
        for name, words in _allowed(kind).items():
            given = getattr(self, name)
            if given not in words:
                raise unknown(f"Semantics.{name}", str(given), words)

    @property
    def in_losses(self) -> bool:
        """True if the mean over ranks is taken by dividing losses."""
        return self.average == "mean" and self.divide_ranks == "loss"

    @property
    def reduction(self) -> Literal["mean", "sum"]:
        """Operation of the reduction over ranks: the sum where losses are divided."""
        return "sum" if self.in_losses else self.average


@cache
def _allowed(semantics: type[Any]) -> dict[str, tuple[str, ...]]:
    hints = get_type_hints(semantics)
    return {field.name: get_args(hints[field.name]) for field in fields(semantics)}
