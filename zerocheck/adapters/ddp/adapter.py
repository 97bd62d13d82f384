"""torch's DistributedDataParallel: nothing is sharded (ZeRO-0)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ...case.schema import Case
from ...case.shapes import sometimes_used, uncalled
from ...case.traits import reduced_precision
from ...contract import Built, BuiltImplementation, Loader, Saving, Semantics, make_optimizer
from ...contract.checkpoint import other_states, take_over, whole
from ...contract.implementation import Call, Stage
from ...contract.names import unwrapped
from ...errors import Unsupported
from ...models.blocks import DTYPES
from ...protocol.layout import Layout
from ..shared import full_checkpoint as file
from ..shared.compiling import compile_model, forget
from ..shared.scaling import scaler_of
from ..shared.schedules import with_schedule, without_schedule
from ..shared.sync import accumulation, synchronized
from . import collectives as predicted_calls
from .layout import ddp_layout, replicated_states
from .refusals import refusal

# Of norms under autocast: their weights stay fp32.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


class Ddp(BuiltImplementation):
    """DistributedDataParallel; gradients are reduced once, or with each microbatch.

    `sharding.bucket` (elements) sets its bucket size, `bucket_view` gradient_as_bucket_view. A
    model that may leave trainable parameters out of the forward is wrapped with
    find_unused_parameters. DDP refuses a model without any trainable parameter, and so does this; a
    changing graph that is said to be static is wrong use by DDP's documentation. It reduces only
    what was trainable when it was made, so the model is wrapped anew after some were unfrozen.
    """

    semantics = Semantics(accumulate="local", unused="skip", buffers="rank0", weight="token")
    stage: Stage | None = 0
    options: ClassVar[tuple[str, ...] | None] = (
        "bucket",
        "sync",
        "bucket_view",
        "find_unused",
        "static_graph",
        "optimizer_first",
        "checkpoint",
    )
    without = without_schedule()
    capabilities = frozenset({"loss_scale", "unfreeze", "compile", "precision", "past_wrapper"})
    avoids_torch_faults = False

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return refusal(case)

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return a rank's memory layout (see `ddp_layout`) and collectives, as far as predicted."""
        held = ddp_layout(
            model, case, gradient_views=case.sharding.bucket_view, states=replicated_states
        )
        if reduced_precision(case):  # gradients come in another order than the bare model's in fp32
            return held
        return with_schedule(held, predicted_calls.ddp(model, case), case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.semantics = of_autocast(synchronized(self.semantics, case), case)
        self._device = mesh.device_type

    @property
    def called(self) -> Call:
        return autocast(self.built.model, self.case, self._device)

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Wrap the model.

        Raises Unsupported if every parameter is frozen.
        """
        first = make_optimizer(model, case) if case.sharding.optimizer_first else None
        wrap = partial(ddp, model, case, mesh, gradient_views=case.sharding.bucket_view)
        wrapped = wrap()
        return Built(
            wrapped,
            first or make_optimizer(wrapped, case),
            accumulate=accumulation(case),
            scaler=scaler_of(case, mesh),
            rewrap=wrap,
        )

    def save(self, directory: str, loader: Loader) -> Saving | None:
        if self.case.sharding.checkpoint != "full":
            return super().save(directory, loader)
        file.write(directory, self._whole_states(), other_states(loader, self.built.scaler))
        return None

    def load(self, directory: str, loader: Loader) -> None:
        if self.case.sharding.checkpoint != "full":
            super().load(directory, loader)
            return
        found = file.read(directory)
        self._inner.load_state_dict(found["model"])
        made = self.optimizers.given
        held = found["optimizer"] if len(made) > 1 else [found["optimizer"]]
        for one, state in zip(made, held, strict=True):
            one.load_state_dict(state)
        take_over(found, loader, self.built.scaler)

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        if self.case.sharding.checkpoint != "full":
            return super().export()
        return self._exported(self._whole_states())

    def close(self) -> None:
        forget(self.case)
        super().close()

    @property
    def _inner(self) -> nn.Module:
        """Module that DDP wraps."""
        return cast(nn.Module, self.built.model.module)

    def _whole_states(self) -> dict[str, Any]:
        """Return the state dicts of the wrapped module and of its optimizer, or of several."""
        held = [one.state_dict() for one in self.optimizers.given]
        optimizer: Any = held if len(held) > 1 else held[0]
        return {"model": self._inner.state_dict(), "optimizer": optimizer}

    def _exported(self, states: Mapping[str, Any]) -> Mapping[tuple[str, str], torch.Tensor]:
        """Convert whole state dicts to {(name, role): tensor}; {} for empty ones (other ranks)."""
        if not states:
            return {}
        named = {p: unwrapped(name) for name, p in self._inner.named_parameters()}
        made = self.optimizers.given
        held = states["optimizer"] if len(made) > 1 else [states["optimizer"]]
        moments: dict[str, Mapping[str, Any]] = {}
        for one, state in zip(made, held, strict=True):
            order = [named[p] for group in one.param_groups for p in group["params"]]
            moments |= file.by_name(state, order)
        buffers = {unwrapped(name) for name, _ in self._inner.named_buffers()}
        return whole(states["model"], moments, self.names, buffers, unwrapped)


def ddp(
    model: nn.Module, case: Case, mesh: DeviceMesh, *, gradient_views: bool
) -> DistributedDataParallel:
    """Wrap the model in DDP with the options of the case. gradient_views: gradient_as_bucket_view.

    Raises Unsupported if every parameter is frozen.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Unsupported("DDP refuses a model without trainable parameters")
    sharding = case.sharding
    left_out = bool(uncalled(case.model) or sometimes_used(case.model))
    wrapped = DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        bucket_cap_mb=sharding.bucket * 4 / 2**20,
        gradient_as_bucket_view=gradient_views,
        find_unused_parameters=sharding.find_unused or left_out,
        static_graph=sharding.static_graph,
    )
    compile_model([wrapped], case)  # from outside, so that torch splits the graph by buckets
    return wrapped


def of_autocast(semantics: Semantics, case: Case) -> Semantics:
    """Return the semantics of a step with its forward under torch.autocast; gradients stay fp32."""
    if case.precision.compute == "fp32":
        return semantics
    return replace(semantics, compute=case.precision.compute, precision_mode="autocast")


def autocast(call: Call, case: Case, device: str) -> Call:
    """Wrap a call in torch.autocast to the compute dtype, unless that is fp32."""
    if case.precision.compute == "fp32":
        return call
    dtype = DTYPES[case.precision.compute]

    def lowered_call(*inputs: Any) -> torch.Tensor:
        with torch.autocast(device, dtype):
            return call(*inputs)

    return lowered_call
