"""Faults in the update and in ownership: optimizer, copies, shards, dtypes."""

from __future__ import annotations

from .fault import fault

UPDATE = [
    fault(
        "update:L2InsteadOfDecoupled", "zero1", "update",
        "weight decay goes through the moments", "TT #4382; DS PR#5104",
        "L2 instead of decoupled",
    ),
    fault(
        "update:DecayTwice", "zero1", "update",
        "weight decay is applied twice", "seen often", "weight decay twice",
    ),
    fault(
        "update:DecayByStepSize", "zero1", "update",
        "weight decay takes the step size that is corrected for bias", "seen often",
        "weight decay by the corrected step size", features=("lr-large",),
    ),
    fault(
        "update:DecayMissing", "zero1", "update",
        "there is no weight decay", "seen often", "weight decay missing",
    ),
    fault(
        "update:DecayOnExcluded", "zero1", "update",
        "parameters without weight decay decay like the others", "MG #4705",
        "weight decay on excluded parameters", features=("some-decay",),
    ),
    fault(
        "update:DecayAfterUpdate", "zero1", "update",
        "weight decay comes after the update", "seen often", "weight decay after the update",
        features=("lr-large",),
    ),
    fault(
        "update:EpsInRoot", "zero1", "update",
        "eps is added inside of the root", "seen often", "eps inside the root",
        features=("eps-1e-3",),
    ),
    fault(
        "update:EpsBeforeCorrection", "zero1", "update",
        "eps is added before the bias correction", "seen often",
        "eps before the bias correction", features=("eps-1e-3",),
    ),
    fault(
        "update:BiasCorrectionOffByOne", "zero1", "update",
        "the bias corrections are those of the next step", "TT #4382", "step off by 1",
    ),
    fault(
        "update:MicrobatchesCountedAsSteps", "zero1", "update",
        "the bias corrections count microbatches", "seen often", "microbatches counted as steps",
        microbatches=3,
    ),
    fault(
        "update:BetasSwapped", "zero1", "update",
        "beta1 and beta2 change places", "seen often", "betas swapped",
    ),
    fault(
        "update:MomentsSwapped", "zero1", "update",
        "exp_avg and exp_avg_sq change places", "seen often", "moments swapped",
    ),
    fault(
        "update:MomentsReset", "zero1", "update",
        "the moments of the step before are lost", "DS PR#5263", "moments reset",
        features=("several-steps",),
    ),
    fault(
        "update:StaleMoments", "zero1", "update",
        "the parameter is updated by the moments from before the step", "seen often",
        "moments of the previous step",
    ),
    fault(
        "update:StepsRestarted", "zero1", "update",
        "the bias corrections count from 0 after a start in mid-training", "DS PR#564, #5263",
        "steps counted from 0", features=("mid-training",),
    ),
    fault(
        "update:MasterRounded", "zero1", "update",
        "the parameters that the optimizer updates are in bf16", "HF accelerate #2674, #3979",
        "rounded to bf16",
    ),
    fault(
        "update:GroupsCollapse", "zero1", "update",
        "all groups learn at the rate of the first", "MG #4705", "options of another group",
        features=("groups",),
    ),
    fault(
        "update:SchedulerLost", "zero1", "update",
        "the learning rate stays that of the first step", "TT #275",
        "learning rate of another step", features=("schedule-warmup", "several-steps"),
    ),
    fault(
        "update:StepPerSubgroup", "zero1", "update",
        "the step count goes up once per subgroup", "DS PR#7982", "step count",
    ),
    fault(
        "update:OutsideTheOptimizer", "ddp", "update",
        "a module is reduced, but not in the optimizer", "MG #565", "never updated",
    ),
    fault(
        "update:FrozenDecay", "ddp", "update",
        "frozen parameters decay", "seen often", "untouched parameter changed",
        features=("frozen",),
    ),
    fault(
        "update:UnclippedUpdate", "ddp", "update",
        "the optimizer gets the gradient before clipping", "DS PR#5170",
        "gradient before clipping", features=("clip-tight",),
    ),
]  # fmt: skip

PUBLISHING = [
    fault(
        "publishing:GatherStale", "zero3", "publish",
        "the forward gathers the parameters of the step before", "MG #3140; DS PR#7707",
        "parameters of the previous step",
    ),
    fault(
        "publishing:NotPublished", "zero1", "publish",
        "the last bucket is not gathered after the update", "seen often",
        "copies of the previous step",
    ),
    fault(
        "publishing:PublishedBeforeUpdate", "zero2", "publish",
        "parameters are gathered before the update", "MG #3140", "copies of the previous step",
    ),
    fault(
        "publishing:PublishedRounded", "zero1", "publish",
        "parameters travel in bf16", "PT #104770", "copies rounded to bf16",
        without=("unfreeze", "overflow"),
    ),
    fault(
        "publishing:MetaInitOverwritten", "fsdp2", "publish",
        "parameters are initialised again", "PT #90465; HF #28244, #43847", "initial state",
    ),
    fault(
        "publishing:InitStep", "zero1", "publish",
        "a real step is taken to make the optimizer's state", "TT #4382; DS PR#5104",
        "initial state",
    ),
    fault(
        "shapes:TransposedAsStored", "zero1", "publish",
        "a transposed parameter is flattened in the order of its memory", "bitsandbytes PR#1187",
        "initial state", features=("transposed",), without=("frozen",),
    ),
]  # fmt: skip

OWNERSHIP = [
    fault(
        "ownership:GroupPartitionId", "zero1", "ownership",
        "one partition id serves for all ranks", "DS PR#2059", "same shard on every rank",
    ),
    fault(
        "ownership:ShardsOverlap", "zero1", "ownership",
        "each shard is one element too long", "FS #907", "shards overlap",
    ),
    fault(
        "ownership:RemainderDropped", "zero1", "ownership",
        "what W does not divide is stripped as padding", "DS #1380",
        "remainder dropped", features=("uneven",),
    ),
    fault(
        "ownership:PaddedShape", "zero3", "ownership",
        "padded shapes are given for the global ones", "DS PR#848, #851", "padded shape",
        features=("uneven",),
        without=("parameter-0d",),
    ),
    fault(
        "ownership:RankShardsLost", "fsdp2", "ownership",
        "the last rank's shards are left out of the state", "DS PR#7585", "rank left out",
    ),
    fault(
        "ownership:NothingSharded", "ddp", "ownership",
        "the plugin that shards is ignored on this device", "accelerate on CPU", "not sharded",
    ),
    fault(
        "shapes:EmptyNotOwned", "zero3", "ownership",
        "a parameter without elements has no owner", "DS #8279",
        "empty parameter left out", features=("parameter-empty",),
    ),
    fault(
        "ownership:Untied", "zero1", "ownership",
        "the alias of a tied parameter is lost", "MG #656; HF accelerate PR#3154", "untied",
        features=("tied",),
    ),
]  # fmt: skip

DTYPES = [
    fault(
        "dtypes:Bf16Unclipped", "zero1", "clip",
        "gradients in bf16 are left out of clipping", "seen often", "not clipped",
        features=("mixed-dtypes", "clip-tight"),
    ),
    fault(
        "dtypes:NormOfOneDtype", "zero1", "clip",
        "the norm of one dtype overwrites that of the other", "seen often", "norm of one dtype",
        features=("mixed-dtypes", "clip-tight"), without=("clip-inf", "frozen"),
    ),
    fault(
        "dtypes:StateInBf16", "zero1", "update",
        "moments of fp32 parameters are kept in bf16", "PT #104770", "rounded to bf16",
        features=("mixed-dtypes",),
    ),
    fault(
        "dtypes:OtherBufferUnreduced", "zero1", "gradient",
        "of one gradient buffer per dtype only one is reduced", "seen often",
        "local gradient only", features=("mixed-dtypes",),
    ),
]  # fmt: skip
