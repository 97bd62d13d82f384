"""Causes of a wrong loss in the forward."""

from __future__ import annotations

from .registry import cause

SAMPLES_OF_ANOTHER_RANK = cause(
    "samples of another rank",
    of=("loss",),
    says="it is that of another rank's samples",
    shows="The loss is that of another rank's samples.",
    usual="The sampler has the wrong rank or number of ranks.",
)
SAMPLES_OF_ANOTHER_MICROBATCH = cause(
    "samples of another microbatch",
    of=("loss",),
    says="it is that of another microbatch's samples",
    shows="The loss is that of another microbatch's samples.",
    usual="Microbatches are read in another order.",
)
EVALUATION_MODE = cause(
    "evaluation mode",
    of=("loss",),
    says="it is that of a model in evaluation mode",
    shows="The loss is that of a model in evaluation mode.",
    usual="model.train() is not called on the wrapped module.",
)
MODULE_OF_AN_EARLIER_STEP = cause(
    "module of an earlier step",
    of=("loss", "gradient"),
    shows="They are those of a model in which one module has the parameters of an earlier step.",
    usual="The module computes with a copy of its parameters that no gather refreshes.",
    attributed=r"computes? with the parameters of \S+ of (the step|\d+ steps) before",
)
BIAS_OF_EACH_TENSOR_PARALLEL_RANK = cause(
    "bias of each tensor-parallel rank",
    of=("loss",),
    shows="The bias of a row-wise layer is added once for each tensor-parallel rank.",
    usual="The bias is added before the sum over the tp axis.",
)
TENSOR_PARALLEL_RANKS_SEEDED_APART = cause(
    "tensor-parallel ranks seeded apart",
    of=("loss", "gradient"),
    shows="Ranks of one tensor-parallel group draw different dropout masks.",
    usual="Every rank is seeded by its global rank.",
)
