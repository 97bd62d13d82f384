"""Distribution of cases: one class that makes a case out of choices.

It does not know where the choices come from. Hypothesis supplies them in `zerocheck.strategies`,
so that cases shrink; a seeded generator supplies them in `drawing.draw`. Every option list begins
with the simplest, so that a case shrinks to the first of each.

Cases are valid by construction, so that nothing is drawn in vain: what depends on other fields is
chosen after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import msgspec

from ..machine.hosts import drawn as drawn_hosts
from .fitting import parted
from .mesh import INNER, Frequency, drawn_size, mesh_of
from .optimizer_options import with_options
from .options import drawn as drawn_options
from .options import placed
from .picker import Picker, section
from .precision import OF_SEEDS as OF_PRECISION
from .precision import drawn as drawn_precision
from .schema import (
    Block,
    Case,
    Data,
    Disturbance,
    Group,
    MeshSizes,
    Model,
    Optimizer,
    Precision,
    Sharding,
    Start,
    SyncKind,
    Training,
)
from .shapes import (
    MATRIX_KINDS,
    draws_random,
    empties,
    matching,
    overflowing,
    parameter_shapes,
    sometimes_used,
    trainable,
    uncalled,
)
from .traits import can_pass_wrapper
from .values import (
    BACKWARD_PREFETCHES,
    CLIPS,
    COMPILED_OF,
    COMPILES,
    FROZEN_PATTERNS,
    GROUP_PATTERNS,
    HIDDEN,
    KERNELS,
    KINDS,
    LOSS_SCALES,
    MOMENTS,
    MORE_BLOCKS,
    NORMS,
    RATES,
    SCHEDULES,
    SIZES,
    STEMS,
    VOCABULARIES,
    WIDTHS,
    WRAPS,
    ZERO_PATTERNS,
)


class Choices(Picker):
    """Choices of one case, in order; a fixed field is not chosen."""

    def case(self) -> Case:
        mesh = self.option("mesh", self._worlds)
        data = self.data()
        model = self.model(data, prod(mesh))
        seed = self.field("seed", lambda: self._choose(100) + 100 * self._choose(100))
        case = Case(
            mesh=mesh,
            hosts=self.field("hosts", lambda: drawn_hosts(seed, prod(mesh))),
            seed=seed,
            data=self.of_model(data, model),
            model=model,
            optimizer=self.optimizer(model),
            start=self.start(model),
            training=self.training(data, model, seed),
            sharding=self.sharding(seed, mesh),
            options=self.options(seed, "options"),
            disturbance=Disturbance(delay=self.option("disturbance.delay", (0.0,) * 24 + (2.0,))),
        )
        case = msgspec.structs.replace(case, sharding=self.inner(case))
        case = with_options(parted(case, self._fixed), self._fixed)
        training = msgspec.structs.replace(case.training, overflow_in=self.overflow_in(case))
        case = msgspec.structs.replace(case, training=training, precision=self.precision(case))
        # By the seed, so that all other choices stay what they are.
        past = self.field("data.past_wrapper", lambda: seed % 11 == 6 and can_pass_wrapper(case))
        return msgspec.structs.replace(
            case, data=msgspec.structs.replace(case.data, past_wrapper=past)
        )

    def data(self) -> Data:
        if self._user is not None:
            factor = self.option("data.loss_factor", (1.0,) * 8 + (1e-6, 1e4))
            data: Data = section("data", self._fixed)
            return msgspec.structs.replace(data, loss_factor=factor)
        return Data(
            batch=self.option("data.batch", (1, 2, 2, 3, 4)),
            length=self.option("data.length", (2, 3, 1, 4, 5)),
            loss_factor=self.option("data.loss_factor", (1.0,) * 8 + (1e-6, 1e4)),
        )

    def of_model(self, data: Data, model: Model) -> Data:
        """Choose the data, with the fields that depend on the model."""
        maskable = model.stem == "embedding" and data.batch * data.length > 1
        random = draws_random(model)
        return msgspec.structs.replace(
            data,
            masked=self.flag("data.masked", 20 if maskable else 0),
            rng=self.option("data.rng", ("seeded", "carried") if random else ("seeded",)),
        )

    def model(self, data: Data, world: int) -> Model:
        fixed = self._fixed
        if self._user is not None:
            return cast("Model", section("model", fixed))
        needs_tokens = (
            fixed.get("model.tied")
            or fixed.get("model.padding_idx") is not None
            or fixed.get("data.masked")
        )
        stem = self.option("model.stem", STEMS[2:] if needs_tokens else STEMS)
        tokens = stem == "embedding"
        same = fixed.get("model.tied") and "model.outputs" in fixed
        inputs = self.option(
            "model.inputs", (fixed["model.outputs"],) if same else VOCABULARIES if tokens else SIZES
        )
        width = self.option("model.width", WIDTHS)
        blocks = self.field("model.blocks", lambda: self.narrowed(self.blocks(width, data)))
        can_tie = tokens and fixed.get("model.outputs", inputs) == inputs
        tied = self.flag("model.tied", 30 if can_tie else 0)
        # A single class has no gradient in the cross entropy.
        outputs = self.option(
            "model.outputs", (inputs,) if tied else SIZES[:8] if tokens else SIZES
        )
        can_pad = tokens and inputs > 1 and data.batch * data.length > 1
        model = Model(
            stem=stem,
            inputs=inputs,
            width=width,
            blocks=blocks,
            calls=self.field("model.calls", lambda: self.calls(len(blocks))),
            outputs=outputs,
            head_bias=self.option("model.head_bias", (True, True, True, False)),
            tied=tied,
            padding_idx=self.option(
                "model.padding_idx", (None, None, 0, inputs // 2) if can_pad else (None,)
            ),
            unused=self.flag("model.unused", 12),
            side=self.flag("model.side", 8),
        )
        frozen = self.field("model.frozen", lambda: self.frozen(model))
        return msgspec.structs.replace(model, frozen=frozen)

    def blocks(self, width: int, data: Data) -> tuple[Block, ...]:
        """Choose 0 to 4 blocks. Each block contains the choice of a next one, for shrinking."""
        blocks: list[Block] = []
        for percent in MORE_BLOCKS:

            def more(percent: int = percent) -> Block | None:
                return self.block(width, data) if self.chance(percent) else None

            block = self._part(more)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def narrowed(self, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        """Return the blocks, one with bf16 parameters in 8 of 100 models that have blocks."""
        if not blocks or not self.chance(8):
            return blocks
        chosen = self._choose(len(blocks))
        narrow = msgspec.structs.replace(blocks[chosen], dtype="bf16")
        return (*blocks[:chosen], narrow, *blocks[chosen + 1 :])

    def block(self, width: int, data: Data) -> Block:
        kind = self.pick(KINDS)
        single = data.batch * data.length == 1
        if single and (kind == "batch_norm" or (kind == "group_norm" and width == 1)):
            kind = "layer_norm"  # torch refuses to normalize over one value
        heads = 1
        if kind == "attention":
            heads = self.pick(_divisors(width))
        elif kind == "group_norm":
            # Not one value per group: its gradient would be zero.
            heads = self.pick(_divisors(width)[:-1] or (1,))
        checkpoint = self.chance(10)
        return Block(
            kind=kind,
            hidden=self.pick(HIDDEN) if kind in ("mlp", "experts") else 8,
            experts=self.pick((2, 3, 4)) if kind == "experts" else 2,
            heads=heads,
            kernel=self.pick((3, 1, 5)) if kind == "conv" else 3,
            activation="relu" if kind in ("mlp", "experts") and self.chance(40) else "gelu",
            bias=not self.chance(25),
            residual=self.chance(30),
            dropout=self.pick((0.1, 0.5)) if self.chance(30 if checkpoint else 12) else 0.0,
            checkpoint=checkpoint,
            gain=self.chance(5),
            empty=self.chance(4),
            transposed=kind in MATRIX_KINDS and self.chance(10),
        )

    def calls(self, blocks: int) -> tuple[int, ...] | None:
        """Choose the calls: all blocks in order, one of them twice, or one of them not at all."""
        if blocks == 0 or not self.chance(20):
            return None
        order = list(range(blocks))
        if blocks > 1 and self.chance(25):
            del order[self._choose(blocks)]
        else:
            order.insert(self._choose(blocks + 1), self._choose(blocks))
        return tuple(order)

    def frozen(self, model: Model) -> tuple[str, ...]:
        """Choose at most two patterns; a parameter that the loss depends on stays trainable."""
        if not self.chance(18):
            return ()
        names = list(parameter_shapes(model))
        idle = (*uncalled(model), *sometimes_used(model))
        none = empties(model)
        used = [name for name in names if not name.startswith(idle) and name not in none]
        patterns: tuple[str, ...] = ()
        for _ in range(self.pick((1, 1, 2))):
            options = [
                pattern
                for pattern in FROZEN_PATTERNS
                if matching(names, (pattern,))
                and len(matching(used, (*patterns, pattern))) < len(used)
                and pattern not in patterns
            ]
            if options:
                patterns = (*patterns, self.pick(options))
        return patterns

    def optimizer(self, model: Model) -> Optimizer:
        return Optimizer(
            kind=self._fixed.get("optimizer.kind", "adamw"),
            user=self._fixed.get("optimizer.user"),
            groups=self.field("optimizer.groups", lambda: self.groups(model)),
            amsgrad=self.flag("optimizer.amsgrad", 15),
            maximize=self.flag("optimizer.maximize", 10),
            schedule=self.option("optimizer.schedule", SCHEDULES),
            kernel=self.option("optimizer.kernel", KERNELS),
        )

    def groups(self, model: Model) -> tuple[Group, ...]:
        """Choose 1 to 3 groups; none is empty and the last one takes the rest."""
        left: Sequence[str] = trainable(model)
        patterns: list[str] = []
        for _ in range(self.pick((0, 0, 0, 1, 1, 2))):
            options = [
                pattern
                for pattern in GROUP_PATTERNS
                if 0 < len(matching(left, (pattern,))) < len(left)
            ]
            if options:
                patterns.append(self.pick(options))
                taken = set(matching(left, patterns[-1:]))
                left = [name for name in left if name not in taken]
        return tuple(self.group(pattern) for pattern in (*patterns, "*"))

    def group(self, pattern: str) -> Group:
        lr, weight_decay = self.pick(RATES)
        return Group(
            pattern=pattern,
            lr=lr,
            beta1=self.pick((0.9, 0.9, 0.9, 0.5)),
            beta2=self.pick((0.999, 0.95, 0.9999)),
            eps=self.pick((1e-8, 1e-8, 1e-3, 1e-6)),
            weight_decay=weight_decay,
        )

    def start(self, model: Model) -> Start:
        wanted = self._fixed.get("start.moments", "zero") != "zero"
        steps = (1, 2, 255, 256, 10_000) if wanted else (0,) * 6 + (1, 2, 255, 256, 10_000)
        step = self.option("start.step", steps)
        moments = self.option("start.moments", MOMENTS if step else MOMENTS[-1:])
        return Start(
            step=step, moments=moments, zeros=self.field("start.zeros", lambda: self.zeros(model))
        )

    def zeros(self, model: Model) -> tuple[str, ...]:
        if not self.chance(30):
            return ()
        names = list(parameter_shapes(model))
        options = [pattern for pattern in ZERO_PATTERNS if matching(names, (pattern,))]
        return (self.pick(options),) if options else ()

    def training(self, data: Data, model: Model, seed: int) -> Training:
        training = Training(
            steps=self.option("training.steps", (1, 2, 2, 3, 3, 4)),
            microbatches=self.option("training.microbatches", (1,) * 6 + (2, 2, 3, 4)),
            clip=self.field(
                "training.clip",
                lambda: self.pick(CLIPS) * data.loss_factor if self.chance(45) else None,
            ),
            norm=self.option("training.norm", NORMS),
            set_to_none=self.option("training.set_to_none", (True, True, True, False)),
            # By the seed, so that all other choices stay what they are.
            compile=self.field(
                "training.compile", lambda: COMPILES.get(seed % COMPILED_OF, "none")
            ),
        )
        later = tuple(range(1, training.steps)) if model.frozen else ()
        overflowing = self._fixed.get("training.overflow") is not None
        loss_scale = self.field(
            "training.loss_scale",
            lambda: self.pick(LOSS_SCALES) if overflowing or self.chance(8) else None,
        )
        can_overflow = loss_scale is not None and training.steps > 1
        return msgspec.structs.replace(
            training,
            loss_scale=loss_scale,
            unfreeze=self.field(
                "training.unfreeze", lambda: self.pick(later) if later and self.chance(50) else None
            ),
            overflow=self.field(
                "training.overflow",
                lambda: self._choose(training.steps) if can_overflow and self.chance(50) else None,
            ),
        )

    def overflow_in(self, case: Case) -> str | None:
        """Return the parameter whose gradient alone overflows, in half of the cases with one.

        By the seed, so that all other choices stay what they are. Its quotient, since the precision
        follows from its remainder.
        """
        seed = case.seed // OF_PRECISION
        names = overflowing(case.model)
        alone = case.training.overflow is not None and seed % 2 == 1
        # What does not fit the ranks is refused later.
        alone = alone and case.sharding.tensor_parallel == 1 and case.training.compile == "none"
        # torch's GradScaler skips the step of each optimizer by its own gradients.
        alone = alone and case.optimizer.kind != "muon"
        return self.field(
            "training.overflow_in",
            lambda: names[seed // 2 % len(names)] if alone and names else None,
        )

    def sharding(self, seed: int, mesh: MeshSizes) -> Sharding:
        axes = mesh_of(mesh)
        replicates = axes.has("replicate")
        syncs: tuple[SyncKind, ...] = ("last", "last", "each")
        if replicates:
            syncs = ("last", "each", "shards")
        wrap = self.option("sharding.wrap", WRAPS)
        # Drawn models have about 300 elements: larger units than the first leave the root alone.
        buckets = (64, 16, 256) if wrap == "size" else (1 << 20, 256, 64, 16)
        return Sharding(
            wrap=wrap,
            reshard=self.option("sharding.reshard", (True, True, False)),
            bucket=self.option("sharding.bucket", buckets),
            prefetch=self.option("sharding.prefetch", (0, 1, 2)),
            backward_prefetch=self.option("sharding.backward_prefetch", BACKWARD_PREFETCHES),
            sync=self.option("sharding.sync", syncs),
            use_orig_params=self.option("sharding.use_orig_params", (True, True, False)),
            bucket_view=self.flag("sharding.bucket_view", 35),
            find_unused=self.flag("sharding.find_unused", 15),
            static_graph=self.flag("sharding.static_graph", 15),
            optimizer_first=self.flag("sharding.optimizer_first", 6),
            device_mesh=self.field("sharding.device_mesh", lambda: seed % 5 != 3),
            export_offload=self.field("sharding.export_offload", lambda: seed % 7 == 4),
            **self.options(seed, "sharding"),
        )

    def inner(self, case: Case) -> Sharding:
        """Return the sharding with the sizes of inner axes, each of which divides what is left.

        By the seed, so that all other choices stay what they are. Tensor parallelism is rare, and
        another axis is drawn only for an implementation that handles it.
        """
        ranks = case.axes.size("shard") if len(case.mesh) == 1 else 1
        sharding = case.sharding
        tensor_parallel, *others = INNER.items()
        first = case.seed % len(others)  # each of them is first to take ranks at times
        for axis, field in (tensor_parallel, *others[first:], *others[:first]):
            size = self._fixed.get(f"sharding.{field}", "seldom" if axis == "tp" else 1)
            if isinstance(size, str):
                size = drawn_size(axis, cast("Frequency", size), case.seed, ranks)
            sharding = msgspec.structs.replace(sharding, **{field: size})
            ranks = max(1, ranks // size)
        return sharding

    def precision(self, case: Case) -> Precision:
        """Return the precision, drawn by the seed: see precision.py."""
        drawn = drawn_precision(case.seed, case.model)
        return Precision(
            compute=self._fixed.get("precision.compute", drawn.compute),
            reduce=self._fixed.get("precision.reduce", drawn.reduce),
        )

    def options(self, seed: int, section: str) -> dict[str, Any]:
        """Return the options in a section of the case, drawn by the seed and not chosen.

        See options.py.
        """
        drawn = drawn_options(seed)
        return {
            name: self._fixed.get(f"{section}.{name}", value)
            for name, value in drawn.items()
            if placed(name)[0] == section
        }


def _divisors(width: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, min(width, 8) + 1) if width % n == 0)
