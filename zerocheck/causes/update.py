"""Causes of a wrong update of an optimizer, step count or skipped step."""

from __future__ import annotations

from .registry import cause

L2_INSTEAD_OF_DECOUPLED = cause(
    "L2 instead of decoupled",
    of=("update",),
    says="weight decay was added to the gradient (L2), and went through the moments",
    shows="Weight decay went through the moments.",
    usual="Adam with L2 is used in place of AdamW.",
)
STEP_OF_EACH_SHARD = cause(
    "step of each shard alone",
    of=("update",),
    says="the optimizer, which needs whole parameters, took each shard for one",
    shows="The update is that of the parameter's shards, each taken for a whole parameter.",
    usual="An optimizer that needs whole parameters is run on local shards.",
)
NORM_OF_EACH_SHARD = cause(
    "norm of each shard",
    of=("update",),
    says="a norm or a mean over a whole parameter was that of each shard alone",
    shows="A norm or a mean over a whole parameter is that of each shard alone.",
    usual="Adafactor clips by, or scales with, the root mean square of the local tensor.",
)
MEAN_OF_SHARD_MEANS = cause(
    "mean of shard means",
    of=("update",),
    says="it is the mean of the means of shards, which have unequal numbers of rows",
    shows="A factored state is the mean of the means of shards of unequal size.",
    usual="Means of local rows are averaged over the ranks, and not weighted by their number.",
)
WEIGHT_DECAY_TWICE = cause(
    "weight decay twice",
    of=("update",),
    says="weight decay was applied twice",
    shows="Weight decay was applied twice.",
    usual="The trainer decays, and so does the optimizer.",
)
WEIGHT_DECAY_BY_THE_CORRECTED_STEP_SIZE = cause(
    "weight decay by the corrected step size",
    of=("update",),
    says="weight decay was multiplied by lr / (1 - beta1^t), the step size, and not by lr",
    shows="Weight decay was multiplied by lr / (1 - beta1^t).",
    usual="The decay is inside of the step that is bias-corrected.",
)
WEIGHT_DECAY_MISSING = cause(
    "weight decay missing",
    of=("update",),
    says="weight decay was not applied",
    shows="Weight decay was not applied.",
    usual="Options of the parameter group are lost when the optimizer is wrapped.",
)
WEIGHT_DECAY_AFTER_THE_UPDATE = cause(
    "weight decay after the update",
    of=("update",),
    says="weight decay came after the update and not before it",
    shows="Weight decay came after the update.",
    usual="The order of the two is exchanged.",
)
WEIGHT_DECAY_WITHOUT_THE_LEARNING_RATE = cause(
    "weight decay without the learning rate",
    of=("update",),
    shows="Weight decay was not multiplied by the learning rate.",
    usual="Decay is decoupled from the schedule as well.",
)
WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS = cause(
    "weight decay on excluded parameters",
    of=("update",),
    says="weight decay was applied to parameters that the case excludes from it",
    shows="Parameters without weight decay were decayed.",
    usual="Groups are merged in the flat buffer.",
)
DECOUPLED_INSTEAD_OF_L2 = cause(
    "decoupled instead of L2",
    of=("update",),
    says="weight decay shrank the parameter (decoupled), and is in none of the states",
    shows="Weight decay shrank the parameter, and is in no state of SGD or Adam.",
    usual="The decay of AdamW is used with SGD or Adam.",
)
GRADIENT_DAMPENED = cause(
    "gradient dampened",
    of=("update",),
    says="the gradient entered the momentum buffer times 1 - momentum (dampening)",
    shows="The gradient entered the momentum buffer times 1 - momentum.",
    usual="The buffer is kept as a moving average, which Adam does, or dampening is set.",
)
LEARNING_RATE_IN_THE_MOMENTUM = cause(
    "learning rate in the momentum",
    of=("update",),
    says="the gradient entered the momentum buffer times the learning rate",
    shows="The gradient entered the momentum buffer times the learning rate.",
    usual="The form of Sutskever is used, where a schedule acts on later steps.",
)
NESTEROV_LEFT_OUT = cause(
    "nesterov left out",
    of=("update",),
    says="Nesterov's form was left out",
    shows="The update is that of plain momentum, without Nesterov's form.",
    usual="The option is lost when the optimizer is wrapped or made again.",
)
NESTEROV_ADDED = cause(
    "nesterov added",
    of=("update",),
    says="Nesterov's form was used, which the case does not ask for",
    shows="The update has Nesterov's form, which the options do not ask for.",
    usual="A fused kernel has one form only.",
)
MOMENTUM_LEFT_OUT = cause(
    "momentum left out",
    of=("update",),
    says="the parameter moved along the gradient, and not along the momentum buffer",
    shows="The parameter moved along the gradient, and not along the momentum buffer.",
    usual="The buffer is computed after the parameter, or into another tensor.",
)
GRADIENT_NOT_DAMPENED = cause(
    "gradient not dampened",
    of=("update",),
    says="the gradient entered the momentum buffer whole, and not times 1 - momentum",
    shows="The gradient entered Muon's momentum buffer whole, and not times 1 - momentum.",
    usual="The buffer is that of SGD, which torch.optim.Muon averages.",
)
UPDATED_BY_ANOTHER_OPTIMIZER = cause(
    "updated by another optimizer",
    of=("update",),
    shows="A parameter has states of the optimizer that is for other parameters.",
    usual="Matrices and the rest are told apart after sharding, by flat shapes or by names.",
    attributed=r"states of \w+, which updates them",
)
MOMENTUM_NORMALIZED = cause(
    "momentum normalized",
    of=("update",),
    says="the momentum buffer was divided by its norm, in place",
    shows="Muon's momentum buffer holds the new momentum over its norm.",
    usual="Newton-Schulz divides its input in place, and a bf16 buffer is not copied before.",
)
ORTHOGONALIZED_BY_SHARD = cause(
    "orthogonalized by shard",
    of=("update",),
    says="Newton-Schulz ran on each shard by itself, and not on the whole matrix",
    shows="Newton-Schulz ran on each shard of a matrix, and not on the whole matrix.",
    usual="Muon is given the local tensors, or a flat shard; the momentum is not gathered.",
)
SCALE_OF_THE_SHARD = cause(
    "scale of the shard",
    of=("update",),
    says="the learning rate was adjusted by the shape of a shard, and not by that of the matrix",
    shows="The learning rate was adjusted by the shape of a shard, and not of the matrix.",
    usual="The factor is computed from the local parameter.",
)
SCALE_OF_THE_TRANSPOSED_MATRIX = cause(
    "scale of the transposed matrix",
    of=("update",),
    says="the learning rate was adjusted by columns over rows",
    shows="The learning rate was adjusted by columns over rows.",
    usual="The matrix is stored, or turned for Newton-Schulz, the other way round.",
)
ANOTHER_ADJUSTMENT = cause(
    "another adjustment",
    of=("update",),
    says="the learning rate was adjusted to the shape by another rule, or not at all",
    shows="The learning rate was adjusted to the shape of the matrix by another rule, or not.",
    usual="The conventions of Jordan and of Moonshot are mixed up.",
)
ORTHOGONALIZED_IN_PARTS = cause(
    "orthogonalized in parts",
    of=("update",),
    says="Newton-Schulz ran on parts of the matrix",
    shows="Newton-Schulz ran on parts of a matrix: halves, or query, key and value.",
    usual="A fused matrix is split in one place and not in the other.",
)
NOT_ORTHOGONALIZED = cause(
    "not orthogonalized",
    of=("update",),
    says="the parameter moved along the momentum itself, without Newton-Schulz",
    shows="The parameter moved along the momentum itself.",
    usual="The matrix took the path of what is no matrix.",
)
ORTHOGONALIZED_IN_ANOTHER_DTYPE = cause(
    "orthogonalized in another dtype",
    of=("update",),
    says="Newton-Schulz ran in fp32, and not in bf16",
    shows="Newton-Schulz ran in fp32, and not in bf16.",
    usual="A cast is left out, or autocast decides.",
)
ANOTHER_NUMBER_OF_ITERATIONS = cause(
    "another number of iterations",
    of=("update",),
    says="Newton-Schulz took another number of iterations",
    shows="Newton-Schulz took another number of iterations.",
    usual="The default of another library is used.",
)
WEIGHT_DECAY_BY_THE_ADJUSTED_RATE = cause(
    "weight decay by the adjusted rate",
    of=("update",),
    says="weight decay was multiplied by the learning rate that is adjusted to the shape",
    shows="Weight decay was multiplied by the learning rate that is adjusted to the shape.",
    usual="One rate is computed for both.",
)
EPS_INSIDE_THE_ROOT = cause(
    "eps inside the root",
    of=("update",),
    says="eps was added inside of the square root",
    shows="eps was added inside of the square root.",
    usual="A formula of another optimizer is used.",
)
EPS_BEFORE_THE_BIAS_CORRECTION = cause(
    "eps before the bias correction",
    of=("update",),
    says="eps was added before the bias correction",
    shows="eps was added before the bias correction.",
    usual="The fused form of the formula leaves the correction out of eps.",
)
BETAS_SWAPPED = cause(
    "betas swapped",
    of=("update",),
    says="beta1 and beta2 were exchanged",
    shows="beta1 and beta2 were exchanged.",
    usual="They are passed in the wrong order.",
)
OPTIONS_OF_ANOTHER_GROUP = cause(
    "options of another group",
    of=("update",),
    says="the options of another parameter group were used",
    shows="Options of another parameter group were used.",
    usual="The flat buffer has one group for all.",
)
LEARNING_RATE_OF_ANOTHER_STEP = cause(
    "learning rate of another step",
    of=("update",),
    says="the learning rate of another step was used",
    shows="The learning rate is that of another step.",
    usual="The schedule is stepped before the optimizer, or its state is not loaded.",
)
OPTION_SCALED = cause(
    "option times a number of ranks",
    of=("update",),
    tier=2,
    says="an option of the optimizer was multiplied or divided by a number of ranks, or of "
    "microbatches",
    shows="The learning rate, weight decay or eps is multiplied or divided by a number of ranks or "
    "microbatches.",
    usual="An option is scaled with the number of ranks, as a learning rate with the batch, and "
    "the case gives it as it is to be.",
)
GRADIENT_BEFORE_CLIPPING = cause(
    "gradient before clipping",
    of=("update",),
    says="the optimizer was given the gradient from before clipping",
    shows="The optimizer was given the gradient from before clipping.",
    usual="Clipping changes another copy than the one that the optimizer reads.",
)
GRADIENT_WITH_THE_WRONG_SIGN = cause(
    "gradient with the wrong sign",
    of=("update",),
    shows="The optimizer took in the negated gradient.",
    usual="maximize is ignored or applied twice.",
)
NO_BIAS_CORRECTION = cause(
    "no bias correction",
    of=("update",),
    says="the bias corrections were left out",
    shows="The bias corrections were left out.",
    usual="The optimizer is configured without them.",
)
MOMENTS_RESET = cause(
    "moments reset",
    of=("update",),
    says="the moments of the step before were lost",
    shows="The moments of the step before were lost.",
    usual="The optimizer is built again, or its state is keyed by a tensor that was replaced.",
)
SCALAR_STATE_LOST = cause(
    "scalar state lost",
    of=("update",),
    says="a state that is one number started anew, while the step count went on",
    shows="A state that is one number started anew, as NAdam's product of momenta.",
    usual="A checkpoint has the states of the shape of their parameter, and the step count, alone.",
)
MOMENTS_SWAPPED = cause(
    "moments swapped",
    of=("update", "roundtrip", "export"),
    says="two states of the optimizer changed places",
    shows="Two states of the optimizer changed places.",
    usual="States are packed and unpacked in different orders.",
    attributed=r"exp_avg[^;]* holds? (max_)?exp_avg|it is exp_avg(_sq)?, and not exp_avg",
)
MOMENTS_OF_THE_PREVIOUS_STEP = cause(
    "moments of the previous step",
    of=("update",),
    says="the optimizer computed with moments from before this step",
    shows="The update used moments from before this step.",
    usual="The parameter is updated before the moments are, or from a stale copy.",
)
STEPS_COUNTED_FROM_0 = cause(
    "steps counted from 0",
    of=("update",),
    says="the bias corrections count the steps of this run alone, not those before it began",
    shows="The bias corrections count the steps of this run alone.",
    usual="The step count is not restored.",
)
MICROBATCHES_COUNTED_AS_STEPS = cause(
    "microbatches counted as steps",
    of=("update",),
    says="the bias corrections count microbatches, and not steps",
    shows="The bias corrections count microbatches.",
    usual="The optimizer's count moves with each microbatch.",
)
STEP_OFF_BY_1 = cause(
    "step off by 1",
    of=("update", "export"),
    shows="The step count is one too high or too low.",
    usual="It is moved before it is used, or after.",
    attributed=r"corrections of the (next step|step before)|step count of [^;]* one (more|less),",
)
STEP_OFF_BY_2 = cause(
    "step off by 2",
    of=("update",),
    shows="The step count is two too high or too low.",
    usual="It is moved by two owners.",
)
ROUNDED_TO_BF16 = cause(
    "rounded to bf16",
    of=("update", "roundtrip", "export"),
    says="it is rounded to bf16, on its way or where it is held",
    shows="Values are bf16 numbers.",
    usual="A master copy is held or sent in bf16.",
    attributed=r"rounded to bf16",
)
NEVER_UPDATED = cause(
    "never updated",
    of=("update",),
    shows="A parameter was not updated at all.",
    usual="No optimizer has it.",
    attributed=r"it is not updated",
)
UNTOUCHED_PARAMETER_CHANGED = cause(
    "untouched parameter changed",
    of=("update",),
    shows="A parameter without a gradient changed.",
    usual="It lies in a flat buffer that is updated as a whole.",
    attributed=r"changed, though it",
)
STEP_COUNT = cause(
    "step count",
    of=("update",),
    shows="The step count did not move by one.",
    usual="Counts are kept for each bucket, or not for parameters that were skipped.",
)
RANKS_DISAGREE = cause(
    "ranks disagree",
    of=("update", "clip", "damage", "durability"),
    shows="Ranks report or do different things in one step.",
    usual="A decision is taken by each rank alone and not reduced.",
    attributed=r"skip|rank",
)
STEP_SKIPPED = cause(
    "step skipped",
    of=("update",),
    shows="A step was skipped though the gradient is finite.",
    usual="An overflow of an earlier step is remembered.",
    attributed=r"skipped|step count of every tensor have the values from before the step",
)
STEP_NOT_SKIPPED = cause(
    "step not skipped",
    of=("update",),
    shows="A step was taken though the gradient is not finite.",
    usual="Overflow is looked for on the rank's own shard alone.",
    attributed=r"skipped",
)
SKIPPED_STEP_CHANGED_THE_STATE = cause(
    "skipped step changed the state",
    of=("update",),
    shows="A skipped step changed parameters or moments.",
    usual="State is changed before the decision to skip.",
    attributed=r"but it changed|but it is counted",
)
