"""Base of DeepSpeed's stages: an engine takes the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...case.schema import Case
from ...contract import (
    Implementation,
    Loader,
    Semantics,
    Shard,
    Step,
    StepReport,
    groups,
    torch_optimizer,
)
from ...contract.implementation import KEPT
from ...errors import Unsupported
from ...optimizers import STATES, states_of
from ...protocol.layout import Layout
from . import alone, checkpoint, full_state, library, precision, releases
from .config import config_of
from .layout import stage0_layout
from .options import named, options_of
from .refusals import refusal


class DeepSpeed(Implementation):
    """DeepSpeedEngine of one stage, with torch's optimizer: the client's, or made by the engine.

    The engine divides the loss by the number of microbatches, and the gradient by that of ranks. A
    parameter that no rank used has the gradient 0 at every stage, so it still decays. Buffers stay
    on their rank. The clipped gradient is seen where the optimizer is given it, which is group by
    group.

    A subclass says what this rank holds: `_parameters`, `_gradients`, `_states`, `_fill`.
    """

    semantics = Semantics(accumulate="local", unused="zero", buffers="local", weight="token")
    keeps = KEPT
    capabilities = frozenset({"precision", "past_wrapper"})
    simulated = alone.traits(offload=False)
    zero: int
    """The stage in its configuration."""

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return refusal(case, cls.zero)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        """Build the engine. Raises Unsupported on a device other than the CPU."""
        if mesh.device_type != library.device():
            raise Unsupported(f"DeepSpeed is run on the CPU only, not on {mesh.device_type}")
        self.case = case
        self.semantics = self._means(case)
        self.model = model
        self.named: Mapping[str, Any] = dict(model.named_parameters())
        given = groups(model, case)
        self._group_of = [number for number, group in enumerate(given) if group["params"]]
        """Of each group of the optimizer, which group of the case it is."""
        self.engine = self._engine([given[number] for number in self._group_of])
        self.inner: torch.optim.Optimizer = self.engine.basic_optimizer
        self.optimizer: Any = self.engine.optimizer
        self._call = precision.call_of(self.engine, case)
        self.updated = sum(len(given[number]["params"]) for number in self._group_of)
        """Tensors that the optimizer updates in a step."""
        self._hook = self.inner.register_step_pre_hook(self._before_update)
        self._step: Step | None = None
        self._clipped: dict[torch.Tensor, torch.Tensor | None] = {}

    def _means(self, case: Case) -> Semantics:
        """Return the semantics of a step of the case."""
        return precision.semantics_of(type(self).semantics, case, self.zero)

    def _config(self) -> dict[str, Any]:
        """Return the configuration of the engine."""
        return config_of(self.case, self.zero)

    def _engine(self, given: list[dict[str, Any]]) -> library.Engine:
        """Build the engine with these parameter groups."""
        config = self._config()
        if options_of(self.case).own_optimizer:
            return library.make_engine(self.model, config, model_parameters=given)
        return library.make_engine(self.model, config, optimizer=torch_optimizer(self.case)(given))

    def train_step(self, step: Step) -> StepReport:
        """Forward, backward and engine.step() of each microbatch; the last one updates."""
        self._step = step
        for number, group in zip(self._group_of, self.inner.param_groups, strict=True):
            group["lr"] = step.lr[number]
        last = len(step.microbatches) - 1
        for number, microbatch in enumerate(step.microbatches):
            loss = microbatch.loss(self._call)
            if microbatch.weight != 1.0:
                loss = loss * microbatch.weight
            self.engine.backward(loss)
            if number == last:
                step.reached("reduced")
            # reports/findings/deepspeed-gathers-with-autograd.md
            with torch.set_grad_enabled(not releases.flat_needs_grad):
                self.engine.step()
        self._step = None
        self._clipped.clear()
        norm = self.engine.get_global_grad_norm()
        clips = self.case.training.clip is not None
        return StepReport(
            grad_norm=float(norm) if clips and norm is not None else None,
            skipped=not self.engine.was_step_applied(),
        )

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the gradients of the coming update, of all groups or of the next one."""
        if self._step is None or self.case.training.clip is None:
            return
        for group in optimizer.param_groups:
            self._clipped.update((one, one.grad) for one in group["params"])
        if len(self._clipped) == self.updated:
            self._step.reached("clipped")

    def shards(self) -> Iterator[Shard]:
        """Iterate over this rank's shards; gradients are those to apply, or the reduced ones."""
        yield from self._parameters()
        yield from self._gradients()
        yield from self._states()
        for name, buffer in self.model.named_buffers():
            yield Shard(name, "buffer", buffer.detach(), tuple(buffer.shape))

    def _parameters(self) -> Iterator[Shard]:
        raise NotImplementedError

    def _gradients(self) -> Iterator[Shard]:
        raise NotImplementedError

    def _states(self) -> Iterator[Shard]:
        raise NotImplementedError

    def save(self, directory: str, loader: Loader) -> None:
        checkpoint.save(self.engine, directory, loader)

    def load(self, directory: str, loader: Loader) -> None:
        checkpoint.load(self.engine, directory, loader)

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """Export by the option `read_out`; moments only by functions, which stage 0 lacks."""
        return full_state.whole(
            self.engine, self.model, options_of(self.case).read_out, states_of(self.case.optimizer)
        )

    def close(self) -> None:
        """Destroy the engine."""
        self._hook.remove()
        self._clipped.clear()
        self.inner.state.clear()
        library.closed(self.engine)
        del self._call, self.named, self.engine, self.optimizer, self.inner, self.model


class DeepSpeed0(DeepSpeed):
    """Stage 0: nothing is sharded; the engine all-reduces `param.grad`. The norm is not reported.
    In bf16 it updates fp32 masters, one of each parameter, and gradients are widened for that.
    """

    zero = 0
    stage = 0
    options = named("own_optimizer")

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return the layout between steps."""
        return stage0_layout(model, case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.masters: dict[str, torch.Tensor] = dict(self._masters())

    def _masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.semantics.master == "none":
            return
        names = {parameter: name for name, parameter in self.named.items()}
        for parameters, masters in zip(
            self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True
        ):
            for parameter, master in zip(parameters, masters, strict=True):
                yield names[parameter], master

    def _parameters(self) -> Iterator[Shard]:
        for name, parameter in self.named.items():
            yield Shard(name, "parameter", parameter.detach(), tuple(parameter.shape))

    def _gradients(self) -> Iterator[Shard]:
        for name, parameter in self.named.items():
            if parameter.requires_grad:
                clipped = self._clipped.get(self.masters.get(name, parameter))
                gradient = parameter.grad if clipped is None else clipped
                yield Shard(name, "gradient", gradient, tuple(parameter.shape))

    def _states(self) -> Iterator[Shard]:
        for name, parameter in self.named.items():
            shape = tuple(parameter.shape)
            if name in self.masters:
                yield Shard(name, "master", self.masters[name].detach(), shape)
            elif self.masters and parameter.requires_grad:  # without elements it is left out
                yield Shard(name, "master", parameter.detach().float(), shape)
            state = self.inner.state.get(self.masters.get(name, parameter), {})
            for role in STATES:
                if role in state:
                    yield Shard(name, role, state[role], shape)
            if "step" in state:
                yield Shard(name, "step", state["step"], ())

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Restore the whole state on every rank."""
        for name, parameter in self.named.items():
            parameter.detach().copy_(full[name, "parameter"])
            if not parameter.requires_grad:
                continue
            updated = self.masters.get(name, parameter)
            updated.detach().copy_(full[name, "parameter"])
            state = self.inner.state[updated]
            if (name, "step") in full:
                state["step"] = full[name, "step"].clone()
            for role in STATES:
                if (name, role) in full:
                    state[role] = torch.zeros_like(updated).copy_(full[name, role])

    def close(self) -> None:
        self.masters.clear()
        super().close()
