"""Faults in gradients: reduction, accumulation, scaling, clipping."""

from __future__ import annotations

from .fault import FORWARD, fault

GRADIENT = [
    fault(
        "gradient:AverageBecomesSum", "zero2", "gradient",
        "the average over ranks is a sum", "PT #162338", "gradient x W", world=3,
    ),
    fault(
        "gradient:DoubleAverage", "zero1", "gradient",
        "the loss is divided by W, then gradients are averaged", "verl-SpeCo PR#29",
        "gradient / W", world=3,
    ),
    fault(
        "gradient:LossTimesWorld", "fsdp2", "gradient",
        "the loss is multiplied by W", "HF transformers #45994", "gradient x W", world=3,
    ),
    fault(
        "gradient:MeanInTheLosses", "fsdp2", "gradient",
        "losses are divided by W, and nothing declares it", "TT disable_fsdp_gradient_division",
        "mean in the losses", world=3,
    ),
    fault(
        "gradient:DivisionLeftOn", "fsdp2", "gradient",
        "losses are divided by W as declared, and FSDP2 averages all the same",
        "TT disable_fsdp_gradient_division", "gradient / W", world=3,
    ),
    fault(
        "gradient:OneParameterUnreduced", "ddp", "gradient",
        "one parameter is left out of the reduction", "PT #47562; MG #599, #1446",
        "local gradient only", world=3,
    ),
    fault(
        "gradient:FirstStepUnsynced", "zero1", "gradient",
        "the first step is not reduced", "PT #60118", "local gradient only", world=3,
    ),
    fault(
        "gradient:SyncFirstStepOnly", "ddp", "gradient",
        "only the first step is reduced", "PT #187732", "local gradient only", world=3,
    ),
    fault(
        "gradient:OversizedBucketSkipped", "zero1", "gradient",
        "buckets above the limit are not reduced", "DS PR#3832", "local gradient only",
        world=3, features=("bucket-small",),
    ),
    fault(
        "gradient:SubgroupDivisor", "zero1", "gradient",
        "some parameters are divided by another group's size", "DS PR#6546, #5618; TT #1551",
        "gradient scaled", world=3,
    ),
    fault(
        "gradient:ReducedTwice", "zero1", "gradient",
        "shards that are reduced already are reduced again", "NeMo PR#9335", "reduced twice",
    ),
    fault(
        "gradient:RootOfWorld", "zero1", "gradient",
        "the sum over ranks is divided by sqrt(W)", "seen often", "gradient x sqrt(W)", world=3,
    ),
    fault(
        "gradient:ShardOffByOne", "zero1", "gradient",
        "each rank reads its shard one element too far", "DS PR#848, #851", "shifted",
    ),
    fault(
        "gradient:ShardOfTheNext", "zero1", "gradient",
        "each rank reduces the shard of the rank after it", "DS PR#1841",
        "shard of another rank", world=3,
    ),
    fault(
        "gradient:TailTakenForPadding", "zero1", "gradient",
        "what W does not divide is cleared as padding", "DS #1380", "tail left out",
        features=("uneven",),
    ),
    fault(
        "gradient:GradientOfThePreviousStep", "zero1", "gradient",
        "the optimizer gets the gradient of the step before", "seen often",
        "gradient of the previous step", features=("several-steps",),
    ),
    fault(
        "gradient:TiedReducedTwice", "zero1", "gradient",
        "a tied parameter is reduced once per alias", "DS PR#7534", "gradient doubled",
        world=3, features=("tied",),
    ),
    fault(
        "gradient:PartitionsMisordered", "zero1", "gradient",
        "two partitions change places before the reduction", "DS PR#318", "shards exchanged",
    ),
    fault(
        "gradient:NoneGradientShifts", "zero2", "gradient",
        "a parameter without a gradient does not move the offset", "DS PR#545", "offset not moved",
        features=("unused",),
    ),
    fault(
        "padding:AlignedWalkedUnaligned", "zero2", "gradient",
        "a buffer is sized with padding and walked without it", "DS PR#8158",
        "uninitialised memory",
    ),
    fault(
        "unused:NoneBecomesZero", "ddp", "gradient",
        "no gradient becomes a zero gradient, so unused parameters move", "FS #605",
        "none became zero", features=("unused",),
    ),
    fault(
        "unused:OutsideFlatBuffer", "zero1", "gradient",
        "a module is not in the flat buffer", "MG #565", "gradient missing",
    ),
    fault(
        "unused:NoneEndsUnit", "zero3", "gradient",
        "a parameter without a gradient ends the collecting of its unit", "seen in review",
        "left out after an unused one",
        features=("block-experts",),
    ),
    fault(
        "unused:AveragedOverUsers", "zero1", "gradient",
        "a gradient is averaged over the ranks that used the parameter", "DS #5618, #6545",
        "averaged over users",
        features=("sometimes-used",), world=3,
    ),
    fault(
        "shapes:ScalarsOutside", "zero2", "gradient",
        "0-d parameters are in no bucket", "seen in review", "gradient missing",
        features=("parameter-0d",), without=("frozen",),
    ),
    fault(
        "gradient:NotWaitedFor", "zero1", "gradient",
        "a reduction is not waited for", "OpenNMT-py #2295",
        "reduction not waited for", features=("delays",),
    ),
    fault(
        "gradient:WaitsForTheOneBefore", "zero1", "gradient",
        "the handle of the bucket before is waited for", "DS PR#1264",
        "reduction not waited for", world=3, features=("bucket-small",),
    ),
    fault(
        "freezing:RequiresGradCached", "fsdp2", "gradient",
        "which parameters train is read once", "seen often", "not unfrozen",
        # What needs no gradient runs another kernel there: the loss differs in its last bits.
        features=("unfreeze",), without=("block-conv", "block-recurrent"),
    ),
    fault(
        "freezing:NotWrappedAgain", "ddp", "gradient",
        "what is unfrozen after DDP was made is not reduced", "Lightning #20340",
        "local gradient only", world=3, features=("unfreeze",),
        without=("sometimes-used", "static-graph"),
    ),
    fault(
        "freezing:FrozenDecays", "zero1", "gradient",
        "what will be unfrozen has a gradient of zeros, and decays", "FS #605 (unused parameters)",
        "gradient of a frozen parameter", features=("unfreeze",),
    ),
    fault(
        "article:ArticleStage1", "zerocheck.faults.article:Repaired", "gradient",
        "gradients are never reduced", "a tutorial on ZeRO from scratch", "local gradient only",
        world=3,
        without=("sometimes-used", "clip"),
    ),
]  # fmt: skip

ACCUMULATION = [
    fault(
        "accumulation:LastMicrobatchOnly", "zero2", "gradient",
        "the accumulator is reset at every microbatch",
        "open-instruct PR#1498; TT #3575; DS #7718", "last microbatch only", microbatches=3,
    ),
    fault(
        "accumulation:ScaleAccumulatedShard", "zero2", "gradient",
        "the accumulator is divided, not what is added to it", "MG PR#3023",
        "accumulator rescaled", world=3, microbatches=2,
    ),
    fault(
        "accumulation:MicrostepOffByOne", "zero2", "gradient",
        "the first step loses its first microbatch", "DS PR#6550, #7967", "microbatch dropped",
        microbatches=3,
    ),
    fault(
        "accumulation:DividedTwiceByGa", "fsdp2", "gradient",
        "the loss is divided by the number of microbatches twice",
        "DS PR#7724; HF accelerate #3877", "gradient / GA", microbatches=3,
    ),
    fault(
        "accumulation:NotDividedByGa", "zero1", "gradient",
        "the loss is not divided by the number of microbatches", "seen often",
        "gradient x GA", microbatches=3,
    ),
    fault(
        "accumulation:MeanOfMeans", "fsdp2", "gradient",
        "microbatches count alike, whatever number of tokens they have", "torchtune PR#1875",
        "mean of means", features=("masked",),
    ),
    fault(
        "accumulation:TokensUndeclared", "zero1", "gradient",
        "the mean over tokens, declared as the mean of means", "seen often",
        "mean over tokens", features=("masked",),
    ),
    fault(
        "accumulation:FirstMicrobatchDoubled", "zero1", "gradient",
        "the first microbatch is added twice", "TT #816", "microbatch doubled", microbatches=3,
    ),
    fault(
        "accumulation:StaleBoundary", "ddp", "gradient",
        "each microbatch acts on the boundary flag of the one before", "DS PR#1264",
        "one microbatch reduced", microbatches=3,
        without=("sometimes-used",),
    ),
    fault(
        "accumulation:NeverZeroed", "fsdp2", "gradient",
        "gradients are not cleared between steps", "seen often",
        "gradient of the previous step kept",
    ),
    fault(
        "accumulation:UnclippedKept", "zero2", "gradient",
        "the sum begins with what was reduced in the step before", "reports/findings",
        "gradient of the previous step kept", features=("clip-tight", "several-steps"),
    ),
]  # fmt: skip

SCALING = [
    fault(
        "loss_scaling:OverflowSeenLate", "zero1", "update",
        "each rank looks for an overflow before its gradient is reduced", "CA PR#1175",
        "ranks disagree", features=("overflow",),
    ),
    fault(
        "loss_scaling:NeverSkips", "zero1", "update",
        "a step that overflows is taken", "seen often", "step not skipped",
        features=("overflow",),
    ),
    fault(
        "loss_scaling:NanOnInfNorm", "zero1", "update",
        "an infinite norm becomes NaN in place of -1, by which a step is skipped", "DS PR#7171",
        "step not skipped",
        features=("overflow",),
    ),
    fault(
        "loss_scaling:OverflowNotCleared", "zero1", "update",
        "after an overflow every step is skipped", "seen often", "step skipped",
        features=("overflow", "several-steps"),
    ),
    fault(
        "loss_scaling:SkippedStepCounted", "zero1", "update",
        "a skipped step leaves a trace in the optimizer's state", "DS PR#8435",
        "skipped step changed the state", features=("overflow", "several-steps"),
    ),
    fault(
        "loss_scaling:UnscaledTwice", "zero1", "gradient",
        "the gradient is divided by the loss scale twice", "seen often", "unscaled twice",
        features=("loss-scale",),
    ),
    fault(
        "loss_scaling:UnscaledByNewScale", "zero1", "gradient",
        "the loss scale is updated before it is divided out", "DS PR#2695",
        "unscaled by another scale", features=("loss-scale",),
    ),
    fault(
        "loss_scaling:ClippedBeforeUnscaling", "zero1", "clip",
        "clipping sees the gradient that is still scaled", "Lightning #9599",
        "norm before unscaling", features=("loss-scale", "clip-tight"),
    ),
]  # fmt: skip

CLIPPING = [
    fault(
        "clipping:ReplicatedCountedWTimes", "ddp", "clip",
        "the norm of replicated gradients is summed over ranks", "PT #88621", "norm x sqrt(W)",
        features=("clip",), without=("clip-inf",),
    ),
    fault(
        "clipping:NormExtraReduce", "zero1", "clip",
        "the total norm is summed over ranks once more", "DS PR#551", "norm x sqrt(W)",
        features=("clip",), without=("clip-inf",),
    ),
    fault(
        "clipping:LocalNorm", "zero1", "clip",
        "each rank clips by the norm of its own shard", "RLinf PR#1542", "local norm",
        features=("clip-tight",),
    ),
    fault(
        "clipping:SumOfLocalNorms", "zero1", "clip",
        "the norms of the shards are added up, not their squares", "seen often",
        "sum of local norms", world=3, features=("clip-tight",),
    ),
    fault(
        "clipping:MeanOfLocalNorms", "zero1", "clip",
        "the norms of the shards are averaged", "seen often", "mean of local norms",
        world=3, features=("clip-tight",),
    ),
    fault(
        "clipping:LargestLocalNorm", "zero1", "clip",
        "the largest norm of a shard is taken, whichever norm is asked for", "seen often",
        "largest local norm", world=3, features=("clip-tight",),
    ),
    fault(
        "clipping:ClippedByLocalNorm", "zero1", "clip",
        "the total norm is reported, that of the own shard clips", "RLinf PR#1542",
        "clipped by the local norm", features=("clip-tight",),
    ),
    fault(
        "clipping:LoggedNormOnly", "zero1", "clip",
        "a partial norm is logged, clipping is right", "miles PR#35", "local norm",
        features=("clip",), spares=FORWARD, mild=True,
    ),
    fault(
        "clipping:ClipAmplifies", "zero1", "clip",
        "small gradients are scaled up: max for min", "DS PR#5150", "coefficient above 1",
        features=("clip-loose",),
    ),
    fault(
        "clipping:NormWrongP", "zero1", "clip",
        "the 2-norm, whichever is asked for", "CA #4795", "another norm",
        features=("clip-inf", "clip-tight"),
    ),
    fault(
        "clipping:Unclipped", "zero1", "clip",
        "clipping depends on a flag that is not set", "DS PR#3166", "not clipped",
        features=("clip-tight",),
    ),
    fault(
        "clipping:Rank0Clips", "zero1", "clip",
        "only rank 0 clips", "DS #1801", "not clipped", features=("clip-tight",),
    ),
    fault(
        "clipping:NormOfNothing", "zero1", "clip",
        "the norm is read from an attribute that is not there", "MG a82fa72d52",
        "norm of nothing", features=("clip-tight",),
    ),
    fault(
        "clipping:NormWithoutHead", "zero1", "clip",
        "the norm leaves out the parameters of one module", "DeepSpeed, seen here",
        "norm without some parameters", world=3, features=("clip-tight",), without=("tied",),
    ),
    fault(
        "clipping:StaleNorm", "zero1", "clip",
        "the norm of the first step is kept", "CA #5002", "norm of another step",
        features=("clip-tight", "several-steps"),
    ),
    fault(
        "clipping:ClippedTwice", "zero1", "clip",
        "clipping runs twice with one coefficient", "seen often", "clipped twice",
        features=("clip-tight",),
    ),
    fault(
        "padding:PaddingInNorm", "zero2", "clip",
        "the norm is taken over padding that nobody wrote", "DS PR#3832, #8158",
        "uninitialised memory", features=("clip",),
    ),
]  # fmt: skip
