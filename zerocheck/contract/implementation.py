"""Contract: the interface that an implementation needs in order to be judged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..case.capabilities import Capability
from ..case.mesh import AxisName
from ..case.schema import Case
from ..models.user import call_with
from ..protocol.layout import Layout
from .semantics import Semantics
from .shard import Shard

Moment = Literal["reduced", "clipped"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
Stage = Literal[0, 1, 2, 3]
Hidden = Literal["states", "owners"]
Call = Callable[..., torch.Tensor]


def seed_all(seed: int) -> None:
    """Seed like `torch.manual_seed`, but only the devices that exist.

    For each kind of device that there is not, that takes down the stack of its caller, for an error
    that can never be: as long as the forward of a small model.
    """
    if _accelerated():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def _accelerated() -> bool:
    return torch.accelerator.is_available()


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Microbatch of one rank: its samples, the loss, and the seed of its random numbers.

    inputs: arguments of the model, of which the last ones are keyword arguments, by the names in
    `keywords`; target: what the loss compares with; seed: set
    before the forward, so that dropout is replayable, or None where each rank carries its random
    numbers on; loss_of(outputs, target): 0-d fp32 tensor; entered(), on_loss(loss): the harness
    records the random state and the loss there.

    weight: tokens of this microbatch over the mean number of tokens of all microbatches and ranks
    in this step; 1.0 where all have the same. An implementation that declares
    `Semantics(weight="token")` takes the mean over tokens: it multiplies the loss by the weight
    first, if it is not 1.0, then divides by the number of microbatches, then scales.
    """

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    seed: int | None
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    on_loss: Callable[[torch.Tensor], None] | None = None
    entered: Callable[[], None] | None = None
    weight: float = 1.0
    keywords: tuple[str, ...] = ()
    past_wrapper: Call | None = None
    """The module without its wrapper, where the loss calls that too (`data.past_wrapper`)."""

    def loss(self, call: Call) -> torch.Tensor:
        """Run `call` with the inputs and return the mean loss, 0-d fp32.

        It is divided neither by the world size nor by the number of microbatches, and not
        weighted.
        """
        if self.seed is not None:
            seed_all(self.seed)
        if self.entered is not None:
            self.entered()
        loss = self.loss_of(
            call_with(call, self.inputs, self.keywords, self.past_wrapper), self.target
        )
        if self.on_loss is not None:
            self.on_loss(loss.detach())
        return loss


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step to take.

    index: 0-based within the case; microbatches: this rank's; lr: learning rate per group, in the
    order of `case.optimizer.groups`; reached("reduced"): call it where every gradient is reduced
    and not clipped yet; reached("clipped"): after clipping, only if the case clips. The harness
    reads `shards()` there and copies. `reached` may raise to end the case: let it pass. With loss
    scaling, "reduced" is after the gradient was divided by the scale.

    unfreeze: names (of the unwrapped model) of parameters that become trainable before this step;
    they are in `zerocheck.groups` from the start.
    """

    index: int
    microbatches: Sequence[Microbatch]
    lr: Sequence[float]
    reached: Callable[[Moment], None]
    unfreeze: tuple[str, ...] = ()


class Loader(Protocol):
    """Position in the data, the same on all ranks, whatever their number."""

    def state_dict(self) -> dict[str, int]:
        """Return {"samples": n}: samples that all ranks together have read since training began."""
        ...

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from that position."""
        ...


class Saving(Protocol):
    """Checkpoint that is still being written, such as torch's `async_save` returns."""

    def result(self) -> object:
        """Wait until it is written; raise the error of writing it."""
        ...


Kept = Literal["data", "rng"]
KEPT: tuple[Kept, ...] = get_args(Kept)
"""What a checkpoint may hold beside the model and the optimizer."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Report of the implementation on the step that it took.

    grad_norm: total norm of the reduced gradient before clipping, or None if it computes none;
    skipped: no update was made, since the gradient is not finite; loss_scale: what the losses of
    this step were multiplied by, 1.0 without scaling. Both are the same on every rank.

    reduced: False if the gradient in `shards()` at "reduced" may be the rank's own, not reduced
    yet. Where ranks hold different ones, it then counts as not shown.
    """

    grad_norm: float | None = None
    skipped: bool = False
    loss_scale: float = 1.0
    reduced: bool = True


class Implementation:
    """Sharded training code under test: one object per rank.

    Subclass it, or give a function `build(model, case, mesh) -> Built` (see contract/build.py) if
    the code looks like torch. Required: `__init__`, `train_step`, `shards`. Optional: `supports`,
    `restore`, `close`, `layout`, `save` with `load`, `export`, and the class attributes
    `semantics`, `fixed`, `without`, `options`, `capabilities`, `axes`, `keeps`, `exchanges` and
    `stage`. What an implementation means by a step may depend on the case: `self.semantics` of the
    instance counts.
    """

    semantics: Semantics = Semantics()
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Case fields that it sets itself, e.g. {"training": {"clip": None}}; the rest is drawn."""
    capabilities: ClassVar[Collection[Capability]] = frozenset()
    """Features that it handles where the case asks for them: "loss_scale" (multiplies losses by a
    scale that begins with `training.loss_scale`, and skips steps that overflow), "unfreeze" (obeys
    `Step.unfreeze`), "compile" (compiles the model with the backend `training.compile`),
    "precision" (computes and reduces in the dtypes of `case.precision`, and says how in its
    `semantics`), "past_wrapper" (a loss may call the module past its wrapper too, as one of
    `model(x)` and `model.module(x)` does).
    Without it, such cases are unsupported and are not drawn."""
    axes: ClassVar[Collection[AxisName]] = frozenset({"shard"})
    """Axes of the mesh that it handles: "shard" (ranks along it have different samples; a sharder
    shards over it, DDP averages over it); "replicate" (ranks along it hold the same shards, of
    different samples); "ep" (ranks along it have different samples, and some of the experts each).
    Ranks along "tp", "cp" and "pp" read the same samples, and compute parts of each layer, parts of
    the sequences, or some of the layers. Cases with others are unsupported and are not drawn. With
    "cp", "ep" or "pp" most cases have the axis, and models that it can split."""

    keeps: ClassVar[Collection[str]] = ()
    """What `save` and `load` keep beside the model and the optimizer: "data" (the loader's state),
    "rng" (the random state of each rank, which comes back where the number of ranks is the same).
    What is not named is the affair of the user's loop, and not judged."""

    exchanges: ClassVar[Collection[str]] = ()
    """Names of the implementations that load one another's checkpoints, its own among them."""

    without: ClassVar[Mapping[str, str]] = {}
    """Obligations that none of its cases can exercise, such as "clip" where it fixes that nothing
    is clipped, each with the reason. Reports say it, and the run does not fail for want of them."""

    options: ClassVar[tuple[str, ...] | None] = None
    """Fields of `case.sharding` that it obeys, e.g. ("wrap",), and names of options of adapters in
    `case.options`; None: it does not say. What it does
    not obey counts as ignored in the coverage, not as exercised."""

    hides: tuple[Hidden, ...] = ()
    """Facts that `shards()` never shows; of the instance. "states": the optimizer keeps its moments
    and step count to itself, and is judged by its parameters, from a start at step 0. "owners": of
    unequal copies of a gradient only that of the rank that updates the parameter counts."""

    stage: Stage | None = None
    """Kinds of state that are sharded over the ranks between steps, as a stage of the ZeRO paper: 0
    nothing, 1 optimizer states, 2 gradients too, 3 parameters too; None: it does not say. Ownership
    demands it, and reports compare the bytes that are held with it. Without a layout, a rank may
    hold no more between steps than its share by it."""

    exports: bool = True
    """False if `export` cannot give the whole state; of the instance."""

    stays_gathered: Collection[str] = ()
    """Names of parameters that stay whole between steps, though its stage shards parameters; of the
    instance."""

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None. No process group is needed."""
        return None

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Predict the exact bytes that this rank will hold and the collectives that it will call.

        model: not wrapped, possibly on the meta device, and possibly another than that of the case,
        of which sharding, mesh, precision, optimizer and training count. It is computed from shapes
        alone: nothing of it may be read from wrapped modules. None: it does not say.
        """
        return None

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        """Set up training. `model` is not wrapped yet and equal on every rank.

        `mesh` has the axes of `case.axes`, by name: `mesh.get_group("shard")`.
        """
        raise NotImplementedError

    def train_step(self, step: Step) -> StepReport:
        """Take one step: forward and backward of all microbatches, reduction, clipping, update."""
        raise NotImplementedError

    def shards(self) -> Iterable[Shard]:
        """Iterate over everything this rank holds now, as local views, without communication."""
        raise NotImplementedError

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Restore a state of mid-training, {(name, role): whole tensor}, before the first step.

        Roles: parameter, and those of `case.optimizer`. adamw: exp_avg, exp_avg_sq, max_exp_avg_sq
        (with amsgrad) and step (0-d fp32); sgd: momentum_buffer (with a momentum).
        Frozen parameters have the role parameter only.
        """
        raise NotImplementedError

    def save(self, directory: str, loader: Loader) -> Saving | None:
        """Write a checkpoint into a directory that every rank sees; every rank calls this.

        The directory may be missing, empty, or hold an older checkpoint of the same training,
        which this one replaces. On return the checkpoint is whole; or what is returned says when:
        every rank waits for its own, and may use collectives there. Training goes on meanwhile, and
        must not change what is written: the state of this call.
        """
        raise NotImplementedError

    def load(self, directory: str, loader: Loader) -> None:
        """Load the last whole checkpoint in the directory; every rank calls this.

        It is called before the first step, in place of `restore`, on an object just built, whose
        model holds other weights. The number of ranks may be another one than at `save`. Raises
        whatever says clearly that there is no whole checkpoint.
        """
        raise NotImplementedError

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """Return the whole state as the library exports it: {(name, role): whole tensor}.

        Every rank calls this; a rank to which the library gives nothing returns {}. Names are those
        of the unwrapped model, roles those of `restore`, and `buffer`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release everything. The next case runs in the same process."""
