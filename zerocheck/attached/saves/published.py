"""Weights that another process computes with, compared with those that were trained.

A rollout or serving engine gets weights by a broadcast, by shared memory or as a file. Nothing is
shared here: training writes digests, and the engine compares its own tensors with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from torch import nn

from ...contract.names import unwrapped
from ...errors import UsageError, did_you_mean, few
from ...protocol.observations import Entry
from ..record.digests import WholeDigest, digest_of, whole_of
from .loaded import ROLES, WrongTensor, judged
from .saved_state import NAME, SavedState, read_saved

Names = Mapping[str, str | Sequence[str]]
_PART = r"([^.]+)"


def compare_weights(
    weights: nn.Module | Mapping[str, torch.Tensor],
    directory: str | Path,
    *,
    names: Names | None = None,
) -> tuple[str, ...]:
    """Return what differs between weights and those that training recorded; nothing if all agree.

    Values are equal bit for bit, or bf16 where training has fp32: rounded to nearest.

    Args:
        weights: a model that is not sharded, or whole tensors by name, on any device.
        directory: folder that `check.published` or `check.saved` wrote into.
        names: names in training by the name here, where they differ. Several are joined along dim
            0, as in a fused QKV. `*` is one part of a name, such as the number of a layer.

    Raises UsageError for a folder without a record, and for unknown names in training.
    """
    names = names or {}
    saved = read_saved(Path(directory))
    trained = _tensors(saved)
    if isinstance(weights, nn.Module):
        weights = weights.state_dict()
    weights = {
        unwrapped(name): tensor.detach()
        for name, tensor in weights.items()
        if isinstance(tensor, torch.Tensor)
    }
    aliases = {_place(tensor) for name, tensor in weights.items() if name in trained}
    differences: dict[WrongTensor, dict[str, str]] = {}
    known: set[str] = set()
    for name, tensor in weights.items():
        parts = _in_training(name, names)
        for part in parts if parts != (name,) else ():
            if part not in trained:
                raise UsageError(
                    f"{name} is {part!r} by names=, and training has no such tensor"
                    f"{did_you_mean(part, trained)}"
                )
        known.update(parts)
        if parts[0] not in trained and _place(tensor) in aliases:  # tied
            continue
        for wrong in _wrong(tensor, parts, saved, trained):
            details = differences.setdefault(msgspec.structs.replace(wrong, detail=""), {})
            details.setdefault(name, wrong.detail)
    missing = [name for name in saved.tensors.get("parameter", {}) if name not in known]
    if missing:
        wrong = WrongTensor("", "was trained, and is missing here")
        differences[wrong] = dict.fromkeys(missing, "")
    wrong_names = {name for details in differences.values() for name in details}
    if 2 * len(wrong_names) > len(weights):
        step = _other_step(weights, Path(directory), names)
        if step is not None:
            return (f"all weights are those of step {step}, and step {saved.step} was recorded",)
    return tuple(_sentence(wrong.text, details) for wrong, details in differences.items())


def _sentence(text: str, details: Mapping[str, str]) -> str:
    detail = next(iter(details.values()))
    return f"{few([*details])} {text}{': ' * bool(detail)}{detail}"


def _in_training(name: str, names: Names) -> tuple[str, ...]:
    for pattern, target in names.items():
        match = re.fullmatch(re.escape(pattern).replace(r"\*", _PART), name)
        if match is not None:
            targets = (target,) if isinstance(target, str) else target
            return tuple(_filled(target, match.groups()) for target in targets)
    return (name,)


def _filled(pattern: str, parts: Sequence[str]) -> str:
    unused = iter(parts)
    return re.sub(r"\*", lambda _: next(unused, "*"), pattern)


def _wrong(
    tensor: torch.Tensor,
    parts: Sequence[str],
    saved: SavedState,
    trained: Mapping[str, WholeDigest],
) -> Iterator[WrongTensor]:
    """Yield what is wrong with a tensor that these tensors of training make."""
    if parts[0] not in trained:
        yield WrongTensor("", "is not in the record of training (another name there: names=)")
        return
    rows = [trained[part].shape[0] if trained[part].shape else 1 for part in parts]
    if len(parts) > 1 and (not tensor.dim() or sum(rows) != len(tensor)):
        yield WrongTensor(
            "", "has another shape than its parts in training", f"{list(tensor.shape)}"
        )
        return
    for part, piece in zip(
        parts, torch.split(tensor, rows) if len(parts) > 1 else [tensor], strict=True
    ):
        wrong = _judged(part, piece, saved, trained)
        if wrong is not None:
            detail = f"{part}{', ' * bool(wrong.detail)}{wrong.detail}" * (len(parts) > 1)
            yield msgspec.structs.replace(wrong, detail=detail or wrong.detail)


def _judged(
    name: str, tensor: torch.Tensor, saved: SavedState, trained: Mapping[str, WholeDigest]
) -> WrongTensor | None:
    """Return what is wrong with a tensor; one in bf16 is looked up among rounded ones."""
    role = next(role for role in ROLES if name in saved.tensors.get(role, {}))
    digest = trained[name]
    if (str(tensor.dtype), digest.dtype) != ("torch.bfloat16", "torch.float32"):
        return judged(role, name, digest, _digest(name, tensor), saved)
    live = _digest(name, tensor.float())
    if live.shape != digest.shape or (digest.nonzero and not live.nonzero):
        return judged(role, name, digest, live, saved)
    if live.total == digest.rounded:
        return None
    source = next((path for path, each in trained.items() if each.rounded == live.total), "")
    if source:
        return WrongTensor("", "holds that of another", f"of {source}, rounded to bf16")
    return WrongTensor("", "is not what was saved, rounded to bf16")


def _tensors(saved: SavedState) -> dict[str, WholeDigest]:
    return saved.tensors.get("parameter", {}) | saved.tensors.get("buffer", {})


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _digest(name: str, tensor: torch.Tensor) -> WholeDigest:
    entry = Entry(name, tuple(tensor.shape), 0, tensor.numel())
    whole = whole_of([digest_of(tensor, entry, rounds=False)])
    return whole or WholeDigest(entry.shape, str(tensor.dtype), (), 0, 0)


def _other_step(weights: Mapping[str, torch.Tensor], directory: Path, names: Names) -> int | None:
    """Return the step of a record beside this one that has all of these weights."""
    for record in sorted(directory.parent.glob(f"*/{NAME}")):
        if record.parent == directory:
            continue
        with suppress(UsageError):  # a damaged record of another step
            saved = read_saved(record.parent)
            trained = _tensors(saved)
            pairs = ((_in_training(name, names), tensor) for name, tensor in weights.items())
            if all(not [*_wrong(tensor, parts, saved, trained)] for parts, tensor in pairs):
                return saved.step
    return None
