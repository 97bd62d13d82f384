"""Samples that a run is given: none comes twice in an epoch, on any rank.

What the model is called with is hashed sample by sample. A data loader that begins anew after a
resume, or gives all ranks the same samples, trains on with a loss that looks right.

A few samples of real data are equal, and samplers repeat up to W - 1 of them to give all ranks as
many; within a step a rank may use a sample several times, which counts once. So groups of at least
64 samples are judged, and wrong is a group of which at least half were there before, and more than
W - 1. Where a share d of all samples are copies of others, a right group is taken for a wrong one
with a probability of at most C(64, 32) d^32, by the union bound: 2e-14 for d = 10 %, and less for
larger groups. A sampler that draws with replacement must not be followed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from ... import causes as bugs
from ...checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from ...errors import UsageError
from ...protocol.verdicts import Violation
from ..record.digests import bits_of, placed
from ..record.guard import ErrorGuard
from ..record.ranks import AllRanks

LEAST = 64
"""Samples that are judged together, at least."""

NAME = "zerocheck-samples.safetensors"


class _Given(msgspec.Struct, frozen=True, array_like=True):
    """Samples of one call of the model: hashes as int64, in bytes."""

    step: int
    epoch: int
    hashes: bytes


class Samples:
    """Samples of this rank since the last exchange, and on rank 0 those of this epoch of all."""

    def __init__(
        self, model: nn.Module, step: Callable[[], int], followed: Followed, sharing: int = 1
    ) -> None:
        """Follow what a model is called with.

        step: returns the number of the current step; followed: what was given before; sharing:
        neighbouring ranks that are given the same samples, of which the first one counts.
        """
        self._step, self._sharing = step, sharing
        self._guard = ErrorGuard()
        self._given: list[tuple[int, int, torch.Tensor]] = []
        self.epoch = 0
        self.followed = followed
        model.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        with self._guard():
            self._take(model, args, kwargs)

    def _take(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            hashes = sample_hashes((args, kwargs))
            if hashes is not None:
                self._given.append((self._step(), self.epoch, hashes))

    def exchange(self, ranks: AllRanks, *, loaded: bool) -> tuple[Violation | None, bool]:
        """Judge the samples since the last exchange; the same answer on all ranks.

        Returns what is wrong, and whether there were enough samples to judge. loaded: a checkpoint
        was loaded in this run. Every rank calls this.
        """
        if self._guard.error is not None:
            raise self._guard.error
        mine = [_Given(s, e, h.cpu().numpy().tobytes()) for s, e, h in self._given]
        self._given.clear()
        gathered = ranks.gather(msgspec.msgpack.encode(mine))
        answer = b""
        if ranks.rank == 0:
            every = [msgspec.msgpack.decode(one, type=list[_Given]) for one in gathered]
            before = self.followed.groups
            found = self.followed.judge(every[:: self._sharing], loaded=loaded)
            answer = msgspec.msgpack.encode((found, self.followed.groups > before))
        answer = ranks.broadcast(answer)
        return msgspec.msgpack.decode(answer, type=tuple[Violation | None, bool])


def sample_hashes(inputs: Any) -> torch.Tensor | None:
    """Hash each sample of the inputs: (B,) int64, or None where no tensor has a first dim.

    A sample is what all tensors whose first dim is that of the first one have at its index.
    """
    tensors = [one for one in _tensors(inputs) if one.dim() and one.numel()]
    if not tensors:
        return None
    count = tensors[0].shape[0]
    total = torch.zeros(count, dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        if tensor.shape[0] == count:
            bits = bits_of(tensor.detach().contiguous()).reshape(count, -1)
            places = torch.arange(bits.shape[1], device=bits.device) + (number << 48)
            total += placed(bits, places).sum(1).to(total.device)
    return total


def hash_of_samples(calls: Iterable[Any]) -> str:
    """Return the hash of all samples of several calls' inputs, "" where there are none."""
    hashes = [one for one in map(sample_hashes, calls) if one is not None]
    if not hashes:
        return ""
    words = torch.cat([one.cpu() for one in hashes]).numpy().tobytes()
    return hashlib.blake2b(words, digest_size=8).hexdigest()


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for one in tree for t in _tensors(one)] if isinstance(tree, list | tuple) else []


class Followed:
    """Samples of the current epoch, of all ranks, and the group that is not judged yet.

    hashes, steps: sorted hashes, and when each came first; groups: number of those judged.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.hashes = np.empty(0, np.int64)
        self.steps = np.empty(0, np.int64)
        self.groups = 0
        self._forget_group()

    def _forget_group(self) -> None:
        self.pending = self._again = self._within = 0
        self._first: tuple[int, int, tuple[int, ...]] | None = None
        self._last = 0

    def judge(self, every: Sequence[Sequence[_Given]], *, loaded: bool) -> Violation | None:
        """Judge what all ranks were given, step by step. every: by rank."""
        by_step: dict[tuple[int, int], list[list[bytes]]] = {}
        for rank, given in enumerate(every):
            for one in given:
                place = by_step.setdefault((one.epoch, one.step), [[] for _ in every])
                place[rank].append(one.hashes)
        found = None
        for (epoch, step), ranks in sorted(by_step.items()):
            if epoch != self.epoch:
                self.epoch, self.hashes, self.steps = epoch, self.hashes[:0], self.steps[:0]
                self._forget_group()
            # A model may be called with one sample several times in a step of its rank.
            parts = [np.unique(np.frombuffer(b"".join(one), np.int64)) for one in ranks]
            wrong = self._judged(step, parts, loaded=loaded)
            found = found or wrong
        return found

    def _judged(
        self, step: int, parts: Sequence[np.ndarray[Any, Any]], *, loaded: bool
    ) -> Violation | None:
        all_hashes = np.concatenate(parts)
        once, counts = np.unique(all_hashes, return_counts=True)
        at = np.minimum(np.searchsorted(self.hashes, once), max(0, len(self.hashes) - 1))
        known = self.hashes[at] == once if len(self.hashes) else np.zeros(len(once), bool)
        again, within = int(counts[known].sum()), int((counts[~known] - 1).sum())
        if self._first is None and again + within:
            same = tuple(
                rank
                for rank, part in enumerate(parts)
                if any(len(part) and np.array_equal(part, o) for o in parts if o is not part)
            )
            before = int(self.steps[at[known]].min()) if again else step
            self._first = (step, before, same)
        self.pending += len(all_hashes)
        self._again += again
        self._within += within
        self._last = step
        new = once[~known]
        order = np.argsort(np.concatenate((self.hashes, new)), kind="stable")
        self.hashes = np.concatenate((self.hashes, new))[order]
        self.steps = np.concatenate((self.steps, np.full(len(new), step, np.int64)))[order]
        if self.pending < LEAST:
            return None
        found = None
        wrong = self._again + self._within
        if self._first is not None and 2 * wrong >= self.pending and wrong > len(parts) - 1:
            found = self._violation(len(parts), loaded=loaded)
        self._forget_group()
        self.groups += 1
        return found

    def _violation(self, world_size: int, *, loaded: bool) -> Violation:
        assert self._first is not None
        step, before, same = self._first
        steps = f"step {step}" if self._last == step else f"steps {step} to {self._last}"
        cause, obligation = "", "loss"
        if self._within > self._again:
            text = f"{self._within} of {self.pending} samples of {steps} come twice in their step"
            if same:
                cause = bugs.SAMPLES_OF_ANOTHER_RANK
                text += f": ranks {', '.join(map(str, same))} are given the same ones"
        else:
            text = f"{self._again} of {self.pending} samples of {steps} were given before in this "
            text += f"epoch, the first of them in step {before}"
            if loaded:
                cause, obligation = bugs.DATA_POSITION_LOST, "roundtrip"
                text += ": the data begins anew after the load"
        return Violation(
            obligation=obligation,  # type: ignore[arg-type]
            step=step,
            role="samples",
            tensors=(),
            ranks=same or tuple(range(world_size)),
            explanation=text,
            causes=(cause,) if cause else (),
        )

    def writer(self) -> Callable[[Path], None]:
        """Return what writes the samples of this epoch, as of now, next to a checkpoint."""
        tensors = {
            "hashes": torch.from_numpy(self.hashes.copy()),
            "steps": torch.from_numpy(self.steps.copy()),
            "epoch": torch.tensor([self.epoch]),
        }
        return lambda folder: write_safetensors(folder / NAME, tensors)

    def read(self, folder: Path) -> None:
        """Go on from the samples in a record's folder; from none where it has none."""
        path = folder / NAME
        if not path.is_file():
            return
        file = SafetensorsFile(path)
        found = {str(key[0]): file.read(key) for key in file.tensors}
        if file.findings or {*found} != {"hashes", "steps", "epoch"}:
            raise UsageError(f"{path} is damaged: it has not the samples of an epoch")
        self.hashes, self.steps = found["hashes"].numpy(), found["steps"].numpy()
        self.epoch = int(found["epoch"][0])
        self._forget_group()
