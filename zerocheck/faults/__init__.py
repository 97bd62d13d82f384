"""Bugs planted on purpose, as proof that the judge detects them.

- `accumulation.py`: faults in the accumulation of microbatches
- `article.py`: two sharders of a well-known tutorial on ZeRO
- `causes_page.py`: page of all causes (docs/causes.md)
- `checkpoints.py`: faults of checkpoints: content, loads, restores, exports, files, and damage
- `clipping.py`: faults in the norm of the gradient and in clipping
- `communication.py`: faults in communication: more is sent than necessary
- `deepspeed.py`: faults planted into DeepSpeed's engine; they need the extra `deepspeed`
- `fault.py`: description of a fault: its source, and the finding that it must cause
- `forward.py`: faults in the forward, and in buffers such as the statistics of batch norm
- `gradient.py`: faults in the reduction of gradients, and what silently leaves something out of it
- `loss_scaling.py`: faults in dynamic loss scaling, in looking for an overflow, and in skipping
  such steps
- `memory.py`: faults of memory: every number is right, and a rank holds more than it should
- `muon.py`: faults in Muon: its update, its momentum and decay, its checkpoints, and what is left
  to AdamW
- `other_optimizers.py`: faults in other optimizers: torch's that are their own reference, the
  user's, and factored
- `ownership.py`: faults in the ownership of elements, and in publishing what was updated
- `parts.py`: parts shared by several faults
- `precision.py`: faults that only mixed precision, or parameters of two dtypes, show
- `races.py`: faults in waiting: right if a collective is already over, wrong if it is late
- `registry.py`: all faults by name
- `replicas.py`: faults of a mesh: sums, divisions and groups of the wrong axis, or of one host
- `unused.py`: faults with parameters without a gradient, frozen or of unusual shape, and with
  padding
- `update.py`: faults in AdamW and SGD themselves, in momentum, and in the inputs of a step
- `wrapper_options.py`: faults of compiled models, tensor parallelism and CPU offload
- `elsewhere/`: bugs of other frameworks, planted to measure a diagnosis that did not know them
- `injections/`: faults injected at the collectives of any implementation
"""
