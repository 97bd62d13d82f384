"""Causes of a wrong state after a checkpoint was loaded."""

from __future__ import annotations

from .registry import cause

NOT_LOADED = cause(
    "not loaded",
    of=("roundtrip",),
    says="it is what the model had before the load",
    shows="Parameters are as before the load.",
    usual="Names do not match, and mismatches are ignored.",
    attributed=r"(?<!frozen parameter)(?<![\])]) (is|are) (that|those) of the model before",
)
SCHEDULE_NOT_RESTORED = cause(
    "schedule not restored",
    of=("roundtrip",),
    shows="The first step after a load has other options than the step after the save had.",
    usual="A learning-rate scheduler is made after the load, is not loaded, or was saved before it "
    "counted its step.",
)
MOMENTS_LOST = cause(
    "moments lost",
    of=("roundtrip",),
    says="it is 0",
    shows="Moments are 0 after the load.",
    usual="The optimizer's state is not saved, or its load is lazy.",
    attributed=r"^(?!.*step count).*(exp_avg|momentum_buffer|mean)[^;]*(?<!\]) (is|are) 0(;|$)",
)
OPTIMIZER_STATE_LOST = cause(
    "optimizer state lost",
    of=("roundtrip",),
    says="the optimizer's states and step count are 0",
    shows="Moments and step count are 0 after the load.",
    usual="The optimizer is built again after the load.",
    attributed=r"^(?=.*(exp_avg|buffer)[^;]* (is|are) 0(;|$))(?=.*step count of [^;]* is 0,)",
)
STATE_OF_AN_EARLIER_STEP = cause(
    "state of an earlier step",
    of=("roundtrip",),
    says="it is that of an earlier step",
    shows="The state is that of an earlier step.",
    usual="The checkpoint is written from a stale copy.",
    attributed=r"(is|are) (that|those) [^;]* steps? earlier",
)
STATE_OF_A_LATER_STEP = cause(
    "state of a later step",
    of=("roundtrip",),
    says="it is that of a later step, taken while the checkpoint was written",
    shows="The state is that of a later step.",
    usual="Training goes on while the checkpoint is written.",
    attributed=r"(is|are) (that|those) [^;]* steps? later",
)
TENSORS_EXCHANGED = cause(
    "tensors exchanged",
    of=("roundtrip", "export"),
    says="it is that of another parameter of the same size",
    shows="Two tensors of equal size changed places.",
    usual="Tensors are matched by position and not by name.",
    attributed=r"[a-z]\S* have changed places|(the saved ones?|that the shards hold) of [^;]",
)
ELEMENTS_SHIFTED = cause(
    "elements shifted",
    of=("roundtrip",),
    says="every element stands some places away",
    shows="Every element stands some places away.",
    usual="Padding of the flat buffer is saved with it.",
    attributed=r"elements? further (on|back) in",
)
SHARDS_IN_ANOTHER_ORDER = cause(
    "shards in another order",
    of=("roundtrip",),
    says="stretches of the saved tensors stand in other places",
    shows="Stretches of the saved tensors stand in other places.",
    usual="Shards are joined in another order than they were cut.",
    attributed=r"in another order of shards|elements? further (on|back) in|no regular order",
)
DIMS_TRANSPOSED = cause(
    "dims transposed",
    of=("roundtrip",),
    says="it is the saved one transposed",
    shows="A tensor is the saved one transposed.",
    usual="It is saved by its storage and loaded by its shape.",
    attributed=r"transposed|order of its memory|that of its memory",
)
REPLICAS_SUMMED = cause(
    "replicas summed",
    of=("roundtrip",),
    says="it is the saved one times the number of ranks that saved",
    shows="A tensor is the saved one times the number of ranks that saved.",
    usual="Copies are summed when shards are merged.",
    attributed=r"times \d+ \(the number of ranks",
)
STEP_COUNT_LOST = cause(
    "step count lost",
    of=("roundtrip",),
    says="the step count is 0",
    shows="The step count is 0 after the load.",
    usual="It is not saved with the moments.",
    attributed=r"^(?!.*(exp_avg|momentum_buffer|mean)).*step count of [^;]* is 0,",
)
STEP_COUNT_OF_AN_EARLIER_STEP = cause(
    "step count of an earlier step",
    of=("roundtrip",),
    says="the step count is that of an earlier step",
    shows="The step count is that of an earlier step.",
    usual="It is saved before it moves.",
    attributed=r"step count of [^;]*(one less|steps? earlier),",
)
OPTIMIZER_STEPPED_BY_THE_LOAD = cause(
    "optimizer stepped by the load",
    of=("roundtrip",),
    says="the step count is one ahead",
    shows="The step count is one ahead after the load.",
    usual="State is made by a step before the load.",
    attributed=r"^(?!.*steps? later).*step count of [^;]* one more,",
)
MAX_EXP_AVG_SQ_FROM_EXP_AVG_SQ = cause(
    "max_exp_avg_sq from exp_avg_sq",
    of=("roundtrip",),
    says="max_exp_avg_sq is exp_avg_sq",
    shows="max_exp_avg_sq is exp_avg_sq.",
    usual="amsgrad's maximum is not saved and begins again.",
    attributed=r"max_exp_avg_sq [^;]* holds? exp_avg_sq",
)
FROZEN_PARAMETER_NOT_LOADED = cause(
    "frozen parameter not loaded",
    of=("roundtrip",),
    says="only frozen parameters are wrong; they are as before the load",
    shows="Only frozen parameters are wrong, and as before the load.",
    usual="Checkpoints are written from what the optimizer has.",
    attributed=r"(every frozen parameter|\(frozen\)) (is|are) (that|those) of the model before",
)
PART_NOT_LOADED = cause(
    "part not loaded",
    of=("roundtrip",),
    says="part of it is as before the load",
    shows="A part of a parameter is as before the load.",
    usual="Shards of a rank that is gone are not read.",
    attributed=r"(\]|ranges|shards? of [^;]*) (is|are) (that|those) of the model before the load",
)
PART_OF_THE_MOMENTS_LOST = cause(
    "part of the moments lost",
    of=("roundtrip",),
    says="part of it is 0",
    shows="A part of the moments is 0 after the load.",
    usual="Shards of a rank that is gone are not read.",
    attributed=r"(exp_avg|momentum_buffer|mean)[^;]*(\]|ranges|shards? of [^;]*) (is|are) 0(;|$)",
)
ELEMENTS_MOVED_OTHERS_0 = cause(
    "elements moved, others 0",
    of=("roundtrip",),
    says="its elements are in other places of the tensor, and the rest is 0",
    shows="Elements are in other places of the tensor, and the rest is 0.",
    usual="A shard is copied to the front of the whole tensor.",
    attributed=r"^(?=.*elements? further (on|back) in)(?=.* (is|are) 0(;|$))",
)
DATA_POSITION_LOST = cause(
    "data position lost",
    of=("roundtrip",),
    shows="Samples are read again from the first.",
    usual="The position of the data is not saved.",
    attributed=r"data position[^;]* is 0 samples",
)
DATA_POSITION_COUNTED_IN_STEPS = cause(
    "data position counted in steps",
    of=("roundtrip",),
    shows="The position in the data is that of as many steps with another number of ranks.",
    usual="Steps are saved, and not samples.",
    attributed=r"data position[^;]*as many steps with",
)
DATA_POSITION_OF_ONE_RANK = cause(
    "data position of one rank",
    of=("roundtrip",),
    shows="The position in the data is that of one rank.",
    usual="Each rank saves the number of samples that it read.",
    attributed=r"data position[^;]* divided by \d+, the number of ranks that saved",
)
RANDOM_STATE_OF_RANK_0_ON_ALL_RANKS = cause(
    "random state of rank 0 on all ranks",
    of=("roundtrip",),
    shows="Every rank has the random state of rank 0.",
    usual="One random state is saved for all.",
    attributed=r"ha(s|ve) the random state that rank 0 saved$",
)
RANDOM_STATES_OF_OTHER_RANKS = cause(
    "random states of other ranks",
    of=("roundtrip",),
    shows="Ranks have each other's random states.",
    usual="States are matched to ranks in another order.",
    attributed=r"ha(s|ve) the random state that rank",
)
RANDOM_STATE_NOT_LOADED = cause(
    "random state not loaded",
    of=("roundtrip",),
    tier=2,
    shows="Random states are none of those that were saved.",
    usual="They are not saved, or drawn from before they are restored.",
    attributed=r"a random state that no rank saved",
)
BUFFERS_NOT_LOADED = cause(
    "buffers not loaded",
    of=("roundtrip",),
    shows="Buffers are as before the load.",
    usual="The checkpoint has parameters alone.",
    attributed=r"(is|are) (that|those) of the model before the load|the saved ones? rounded",
)
BUFFERS_OF_SEVERAL_RANKS = cause(
    "buffers of several ranks",
    of=("roundtrip",),
    shows="Loaded buffers are mixed of those of several ranks.",
    usual="Every rank writes its buffers under the same name.",
    attributed=r"(is|are) (that|those) of rank",
)
LOSS_SCALE_BEGINS_ANEW = cause(
    "loss scale begins anew",
    of=("roundtrip",),
    shows="The loss scale is the initial one after the load.",
    usual="The scaler's state is not saved.",
    attributed=r"loss scale[^;]* that of the first step",
)
CHANGED_BY_SAVING = cause(
    "changed by saving",
    of=("roundtrip",),
    shows="Saving changed the state.",
    usual="State is materialised or gathered in place for the checkpoint.",
    attributed=r"^after saving, ",
)
FIRST_STEP_COUNTED_BY_SAVING = cause(
    "first step counted by saving",
    of=("roundtrip",),
    shows="Saving made optimizer state with a step count.",
    usual="States are made by a step with zero gradients.",
    attributed=r"^after saving, .*step count of [^;]* is 1, one more",
)
