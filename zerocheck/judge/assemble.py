"""Whole flat vectors, one per role and point, assembled from the records of each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from msgspec.structs import replace

from ..case.mesh import Mesh
from ..contract.shard import OF_NO_STATE
from ..optimizers import STATES
from ..protocol.observations import Entry, Point, RankObservation, Recorded, StepObservation
from . import vectors
from .compare import same_bits
from .layout import ParameterLayout
from .manifest_plan import Cover, ManifestPlan, cover_of, plan_of
from .pieces import in_pieces

Fetch = Callable[[int, Recorded], torch.Tensor]
"""fetch(rank, record) -> the flat tensor that the record points to; a view is enough."""


@dataclass(frozen=True)
class RoleState:
    """One role at one point: what each rank holds, and the whole vector put together.

    whole: (size,), NaN where nobody holds anything; where several ranks hold an element, that of
    the lowest rank. parts[r] and plans[r]: rank r's data and where it lies. replicated: the mesh
    of the ranks, if it has a replicate axis; else None. cover: of the plans, where it is known;
    then `whole` was put together from the parts.
    """

    whole: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    plans: tuple[ManifestPlan, ...]
    manifests: tuple[tuple[Entry, ...], ...]
    replicated: Mesh | None = None
    cover: Cover | None = None

    def as_of(self, rank: int) -> torch.Tensor:
        """Return `whole`, with the shards of this rank's replica as the replica holds them.

        `whole` itself if no bit of that differs.
        """
        if self.held_once:
            return self.whole
        mesh = self.replicated
        members = (rank,) if mesh is None else mesh.group(rank, "shard")
        if all(self.plans[r].agrees(self.whole, self.parts[r]) for r in members):
            return self.whole
        if self.plans[rank].index is None:
            return self.parts[rank]
        whole = vectors.copy(self.whole)
        for member in members:
            self.plans[member].scatter(whole, self.parts[member])
        return whole

    @property
    def present(self) -> frozenset[str]:
        """Names that some rank holds."""
        return frozenset().union(*(plan.present for plan in self.plans))

    @property
    def values(self) -> torch.Tensor:
        """Every element that some rank holds, once, without its place."""
        held = self.covered()
        return self.whole if held is None else vectors.taken(self.whole, vectors.positions(held))

    def covered(self) -> torch.Tensor | None:
        """Mask of the elements that some rank holds, or None for all of them."""
        cover = cover_of(self.plans, len(self.whole)) if self.cover is None else self.cover
        return cover.mask

    @property
    def held_once(self) -> bool:
        """True if no element has a copy, so that no two can differ."""
        return self.cover is not None and self.cover.once

    @property
    def agree(self) -> bool:
        """True if all copies of each element have the same bits."""
        return self.held_once or all(
            plan.agrees(self.whole, part) for part, plan in zip(self.parts, self.plans, strict=True)
        )

    @property
    def whole_everywhere(self) -> bool:
        """True if every rank holds every element, in order."""
        return all(plan.index is None for plan in self.plans)


@dataclass
class Observation:
    """All observations of one case."""

    layout: ParameterLayout
    ranks: Sequence[RankObservation]
    fetch: Fetch
    first: int = 0
    """Index of the first step."""
    mesh: Mesh | None = None
    """Axes of the ranks, where they count: see `RoleState` and `_steps`."""
    _found: dict[tuple[int, Point, str], list[list[Recorded]]] = field(init=False)
    _held: dict[tuple[int, Point, str], RoleState | None] = field(init=False, default_factory=dict)
    _plans: dict[tuple[Entry, ...], ManifestPlan] = field(init=False, default_factory=dict)
    _covers: dict[tuple[int, ...], Cover] = field(init=False, default_factory=dict)
    """By the ids of the plans."""

    def __post_init__(self) -> None:
        self._found = {}
        for rank, one in enumerate(self.ranks):
            for record in one.records:
                key = (record.step, record.point, record.role)
                if key not in self._found:
                    self._found[key] = [[] for _ in self.ranks]
                self._found[key][rank].append(record)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def states(self) -> tuple[str, ...]:
        """Roles of optimizer states that some rank exposed, in the order of a step."""
        exposed = {role for _, _, role in self._found} - OF_NO_STATE
        return (*(one for one in STATES if one in exposed), *sorted(exposed.difference(STATES)))

    def steps(self, index: int) -> list[StepObservation]:
        """Return each rank's observation of step `index`."""
        return [steps[index - self.first] for steps in self._steps]

    @cached_property
    def _steps(self) -> tuple[tuple[StepObservation, ...], ...]:
        """Each rank's steps. In a pipeline a stage has the losses of the last one of its group."""
        mesh = self.mesh
        if mesh is None or not mesh.has("pp"):
            return tuple(observed.steps for observed in self.ranks)
        joined = []
        for rank, observed in enumerate(self.ranks):
            group = zip(*(self.ranks[other].steps for other in mesh.group(rank, "pp")), strict=True)
            losses = (max((step.losses for step in steps), key=len) for steps in group)
            pairs = zip(observed.steps, losses, strict=True)
            joined.append(tuple(replace(step, losses=step.losses or last) for step, last in pairs))
        return tuple(joined)

    def unreduced(self, index: int) -> bool:
        """Return True if the gradients of step `index` may be each rank's own.

        See StepReport.reduced. The last forward has no report of its own, so those of all steps
        count for it.
        """
        steps = self.steps(index)
        if not any(step.reported for step in steps):
            steps = [step for one in self.ranks for step in one.steps]
        return any(step.reported and not step.reduced for step in steps)

    def random_states(self, index: int) -> list[list[bytes]]:
        """Return, per rank, the random state at the entry of each loss of step `index`."""
        return [
            [one.random_states[number] for number in one.steps[index - self.first].random]
            for one in self.ranks
        ]

    def rng_after(self, index: int, *, apart: bool) -> list[tuple[str, ...]]:
        """Return, per rank, hashes of the random states after the forwards of step `index`.

        Empty where ranks are not apart: those that compute one thing together leave the same.
        """
        return [one.rng_after for one in self.steps(index)] if apart else []

    def rng_after_elsewhere(self, index: int) -> set[str]:
        """Return hashes of the random states after the forwards of all other steps."""
        steps = [
            step for one in self.ranks for n, step in enumerate(one.steps, self.first) if n != index
        ]
        return {one for step in steps for one in step.rng_after}

    def loss_scales(self, index: int) -> list[float]:
        """Return, per rank, the reported loss scale of step `index`.

        Nothing is reported of the last forward: it has the scale of the step before, or half of it
        if that was skipped. Scales are powers of two, so another one changes no bit unless
        something underflows. One that cannot be (see skip.py) counts as 1.
        """
        return [_loss_scale(one.steps, index - self.first) for one in self.ranks]

    def entries(self, step: int, point: Point, role: str) -> list[list[Entry]]:
        """Return, per rank, the locations of all shards of a role at a point."""
        found = self._found.get((step, point, role), [[] for _ in self.ranks])
        return [
            [e for record in records for e in one.manifests[record.manifest]]
            for one, records in zip(self.ranks, found, strict=True)
        ]

    def last(self, point: Point, role: str) -> int | None:
        """Return the last step at which a role was exposed at a point, or None."""
        return max((s for s, p, r in self._found if (p, r) == (point, role)), default=None)

    def manifests(self, step: int, point: Point, role: str) -> tuple[tuple[int, ...], ...]:
        """Return, per rank, the manifest numbers of a role; equal numbers have equal entries."""
        found = self._found.get((step, point, role), [()] * len(self.ranks))
        return tuple([tuple([record.manifest for record in records]) for records in found])

    def held(self, step: int, point: Point, role: str) -> RoleState | None:
        """Assemble the vector of a role of the parameters' shape, or None if no rank exposed it."""
        key = (step, point, role)
        if key not in self._held:
            self._held[key] = self._assemble(key)
        return self._held[key]

    def dtype(self, step: int, point: Point, role: str) -> torch.dtype:
        """Return the narrowest dtype in which shards of a role are held; fp32 without any."""
        records = [one for of in self._found.get((step, point, role), ()) for one in of]
        names = {one.dtype.removeprefix("torch.") for one in records if one.numel}
        narrow = [name for name in ("bfloat16", "float16") if name in names]
        found: torch.dtype = getattr(torch, narrow[0] if narrow else "float32")
        return found

    def forget(self, step: int, points: Collection[Point] = ()) -> None:
        """Discard the vectors assembled for a step, at these points or at all of them."""
        self._held = {
            key: held
            for key, held in self._held.items()
            if key[0] != step or (points and key[1] not in points)
        }

    def scalars(self, step: int, role: str, point: Point = "state") -> list[dict[str, float]]:
        """Return, per rank, 0-d values by name (role `step`)."""
        return [
            {entry.name: float(data) for entry, data in pieces}
            for pieces in self._pieces(step, point, role)
        ]

    def buffers(self, step: int) -> list[dict[str, torch.Tensor]]:
        """Return, per rank, the buffers after a step by name, each in its shape."""
        return [
            {entry.name: data.view(entry.shape) for entry, data in pieces}
            for pieces in self._pieces(step, "state", "buffer")
        ]

    def by_name(self, step: int, point: Point, role: str) -> list[dict[str, torch.Tensor]]:
        """Return, per rank, its shards of a role at a point by name: end to end, flat."""
        result = []
        for pieces in self._pieces(step, point, role):
            held: dict[str, list[torch.Tensor]] = {}
            for entry, data in pieces:
                held.setdefault(entry.name, []).append(data)
            result.append({name: torch.cat(parts) for name, parts in held.items()})
        return result

    def narrow(self, step: int, point: Point, role: str) -> list[frozenset[str]]:
        """Return, per rank, the names whose shards of a role are narrower than fp32."""
        found = self._found.get((step, point, role), [[] for _ in self.ranks])
        return [
            frozenset(
                entry.name
                for record in records
                if record.dtype.removeprefix("torch.") in ("bfloat16", "float16")
                for entry in self.ranks[rank].manifests[record.manifest]
            )
            for rank, records in enumerate(found)
        ]

    def _pieces(self, step: int, point: Point, role: str) -> list[list[tuple[Entry, torch.Tensor]]]:
        """Iterate, per rank, over every shard of a role at a point, with its data, flat."""
        found = self._found.get((step, point, role), [[] for _ in self.ranks])
        result: list[list[tuple[Entry, torch.Tensor]]] = []
        for rank, records in enumerate(found):
            pieces: list[tuple[Entry, torch.Tensor]] = []
            for record in records:
                entries = self.ranks[rank].manifests[record.manifest]
                data = self.fetch(rank, record) if record.numel else torch.empty(0)
                sizes = [entry.stop - entry.start for entry in entries]
                pieces += zip(entries, torch.split(data, sizes), strict=True)
            result.append(pieces)
        return result

    def records(self) -> list[tuple[int, Recorded]]:
        """Return every record with its rank, in order."""
        return [(rank, record) for rank, one in enumerate(self.ranks) for record in one.records]

    def _assemble(self, key: tuple[int, Point, str]) -> RoleState | None:
        found = self._found.get(key)
        if found is None:
            return None
        parts: list[torch.Tensor] = []
        plans: list[ManifestPlan] = []
        manifests: list[tuple[Entry, ...]] = []
        for rank, records in enumerate(found):
            data = [_wide(self.fetch(rank, record)) for record in records if record.numel]
            part = data[0] if len(data) == 1 else vectors.joined(data)
            manifest = tuple(
                entry for record in records for entry in self.ranks[rank].manifests[record.manifest]
            )
            manifests.append(manifest)
            plan = self._plans.get(manifest)
            if plan is None:
                plan = self._plans[manifest] = plan_of(manifest, self.layout)
            part = part if plan.order is None else vectors.taken(part, plan.order)
            if _replica(part, parts, plan):
                part = parts[0]  # what was put together or widened takes memory
            plans.append(plan)
            parts.append(part)
        numbers = tuple(map(id, plans))
        cover = self._covers.get(numbers)
        if cover is None:
            cover = self._covers[numbers] = cover_of(plans, self.layout.size)
        if plans[0].index is None:
            whole = parts[0]
        else:
            whole = vectors.empty(self.layout.size)
            if cover.mask is not None:
                whole.fill_(torch.nan)
            for part, plan in zip(reversed(parts), reversed(plans), strict=True):
                plan.scatter(whole, part)
        return RoleState(
            whole, tuple(parts), tuple(plans), tuple(manifests), self.replicated, cover
        )

    @property
    def replicated(self) -> Mesh | None:
        """Mesh whose replicas hold copies, or None: see `RoleState`."""
        return self.mesh if self.mesh is not None and self.mesh.has("replicate") else None


def _replica(part: torch.Tensor, parts: Sequence[torch.Tensor], plan: ManifestPlan) -> bool:
    """Return True if a large part equals that of the first rank bit for bit."""
    large = in_pieces(None, len(part)) and plan.index is None
    return large and bool(parts) and len(parts[0]) == len(part) and same_bits(part, parts[0])


def _wide(data: torch.Tensor) -> torch.Tensor:
    """Cast to fp32 at least, which holds every bf16 value exactly."""
    narrow = data.dtype in (torch.bfloat16, torch.float16)
    return vectors.copy(data, torch.float32) if narrow else data


def _loss_scale(steps: Sequence[StepObservation], index: int) -> float:
    report = steps[index]
    scale = report.loss_scale
    if not report.reported and index:
        before = steps[index - 1]
        scale = before.loss_scale / 2 if before.skipped else before.loss_scale
    return scale if scale > 0 and math.isfinite(scale) else 1.0
