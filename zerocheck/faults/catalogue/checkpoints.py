"""Faults of checkpoints: their content, exports, and their files."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

CHECKPOINTS = [
    fault(
        "checkpoints:StepCountLost", "zero1", "roundtrip",
        "the step count begins anew after a load", "DS PR#564, #5263", bugs.STEP_COUNT_LOST,
        features=("resume",),
    ),
    fault(
        "checkpoints:GroupsCollapseOnLoad", "zero1", "continuation",
        "after a load all groups have the options of the first", "MG #4705",
        bugs.OPTIONS_OF_ANOTHER_GROUP, features=("resume", "groups"),
    ),
    fault(
        "checkpoints:StateForAnotherOptimizer", "zero1", "roundtrip",
        "the state is loaded into another optimizer than the one that steps", "MG #761",
        bugs.OPTIMIZER_STATE_LOST, features=("resume",),
    ),
    fault(
        "checkpoints:LocalRankShards", "zero3", "roundtrip",
        "on the second node a rank reads what is due to its local rank", "DS PR#7601",
        features=("resume-more",),
    ),
    fault(
        "checkpoints:FirstBucketSaved", "zero1", "roundtrip",
        "the optimizer state of the first bucket alone is written", "DS PR#7585",
        bugs.OPTIMIZER_STATE_LOST, features=("resume", "bucket-small"),
    ),
    fault(
        "checkpoints:EarlierBucketsForgotten", "zero2", "roundtrip",
        "what is collected of a bucket forgets the buckets before", "MG 9a8420c90a",
        bugs.OPTIMIZER_STATE_LOST, features=("resume", "bucket-small"),
    ),
    fault(
        "checkpoints:SavesComputeCopy", "zero3", "roundtrip",
        "parameters are written in the dtype of compute", "PT #104770", bugs.ROUNDED_TO_BF16,
        features=("resume",),
    ),
    fault(
        "checkpoints:NotPublishedAfterLoad", "zero1", "roundtrip",
        "each rank loads what it updates, and nobody sends it", "MG #6920", bugs.COPIES_DIFFER,
        features=("resume",),
    ),
    fault(
        "checkpoints:DataPositionOfOneRank", "zero3", "roundtrip",
        "each rank keeps how many samples it read itself", "TT #816",
        bugs.DATA_POSITION_OF_ONE_RANK, features=("resume",),
    ),
    fault(
        "checkpoints:DataPositionLost", "zero2", "roundtrip",
        "the loader begins anew", "TT #816", bugs.DATA_POSITION_LOST, features=("resume",),
    ),
    fault(
        "checkpoints:RngOneForAll", "zero1", "roundtrip",
        "every rank goes on with the random state of rank 0", "MG #6858",
        bugs.RANDOM_STATE_OF_RANK_0_ON_ALL_RANKS, features=("resume-same",),
    ),
    fault(
        "checkpoints:BuffersNotLoaded", "zero3", "roundtrip",
        "buffers are not restored", "PT #178569", bugs.BUFFERS_NOT_LOADED,
        features=("resume", "block-batch-norm"),
    ),
    fault(
        "checkpoints:BuffersCast", "zero1", "roundtrip",
        "buffers pass through half precision", "FS #427", bugs.BUFFERS_NOT_LOADED,
        features=("resume", "block-batch-norm"),
    ),
    fault(
        "checkpoints:LossScaleLost", "zero3", "roundtrip",
        "the loss scale begins anew", "none known", bugs.LOSS_SCALE_BEGINS_ANEW,
        features=("resume", "overflow"),
    ),
    fault(
        "checkpoints:MaximumLost", "zero1", "roundtrip",
        "the maximum of amsgrad is left out", "none known", bugs.MOMENTS_LOST,
        features=("resume", "amsgrad"),
    ),
    fault(
        "checkpoints:SavedMomentsSwapped", "zero3", "roundtrip",
        "exp_avg and exp_avg_sq change names", "none known", bugs.MOMENTS_SWAPPED,
        features=("resume",),
    ),
    fault(
        "checkpoints:FrozenNotSaved", "zero2", "roundtrip",
        "frozen parameters are left out", "none known", bugs.FROZEN_PARAMETER_NOT_LOADED,
        features=("resume", "frozen"),
    ),
    fault(
        "checkpoints:WrittenWhileTraining", "zero3", "roundtrip",
        "what is written in the background is not copied first", "none known",
        bugs.STATE_OF_A_LATER_STEP, features=("resume-background",),
    ),
    fault(
        "checkpoints:ScheduleLost", "zero1", "continuation",
        "the schedule of learning rates begins anew", "TT #275", bugs.LEARNING_RATE_OF_ANOTHER_STEP,
        features=("resume", "schedule-warmup"),
    ),
    fault(
        "checkpoints:SavingSteps", "zero2", "roundtrip",
        "saving steps the optimizer", "none known", bugs.CHANGED_BY_SAVING, features=("resume",),
    ),
]  # fmt: skip

EXPORTS = [
    fault(
        "exports:ExportMutates", "zero1", "roundtrip",
        "the exporter gathers into live memory", "DS PR#6792", bugs.CHANGED_BY_SAVING,
        features=("resume",),
    ),
    fault(
        "exports:PaddingStrippedWrong", "zero3", "export",
        "padding at the end is taken off the front", "DS #1380", features=("resume", "uneven"),
    ),
    fault(
        "exports:ExportOfOneRank", "zero1", "export",
        "moments are exported from rank 0 alone", "DS PR#7585", bugs.PART_OF_IT_IS_0,
        features=("resume",),
    ),
    fault(
        "exports:ExportRounded", "zero2", "export",
        "parameters are exported in the dtype of compute", "PT #104770", bugs.ROUNDED_TO_BF16,
        features=("resume",),
    ),
    fault(
        "exports:ExportWithoutFrozen", "zero1", "export",
        "frozen parameters are left out of the export", "none known", bugs.LEFT_OUT,
        features=("resume", "frozen"),
    ),
]  # fmt: skip

FILES = [
    fault(
        "files:OldRemovedFirst", "zero1", "durability",
        "the old checkpoint is removed before the new one is there", "none known",
        bugs.OLDER_CHECKPOINT_LOST, features=("resume-killed", "resume-over"),
    ),
    fault(
        "files:WrittenInPlace", "zero2", "durability",
        "the new checkpoint is written over the old one's files", "none known",
        bugs.OLDER_CHECKPOINT_LOST, features=("resume-killed", "resume-over"),
    ),
    fault(
        "files:PointerFirst", "zero3", "durability",
        "the new checkpoint is named before it is whole", "none known",
        bugs.OLDER_CHECKPOINT_LOST, features=("resume-killed", "resume-over"),
    ),
    fault(
        "files:FilesNotVerified", "zero1", "damage",
        "checksums are written, and never read", "none known",
        bugs.DAMAGED(damage="mix"), features=("resume-mix",),
    ),
    fault(
        "files:SizesAlone", "zero3", "damage",
        "of each file the size alone is checked", "none known",
        bugs.DAMAGED(damage="mix"), features=("resume-mix",),
    ),
]  # fmt: skip
