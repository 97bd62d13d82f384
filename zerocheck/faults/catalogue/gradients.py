"""Faults in gradients: reduction, accumulation, scaling, clipping."""

from __future__ import annotations

from ... import causes as bugs
from .fault import FORWARD, fault

GRADIENT = [
    fault(
        "gradient:AverageBecomesSum", "zero2", "gradient",
        "the average over ranks is a sum", "PT #162338", bugs.GRADIENT_TIMES_W, world=3,
    ),
    fault(
        "gradient:DoubleAverage", "zero1", "gradient",
        "the loss is divided by W, then gradients are averaged", "verl-SpeCo PR#29",
        bugs.GRADIENT_OVER_W, world=3,
    ),
    fault(
        "gradient:LossTimesWorld", "fsdp2", "gradient",
        "the loss is multiplied by W", "HF transformers #45994", bugs.GRADIENT_TIMES_W, world=3,
    ),
    fault(
        "gradient:MeanInTheLosses", "fsdp2", "gradient",
        "losses are divided by W, and nothing declares it", "TT disable_fsdp_gradient_division",
        bugs.MEAN_IN_THE_LOSSES, world=3,
    ),
    fault(
        "gradient:DivisionLeftOn", "fsdp2", "gradient",
        "losses are divided by W as declared, and FSDP2 averages all the same",
        "TT disable_fsdp_gradient_division", bugs.GRADIENT_OVER_W, world=3,
    ),
    fault(
        "gradient:OneParameterUnreduced", "ddp", "gradient",
        "one parameter is left out of the reduction", "PT #47562; MG #599, #1446",
        bugs.LOCAL_GRADIENT_ONLY, world=3,
    ),
    fault(
        "gradient:FirstStepUnsynced", "zero1", "gradient",
        "the first step is not reduced", "PT #60118", bugs.LOCAL_GRADIENT_ONLY, world=3,
    ),
    fault(
        "gradient:SyncFirstStepOnly", "ddp", "gradient",
        "only the first step is reduced", "PT #187732", bugs.LOCAL_GRADIENT_ONLY, world=3,
    ),
    fault(
        "gradient:OversizedBucketSkipped", "zero1", "gradient",
        "buckets above the limit are not reduced", "DS PR#3832", bugs.LOCAL_GRADIENT_ONLY,
        world=3, features=("bucket-small",),
    ),
    fault(
        "gradient:SubgroupDivisor", "zero1", "gradient",
        "some parameters are divided by another group's size", "DS PR#6546, #5618; TT #1551",
        bugs.GRADIENT_SCALED, world=3,
    ),
    fault(
        "gradient:ReducedTwice", "zero1", "gradient",
        "shards that are reduced already are reduced again", "NeMo PR#9335", bugs.REDUCED_TWICE,
    ),
    fault(
        "gradient:RootOfWorld", "zero1", "gradient",
        "the sum over ranks is divided by sqrt(W)", "seen often",
        bugs.GRADIENT_TIMES_ROOT_W, world=3,
    ),
    fault(
        "gradient:ShardOffByOne", "zero1", "gradient",
        "each rank reads its shard one element too far", "DS PR#848, #851", bugs.SHIFTED,
    ),
    fault(
        "gradient:ShardOfTheNext", "zero1", "gradient",
        "each rank reduces the shard of the rank after it", "DS PR#1841",
        bugs.SHARD_OF_ANOTHER_RANK, world=3,
    ),
    fault(
        "gradient:TailTakenForPadding", "zero1", "gradient",
        "what W does not divide is cleared as padding", "DS #1380", bugs.TAIL_LEFT_OUT,
        features=("uneven",),
    ),
    fault(
        "gradient:GradientOfThePreviousStep", "zero1", "gradient",
        "the optimizer gets the gradient of the step before", "seen often",
        bugs.GRADIENT_OF_THE_PREVIOUS_STEP, features=("several-steps",),
    ),
    fault(
        "gradient:TiedReducedTwice", "zero1", "gradient",
        "a tied parameter is reduced once per alias", "DS PR#7534", bugs.GRADIENT_DOUBLED,
        world=3, features=("tied",),
    ),
    fault(
        "gradient:PartitionsMisordered", "zero1", "gradient",
        "two partitions change places before the reduction", "DS PR#318", bugs.SHARDS_EXCHANGED,
    ),
    fault(
        "gradient:NoneGradientShifts", "zero2", "gradient",
        "a parameter without a gradient does not move the offset", "DS PR#545",
        bugs.OFFSET_NOT_MOVED, features=("unused",),
    ),
    fault(
        "padding:AlignedWalkedUnaligned", "zero2", "gradient",
        "a buffer is sized with padding and walked without it", "DS PR#8158",
        bugs.UNINITIALISED_MEMORY,
    ),
    fault(
        "unused:NoneBecomesZero", "ddp", "gradient",
        "no gradient becomes a zero gradient, so unused parameters move", "FS #605",
        bugs.NONE_BECAME_ZERO, features=("unused",),
    ),
    fault(
        "unused:OutsideFlatBuffer", "zero1", "gradient",
        "a module is not in the flat buffer", "MG #565", bugs.GRADIENT_MISSING,
    ),
    fault(
        "unused:NoneEndsUnit", "zero3", "gradient",
        "a parameter without a gradient ends the collecting of its unit", "seen in review",
        bugs.LEFT_OUT_AFTER_AN_UNUSED_ONE,
        features=("block-experts",),
    ),
    fault(
        "unused:AveragedOverUsers", "zero1", "gradient",
        "a gradient is averaged over the ranks that used the parameter", "DS #5618, #6545",
        bugs.AVERAGED_OVER_USERS,
        features=("sometimes-used",), world=3,
    ),
    fault(
        "shapes:ScalarsOutside", "zero2", "gradient",
        "0-d parameters are in no bucket", "seen in review", bugs.GRADIENT_MISSING,
        features=("parameter-0d",), without=("frozen",),
    ),
    fault(
        "gradient:NotWaitedFor", "zero1", "gradient",
        "a reduction is not waited for", "OpenNMT-py #2295",
        bugs.REDUCTION_NOT_WAITED_FOR, features=("delays",),
    ),
    fault(
        "gradient:WaitsForTheOneBefore", "zero1", "gradient",
        "the handle of the bucket before is waited for", "DS PR#1264",
        bugs.REDUCTION_NOT_WAITED_FOR, world=3, features=("bucket-small",),
    ),
    fault(
        "freezing:RequiresGradCached", "fsdp2", "gradient",
        "which parameters train is read once", "seen often", bugs.NOT_UNFROZEN,
        # What needs no gradient runs another kernel there: the loss differs in its last bits.
        features=("unfreeze",), without=("block-conv", "block-recurrent"),
    ),
    fault(
        "freezing:NotWrappedAgain", "ddp", "gradient",
        "what is unfrozen after DDP was made is not reduced", "Lightning #20340",
        bugs.LOCAL_GRADIENT_ONLY, world=3, features=("unfreeze",),
        without=("sometimes-used", "static-graph"),
    ),
    fault(
        "freezing:FrozenDecays", "zero1", "gradient",
        "what will be unfrozen has a gradient of zeros, and decays", "FS #605 (unused parameters)",
        bugs.GRADIENT_OF_A_FROZEN_PARAMETER, features=("unfreeze",),
    ),
    fault(
        "article:ArticleStage1", "zerocheck.faults.article:Repaired", "gradient",
        "gradients are never reduced", "a tutorial on ZeRO from scratch", bugs.LOCAL_GRADIENT_ONLY,
        world=3,
        without=("sometimes-used", "clip"),
    ),
]  # fmt: skip

ACCUMULATION = [
    fault(
        "accumulation:LastMicrobatchOnly", "zero2", "gradient",
        "the accumulator is reset at every microbatch",
        "open-instruct PR#1498; TT #3575; DS #7718", bugs.LAST_MICROBATCH_ONLY, microbatches=3,
    ),
    fault(
        "accumulation:ScaleAccumulatedShard", "zero2", "gradient",
        "the accumulator is divided, not what is added to it", "MG PR#3023",
        bugs.ACCUMULATOR_RESCALED, world=3, microbatches=2,
    ),
    fault(
        "accumulation:MicrostepOffByOne", "zero2", "gradient",
        "the first step loses its first microbatch", "DS PR#6550, #7967", bugs.MICROBATCH_DROPPED,
        microbatches=3,
    ),
    fault(
        "accumulation:DividedTwiceByGa", "fsdp2", "gradient",
        "the loss is divided by the number of microbatches twice",
        "DS PR#7724; HF accelerate #3877", bugs.GRADIENT_OVER_GA, microbatches=3,
    ),
    fault(
        "accumulation:NotDividedByGa", "zero1", "gradient",
        "the loss is not divided by the number of microbatches", "seen often",
        bugs.GRADIENT_TIMES_GA, microbatches=3,
    ),
    fault(
        "accumulation:MeanOfMeans", "fsdp2", "gradient",
        "microbatches count alike, whatever number of tokens they have", "torchtune PR#1875",
        bugs.MEAN_OF_MEANS, features=("masked",),
    ),
    fault(
        "accumulation:TokensUndeclared", "zero1", "gradient",
        "the mean over tokens, declared as the mean of means", "seen often",
        bugs.MEAN_OVER_TOKENS, features=("masked",),
    ),
    fault(
        "accumulation:FirstMicrobatchDoubled", "zero1", "gradient",
        "the first microbatch is added twice", "TT #816", bugs.MICROBATCH_DOUBLED, microbatches=3,
    ),
    fault(
        "accumulation:StaleBoundary", "ddp", "gradient",
        "each microbatch acts on the boundary flag of the one before", "DS PR#1264",
        bugs.ONE_MICROBATCH_REDUCED, microbatches=3,
        without=("sometimes-used",),
    ),
    fault(
        "accumulation:NeverZeroed", "fsdp2", "gradient",
        "gradients are not cleared between steps", "seen often",
        bugs.GRADIENT_OF_THE_PREVIOUS_STEP_KEPT,
    ),
    fault(
        "accumulation:UnclippedKept", "zero2", "gradient",
        "the sum begins with what was reduced in the step before", "reports/findings",
        bugs.GRADIENT_OF_THE_PREVIOUS_STEP_KEPT, features=("clip-tight", "several-steps"),
    ),
]  # fmt: skip

SCALING = [
    fault(
        "loss_scaling:OverflowSeenLate", "zero1", "update",
        "each rank looks for an overflow before its gradient is reduced", "CA PR#1175",
        bugs.RANKS_DISAGREE, features=("overflow",),
    ),
    fault(
        "loss_scaling:NeverSkips", "zero1", "update",
        "a step that overflows is taken", "seen often", bugs.STEP_NOT_SKIPPED,
        features=("overflow",),
    ),
    fault(
        "loss_scaling:NanOnInfNorm", "zero1", "update",
        "an infinite norm becomes NaN in place of -1, by which a step is skipped", "DS PR#7171",
        bugs.STEP_NOT_SKIPPED,
        features=("overflow",),
    ),
    fault(
        "loss_scaling:OverflowNotCleared", "zero1", "update",
        "after an overflow every step is skipped", "seen often", bugs.STEP_SKIPPED,
        features=("overflow", "several-steps"),
    ),
    fault(
        "loss_scaling:SkippedStepCounted", "zero1", "update",
        "a skipped step leaves a trace in the optimizer's state", "DS PR#8435",
        bugs.SKIPPED_STEP_CHANGED_THE_STATE, features=("overflow", "several-steps"),
    ),
    fault(
        "loss_scaling:UnscaledTwice", "zero1", "gradient",
        "the gradient is divided by the loss scale twice", "seen often", bugs.UNSCALED_TWICE,
        features=("loss-scale",),
    ),
    fault(
        "loss_scaling:UnscaledByNewScale", "zero1", "gradient",
        "the loss scale is updated before it is divided out", "DS PR#2695",
        bugs.UNSCALED_BY_ANOTHER_SCALE, features=("loss-scale",),
    ),
    fault(
        "loss_scaling:ClippedBeforeUnscaling", "zero1", "clip",
        "clipping sees the gradient that is still scaled", "Lightning #9599",
        bugs.NORM_BEFORE_UNSCALING, features=("loss-scale", "clip-tight"),
    ),
]  # fmt: skip

CLIPPING = [
    fault(
        "clipping:ReplicatedCountedWTimes", "ddp", "clip",
        "the norm of replicated gradients is summed over ranks", "PT #88621",
        bugs.NORM_TIMES_ROOT_W, features=("clip",), without=("clip-inf",),
    ),
    fault(
        "clipping:NormExtraReduce", "zero1", "clip",
        "the total norm is summed over ranks once more", "DS PR#551", bugs.NORM_TIMES_ROOT_W,
        features=("clip",), without=("clip-inf",),
    ),
    fault(
        "clipping:LocalNorm", "zero1", "clip",
        "each rank clips by the norm of its own shard", "RLinf PR#1542", bugs.LOCAL_NORM,
        features=("clip-tight",),
    ),
    fault(
        "clipping:SumOfLocalNorms", "zero1", "clip",
        "the norms of the shards are added up, not their squares", "seen often",
        bugs.SUM_OF_LOCAL_NORMS, world=3, features=("clip-tight",),
    ),
    fault(
        "clipping:MeanOfLocalNorms", "zero1", "clip",
        "the norms of the shards are averaged", "seen often", bugs.MEAN_OF_LOCAL_NORMS,
        world=3, features=("clip-tight",),
    ),
    fault(
        "clipping:LargestLocalNorm", "zero1", "clip",
        "the largest norm of a shard is taken, whichever norm is asked for", "seen often",
        bugs.LARGEST_LOCAL_NORM, world=3, features=("clip-tight",),
    ),
    fault(
        "clipping:ClippedByLocalNorm", "zero1", "clip",
        "the total norm is reported, that of the own shard clips", "RLinf PR#1542",
        bugs.CLIPPED_BY_THE_LOCAL_NORM, features=("clip-tight",),
    ),
    fault(
        "clipping:LoggedNormOnly", "zero1", "clip",
        "a partial norm is logged, clipping is right", "miles PR#35", bugs.LOCAL_NORM,
        features=("clip",), spares=FORWARD, mild=True,
    ),
    fault(
        "clipping:ClipAmplifies", "zero1", "clip",
        "small gradients are scaled up: max for min", "DS PR#5150", bugs.COEFFICIENT_ABOVE_1,
        features=("clip-loose",),
    ),
    fault(
        "clipping:NormWrongP", "zero1", "clip",
        "the 2-norm, whichever is asked for", "CA #4795", bugs.ANOTHER_NORM,
        features=("clip-inf", "clip-tight"),
    ),
    fault(
        "clipping:Unclipped", "zero1", "clip",
        "clipping depends on a flag that is not set", "DS PR#3166", bugs.NOT_CLIPPED,
        features=("clip-tight",),
    ),
    fault(
        "clipping:Rank0Clips", "zero1", "clip",
        "only rank 0 clips", "DS #1801", bugs.NOT_CLIPPED, features=("clip-tight",),
    ),
    fault(
        "clipping:NormOfNothing", "zero1", "clip",
        "the norm is read from an attribute that is not there", "MG a82fa72d52",
        bugs.NORM_OF_NOTHING, features=("clip-tight",),
    ),
    fault(
        "clipping:NormWithoutHead", "zero1", "clip",
        "the norm leaves out the parameters of one module", "DeepSpeed, seen here",
        bugs.NORM_WITHOUT_SOME_PARAMETERS, world=3, features=("clip-tight",), without=("tied",),
    ),
    fault(
        "clipping:StaleNorm", "zero1", "clip",
        "the norm of the first step is kept", "CA #5002", bugs.NORM_OF_ANOTHER_STEP,
        features=("clip-tight", "several-steps"),
    ),
    fault(
        "clipping:ClippedTwice", "zero1", "clip",
        "clipping runs twice with one coefficient", "seen often", bugs.CLIPPED_TWICE,
        features=("clip-tight",),
    ),
    fault(
        "padding:PaddingInNorm", "zero2", "clip",
        "the norm is taken over padding that nobody wrote", "DS PR#3832, #8158",
        bugs.UNINITIALISED_MEMORY, features=("clip",),
    ),
]  # fmt: skip
