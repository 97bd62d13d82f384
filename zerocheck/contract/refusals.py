"""Refusals by torch of any caller's code: the cases are unsupported, and the code is not wrong.

Built-in implementations report them in `supports`, before anything runs. For a user's `build` they
are detected here: by the errors that torch raises while the model is wrapped, and by the properties
of the wrapped model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..case.schema import Case, OptimizerKind
from ..case.shapes import (
    calls_twice,
    empties,
    leaves_a_rank_empty,
    parameter_dtypes,
    sometimes_used,
    transposed,
    unfrozen,
)
from ..compat import reduces_unused
from ..errors import Unsupported
from ..optimizers import optimizer_of
from .names import named_parameters
from .no_kernel import Refusal, without_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


REFUSALS = (
    # torch/distributed/fsdp/_fully_shard
    Refusal(ValueError, r"fully_shard doesn't support scalar parameters"),
    Refusal(NotImplementedError, r"FSDP does not support non-contiguous parameters"),
    Refusal(AssertionError, r"FSDP expects uniform original parameter dtype"),
    # torch/distributed/fsdp/_flat_param.py
    Refusal(ValueError, r"FSDP doesn't support sc?alar parameters"),
    Refusal(ValueError, r"Must flatten tensors with uniform"),
    # torch/distributed/fsdp/wrap.py
    Refusal(ValueError, r"has both parameters with requires_grad=True and False"),
    # torch/distributed/_shard/sharded_tensor/api.py
    Refusal(ValueError, r"Only torch.contiguous_format memory_format is currently supported"),
)


ON_GPUS = (
    # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, for collectives without a form for GPUs
    Refusal(RuntimeError, r"ProcessGroupGloo::\w+: unsupported device type"),
    Refusal(RuntimeError, r"Backend gloo does not (support|implement) \w+"),
)

GRADIENT_SCALER_ON_GPUS = (
    # aten/src/ATen/native/cuda/AmpKernels.cu: a GradScaler takes no gradients in bf16 there
    Refusal(
        NotImplementedError, r"non_finite_check_and_unscale_cuda. not implemented for .BFloat16"
    ),
)

FUSED_ON_GPUS = (
    # aten/src/ATen/native/cuda/FusedAdamKernel.cu: gradients have the strides of their parameters
    Refusal(RuntimeError, r"params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device"),
)

RECURRENT_ON_GPUS = (
    # torch/distributed/fsdp/_flat_param.py: cuDNN wants the weights of a recurrent module end to
    # end, so its forward moves them out of the flat parameter
    Refusal(AssertionError, r"FSDP does not support changing the parameters between forward and"),
)


TRANSPOSED_RECURRENT_ON_GPUS = (
    # aten/src/ATen/native/cudnn/RNN.cpp: a recurrent module with transposed weights cannot go there
    Refusal(RuntimeError, r"view size is not compatible with input tensor's size and stride"),
)


FUSED_SGD = (
    # torch/distributed/tensor/_dispatch.py: FSDP2 and tensor parallelism have DTensors
    Refusal(NotImplementedError, r"Operator aten._fused_sgd_.default does not have a sharding"),
)


MUON = (
    # torch/distributed/tensor/_dispatch.py: the update of a small matrix is replicated
    Refusal(RuntimeError, r"in-place operations that require placement changes"),
)


STEP_OF_DTENSORS = (
    # torch/distributed/tensor/_dispatch.py: an operator of the optimizer has no rule for shards
    Refusal(NotImplementedError, r"does not have a sharding strategy registered"),
    Refusal(RuntimeError, r"in-place operations that require placement changes"),
)


WITH_RULES: tuple[OptimizerKind, ...] = ("adamw", "adam", "sgd", "muon")
"""Optimizers whose operators have rules for shards; what is refused of the last two is listed."""


MIXED_DTYPES = (
    # torch/distributed/fsdp/_fully_shard: FSDP2 looks at the dtypes of a unit in its first forward
    Refusal(AssertionError, r"FSDP expects uniform original parameter dtype"),
)


CALLED_TWICE = (
    # torch/csrc/distributed/c10d/reducer.cpp: reentrant checkpoints of a module that is called
    # twice go backward twice, which DDP documents that it does not support
    Refusal(RuntimeError, r"Expected to mark a variable ready only once"),
)


WITHOUT_CLOSURE = (
    # torch/distributed/checkpoint/state_dict.py: `_init_optim_state`
    Refusal(TypeError, r"unexpected keyword argument 'closure'"),
)


def refused_while_run(device: torch.device, error: BaseException, case: Case) -> str | None:
    """Return the reason why torch cannot run a case that raised `error` in a step, or None."""
    kinds = {block.kind for block in case.model.blocks}
    optimizer = optimizer_of(case.optimizer)
    crosswise = transposed(case.model)
    on_gpus = (
        *ON_GPUS,
        *(RECURRENT_ON_GPUS if "recurrent" in kinds else ()),
        *(GRADIENT_SCALER_ON_GPUS if case.training.loss_scale is not None else ()),
        *(FUSED_ON_GPUS if case.optimizer.kernel == "fused" and crosswise else ()),
        *(TRANSPOSED_RECURRENT_ON_GPUS if "recurrent" in kinds and crosswise else ()),
    )
    listed = {
        f"torch refuses it on {device.type}": () if device.type == "cpu" else on_gpus,
        "torch refuses fused SGD of DTensors": FUSED_SGD,
        "torch refuses several dtypes in a unit": MIXED_DTYPES,
        "torch refuses Muon of DTensors": MUON if case.optimizer.kind == "muon" else (),
        f"torch refuses {optimizer.name} of DTensors": (
            () if case.optimizer.kind in WITH_RULES else STEP_OF_DTENSORS
        ),
        f"torch's checkpoints call step(closure=None), as its Optimizer has it; {optimizer.name}": (
            WITHOUT_CLOSURE if case.optimizer.user is not None else ()
        ),
        "torch refuses a module that is called twice": (
            CALLED_TWICE if calls_twice(case.model) else ()
        ),
    }
    for words, refusals in listed.items():
        for refusal in refusals:
            if isinstance(error, refusal.kind) and re.search(refusal.message, str(error)):
                return f"{words}: {str(error).splitlines()[0]}"
    return None


def refused_cast(model: nn.Module, error: BaseException, case: Case) -> str | None:
    """Return the reason why a model that the code under test cast cannot run here, or None.

    Only if its parameters have other dtypes than the case says, so that no operator can be blamed
    for what an implementation casts in a forward.
    """
    sentence = without_kernel(error)
    if sentence is None:
        return None
    dtypes = parameter_dtypes(case.model)
    for name, parameter in named_parameters(model):
        if name in dtypes and parameter.dtype != DTYPES[dtypes[name]]:
            dtype, kind = str(parameter.dtype).removeprefix("torch."), parameter.device.type
            return f"a model that is cast to {dtype} cannot run this case on {kind}: {sentence}"
    return None


ADVICE = (
    (
        # FSDP2's set_gradient_divide_factor; torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
        Refusal(RuntimeError, r"Cannot use ReduceOp.PREMUL_SUM with Gloo"),
        "zerocheck: on Gloo a divide factor needs set_force_sum_reduction_for_comms(True) "
        "on each FSDPModule, but for a mesh of one rank, where torch then divides twice",
    ),
    (
        # torch/distributed/fsdp/_init_utils.py, for CPU ranks
        Refusal(RuntimeError, r"FSDP needs a non-CPU accelerator device"),
        "zerocheck: on CPU ranks FSDP1 needs its device: "
        "FullyShardedDataParallel(..., device_id=torch.device(mesh.device_type))",
    ),
    (
        # torch/_dynamo/exc.py, of what `ForwardProbe` hooks into modules
        Refusal(RuntimeError, r"found no compiled frames|Dynamo does not support"),
        "zerocheck: compile where the case asks for it (training.compile is the backend, or none), "
        'and say so: capabilities = {"unfreeze", "compile"}; else hooks of zerocheck are in the '
        "modules",
    ),
)
"""What torch says of a backend, or of zerocheck's hooks, and what to do about it."""


def advise(error: Exception) -> None:
    """Add to an error of torch the advice for the user's code, where it is known."""
    for refusal, advice in ADVICE:
        if isinstance(error, refusal.kind) and re.search(refusal.message, str(error)):
            error.add_note(advice)


@contextmanager
def torch_refusals() -> Iterator[None]:
    """Raise Unsupported with torch's own message for the errors listed in REFUSALS."""
    try:
        yield
    except Exception as error:
        message = str(error)
        if any(isinstance(error, r.kind) and re.search(r.message, message) for r in REFUSALS):
            raise Unsupported(f"torch refuses the model: {message.splitlines()[0]}") from error
        raise


@contextmanager
def refused_infinity_norm(case: Case) -> Iterator[None]:
    """Raise Unsupported where torch's infinity norm fails on a parameter without elements.

    Only where every rank has such a parameter whole, so that all of them come here: where sharding
    alone leaves a rank without elements, the others wait in a collective.
    """
    try:
        yield
    except RuntimeError as error:
        if empties(case.model) and "infinity norm on an empty tensor" in str(error):
            raise Unsupported(f"torch refuses to clip: {str(error).splitlines()[0]}") from error
        raise


def check_built(model: nn.Module, case: Case, *, own_clip: bool) -> None:
    """Raise Unsupported for a wrapped model that torch would fail on later, or get wrong.

    own_clip: the implementation clips by itself, not by torch's clip_grad_norm_. Every rank comes
    to the same answer.
    """
    sharded = [
        (name, parameter)
        for name, parameter in named_parameters(model)
        if isinstance(parameter, DTensor)
    ]
    for name, parameter in sharded:
        if parameter.numel() == 0:
            # It is wrapped without a word; the first backward raises in `_chunk_cat`.
            raise Unsupported(f"torch cannot reduce gradients without elements: {name}")
    by_inf = case.training.clip is not None and case.training.norm == "inf"
    if by_inf and not own_clip:
        if empties(case.model):
            raise Unsupported(
                f"torch has no inf-norm of a tensor without elements: {empties(case.model)[0]}"
            )
        later = unfrozen(case)
        for name, parameter in sharded:
            if parameter.requires_grad or name in later:
                _check_inf_norm(parameter)
    if sometimes_used(case.model) and reduces_unused(model) is False:
        raise Unsupported(
            "by default FSDP2 mixes up the gradients of parameters that only some ranks use; to "
            "have such cases checked, call model.set_reduce_scatter_unused_params(True)"
        )


def _check_inf_norm(parameter: DTensor) -> None:
    """Raise Unsupported where an empty dim-0 shard makes `torch._foreach_norm` fail.

    The other ranks would wait.
    """
    if leaves_a_rank_empty(parameter.shape[0], parameter.device_mesh.size()):
        raise Unsupported(
            "torch cannot take the infinity norm of an empty shard: "
            "see reports/findings/fsdp2-inf-norm-of-an-empty-shard.md"
        )
