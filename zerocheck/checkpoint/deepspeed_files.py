"""Checkpoints of DeepSpeed: flat partitions of each rank, put together to tensors with names.

Of stages 1 and 2 a parameter is the fragments that the ranks hold of it, in their order; of stage
3, the equal parts of it, of which the last is padded. The model is that of the optimizer, in fp32,
from which training continues, and what is not trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..catalogue import IN_CHECKPOINTS
from ..errors import UsageError, few
from .records import load
from .source import (
    DamagedCheckpoint,
    Key,
    MissingFile,
    OpenCheckpoint,
    Stored,
    StoredBox,
    dotted,
    leaves,
    shape_problem,
    whole,
    with_values,
)

_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt")
_WHOLE = "mp_rank_00_model_states.pt"
_LEFT_OUT = (
    "module",
    "optimizer",
    "ds_config",
    "buffer_names",
    "param_shapes",
    "shared_params",
    "frozen_param_shapes",
    "frozen_param_fragments",
)
"""Entries of a file of the model that are no values to compare."""
_MOST_RANKS = 1 << 16
_NO_SUCH_FORM = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors that a file of another form than DeepSpeed's raises while it is read."""


def is_deepspeed(names: Sequence[str]) -> bool:
    """Return True for the files of a folder that DeepSpeed wrote."""
    return any(name.endswith(("model_states.pt", "optim_states.pt")) for name in names)


class _Fragment(NamedTuple):
    """Part of a tensor: in the file of a rank, elements of a flat tensor. None: file missing."""

    file: str
    flat: torch.Tensor | None
    start: int
    size: int


def _joined(
    files: Sequence[str], flats: Sequence[torch.Tensor | None], parts: Sequence[tuple[int, int]]
) -> list[_Fragment]:
    """Return a tensor's parts in the files of all ranks."""
    return [
        _Fragment(file, flat, *part) for file, flat, part in zip(files, flats, parts, strict=True)
    ]


class DeepSpeedFolder(OpenCheckpoint):
    """An opened folder of DeepSpeed, such as `global_step10`; see `Source`."""

    format = "DeepSpeed"

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._fragments: dict[Key, list[_Fragment]] = {}
        self.verified.append("every record of torch.save against its CRC-32")
        self.unverifiable.append("that all files are of one save (they name none)")
        names = sorted(one.name for one in directory.iterdir())
        files = [name for name in names if is_deepspeed([name])]
        foreign = [name for name in files if name != _WHOLE and not _RANK.fullmatch(name)]
        if foreign:
            raise UsageError(
                f"{str(directory)!r} has {few(foreign)}: files of DeepSpeed with experts, stages "
                "of a pipeline, or tensor parallelism are not read yet"
            )
        models = {name: self._load(name) for name in files if name.endswith("model_states.pt")}
        optimizers = {name: self._load(name) for name in files if name not in models}
        if not models:
            self.wrong("files", _WHOLE, "it is missing, with the names and shapes of the model")
        try:
            self._open(models, optimizers)
        except _NO_SUCH_FORM as error:
            text = f"its files have not the form that DeepSpeed writes ({error!r})"
            self.wrong("readable", directory.name, text)

    def _open(
        self, models: Mapping[str, dict[str, Any]], optimizers: Mapping[str, dict[str, Any]]
    ) -> None:
        model = next((one for one in models.values() if one), None)
        if model is None:
            return
        self._model(model)
        if optimizers:
            self._partitions(model, models, optimizers)
        elif model.get("optimizer"):
            self._whole_optimizer(model["optimizer"])
        for name, source in (model.get("shared_params") or {}).items():
            self._alias(("module", name), ("module", source))
        counted = {int(one["global_steps"]) for one in models.values() if "global_steps" in one}
        if len(counted) > 1:
            self.wrong("files", "all", f"they are of different saves: global_steps {counted}")

    def _load(self, name: str) -> dict[str, Any]:
        try:
            tree: dict[str, Any] = load(self._directory / name, repr(name), IN_CHECKPOINTS)
        except DamagedCheckpoint as error:
            self.wrong("readable", name, str(error))
            return {}
        return tree

    def _model(self, model: Mapping[str, Any]) -> None:
        """Take what one file has whole: weights and buffers, and values of the training."""
        for name, tensor in model["module"].items():
            if isinstance(tensor, torch.Tensor) and (tensor.numel() or not model["param_shapes"]):
                self._take(("module", name), tensor)
        rest = {name: value for name, value in model.items() if name not in _LEFT_OUT}
        for key, leaf in leaves(rest):
            if not isinstance(leaf, torch.Tensor) and leaf is not None:
                self.value(key, leaf)

    def _take(self, key: Key, tensor: torch.Tensor) -> None:
        self.tensors[key] = whole(tensor)
        self._fragments[key] = [_Fragment(_WHOLE, tensor.reshape(-1), 0, tensor.numel())]

    def _alias(self, key: Key, source: Key) -> None:
        if source in self.tensors:
            self.tensors[key], self._fragments[key] = self.tensors[source], self._fragments[source]

    def _whole_optimizer(self, state: Mapping[str, Any]) -> None:
        """Take the optimizer of stage 0, with masters where the model is in 16 bits."""
        inner = state.get("optimizer_state_dict", state)
        for key, leaf in leaves({"state": inner["state"], "param_groups": inner["param_groups"]}):
            if isinstance(leaf, torch.Tensor):
                self._take(("optimizer", *key), leaf)
            else:
                self.value(("optimizer", *key), leaf)
        if "fp32_groups" in state:
            self.notes.append(
                "stage 0 in 16 bits: its fp32 weights have no names, and are not read"
            )

    def _partitions(
        self,
        model: Mapping[str, Any],
        models: Mapping[str, dict[str, Any]],
        optimizers: Mapping[str, dict[str, Any]],
    ) -> None:
        """Put the partitions of all ranks together."""
        states = {_rank(name): (name, tree) for name, tree in optimizers.items()}
        first = next((tree for _, tree in states.values() if tree), None)
        if first is None:
            return
        equal = "fp32_flat_groups" in first["optimizer_state_dict"]
        counts = first["optimizer_state_dict"]["partition_count"]
        counts = counts if isinstance(counts, list | tuple) else [counts]
        if len({*counts}) > 1 or not 0 < counts[0] <= _MOST_RANKS:
            raise UsageError(
                f"{str(self._directory)!r} has parameters over {few([*map(str, counts)])} ranks "
                f"(allowed: one number for all, from 1 to {_MOST_RANKS})"
            )
        like = next(iter(optimizers))
        ranks = [self._rank_of(rank, states, like) for rank in range(counts[0])]
        for rank in states.keys() - {*range(counts[0])}:
            self.wrong("files", states[rank][0], f"the save was of {counts[0]} ranks: another's")
        self.loads = (
            f"on {counts[0]} ranks; on another number after ds_to_universal.py, or without the "
            "optimizer's state"
        )
        self.format = f"DeepSpeed, ZeRO-{'3' if equal else '1 or 2'}"
        for number, shapes in enumerate(model["param_shapes"]):
            parts = _equal_parts(shapes, len(ranks)) if equal else _fragments(number, shapes, ranks)
            self._unit(number, shapes, ranks, parts)
        self._settings(ranks, model["param_shapes"])
        if equal:
            self._frozen(model, models, counts[0])

    def _rank_of(
        self, rank: int, states: Mapping[int, tuple[str, dict[str, Any]]], like: str
    ) -> _RankFile:
        if rank in states:
            name, tree = states[rank]
            return _RankFile(name, tree.get("optimizer_state_dict"))
        name = re.sub(r"rank_\d+", f"rank_{rank}", like, count=1)
        self.wrong("files", name, "it is missing, with the partitions of its rank")
        return _RankFile(name, None)

    def _unit(
        self, number: int, shapes: Mapping[str, Any], ranks: Sequence[_RankFile], parts: _Parts
    ) -> None:
        """Take the parameters of a group, or of a part of one."""
        files = [one.name for one in ranks]
        kinds = next((one.kinds(number) for one in ranks if one.state is not None), {})
        for name, shape in shapes.items():
            size = sum(length for _, length in parts[name])
            if size < prod(shape) and all(one.state for one in ranks):
                text = f"its partitions have {size} of its {prod(shape)} elements"
                self.wrong("tiling", f"model {name}", text)
                continue
            flats = [one.weights(number) for one in ranks]
            self._put(("module", name), shape, _joined(files, flats, parts[name]))
            for kind, value in kinds.items():
                key = ("optimizer", "state", name, kind)
                if value.ndim:
                    flats = [one.kinds(number).get(kind) for one in ranks]
                    self._put(key, shape, _joined(files, flats, parts[name]))
                else:
                    self.values[key] = value.item()

    def _put(self, key: Key, shape: Sequence[int], fragments: list[_Fragment]) -> None:
        dtype = next((one.flat.dtype for one in fragments if one.flat is not None), None)
        if dtype is None:
            return
        problem = shape_problem(shape, dtype)
        if problem:
            self.wrong("readable", dotted(key), problem)
            return
        form = tuple(shape)
        self.tensors[key] = Stored(form, dtype, (StoredBox((0,) * len(form), form),))
        self._fragments[key] = fragments

    def _settings(self, ranks: Sequence[_RankFile], shapes: Sequence[Mapping[str, Any]]) -> None:
        """Take the parameter groups, with the names of their members."""
        for number, group in enumerate(next(one.groups for one in ranks if one.state is not None)):
            units = [unit for unit in group["params"] if unit < len(shapes)]
            members = [name for unit in units for name in shapes[unit]]
            for word, value in {**group, "params": members}.items():
                self.values["optimizer", "param_groups", number, word] = value

    def _frozen(
        self, model: Mapping[str, Any], models: Mapping[str, dict[str, Any]], count: int
    ) -> None:
        """Take parameters that are not trained, which stage 3 partitions too."""
        files = [f"zero_pp_rank_{rank}_{_WHOLE}" for rank in range(count)]
        for file in files:
            if file not in models:
                self.wrong("files", file, "it is missing, with the buffers of its rank")
        trees = [models.get(file) or {} for file in files]
        shapes = model.get("frozen_param_shapes") or {}
        for name, shape in shapes.items():
            parts = _equal_parts({name: shape}, count)[name]
            flats = [tree.get("frozen_param_fragments", {}).get(name) for tree in trees]
            self._put(("module", name), shape, _joined(files, flats, parts))

    def files_of(self, key: Key) -> frozenset[str]:
        """See `Source.files_of`."""
        return frozenset(piece.file for piece in self._fragments[key] if piece.size)

    def read(self, key: Key) -> torch.Tensor:
        """See `Source.read`: the parts of all ranks, joined."""
        stored, parts = self.tensors[key], []
        for piece in self._fragments[key]:
            if piece.flat is None and piece.size:
                raise self._lost(piece.file)
            if piece.flat is not None:
                flat = with_values(piece.flat).reshape(-1)
                parts.append(flat[piece.start : piece.start + piece.size])
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if joined.numel() < stored.numel:
            raise DamagedCheckpoint(f"its parts have {joined.numel()} of {stored.numel} elements")
        return joined[: stored.numel].reshape(stored.shape)

    def _lost(self, file: str) -> DamagedCheckpoint:
        """Return why a file of a rank has not its part."""
        if not (self._directory / file).is_file():
            return MissingFile(file)
        error = DamagedCheckpoint(f"its file {file} is damaged")
        error.file = file
        return error


class _RankFile(NamedTuple):
    """Optimizer state in the file of a rank; None where it is missing or damaged."""

    name: str
    state: Mapping[str, Any] | None

    def weights(self, number: int) -> torch.Tensor | None:
        """Return the flat fp32 weights of a group."""
        if self.state is None:
            return None
        flat = self.state.get("fp32_flat_groups") or self.state["single_partition_of_fp32_groups"]
        weights: torch.Tensor = flat[number]
        return weights

    @property
    def _optimizer(self) -> Mapping[str, Any]:
        assert self.state is not None
        inner: Mapping[str, Any] = (
            self.state.get("optimizer_state_dict") or self.state["base_optimizer_state"]
        )
        return inner

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Parameter groups."""
        groups: Sequence[Mapping[str, Any]] = self._optimizer["param_groups"]
        return groups

    def kinds(self, number: int) -> dict[str, torch.Tensor]:
        """Return the flat optimizer state of a group, by its kind."""
        if self.state is None:
            return {}
        kinds = self._optimizer["state"].get(number, {})
        return {kind: value for kind, value in kinds.items() if isinstance(value, torch.Tensor)}

    def fragment(self, number: int, name: str) -> tuple[int, int]:
        """Return where a parameter begins in the partition, and its elements there."""
        assert self.state is not None
        fragment = self.state["param_slice_mappings"][number].get(name)
        return (0, 0) if fragment is None else (fragment.start, fragment.numel)


_Parts = dict[str, list[tuple[int, int]]]
"""Where each parameter begins in the flat tensors of each rank, and its elements there."""


def _fragments(number: int, shapes: Mapping[str, Any], ranks: Sequence[_RankFile]) -> _Parts:
    """Return the parts that ranks say they have; those of missing files are what is left."""
    parts: _Parts = {}
    for name, shape in shapes.items():
        given = [(0, 0) if one.state is None else one.fragment(number, name) for one in ranks]
        gap = prod(shape) - sum(size for _, size in given)
        parts[name] = [
            (0, gap) if one.state is None else part for one, part in zip(ranks, given, strict=True)
        ]
    return parts


def _equal_parts(shapes: Mapping[str, Any], count: int) -> _Parts:
    """Return parts of equal size, one behind the other in each rank; the last ends in padding."""
    parts: _Parts = {}
    begin = 0
    for name, shape in shapes.items():
        numel, size = prod(shape), ceil(prod(shape) / count)
        parts[name] = [(begin, max(0, min(size, numel - rank * size))) for rank in range(count)]
        begin += size
    return parts


def _rank(name: str) -> int:
    found = _RANK.fullmatch(name)
    return int(found[1]) if found else 0
