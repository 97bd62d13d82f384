"""ZeRO-1: the optimizer state is partitioned (section 5.1 of the ZeRO paper, `P_os`).

    forward, backward   as on one device, with all parameters and all gradients
    reduce-scatter      each rank gets the mean gradient of its shard         P elements
    optimizer           each rank updates its shard, with its share of state
    all-gather          each rank gets the updated shards of all others       P elements

Plain data parallelism moves the same 2 P: its all-reduce is a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from functools import partial

import torch

from ...compat import reduce_scatter_single, wait
from ...contract import Semantics
from .adapter import Sharder
from .bucket import Bucket, buckets_of, publish
from .precision import gradient_dtype


class Zero1(Sharder):
    """One rank of ZeRO-1. Gradients of all microbatches are summed locally and reduced once."""

    semantics = Semantics(accumulate="local", unused="zero", buffers="local", weight="token")
    stage = 1
    options = ("bucket",)

    def _partition(self) -> None:
        """Keep parameters and gradients whole; the backward adds into views of flat buffers."""
        self.buckets = buckets_of(self.model, self.case, self.group)
        self.gradients: list[torch.Tensor] = []
        for bucket in self.buckets:
            dtype = gradient_dtype(self.case, bucket.full)
            gradients = torch.zeros_like(bucket.full, dtype=dtype)
            self.gradients.append(gradients)
            bucket.gradient = gradients[bucket.mine]
            if dtype == bucket.full.dtype:
                for parameter, view in zip(bucket.parameters, bucket.views(gradients), strict=True):
                    parameter.grad = view

    def flat_buffers(self) -> list[Bucket]:
        """Return the buckets."""
        return self.buckets

    def _listen(self, place: int, number: int) -> None:
        """Hook a parameter whose gradients are summed in another dtype, which autograd cannot."""
        parameter = self.buckets[place].parameters[number]
        total = self.buckets[place].views(self.gradients[place])[number]
        if total.dtype != parameter.dtype:
            add = partial(self._add, total)
            hook = parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _add(self, total: torch.Tensor, parameter: torch.Tensor) -> None:
        """Add a complete gradient to its sum, and free it."""
        total.add_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = None

    def _clear_gradients(self) -> None:
        for gradients in self.gradients:
            gradients.zero_()

    def _reduce(self) -> None:
        """Replace this rank's shard of the gradients by their mean over ranks.

        In place: the shard is a view of the whole. The rest of the buffer is used up.
        """
        launched = []
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            work = reduce_scatter_single(bucket.gradient, gradients, self.group)
            launched.append((work, bucket.gradient))
        for work, mine in launched:
            wait(work)
            mine.div_(self.world_size)
        super()._reduce()

    def _publish(self) -> None:
        """Gather the updated shards of all ranks."""
        publish(self.buckets)

    def close(self) -> None:
        """Drop the buckets and the whole gradients, too."""
        super().close()
        self.buckets.clear()
        self.gradients.clear()
