"""Weights that another process computes with, compared with those that were trained.

A rollout or serving engine gets weights by a broadcast, by shared memory or as a file. Nothing is
shared here: training writes digests, and the engine compares its own tensors with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from torch import nn

from ...checkpoint.result import CheckpointProblem, CheckpointReport
from ...checkpoint.source import DamagedCheckpoint
from ...contract.names import unwrapped
from ...errors import UsageError, did_you_mean, few
from ..record.ranks import AllRanks
from .in_files import WeightsInFiles, digest, recorded_or_read
from .loaded import ROLES, JudgedLoad, WrongTensor, judged, violation_of
from .relations import Names, Relation, relations
from .saved_state import NAME, SavedState, TrainedModel, read_saved, record_folder, state_of


def compare_weights(
    weights: nn.Module | Mapping[str, torch.Tensor] | str | Path,
    trained: str | Path,
    *,
    names: Names | None = None,
    partial: bool = False,
) -> tuple[str, ...]:
    """Return what differs between weights and those that were trained; nothing if all agree.

    Values are equal bit for bit, or bf16 where training has fp32: rounded to nearest.

    Args:
        weights: a model that is not sharded, whole tensors by name, on any device, or the path of
            an export.
        trained: folder that `check.published` or `check.saved` wrote into, or a checkpoint.
        names: names in training by the name here, where they differ. Several are joined along dim
            0, on both sides: a fused QKV. `*` is one part of a name, such as the number of a layer,
            and `**` any number of parts; `*` more here joins what it stands for, such as experts.
            `.T` behind all names in training: transposed here.
        partial: True if the weights are a part of the model, such as adapters.

    Raises UsageError for a folder without a record or checkpoint, and for unknown names in
    training.
    """
    if isinstance(weights, str | Path):
        weights = WeightsInFiles(Path(weights))
    elif isinstance(weights, nn.Module):
        weights = weights.state_dict()
    saved = recorded_or_read(Path(trained))
    found = differences(weights, saved, names or {}, partial, trained)
    return tuple(f"{where} {what}" for where, what in found)


def differences(
    weights: Mapping[str, torch.Tensor],
    saved: SavedState,
    names: Names,
    partial: bool,
    folder: str | Path = "",
) -> list[tuple[str, str]]:
    """Return which tensors differ, and how. folder: the record's, whose neighbours are searched."""
    compared = _WeightComparison(saved)
    here = {unwrapped(name): name for name in weights}
    related = [
        relation._replace(here=tuple(here[name] for name in relation.here))
        for relation in relations(here, names)
    ]
    found: dict[WrongTensor, dict[str, str]] = {}
    for relation in related:
        compared.check_names(relation)
        for wrong in compared.wrong(weights, relation):
            details = found.setdefault(msgspec.structs.replace(wrong, detail=""), {})
            details.setdefault(few(relation.here), wrong.detail)
    missing = [] if partial else [*compared.missing(related)]
    if missing:
        found[WrongTensor("", "was trained, and is missing here")] = dict.fromkeys(missing, "")
    if 2 * len({name for details in found.values() for name in details}) > len(related):
        step = _other_step(weights, Path(folder), related) if folder else None
        if step is not None:
            return [
                ("all weights", f"are those of step {step}, and step {saved.step} was recorded")
            ]
    return [(few([*details]), _detailed(wrong.text, details)) for wrong, details in found.items()]


def _detailed(text: str, details: Mapping[str, str]) -> str:
    detail = next(iter(details.values()))
    return f"{text}{': ' * bool(detail)}{detail}"


def report_of(
    path: Path, trained: Path, names: Names, *, partial: bool = False
) -> CheckpointReport:
    """Report on an export, against a checkpoint or a record. Raises UsageError."""
    weights = WeightsInFiles(path)
    found = differences(weights, recorded_or_read(trained), names, partial, trained)
    contents = weights.contents
    wrong = [CheckpointProblem(check="trained", where=where, detail=what) for where, what in found]
    return CheckpointReport(
        checkpoints=(contents.described(),),
        findings=(*contents.source.findings, *wrong),
        checked=("files", "trained"),
        unchecked={},
        notes=tuple(contents.notes),
        verified=(f"{len(weights)} tensors against {trained}",),
    )


def judge_export(
    directory: Path,
    trained: TrainedModel,
    ranks: AllRanks,
    *,
    step: int,
    names: Names,
    partial: bool,
) -> JudgedLoad:
    """Judge what was exported as it is in the files. Every rank calls this, in `attempt`."""
    live = state_of(trained, ranks, step=step, data=None)
    message = b""
    if live is not None:
        weights = WeightsInFiles(directory)
        wrong = [
            violation_of(
                (step, ranks.size), "parameter", (), f"{where} {what}", obligation="export"
            )
            for where, what in differences(weights, live.saved, names, partial)
        ]
        text = f"zerocheck: {directory}: {len(weights)} tensors are what was trained at step {step}"
        message = JudgedLoad.of("export", step, wrong, text)
    return msgspec.msgpack.decode(ranks.broadcast(message), type=JudgedLoad)


class _WeightComparison:
    """Comparison with one state of training."""

    def __init__(self, saved: SavedState) -> None:
        self._saved = saved
        self._trained = saved.weights

    def check_names(self, relation: Relation) -> None:
        """Raise UsageError for names in training that do not exist."""
        for part in relation.trained:
            if part not in self._trained and part != unwrapped(relation.here[0]):
                raise UsageError(
                    f"{relation.here[0]} is {part!r} by names=, and training has no such tensor"
                    f"{did_you_mean(part, self._trained)}"
                )

    def wrong(
        self, weights: Mapping[str, torch.Tensor], relation: Relation
    ) -> Iterator[WrongTensor]:
        """Yield what is wrong with the tensors of a relation."""
        try:
            pieces = [weights[name].detach() for name in relation.here]
        except DamagedCheckpoint as error:
            yield WrongTensor("", "cannot be read", str(error))
            return
        parts = relation.trained
        if parts[0] not in self._trained:
            if not self._copy(pieces[0]):
                text = "is not in the record of training (another name there: names=)"
                yield WrongTensor("", text)
            return
        shapes = [self._trained[part].shape for part in parts]
        whole = _joined(pieces, relation, shapes)
        if whole is None:
            text = "has another shape than its parts in training"
            yield WrongTensor("", text, f"{list(pieces[0].shape)}")
            return
        for part, piece in zip(parts, whole, strict=True):
            wrong = self._judged(part, piece)
            if wrong is not None:
                detail = f"{part}{', ' * bool(wrong.detail)}{wrong.detail}" * (len(parts) > 1)
                yield msgspec.structs.replace(wrong, detail=detail or wrong.detail)

    def _copy(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor has the values of one that was trained: a tied one."""
        one = digest("", tensor if tensor.dtype is not torch.bfloat16 else tensor.float())
        key = one.shape, one.total
        return one.nonzero > 0 and any(
            key in ((each.shape, each.total), (each.shape, each.rounded))
            for each in self._trained.values()
        )

    def missing(self, related: Sequence[Relation]) -> Iterator[str]:
        """Yield parameters of training that are not here, unless what they are tied to is."""
        known = {part for relation in related for part in relation.trained}
        values = {(each.shape, each.blocks) for n, each in self._trained.items() if n in known}
        for name, each in self._saved.tensors.get("parameter", {}).items():
            tied = each.nonzero > 0 and (each.shape, each.blocks) in values
            if name not in known and not tied:
                yield name

    def _judged(self, name: str, tensor: torch.Tensor) -> WrongTensor | None:
        """Return what is wrong with a tensor; one in bf16 is looked up among rounded ones."""
        role = next(role for role in ROLES if name in self._saved.tensors.get(role, {}))
        trained = self._trained[name]
        if (str(tensor.dtype), trained.dtype) != ("torch.bfloat16", "torch.float32"):
            return judged(role, name, trained, digest(name, tensor), self._saved)
        live = digest(name, tensor.float())
        if live.shape != trained.shape or (trained.nonzero and not live.nonzero):
            return judged(role, name, trained, live, self._saved)
        if live.total == trained.rounded:
            return None
        same = (path for path, each in self._trained.items() if each.rounded == live.total)
        source = next(same, "")
        if source:
            return WrongTensor("", "holds that of another", f"of {source}, rounded to bf16")
        return WrongTensor("", "is not what was saved, rounded to bf16")


def _joined(
    pieces: Sequence[torch.Tensor], relation: Relation, shapes: Sequence[tuple[int, ...]]
) -> Sequence[torch.Tensor] | None:
    """Return tensors of these shapes that the pieces make along dim 0, or None."""
    if relation.transposed:
        pieces = [each.mT if each.dim() > 1 else each for each in pieces]
    if len(pieces) > 1:
        if not pieces[0].dim() or len({each.shape[1:] for each in pieces}) > 1:
            return None
        whole = torch.cat([*pieces])
        if len(shapes) == 1 and whole.numel() == math.prod(shapes[0]):
            return [whole.reshape(shapes[0])]  # of numbered experts, which are stacked
    else:
        whole = pieces[0]
    if len(shapes) == 1:
        return [whole]
    rows = [shape[0] if shape else 1 for shape in shapes]
    return torch.split(whole, rows) if whole.dim() and sum(rows) == len(whole) else None


def _other_step(
    weights: Mapping[str, torch.Tensor], directory: Path, related: Sequence[Relation]
) -> int | None:
    """Return the step of a record beside this one that has all of these weights."""
    for record in sorted(directory.parent.glob(f"*/{NAME}")):
        if record.parent == record_folder(directory):
            continue
        with suppress(UsageError):  # a damaged record of another step
            saved = read_saved(record.parent)
            compared = _WeightComparison(saved)
            if all(not [*compared.wrong(weights, relation)] for relation in related):
                return saved.step
    return None
