"""Obligations of a checked step: of the shards of one rank, and of all ranks.

- `after_clipping.py`: check that the optimizer is given the clipped gradient, and nothing has
  changed it since
- `copies.py`: obligation of all ranks: replicas are equal bit for bit
- `cross_rank_checks.py`: obligations that need all ranks: ownership, agreement on the step, and the
  norm
- `joint_context.py`: context of a checked step on all ranks
- `norms.py`: check of the gradient norm that ranks report when they clip: each element counts once
- `not_finite.py`: first value of a step that is not finite: phase, rank, microbatch, module
- `published_copies.py`: obligation of engines with masters: after a step the parameters are the
  masters, cast
- `rank_checks.py`: obligations that a rank judges by its own shards: update and clip
- `script_changes.py`: changes that a script makes to gradients between the end of their reduction
  and the step
- `slices.py`: context of a checked step on one rank: its own shards, in slices that fit in memory
- `workers.py`: threads that judge the shards of a step: the cores of the host, divided among its
  ranks
"""
