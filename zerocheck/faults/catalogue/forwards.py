"""Faults in the forward and its buffers, and sharders that break off or hang."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

FORWARDS = [
    fault(
        "forward:SeedForAll", "zero2", "loss",
        "every forward starts from one seed", "MG #6858", bugs.SEED_FOR_ALL, features=("dropout",),
    ),
    fault(
        "forward:SeededAlike", "zero2", "loss",
        "every rank seeds its generator alike", "MG #6858", bugs.SEED_FOR_ALL,
        features=("carried-rng",),
    ),
    fault(
        "forward:EvaluationMode", "ddp", "loss",
        "the model is left in evaluation mode", "seen often", bugs.EVALUATION_MODE,
        features=("dropout",), without=("sometimes-used",),
    ),
    fault(
        "forward:FirstMicrobatchTwice", "zero3", "loss",
        "the first microbatch is run again in place of the second", "TT #816",
        bugs.SAMPLES_OF_ANOTHER_MICROBATCH, microbatches=3,
    ),
    fault(
        "forward:MicrobatchDropped", "zero1", "loss",
        "the last microbatch is not run", "DS PR#7981", bugs.MICROBATCH_DROPPED, microbatches=2,
    ),
    fault(
        "forward:SamplesOfRank0", "zero1", "loss",
        "every rank reads the samples of rank 0", "TT #816", bugs.SAMPLES_OF_ANOTHER_RANK,
    ),
    fault(
        "forward:ShardsMisordered", "zero3", "loss",
        "two shards change places when they are gathered", "DS PR#318", bugs.SHARDS_EXCHANGED,
    ),
    fault(
        "forward:UnitNotGathered", "zero3", "loss",
        "a unit is read before its parameters are there", "DS PR#5606",
        bugs.UNINITIALISED_MEMORY,
    ),
]  # fmt: skip

BUFFERS = [
    fault(
        "buffers:BuffersNotBroadcast", "ddp", "buffers",
        "buffers are not sent from rank 0", "PT #178569; LlamaFactory #10820", bugs.BUFFERS_LOCAL,
        features=("block-batch-norm", "several-steps"), world=3,
    ),
    fault(
        "buffers:BuffersSentOnce", "ddp", "buffers",
        "buffers are not sent from rank 0 at every forward", "seen often", bugs.BUFFERS_LOCAL,
        features=("block-batch-norm", "microbatches"), without=("static-graph",), world=3,
        microbatches=3,
    ),
    fault(
        "buffers:BuffersAveraged", "zero1", "buffers",
        "buffers are averaged over ranks", "seen often", bugs.BUFFERS_AVERAGED,
        features=("block-batch-norm",), world=3,
    ),
    fault(
        "buffers:BuffersOfRank0", "zero2", "buffers",
        "buffers of rank 0 overwrite the others'", "seen often", bugs.BUFFERS_OF_RANK_0,
        features=("block-batch-norm",), world=3,
    ),
    fault(
        "buffers:BuffersRounded", "zero3", "buffers",
        "buffers are cast to half precision", "FS #427", bugs.BUFFERS_ROUNDED_TO_BF16,
        features=("block-batch-norm",),
    ),
    fault(
        "buffers:BuffersForgotten", "fsdp2", "buffers",
        "buffers are set back after every step", "seen often", bugs.BUFFERS_NOT_UPDATED,
        features=("block-batch-norm",),
    ),
]  # fmt: skip

BROKEN = [
    fault(
        "unused:UnusedNotReduced", "fsdp2", None,
        "each rank reduce-scatters the gradients that it has", "PT #158719; torchtitan #2747",
        bugs.DIFFERENT_COLLECTIVES,
        features=("side",), without=("block-experts", "frozen"), microbatches=1,
    ),
    fault(
        "article:ArticleStage2", "zerocheck.faults.article:Repaired", None,
        "each rank all-reduces only the tensors that it owns", "a tutorial on ZeRO from scratch",
        bugs.DIFFERENT_COLLECTIVES,
        without=("sometimes-used", "clip"),
    ),
]  # fmt: skip
