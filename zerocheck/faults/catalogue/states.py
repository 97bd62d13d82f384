"""Faults in the update and in ownership: optimizer, copies, shards, dtypes."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

UPDATE = [
    fault(
        "update:L2InsteadOfDecoupled", "zero1", "update",
        "weight decay goes through the moments", "TT #4382; DS PR#5104",
        bugs.L2_INSTEAD_OF_DECOUPLED,
    ),
    fault(
        "update:DecayTwice", "zero1", "update",
        "weight decay is applied twice", "seen often", bugs.WEIGHT_DECAY_TWICE,
    ),
    fault(
        "update:DecayByStepSize", "zero1", "update",
        "weight decay takes the step size that is corrected for bias", "seen often",
        bugs.WEIGHT_DECAY_BY_THE_CORRECTED_STEP_SIZE, features=("lr-large",),
    ),
    fault(
        "update:DecayMissing", "zero1", "update",
        "there is no weight decay", "seen often", bugs.WEIGHT_DECAY_MISSING,
    ),
    fault(
        "update:DecayOnExcluded", "zero1", "update",
        "parameters without weight decay decay like the others", "MG #4705",
        bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS, features=("some-decay",),
    ),
    fault(
        "update:DecayAfterUpdate", "zero1", "update",
        "weight decay comes after the update", "seen often", bugs.WEIGHT_DECAY_AFTER_THE_UPDATE,
        features=("lr-large",),
    ),
    fault(
        "update:EpsInRoot", "zero1", "update",
        "eps is added inside of the root", "seen often", bugs.EPS_INSIDE_THE_ROOT,
        features=("eps-1e-3",),
    ),
    fault(
        "update:EpsBeforeCorrection", "zero1", "update",
        "eps is added before the bias correction", "seen often",
        bugs.EPS_BEFORE_THE_BIAS_CORRECTION, features=("eps-1e-3",),
    ),
    fault(
        "update:BiasCorrectionOffByOne", "zero1", "update",
        "the bias corrections are those of the next step", "TT #4382", bugs.STEP_OFF_BY_1,
    ),
    fault(
        "update:MicrobatchesCountedAsSteps", "zero1", "update",
        "the bias corrections count microbatches", "seen often", bugs.MICROBATCHES_COUNTED_AS_STEPS,
        microbatches=3,
    ),
    fault(
        "update:BetasSwapped", "zero1", "update",
        "beta1 and beta2 change places", "seen often", bugs.BETAS_SWAPPED,
    ),
    fault(
        "update:MomentsSwapped", "zero1", "update",
        "exp_avg and exp_avg_sq change places", "seen often", bugs.MOMENTS_SWAPPED,
    ),
    fault(
        "update:MomentsReset", "zero1", "update",
        "the moments of the step before are lost", "DS PR#5263", bugs.MOMENTS_RESET,
        features=("several-steps",),
    ),
    fault(
        "update:StaleMoments", "zero1", "update",
        "the parameter is updated by the moments from before the step", "seen often",
        bugs.MOMENTS_OF_THE_PREVIOUS_STEP,
    ),
    fault(
        "update:StepsRestarted", "zero1", "update",
        "the bias corrections count from 0 after a start in mid-training", "DS PR#564, #5263",
        bugs.STEPS_COUNTED_FROM_0, features=("mid-training",),
    ),
    fault(
        "update:MasterRounded", "zero1", "update",
        "the parameters that the optimizer updates are in bf16", "HF accelerate #2674, #3979",
        bugs.ROUNDED_TO_BF16,
    ),
    fault(
        "update:GroupsCollapse", "zero1", "update",
        "all groups learn at the rate of the first", "MG #4705", bugs.OPTIONS_OF_ANOTHER_GROUP,
        features=("groups",),
    ),
    fault(
        "update:SchedulerLost", "zero1", "update",
        "the learning rate stays that of the first step", "TT #275",
        bugs.LEARNING_RATE_OF_ANOTHER_STEP, features=("schedule-warmup", "several-steps"),
    ),
    fault(
        "update:StepPerSubgroup", "zero1", "update",
        "the step count goes up once per subgroup", "DS PR#7982", bugs.STEP_COUNT,
    ),
    fault(
        "update:OutsideTheOptimizer", "ddp", "update",
        "a module is reduced, but not in the optimizer", "MG #565", bugs.NEVER_UPDATED,
    ),
    fault(
        "update:FrozenDecay", "ddp", "update",
        "frozen parameters decay", "seen often", bugs.UNTOUCHED_PARAMETER_CHANGED,
        features=("frozen",),
    ),
    fault(
        "update:UnclippedUpdate", "ddp", "update",
        "the optimizer gets the gradient before clipping", "DS PR#5170",
        bugs.GRADIENT_BEFORE_CLIPPING, features=("clip-tight",),
    ),
]  # fmt: skip

PUBLISHING = [
    fault(
        "publishing:GatherStale", "zero3", "publish",
        "the forward gathers the parameters of the step before", "MG #3140; DS PR#7707",
        bugs.PARAMETERS_OF_THE_PREVIOUS_STEP,
    ),
    fault(
        "publishing:NotPublished", "zero1", "publish",
        "the last bucket is not gathered after the update", "seen often",
        bugs.COPIES_OF_THE_PREVIOUS_STEP,
    ),
    fault(
        "publishing:PublishedBeforeUpdate", "zero2", "publish",
        "parameters are gathered before the update", "MG #3140", bugs.COPIES_OF_THE_PREVIOUS_STEP,
    ),
    fault(
        "publishing:PublishedRounded", "zero1", "publish",
        "parameters travel in bf16", "PT #104770", bugs.COPIES_ROUNDED_TO_BF16,
        without=("unfreeze", "overflow"),
    ),
    fault(
        "publishing:MetaInitOverwritten", "fsdp2", "publish",
        "parameters are initialised again", "PT #90465; HF #28244, #43847", bugs.INITIAL_STATE,
    ),
    fault(
        "publishing:InitStep", "zero1", "publish",
        "a real step is taken to make the optimizer's state", "TT #4382; DS PR#5104",
        bugs.INITIAL_STATE,
    ),
    fault(
        "shapes:TransposedAsStored", "zero1", "publish",
        "a transposed parameter is flattened in the order of its memory", "bitsandbytes PR#1187",
        bugs.INITIAL_STATE, features=("transposed",), without=("frozen",),
    ),
]  # fmt: skip

OWNERSHIP = [
    fault(
        "ownership:GroupPartitionId", "zero1", "ownership",
        "one partition id serves for all ranks", "DS PR#2059", bugs.SAME_SHARD_ON_EVERY_RANK,
    ),
    fault(
        "ownership:ShardsOverlap", "zero1", "ownership",
        "each shard is one element too long", "FS #907", bugs.SHARDS_OVERLAP,
    ),
    fault(
        "ownership:RemainderDropped", "zero1", "ownership",
        "what W does not divide is stripped as padding", "DS #1380",
        bugs.REMAINDER_DROPPED, features=("uneven",),
    ),
    fault(
        "ownership:PaddedShape", "zero3", "ownership",
        "padded shapes are given for the global ones", "DS PR#848, #851", bugs.PADDED_SHAPE,
        features=("uneven",),
        without=("parameter-0d",),
    ),
    fault(
        "ownership:RankShardsLost", "fsdp2", "ownership",
        "the last rank's shards are left out of the state", "DS PR#7585", bugs.RANK_LEFT_OUT,
    ),
    fault(
        "ownership:NothingSharded", "ddp", "ownership",
        "the plugin that shards is ignored on this device", "accelerate on CPU", bugs.NOT_SHARDED,
    ),
    fault(
        "shapes:EmptyNotOwned", "zero3", "ownership",
        "a parameter without elements has no owner", "DS #8279",
        bugs.EMPTY_PARAMETER_LEFT_OUT, features=("parameter-empty",),
    ),
    fault(
        "ownership:Untied", "zero1", "ownership",
        "the alias of a tied parameter is lost", "MG #656; HF accelerate PR#3154", bugs.UNTIED,
        features=("tied",),
    ),
]  # fmt: skip

DTYPES = [
    fault(
        "dtypes:Bf16Unclipped", "zero1", "clip",
        "gradients in bf16 are left out of clipping", "seen often", bugs.NOT_CLIPPED,
        features=("mixed-dtypes", "clip-tight"),
    ),
    fault(
        "dtypes:NormOfOneDtype", "zero1", "clip",
        "the norm of one dtype overwrites that of the other", "seen often", bugs.NORM_OF_ONE_DTYPE,
        features=("mixed-dtypes", "clip-tight"), without=("clip-inf", "frozen"),
    ),
    fault(
        "dtypes:StateInBf16", "zero1", "update",
        "moments of fp32 parameters are kept in bf16", "PT #104770", bugs.ROUNDED_TO_BF16,
        features=("mixed-dtypes",),
    ),
    fault(
        "dtypes:OtherBufferUnreduced", "zero1", "gradient",
        "of one gradient buffer per dtype only one is reduced", "seen often",
        bugs.LOCAL_GRADIENT_ONLY, features=("mixed-dtypes",),
    ),
]  # fmt: skip
